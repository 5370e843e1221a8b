"""Every encoding, base and fine-tuning, each with seeds, by one command: python -m studies.matrix

It only calls train.py and eval.py, and gathers their rows into results/matrix.jsonl. What is there is not done again,
and what is half done goes on, so stop it at any time. `quick` is the same at a toy size, `h200` the same on a GPU.
"""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import compare
import report
from conf.errors import check, one_line_errors
from conf.registry import ROOT, choices, usual
from data import tokens
from model import checkpoint, gpt, runtime, scaling

BASES = (100, 500, 1000, 100_000, 1_000_000)  # beside the default 10000
EXTENSIONS = ("none", "pi", "ntk", "yarn")  # fine-tuned to 4 L; none is direct fine-tuning
STEPS = (20, 50, 100, 200)  # of fine-tuning


@dataclass(frozen=True)
class Size:
    L: int
    steps: int  # of pre-training
    batch_tokens: int
    lengths: tuple[int, ...]
    train: tuple[str, ...] = ()  # settings of train.py
    documents: int = 32  # read by eval.py
    score: int = 64  # their last tokens, the targets
    seeds: tuple[int, ...] = (0,)
    finetune: tuple[int, ...] = STEPS
    rates: tuple[float, float] = (20_000, 30_000)  # tokens/s of training and of evaluation, for the forecast
    start: float = 30  # seconds of starting and compiling, for the same


SIZES = {
    "default": Size(256, 2600, 2048, (128, 256, 512, 1024, 2048, 4096, 8192), seeds=(0, 1, 2)),
    "quick": Size(64, 500, 2048, (32, 64, 128, 256, 512),
                  ("ctx=64", "steps=500", "optim.warmup=20", "val_every=500", "val_windows=32",
                   "model.n_layers=2", "model.n_heads=2", "model.width=128", "data.vocab_size=512"),
                  documents=8, score=32, finetune=(10, 40), rates=(70_000, 60_000), start=10),
    "h200": Size(512, 200, 65_536, (256, 512, 1024, 2048, 4096, 8192, 16384),
                 ("exp=h200",), finetune=(10, 20), rates=(1_000_000, 1_000_000)),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run of train.py, and what it is evaluated with."""

    part: str  # encodings, base or finetune
    name: str
    seed: int
    train: tuple[str, ...]
    steps: int
    lengths: tuple[int, ...]
    every_scaling: bool = False
    about: dict = field(default_factory=dict)  # what the rows say of it


def plan(size: Size, seeds: tuple[int, ...]) -> list[Job]:
    """All jobs, seed by seed, so that what is done by any time is a study of fewer seeds."""
    jobs = []
    for seed in seeds:
        settings = (*size.train, f"seed={seed}")
        for pos in sorted(choices("pos"), key=lambda pos: pos != "rope"):
            longest = (f"pos.max_positions={max(size.lengths)}",) if pos == "learned" else ()
            # Every scaling for rope with all seeds; for the other rotary encodings, which follow it, with the first.
            jobs.append(Job("encodings", f"{pos}-s{seed}", seed, (f"pos={pos}", *longest, *settings), size.steps,
                            size.lengths, every_scaling=pos == "rope" or seed == seeds[0]))  # fmt: skip
        target = 4 * size.L
        near = tuple(n for n in size.lengths if n >= size.L and n <= 2 * target)
        for steps in size.finetune:
            for method in EXTENSIONS:
                own = (*(x for x in size.train if x.startswith("exp=")), f"init=rope-s{seed}", f"ctx={target}",
                       f"scaling={method}", f"steps={steps}", f"seed={seed}", "val_windows=64", "optim=finetune",
                       "optim.lr=5e-4", "optim.warmup=5")  # fmt: skip
                share = round(100 * steps / size.steps, 2)
                jobs.append(Job("finetune", f"{method}-{steps}-s{seed}", seed, own, steps, near,
                                about={"method": method, "finetune_steps": steps, "percent": share}))  # fmt: skip
        longer = size.steps + max(size.finetune)
        jobs.append(Job("finetune", f"scratch-{target}-s{seed}", seed,
                        ("pos=rope", *settings, f"ctx={target}", f"steps={longer}"), longer, near,
                        about={"method": "from scratch", "finetune_steps": 0, "percent": 0}))  # fmt: skip
        for base in BASES:
            jobs.append(Job("base", f"base{base}-s{seed}", seed, ("pos=rope", f"pos.base={base}", *settings),
                            size.steps, size.lengths, about={"base": base}))  # fmt: skip
    return jobs


def minutes(job: Job, size: Size) -> float:
    """About how long it takes: its tokens over the rates, and its start."""
    curves = 20 if job.every_scaling and job.about.get("base") is None and "rope" in job.name else 2
    read = curves * size.documents * sum(job.lengths)
    return (job.steps * size.batch_tokens / size.rates[0] + read / size.rates[1] + size.start) / 60


def read(path: Path) -> list[dict]:
    """The rows that are in path."""
    if not path.exists():
        raise ValueError(f"--rows {path}: not found: first python -m studies.matrix")
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_of(row: dict) -> str:
    """The name of the run that a row is of, without the seed."""
    return row["name"].rpartition("-s")[0]


def write_table(table: Callable[[list[dict]], str], about: str, out: str) -> None:
    """A command that prints table(rows of the matrix), and writes it to results/ under this name."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="what studies.matrix wrote")
    parser.add_argument("--out", default=str(ROOT / "results" / out), help="the table")
    args = parser.parse_args()
    text = table(read(Path(args.rows)))
    checkpoint.write_atomically(Path(args.out), lambda f: f.write(text.encode()))
    print(text)


def scalings(run: Path, longest: int) -> list[str]:
    """The methods that this run can be read with, the controls left out (eval.py always measures them)."""
    state = checkpoint.load(run)
    trained = gpt.trained(state["cfg"], gpt.build_encoding(state["cfg"]))
    found = []
    for name in choices("scaling"):
        try:
            scaling.resolve(usual("scaling", name), trained, longest, longest)
        except ValueError:  # does not fit, or needs factors from a search
            continue
        if name not in ("none", "window"):
            found.append(name)
    return found


def commit() -> str:
    """The commit that runs, with a + if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    changed = "\n".join(x for x in changed.splitlines() if not x.endswith(("jsonl", "png", "svg", "md")))
    return (name or "unknown") + ("+" if changed else "")


def gather(job: Job, run: Path, command: str) -> list[dict]:
    """What eval.py measured of this run, with the gain over its window control at the same n."""
    curves = [compare.read(f) for f in sorted((run / "eval").glob("*.jsonl"))]
    newest = max(curves, key=lambda c: c[0]["age"])[0]["targets"]
    state = checkpoint.load(run)
    cfg = state["cfg"]
    window = next(c for c in compare.select(curves, newest) if c[0]["label"] == "window")
    by_n = {row["n"]: row for row in window}
    rows = []
    for curve in compare.select(curves, newest):
        for row in curve:
            mean, low, high = report.gain(row, by_n[row["n"]])
            kept = ("pos", "seed", "label", "n", "factor", "train_ctx", "extended_ctx", "loss", "low", "high",
                    "bits_per_byte", "tokens", "bytes", "targets", "dtype", "device", "nll")  # fmt: skip
            rows.append({"part": job.part, "name": job.name, "base": cfg.pos.get("base"), **job.about,
                         **{k: row[k] for k in kept}, "gain": mean, "gain_low": low, "gain_high": high,
                         "in_window": state["validation"]["bits_per_byte"], "steps": cfg.steps,
                         "threads": torch.get_num_threads(), "commit": commit(), "command": command})  # fmt: skip
    return rows


@torch.inference_mode()
def shifted(job: Job, run: Path, size: Size, command: str) -> list[dict]:
    """Rows of the same targets given L/2 tokens, at positions 0 .. L/2 - 1 and at L/2 .. L - 1, all of them trained.

    An encoding that goes by distance alone cannot tell the two apart.
    """
    state = checkpoint.load(run)
    cfg, n, score = state["cfg"], size.L // 2, size.score
    corpus = tokens.prepare(cfg.data, cfg.cache)
    _, text = tokens.long_documents(corpus, max(job.lengths), size.documents)
    model = gpt.build(cfg, corpus.vocab_size).eval()
    model.load_state_dict(state["model"])
    rows = []
    for label, start in (("unshifted", 0), ("shifted", n)):
        with runtime.autocast(torch.device("cpu"), cfg.dtype):
            losses = model.losses(text[:, -n - 1 : -1], text[:, -score:], torch.arange(n) + start).double()
        rows.append({"part": job.part, "name": job.name, "pos": cfg.pos["kind"], "seed": cfg.seed, "label": label,
                     "n": n, "train_ctx": size.L, "loss": losses.mean().item(), "tokens": losses.numel(),
                     "nll": losses.sum(dim=1).numpy().round(4).tolist(), "commit": commit(),
                     "command": command})  # fmt: skip
    return rows


class Stopped(Exception):
    pass


def call(argv: list[str], deadline: float) -> None:
    """A command of this repo, to its end. Past the deadline it is asked to save and stop: Stopped."""
    child = subprocess.Popen([sys.executable, str(ROOT / argv[0]), *argv[1:]])
    try:
        code = child.wait(max(0.1, deadline - time.monotonic()) if deadline < float("inf") else None)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as e:
        if not isinstance(e, KeyboardInterrupt):  # Ctrl-C reaches the child by itself
            child.send_signal(signal.SIGTERM)
        child.wait()
        raise Stopped from None
    if code in (130, 143):
        raise Stopped
    if code:
        raise ValueError(f"`python {' '.join(argv)}` ended with exit code {code}; the same command goes on from there")


def do(job: Job, size: Size, runs: str, deadline: float) -> list[dict]:
    about = [f"name={job.name}", f"runs={runs}"]
    call(["train.py", *job.train, *about], deadline)
    run = Path(runs) / job.name
    methods = ",".join(scalings(run, max(job.lengths)) if job.every_scaling else []) or "none"
    ns = f"ctx=[{','.join(map(str, job.lengths))}]"
    evaluate = ["eval.py", "-m", f"run={job.name}", f"runs={runs}", ns, f"documents={size.documents}"]
    call([*evaluate, f"score={size.score}", f"scaling={methods}"], deadline)
    if job.name.startswith("rope-s"):  # the tax: one factor at all lengths, as a deployed model pays it
        call([*evaluate, f"score={size.score}", "scaling=pi,ntk,yarn", "++scaling.factor=fixed"], deadline)
        call([*evaluate, f"score={size.score}", "scaling=ntk,yarn,rerope,rerope_leaky", "plus=logn"], deadline)
    command = f"python train.py {' '.join(job.train)} name={job.name}"
    return gather(job, run, command) + (shifted(job, run, size, command) if job.part == "encodings" else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", nargs="?", default="default", help=", ".join(SIZES))
    parser.add_argument("--seeds", help="such as 0 or 0,1,2; the size's own otherwise")
    parser.add_argument("--only", help="encodings, base or finetune; names of jobs go, too: rope-s0,base100-s0")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after so many")
    parser.add_argument("--runs", help="the folder of runs; runs/matrix-SIZE otherwise")
    parser.add_argument("--out", help="the rows; results/matrix.jsonl (or matrix-SIZE.jsonl) otherwise")
    args = parser.parse_args()
    check(args.size in SIZES, "size", args.size, f"one of {', '.join(SIZES)}")
    size = SIZES[args.size]
    runs = args.runs or f"runs/matrix-{args.size}"
    out = Path(args.out or f"results/matrix{'' if args.size == 'default' else '-' + args.size}.jsonl")
    seeds = tuple(int(x) for x in args.seeds.split(",")) if args.seeds else size.seeds
    jobs = plan(size, seeds)
    if args.only:
        wanted = args.only.split(",")
        known = {x for job in jobs for x in (job.part, job.name)}
        for x in wanted:
            check(x in known, "--only", x, f"encodings, base, finetune or a job such as {jobs[0].name}")
        jobs = [job for job in jobs if job.part in wanted or job.name in wanted]
    rows = read(out) if out.exists() else []
    todo = [job for job in jobs if job.name not in {row["name"] for row in rows}]
    left = sum(minutes(job, size) for job in todo)
    print(f"{len(jobs)} jobs, {len(todo)} to do: about {left / 60:.1f} h at {size.rates[0]:,.0f} tokens/s of training")
    deadline = time.monotonic() + 60 * args.minutes
    for i, job in enumerate(todo):
        print(f"\n=== {job.name} ({i + 1} of {len(todo)}; about {left / 60:.1f} h left) ===", flush=True)
        try:
            rows += do(job, size, runs, deadline)
        except Stopped:
            sys.exit(f"stopped: {i} jobs done, {len(todo) - i} left; the same command goes on from there")
        text = "".join(json.dumps(row) + "\n" for row in rows)
        checkpoint.write_atomically(out, lambda f, text=text: f.write(text.encode()))
        left -= minutes(job, size)
    print(f"\nrows: {out}   next: python -m studies.claims, studies.tables, studies.figures")


if __name__ == "__main__":
    one_line_errors(main)()
