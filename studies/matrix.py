"""Train and evaluate the runs of a plan of the study, each with several seeds: python -m studies.matrix --plan rope

A job trains one run with train.py and evaluates it with eval.py, each in a child process. The results are collected as
rows of runs/matrix-SIZE/PLAN.jsonl; those of a finished plan are copied to results/. The command can be stopped at any
time: when it is run again, finished jobs are skipped and unfinished ones are resumed. `quick` is the same study at a
toy size, `h200` at 41M parameters on a GPU; `smoke` takes seconds a job, to try the command. studies/plan.py lists the
plans.
"""

import argparse
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch

from conf.errors import check, user_errors
from conf.registry import choices
from engine.files import locked
from measure.curves import write_jsonl
from studies.jobs import Stopped, run_job, stop, stopping
from studies.plan import PLANS, Job, load_size, planned_jobs, select_jobs
from studies.rows import StudyRow, read_rows


def main() -> None:
    """Run all jobs that have no rows yet. The file of rows is written after each job, so no finished job is lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", nargs="?", default="default", help=", ".join(choices("study")))
    parser.add_argument("--plan", choices=PLANS, default="rope", help="which runs: see studies/plan.py")
    parser.add_argument("--seeds", type=whole_numbers, help="such as 0 or 0,1,2; without it, those of each part")
    parser.add_argument("--only", help="names of jobs (rope-s0,base100-s0) or parts (rope, finetune; encodings, base)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, on a GPU or a machine with many cores")
    parser.add_argument("--runs", help="the folder of runs; without it, runs/matrix-SIZE")
    parser.add_argument("--cache", default=".cache", help="the folder of prepared corpora (default .cache)")
    parser.add_argument("--out", help="the rows; without it, PLAN.jsonl in the folder of runs")
    args = parser.parse_args()

    size = load_size(args.size)
    runs = args.runs or f"runs/matrix-{args.size}"
    out = Path(args.out or f"{runs}/{args.plan}.jsonl")
    jobs = select_jobs(planned_jobs(args.plan, size, args.seeds), args.only)
    finished = {row.run for row in (read_rows(out).rows if out.exists() else ())}
    todo = [job for job in jobs if job.name not in finished]
    print(f"{len(jobs)} jobs, {len(todo)} to do")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    share_cores(args.jobs)
    done = 0
    try:
        run = functools.partial(run_job, size=size, runs=runs, cache=args.cache, one=args.jobs == 1)
        for job, new_rows in finished_jobs(todo, run, args.jobs):
            with locked(out.parent, wait=True):  # another command may add rows to the same file
                others = [row for row in (read_rows(out).rows if out.exists() else ()) if row.run != job.name]
                write_jsonl(out, [*others, *new_rows])
            done += 1
            print(f"\n=== {job.name} is done: {done} of {len(todo)} ===")
    except (Stopped, KeyboardInterrupt) as e:
        print(f"stopped: {done} jobs done, {len(todo) - done} left; the same command resumes", file=sys.stderr)
        sys.exit(128 + e.args[0] if e.args else 1)
    print(f"\nrows: {out}   next: python -m studies.figures --rows {out.parent} --out {out.parent}")


def interrupt(number: int, frame: object) -> None:
    """The handler of Ctrl-C and SIGTERM: the child saves before this process ends."""
    raise KeyboardInterrupt(number)


def share_cores(jobs: int) -> None:
    """Give each of several jobs at a time its part of the threads, unless OMP_NUM_THREADS says how many."""
    check(jobs >= 1, "--jobs", jobs, "at least 1")
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // jobs)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the child processes
        torch.set_num_threads(threads)  # which the rows name


def finished_jobs(
    todo: Sequence[Job], run: Callable[[Job], list[StudyRow]], jobs: int
) -> Iterator[tuple[Job, list[StudyRow]]]:
    """Run every job, `jobs` of them at a time, and yield each with its rows when it is finished.

    A job that starts from the run of another one (init=NAME) waits for it. The first exception of a job is raised after
    the jobs that have begun have ended; no other is begun.
    """
    futures: dict[str, Future[tuple[Job, list[StudyRow]]]] = {}
    stopping.clear()

    def after_its_parent(job: Job) -> tuple[Job, list[StudyRow]]:
        parent = next((x.removeprefix("init=") for x in job.train if x.startswith("init=")), None)
        if parent in futures:  # which comes first in the queue, so it has begun
            futures[parent].result()
        print(f"\n=== {job.name} ===", flush=True)
        return job, run(job)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for job in todo:
                futures[job.name] = pool.submit(after_its_parent, job)
            pending = {*futures.values()}
            while pending:  # with a timeout: a signal that comes just before a wait is handled when the wait ends
                ended, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in sorted(ended, key=lambda x: x.exception() is not None))
        except (KeyboardInterrupt, GeneratorExit):  # only the main thread gets it, and the jobs run in others
            stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def whole_numbers(text: str) -> tuple[int, ...]:
    """0,1,2 -> (0, 1, 2)"""
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    user_errors(main)()
