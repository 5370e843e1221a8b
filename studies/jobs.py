"""One job of a study: train a run with train.py, evaluate it with eval.py, each in a child process; gather its rows."""

import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import torch

from conf.errors import UserError
from conf.registry import ROOT, choices, yaml_values
from engine.device import autocast
from engine.files import commit
from engine.run import Run
from measure.curves import Row, read_run, select_shared
from measure.intervals import mean_interval
from measure.tasks.matched import NEAR, Matched
from model.scaling import resolve
from studies.plan import MAIN_METHODS, Job, Size
from studies.rows import StudyRow

# ---- child processes ----


class Stopped(Exception):
    """The deadline has passed, or the user pressed Ctrl-C."""


PATIENCE = 60.0  # seconds from SIGTERM to a child until it is killed
children: set[subprocess.Popen] = set()  # those of `run_script` that run now, in any thread
stopping = threading.Event()  # set when no further ones may be started


def run_script(argv: list[str], deadline: float) -> None:
    """Run a script of this repository in a child process until it ends.

    argv: the script and its arguments. deadline: in seconds of time.monotonic(); when it passes, the child gets
    SIGTERM, saves, and Stopped is raised. UserError if the child fails.
    """
    if stopping.is_set():
        raise Stopped
    child = subprocess.Popen([sys.executable, str(ROOT / argv[0]), *argv[1:]])
    children.add(child)
    timeout = max(0.1, deadline - time.monotonic()) if deadline < math.inf else None
    try:
        code = child.wait(timeout)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # Ctrl-C, or SIGTERM: see studies/matrix.py
        stop(child)
        raise Stopped from None
    finally:
        children.discard(child)
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):  # it was stopped by a signal, perhaps as it started
        raise Stopped
    if code:
        command = " ".join(["python", *argv])
        raise UserError(f"`{command}` failed with exit code {code}; run the same command again to resume from there")


def stop(*running: subprocess.Popen) -> None:
    """Send SIGTERM to child processes, which then save and end. One that has not after a minute is killed."""
    for child in running:
        child.send_signal(signal.SIGTERM)
    until = time.monotonic() + PATIENCE
    for child in running:
        try:
            child.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


# ---- a job ----


def run_job(job: Job, size: Size, runs: str, cache: str, deadline: float) -> list[StudyRow]:
    """Train and evaluate; returns the job's rows. deadline: of time.monotonic(); past it, Stopped is raised."""
    folders = (f"runs={runs}", f"cache={cache}")
    run_script(["train.py", *job.train, f"name={job.name}", *folders], deadline)
    run = Run.open(job.name, runs=runs, cache=cache)

    targets = [f"documents={size.documents}", f"task.scored_tokens={size.scored_tokens}"]
    targets += [f"task.windows={size.windows}", f"task.far_windows={size.far_windows}"]
    evaluate = ["eval.py", "-m", f"run={job.name}", *folders, *targets]
    methods = applicable_scalings(run, max(job.lengths)) if job.scalings != "controls" else []
    # Lengths between L and 2 L are for the main methods only
    doubling = [n for n in job.lengths if n <= NEAR and (n % size.L == 0 or n < size.L)]
    near, every = (f"ctx=[{','.join(map(str, lengths))}]" for lengths in (doubling, job.lengths))
    main_methods = [name for name in MAIN_METHODS if name in methods]
    run_script([*evaluate, every, f"scaling={','.join(['none', *main_methods, *(job.methods or ())])}"], deadline)
    others = [name for name in methods if name not in main_methods]
    if others and job.scalings == "all":
        run_script([*evaluate, near, f"scaling={','.join(others)}"], deadline)
        # One factor at all lengths, as in a deployed model, to measure the increase of the loss within L; and methods
        # that are combined with log-n
        run_script([*evaluate, near, "scaling=pi,ntk,yarn", "++scaling.factor=fixed"], deadline)
        run_script([*evaluate, near, "scaling=ntk,yarn,rerope,rerope_leaky", "plus=logn"], deadline)
    return gather(job, run, size)


def applicable_scalings(run: Run, longest: int) -> list[str]:
    """The scaling methods that this run can be evaluated with at the longest length.

    Without the controls none and window, which eval.py measures in every evaluation.
    """
    names = []
    for name in sorted({*choices("scaling")} - {"none", "window"}):
        try:
            resolve(yaml_values("scaling", name), run.context, longest, longest)
        except UserError:  # not applicable to this encoding, or its yaml lacks values that only a search can find
            continue
        names.append(name)
    return names


def gather(job: Job, run: Run, size: Size) -> list[StudyRow]:
    """The rows of a run: one for each of its curves and each length, and those of the shifted text."""
    task = Matched(run.corpus, max(job.lengths), size.documents, size.scored_tokens, size.windows, size.far_windows)
    curves = select_shared(read_run(run.folder, run.digest), task.texts())
    rows = [row for curve in curves for row in curve.rows]
    if job.methods is not None:  # the matrix has the same run with more methods and lengths
        labels = ("none", "window", *job.methods)
        rows = [row for row in rows if row.n in job.lengths and row.label in labels]
    if job.part == "encodings":
        (unscaled,) = (row for row in rows if (row.label, row.n) == ("none", size.L // 2))
        rows += shifted(unscaled, run, task)
    about = {"base": run.cfg.pos.get("base"), "in_window": run.validation["bits_per_byte"], "steps": run.cfg.steps}
    about["tokens_per_second"] = round(run.step * run.cfg.batch_tokens / run.seconds)
    origin = {"threads": torch.get_num_threads(), "commit": commit()}
    origin["command"] = f"python train.py {' '.join(job.train)} name={job.name}"
    return [StudyRow(**asdict(row), part=job.part, **about, **origin, **job.columns) for row in rows]


@torch.inference_mode()
def shifted(unscaled: Row, run: Run, task: Matched) -> list[Row]:
    """Two rows, `unshifted` and `shifted`: the same text of L/2 tokens at positions 0 .. L/2 - 1 and L/2 .. L - 1.

    All of these positions were trained. An encoding that depends only on distances has the same loss in both rows.
    unscaled: the run's row at L/2, on the same targets.
    """
    n = unscaled.n
    (piece,) = task.pieces(n)
    rows = []
    for label, start in (("unshifted", 0), ("shifted", n)):
        with autocast(torch.device("cpu"), run.cfg.dtype):
            passes = zip(piece.tokens.split(32), piece.targets.split(32), strict=True)
            losses = torch.cat([run.model.losses(*part, torch.arange(n) + start).double() for part in passes])
        loss, low, high = mean_interval(losses.view(1, unscaled.documents, -1).mean(dim=2).numpy())
        values = {"loss": loss, "low": low, "high": high, "ppl": math.exp(min(loss, 700))}
        values |= {"bits_per_byte": unscaled.bits_per_byte * loss / unscaled.loss}
        nll = losses.sum(dim=1).numpy().round(4).tolist()
        rows.append(replace(unscaled, label=label, nll=nll, **values))
    return rows
