"""All encodings, bases and fine-tunings, each with several seeds, by one command: python -m studies.matrix

A job trains one run with train.py and evaluates it with eval.py, each in a child process. The results are collected as
rows of results/matrix.jsonl. The command can be stopped at any time: when it is run again, finished jobs are skipped
and unfinished ones are resumed. `quick` is the same study at a toy size, `h200` at 41M parameters on a GPU; `smoke`
takes seconds a job, to try the command. `--plan layers` runs the second plan, whose rows are results/layers.jsonl.
"""

if __name__ == "__main__":
    import conf.interrupt  # noqa: F401 (first: Ctrl-C while torch is imported)

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from conf.errors import check, user_errors_in_one_line
from conf.leftovers import check_writable
from conf.registry import choices
from engine.checkpoint import write_atomically
from studies.jobs import run_job
from studies.plan import PLANS, load_size, minutes, parse_seeds, select_jobs
from studies.processes import Stopped, finished_jobs, share_cores
from studies.rows import read_rows


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
