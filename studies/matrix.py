"""All encodings, bases and fine-tunings, each with several seeds, by one command: python -m studies.matrix

A job trains one run with train.py and evaluates it with eval.py, each in a child process. The results are collected as
rows of results/matrix.jsonl. The command can be stopped at any time: when it is run again, finished jobs are skipped
and unfinished ones are resumed. `quick` is the same study at a toy size, `h200` at 41M parameters on a GPU; `smoke`
takes seconds a job, to try the command. `--plan layers` runs the second plan, whose rows are results/layers.jsonl.
"""

if __name__ == "__main__":
    import conf.interrupt  # noqa: F401 (first: Ctrl-C while torch is imported)

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

from conf.errors import UserError, check, user_errors_in_one_line
from conf.leftovers import check_writable
from conf.registry import ROOT, choices, yaml_values
from engine.checkpoint import write_atomically
from engine.code_version import commit
from engine.device import autocast
from engine.run import Run
from measure.comparison import select_shared
from measure.curves import controls, read_curve
from measure.statistics import gain
from measure.tasks.matched import NEAR, Matched
from model.scaling import resolve
from studies.plan import MAIN_METHODS, PLANS, Job, Size, load_size, minutes, parse_seeds, select_jobs
from studies.rows import Rows, read_rows

# ---- one job ----


class Stopped(Exception):
    """The deadline has passed, or the user pressed Ctrl-C."""


def run_job(job: Job, size: Size, runs: str, cache: str, deadline: float) -> Rows:
    """Train and evaluate; returns the job's rows. deadline: of time.monotonic(); past it, Stopped is raised."""
    folders = (f"runs={runs}", f"cache={cache}")
    run_script(["train.py", *job.train, f"name={job.name}", *folders], deadline)
    run = Run.open(job.name, runs=runs, cache=cache)

    methods = applicable_scalings(run, max(job.lengths)) if job.scalings != "controls" else []
    evaluate = ["eval.py", "-m", f"run={job.name}", *folders, *target_settings(size)]
    # Lengths between L and 2 L are for the main methods only
    doubling = [n for n in job.lengths if n <= NEAR and (n % size.L == 0 or n < size.L)]
    near, every = (f"ctx=[{','.join(map(str, lengths))}]" for lengths in (doubling, job.lengths))
    main_methods = [name for name in MAIN_METHODS if name in methods]
    run_script([*evaluate, every, f"scaling={','.join(['none', *main_methods, *(job.methods or ())])}"], deadline)
    others = [name for name in methods if name not in main_methods]
    if others and job.scalings == "all":
        run_script([*evaluate, near, f"scaling={','.join(others)}"], deadline)
    if job.part == "encodings" and job.name.startswith("rope-s"):
        # One factor at all lengths, as in a deployed model, to measure the increase of the loss within L; and methods
        # that are combined with log-n
        run_script([*evaluate, near, "scaling=pi,ntk,yarn", "++scaling.factor=fixed"], deadline)
        run_script([*evaluate, near, "scaling=ntk,yarn,rerope,rerope_leaky", "plus=logn"], deadline)

    command = f"python train.py {' '.join(job.train)} name={job.name}"
    rows = gather(job, run, command)
    if job.part == "encodings":
        rows += shifted(job, run, size, command)
    return rows


def target_settings(size: Size) -> list[str]:
    """The overrides of eval.py that choose the targets."""
    windows = [f"task.windows={size.windows}", f"task.far_windows={size.far_windows}"]
    return [f"documents={size.documents}", f"task.scored_tokens={size.scored_tokens}", *windows]


children: set[subprocess.Popen] = set()  # those of `run_script` that run now, in any thread
stopping = threading.Event()  # set when no further ones may be started


def run_script(argv: list[str], deadline: float) -> None:
    """Run a script of this repository in a child process until it ends.

    argv: the script and its arguments. deadline: in seconds of time.monotonic(); when it passes, the child gets
    SIGTERM, saves, and Stopped is raised. UserError if the child fails.
    """
    if stopping.is_set():
        raise Stopped
    child = subprocess.Popen([sys.executable, str(ROOT / argv[0]), *argv[1:]], preexec_fn=end_with_parent)
    children.add(child)
    timeout = max(0.1, deadline - time.monotonic()) if deadline < float("inf") else None
    try:
        code = child.wait(timeout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C, or SIGTERM: see `main`
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise Stopped from None
    finally:
        children.discard(child)
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):  # it was stopped by a signal, perhaps as it started
        raise Stopped
    if code:
        raise UserError(
            f"`python {' '.join(argv)}` failed with exit code {code}; run the same command again to resume from there"
        )


def end_with_parent() -> None:
    """Called in the child before it starts: it gets SIGTERM, and saves, when its parent is killed. On Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def applicable_scalings(run: Run, longest: int) -> list[str]:
    """The scaling methods that this run can be evaluated with at the longest length.

    Without the controls none and window, which eval.py measures in every evaluation.
    """
    names = []
    for name in choices("scaling"):
        try:
            resolve(yaml_values("scaling", name), run.context, longest, longest)
        except UserError:  # not applicable to this encoding, or its yaml lacks values that only a search can find
            continue
        if name not in ("none", "window"):
            names.append(name)
    return names


# ---- rows ----

# Columns that are copied from the rows of eval.py
CURVE_COLUMNS = ("seed", "label", "n", "factor", "train_ctx", "extended_ctx", "loss", "low", "high", "bits_per_byte",
                 "tokens", "bytes", "texts", "targets", "dtype", "device", "documents", "windows", "nll")  # fmt: skip


def gather(job: Job, run: Run, command: str) -> Rows:
    """The rows of a run: one for each of its newest curves and each length.

    Each has the columns of eval.py in CURVE_COLUMNS, the gain over the run's better control at the same length (nats
    per token, with its 95 % interval), and the origin: commit, command and number of threads.
    """
    curves = [read_curve(file) for file in sorted((run.folder / "eval").glob("*.jsonl"))]
    newest = max(curves, key=lambda curve: curve.written)
    selected = select_shared(curves, newest.first.texts)
    bars = controls(selected)[run.name]
    origin = {"threads": torch.get_num_threads(), "commit": commit(), "command": command}
    rows = []
    for row in (row for curve in selected for row in curve.rows):
        if job.methods is not None and not (row.n in job.lengths and row.label in ("none", "window", *job.methods)):
            continue  # of the matrix, which has the same run with more methods and lengths
        mean, low, high = gain(row, bars[row.n])
        rows.append(
            {
                "part": job.part,
                "name": job.name,
                "base": run.cfg.pos.get("base"),
                **job.columns,
                "pos": run.cfg.pos["kind"],
                **{column: getattr(row, column) for column in CURVE_COLUMNS},
                "gain": mean,
                "gain_low": low,
                "gain_high": high,
                "in_window": run.validation["bits_per_byte"],
                "steps": run.cfg.steps,
                **origin,
            }
        )
    return rows


@torch.inference_mode()
def shifted(job: Job, run: Run, size: Size, command: str) -> Rows:
    """Two rows, `unshifted` and `shifted`: the same text of L/2 tokens at positions 0 .. L/2 - 1 and L/2 .. L - 1.

    All of these positions were trained. An encoding that depends only on distances has the same loss in both rows.
    """
    n = size.L // 2
    task = Matched(run.corpus, max(job.lengths), size.documents, size.scored_tokens, size.windows, size.far_windows)
    (piece,) = task.pieces(n)
    rows = []
    for label, start in (("unshifted", 0), ("shifted", n)):
        with autocast(torch.device("cpu"), run.cfg.dtype):
            passes = zip(piece.tokens.split(32), piece.targets.split(32), strict=True)
            losses = torch.cat([run.model.losses(*part, torch.arange(n) + start).double() for part in passes])
        rows.append(
            {
                "part": job.part,
                "name": job.name,
                "pos": run.cfg.pos["kind"],
                "seed": run.cfg.seed,
                "label": label,
                "n": n,
                "train_ctx": size.L,
                "loss": losses.mean().item(),
                "tokens": losses.numel(),
                "documents": len(task.names),
                "windows": task.windows(n),
                "nll": losses.sum(dim=1).numpy().round(4).tolist(),
                "commit": commit(),
                "command": command,
            }
        )
    return rows


# ---- the command ----


def main() -> None:
    """Run all jobs that have no rows yet. The file of rows is written after each job, so no finished job is lost."""
    args = parse_arguments()
    size = load_size(args.size)
    runs = args.runs or f"runs/matrix-{args.size}"
    out = Path(args.out or f"results/{args.plan}{'' if args.size == 'default' else '-' + args.size}.jsonl")
    seeds = parse_seeds(args.seeds) if args.seeds else (0,) if args.plan == "layers" else size.seeds
    jobs = select_jobs(PLANS[args.plan](size, seeds), args.only)
    rows = read_rows(out) if out.exists() else []
    finished = {row["name"] for row in rows}
    todo = [job for job in jobs if job.name not in finished]
    left = sum(minutes(job, size) for job in todo)
    print(
        f"{len(jobs)} jobs, {len(todo)} to do: about {left / 60:.1f} h at {size.train_rate:,.0f} tokens/s of training"
    )

    check_writable("--out", out)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the child saves before this process ends
    check(args.jobs >= 1, "jobs", args.jobs, "at least 1")
    share_cores(args.jobs)
    done, deadline = 0, time.monotonic() + 60 * args.minutes
    try:
        for job, new_rows in finished_jobs(todo, lambda job: run_job(job, size, runs, args.cache, deadline), args.jobs):
            rows += new_rows
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(out, lambda f, text=text: f.write(text.encode()))
            done, left = done + 1, left - minutes(job, size)
            print(f"\n=== {job.name} is done: {done} of {len(todo)}; about {left / 60 / args.jobs:.1f} h left ===")
    except (Stopped, KeyboardInterrupt):
        sys.exit(f"stopped: {done} jobs done, {len(todo) - done} left; run the same command again to resume")
    reports = "studies.layers" if args.plan == "layers" else "studies.claims, studies.tables"
    print(f"\nrows: {out}   next: python -m {reports}, studies.figures")


def finished_jobs(todo: Sequence[Job], run: Callable[[Job], Rows], jobs: int) -> Iterator[tuple[Job, Rows]]:
    """Run every job, `jobs` of them at a time, and yield each with its rows when it is finished.

    A job that starts from the run of another one (init=NAME) waits for it. The first exception of a job is raised after
    the jobs that have begun have ended; no other is begun.
    """
    futures: dict[str, Future[Rows]] = {}
    stopping.clear()

    def after_its_parent(job: Job) -> Rows:
        parent = next((x.removeprefix("init=") for x in job.train if x.startswith("init=")), None)
        if parent in futures:  # which comes first in the queue, so it has begun
            futures[parent].result()
        print(f"\n=== {job.name} ===", flush=True)
        return run(job)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for job in todo:
                futures[job.name] = pool.submit(after_its_parent, job)
            by_future = {futures[job.name]: job for job in todo}
            for future in as_completed(by_future):
                yield by_future[future], future.result()
        except KeyboardInterrupt:  # only the main thread gets it, and the jobs run in others
            stopping.set()
            for child in tuple(children):
                child.send_signal(signal.SIGTERM)
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def share_cores(jobs: int) -> None:
    """Give each of several jobs at a time its part of the threads, unless OMP_NUM_THREADS says how many."""
    if jobs > 1 and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, torch.get_num_threads() // jobs)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the child processes
        torch.set_num_threads(threads)  # which the rows name


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", nargs="?", default="default", help=", ".join(choices("study")))
    parser.add_argument("--plan", choices=PLANS, default="matrix", help="which jobs; layers: see docs/layers.md")
    parser.add_argument("--seeds", help="such as 0 or 0,1,2; without it, those of the size, and 0 for layers")
    parser.add_argument(
        "--only",
        help="names of jobs (rope-s0,base100-s0) or parts (encodings, base, finetune; references, layers, further)",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after this time")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, on a GPU or a machine with many cores")
    parser.add_argument("--runs", help="the folder of runs; without it, runs/matrix-SIZE")
    parser.add_argument("--cache", default=".cache", help="the folder of prepared corpora (default .cache)")
    parser.add_argument("--out", help="the rows; without it, results/PLAN.jsonl (or PLAN-SIZE.jsonl)")
    return parser.parse_args()


if __name__ == "__main__":
    user_errors_in_one_line(main)()
