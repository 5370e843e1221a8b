"""One job of a study: train a run with train.py, evaluate it with eval.py, and gather its rows."""

import torch

from conf.errors import UserError
from conf.registry import choices, yaml_values
from engine.code_version import commit
from engine.device import autocast
from engine.run import Run
from measure.comparison import select_shared
from measure.curves import controls, read_curve
from measure.statistics import gain
from measure.tasks.matched import NEAR, Matched
from model.scaling import resolve
from studies.plan import MAIN_METHODS, Job, Size
from studies.processes import run_script
from studies.rows import Rows


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
