"""Every encoding, base and fine-tuning, each with several seeds, by one command: python -m studies.matrix

A job trains one run with train.py and evaluates it with eval.py, each in a child process. The results are collected as
rows of results/matrix.jsonl. The command can be stopped at any time: when it is run again, finished jobs are skipped
and unfinished ones are resumed. `quick` is the same study at a toy size, `h200` at 41M parameters on a GPU; `smoke`
takes seconds a job, to try the command.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError, check, user_errors_in_one_line
from conf.registry import ROOT, choices, yaml_values
from engine.checkpoint import write_atomically
from engine.device import autocast
from engine.run import Run
from measure.curves import controls, read_curve, select
from measure.statistics import gain
from measure.tasks.matched import NEAR, Matched
from model.scaling import resolve
from studies.rows import Rows, read_rows

BASES = (100, 500, 1000, 100_000, 1_000_000)  # besides the default of 10000
EXTENSIONS = ("none", "pi", "ntk", "yarn")  # methods that are fine-tuned to 4 L; none: fine-tuned without scaling
FINETUNE_STEPS = (20, 50, 100, 200)
MAIN_METHODS = ("pi", "ntk", "yarn", "rerope", "logn")  # evaluated at all lengths; the others up to NEAR
CACHE = ".cache"  # of the corpora: the default of train.py and eval.py


@dataclass(frozen=True)
class Size:
    """The study at one size of model and corpus."""

    L: int  # the trained context, tokens
    steps: int  # of pre-training
    batch_tokens: int
    lengths: tuple[int, ...]  # evaluated; past NEAR only with MAIN_METHODS
    train: tuple[str, ...] = ()  # overrides of train.py
    documents: int = 32  # evaluated
    scored_tokens: int = 64  # at the end of each window
    windows: int = 8  # of each document
    far_windows: int = 2  # of each document at lengths past NEAR
    seeds: tuple[int, ...] = (0,)
    finetune: tuple[int, ...] = FINETUNE_STEPS
    compile: bool = False  # in evaluation
    # For the forecast of the duration:
    train_rate: float = 20_000  # tokens/s
    eval_rate: float = 30_000  # tokens/s
    start_seconds: float = 30  # to start and compile


SIZES = {
    "default": Size(
        L=256,
        steps=2600,
        batch_tokens=2048,
        lengths=(128, 256, 288, 320, 384, 448, 512, 1024, 2048, 4096, 8192),
        seeds=(0, 1, 2),
        compile=True,
    ),
    "quick": Size(
        L=64,
        steps=500,
        batch_tokens=2048,
        lengths=(32, 64, 80, 96, 128, 256, 512),
        train=("ctx=64", "steps=500", "optim.warmup=20", "val_every=500", "val_windows=32", "model.n_layers=2",
               "model.n_heads=2", "model.width=128", "data.vocab_size=512"),
        documents=8,
        scored_tokens=32,
        finetune=(10, 40),
        train_rate=70_000,
        eval_rate=60_000,
        start_seconds=10,
    ),
    "smoke": Size(
        L=64,
        steps=20,
        batch_tokens=512,
        lengths=(32, 64, 128, 256),
        train=("exp=smoke", "steps=20", "model.n_layers=1", "val_every=20", "val_windows=8"),
        documents=4,
        scored_tokens=32,
        finetune=(5, 10),
        train_rate=30_000,
        eval_rate=30_000,
        start_seconds=20,
    ),
    "h200": Size(
        L=512,
        steps=200,
        batch_tokens=65_536,
        lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
        train=("exp=h200",),
        finetune=(10, 20),
        train_rate=1_000_000,
        eval_rate=1_000_000,
    ),
}  # fmt: skip


# ---- the plan ----


@dataclass(frozen=True)
class Job:
    """One training run and its evaluation."""

    part: str  # encodings, base or finetune
    name: str
    seed: int
    train: tuple[str, ...]  # overrides of train.py
    steps: int
    lengths: tuple[int, ...]  # evaluated
    scalings: str = "controls"  # evaluated with: all methods that apply, those of MAIN_METHODS, or the controls only
    columns: dict[str, Any] = field(default_factory=dict)  # additional columns of its rows


def plan(size: Size, seeds: tuple[int, ...]) -> list[Job]:
    """All jobs, ordered by seed: if the study is stopped, the finished jobs are a study with fewer seeds."""
    jobs = []
    for seed in seeds:
        jobs += encoding_jobs(size, seed, first=seed == seeds[0])
        jobs += finetune_jobs(size, seed)
        jobs += base_jobs(size, seed)
    return jobs


def encoding_jobs(size: Size, seed: int, first: bool) -> list[Job]:
    """A run of every encoding. rope comes first, because the fine-tunings start from it."""
    jobs = []
    for pos in sorted(choices("pos"), key=lambda pos: pos != "rope"):
        # An encoding with a table of positions needs rows for the longest length that is evaluated
        table = (f"pos.max_positions={max(size.lengths)}",) if "max_positions" in yaml_values("pos", pos) else ()
        train = (f"pos={pos}", *table, *size.train, f"seed={seed}")
        # All methods are evaluated on rope, with all seeds. On the other encodings the results are similar, so there
        # the main methods with the first seed are enough
        scalings = "all" if pos == "rope" else "main" if first else "controls"
        jobs.append(Job("encodings", f"{pos}-s{seed}", seed, train, size.steps, size.lengths, scalings))
    return jobs


def finetune_jobs(size: Size, seed: int) -> list[Job]:
    """Fine-tuning of rope to a context of 4 L with each method of EXTENSIONS, for several numbers of steps.

    In addition one run that is trained at 4 L from scratch, for comparison. The columns `method`, `finetune_steps` and
    `percent` (of the pre-training's steps) identify them in the rows.
    """
    target = 4 * size.L
    lengths = tuple(size.L * k for k in (1, 2, 4, 5, 8))  # 4 L is the target, and 5 and 8 L are past it
    exp = tuple(x for x in size.train if x.startswith("exp="))  # the other settings come from the run it starts from
    optim = ("optim=finetune", "optim.lr=5e-4", "optim.warmup=5")
    jobs = []
    for steps in size.finetune:
        for method in EXTENSIONS:
            settings = (f"ctx={target}", f"scaling={method}", f"steps={steps}", f"seed={seed}", "val_windows=64")
            train = (*exp, f"init=rope-s{seed}", *settings, *optim)
            columns = {"method": method, "finetune_steps": steps, "percent": round(100 * steps / size.steps, 2)}
            name = f"{method}-{steps}-s{seed}"
            jobs.append(Job("finetune", name, seed, train, steps, lengths, columns=columns))
    # From scratch with as many steps as pre-training and the longest fine-tuning have together
    steps = size.steps + max(size.finetune)
    train = ("pos=rope", *size.train, f"seed={seed}", f"ctx={target}", f"steps={steps}")
    columns = {"method": "from scratch", "finetune_steps": 0, "percent": 0}
    jobs.append(Job("finetune", f"scratch-{target}-s{seed}", seed, train, steps, lengths, columns=columns))
    return jobs


def base_jobs(size: Size, seed: int) -> list[Job]:
    """Runs of rope that are pre-trained with each base of BASES; their rows have it in the column `base`."""
    jobs = []
    for base in BASES:
        train = ("pos=rope", f"pos.base={base}", *size.train, f"seed={seed}")
        name = f"base{base}-s{seed}"
        jobs.append(Job("base", name, seed, train, size.steps, size.lengths, columns={"base": base}))
    return jobs


def minutes(job: Job, size: Size) -> float:
    """A rough forecast of a job's duration in minutes: its tokens divided by the rates, plus the time to start."""
    # About 20 methods apply to an encoding that rotates, and few to the others
    curves = {"all": 20, "main": 2 + len(MAIN_METHODS), "controls": 2}[job.scalings]
    far = min(curves, 2 + len(MAIN_METHODS)) * size.far_windows * sum(n for n in job.lengths if n > NEAR)
    near = curves * size.windows * sum(n for n in job.lengths if n <= NEAR)
    eval_tokens = size.documents * (near + far)
    seconds = job.steps * size.batch_tokens / size.train_rate + eval_tokens / size.eval_rate + size.start_seconds
    return seconds / 60


# ---- one job ----


class Stopped(Exception):
    """The deadline has passed, or the user pressed Ctrl-C."""


def run_job(job: Job, size: Size, runs: str, deadline: float) -> Rows:
    """Train and evaluate; returns the job's rows. deadline: of time.monotonic(); past it, Stopped is raised."""
    run_script(["train.py", *job.train, f"name={job.name}", f"runs={runs}"], deadline)
    run = Run.open(job.name, runs=runs, cache=CACHE)

    methods = applicable_scalings(run, max(job.lengths)) if job.scalings != "controls" else []
    evaluate = ["eval.py", "-m", f"run={job.name}", f"runs={runs}", f"compile={size.compile}", *target_settings(size)]
    # Lengths between L and 2 L are for the main methods only
    doubling = [n for n in job.lengths if n <= NEAR and (n % size.L == 0 or n < size.L)]
    near, every = (f"ctx=[{','.join(map(str, lengths))}]" for lengths in (doubling, job.lengths))
    main_methods = [name for name in MAIN_METHODS if name in methods]
    run_script([*evaluate, every, f"scaling={','.join(['none', *main_methods])}"], deadline)
    others = [name for name in methods if name not in main_methods]
    if others and job.scalings == "all":
        run_script([*evaluate, near, f"scaling={','.join(others)}"], deadline)
    if job.name.startswith("rope-s"):
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


def run_script(argv: list[str], deadline: float) -> None:
    """Run a script of this repository in a child process until it ends.

    argv: the script and its arguments. deadline: in seconds of time.monotonic(); when it passes, the child gets
    SIGTERM, saves, and Stopped is raised. UserError if the child fails.
    """
    child = subprocess.Popen([sys.executable, str(ROOT / argv[0]), *argv[1:]])
    timeout = max(0.1, deadline - time.monotonic()) if deadline < float("inf") else None
    try:
        code = child.wait(timeout)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise Stopped from None
    except KeyboardInterrupt:  # the terminal sends Ctrl-C to the child as well
        child.wait()
        raise Stopped from None
    if code in (130, 143):  # it was stopped by SIGINT or SIGTERM
        raise Stopped
    if code:
        raise UserError(
            f"`python {' '.join(argv)}` failed with exit code {code}; run the same command again to resume from there"
        )


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
    selected = select(curves, newest.first.texts)
    bars = controls(selected)[run.name]
    origin = {"threads": torch.get_num_threads(), "commit": commit(), "command": command}
    rows = []
    for row in (row for curve in selected for row in curve.rows):
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


def commit() -> str:
    """The short hash of the checked-out commit, followed by + if the code differs from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    status = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    # Results and texts may differ: they do not change a number
    changed = [line for line in status.splitlines() if not line.endswith(("jsonl", "png", "svg", "md"))]
    return (name or "unknown") + ("+" if changed else "")


# ---- the command ----


def main() -> None:
    """Run all jobs that have no rows yet. The file of rows is written after each job, so no finished job is lost."""
    args = parse_arguments()
    check(args.size in SIZES, "size", args.size, f"one of {', '.join(SIZES)}")
    size = SIZES[args.size]
    runs = args.runs or f"runs/matrix-{args.size}"
    out = Path(args.out or f"results/matrix{'' if args.size == 'default' else '-' + args.size}.jsonl")
    jobs = select_jobs(plan(size, parse_seeds(args.seeds) if args.seeds else size.seeds), args.only)
    rows = read_rows(out) if out.exists() else []
    finished = {row["name"] for row in rows}
    todo = [job for job in jobs if job.name not in finished]
    left = sum(minutes(job, size) for job in todo)
    print(
        f"{len(jobs)} jobs, {len(todo)} to do: about {left / 60:.1f} h at {size.train_rate:,.0f} tokens/s of training"
    )

    deadline = time.monotonic() + 60 * args.minutes
    for i, job in enumerate(todo):
        print(f"\n=== {job.name} ({i + 1} of {len(todo)}; about {left / 60:.1f} h left) ===", flush=True)
        try:
            rows += run_job(job, size, runs, deadline)
        except Stopped:
            sys.exit(f"stopped: {i} jobs done, {len(todo) - i} left; run the same command again to resume")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_atomically(out, lambda f, text=text: f.write(text.encode()))
        left -= minutes(job, size)
    print(f"\nrows: {out}   next: python -m studies.claims, studies.tables, studies.figures")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", nargs="?", default="default", help=", ".join(SIZES))
    parser.add_argument("--seeds", help="such as 0 or 0,1,2; without it, those of the size")
    parser.add_argument("--only", help="parts (encodings, base, finetune) or names of jobs: rope-s0,base100-s0")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after this time")
    parser.add_argument("--runs", help="the folder of runs; without it, runs/matrix-SIZE")
    parser.add_argument("--out", help="the rows; without it, results/matrix.jsonl (or matrix-SIZE.jsonl)")
    return parser.parse_args()


def parse_seeds(text: str) -> tuple[int, ...]:
    """The seeds in a list with commas, 0,1,2 -> (0, 1, 2). UserError for anything else."""
    names = text.split(",")
    check(all(name.isdecimal() for name in names), "--seeds", text, "whole numbers, such as 0 or 0,1,2")
    return tuple(map(int, names))


def select_jobs(jobs: list[Job], only: str | None) -> list[Job]:
    """The jobs whose part or name is in `only`, a list with commas; all of them for None."""
    if not only:
        return jobs
    wanted = only.split(",")
    known = {name for job in jobs for name in (job.part, job.name)}
    for name in wanted:
        check(name in known, "--only", name, f"encodings, base, finetune or a job such as {jobs[0].name}")
    return [job for job in jobs if job.part in wanted or job.name in wanted]


if __name__ == "__main__":
    user_errors_in_one_line(main)()
