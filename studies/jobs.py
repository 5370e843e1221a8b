"""One job of a study: train a run with train.py, evaluate it with eval.py, each in a child process; gather its rows."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from conf.cli import Prefixed, checked, compose
from conf.errors import UserError
from conf.registry import ROOT
from conf.schema import EvalConfig
from engine.files import commit
from engine.run import Run
from hf.open import open_run
from measure import tasks
from measure.breakdowns import Groups, antecedent_groups, target_losses
from measure.curves import Row, losses_file, read_run, select_shared
from measure.tasks.matched import Matched
from studies.plan import Job, Size, targets
from studies.rows import StudyRow

# ---- child processes ----


class Stopped(Exception):
    """The user pressed Ctrl-C, or the process got SIGTERM."""


children: set[subprocess.Popen] = set()  # those of `run_script` that run now, in any thread
stopping = threading.Event()  # set when no further ones may be started
starting = threading.Lock()  # held while one is started, and while all are stopped, so that none is missed


def run_script(argv: list[str], prefix: str = "") -> None:
    """Run a script of this repository in a child process until it ends.

    argv: the script and its arguments. prefix: of each line that it prints. UserError if the child fails, and Stopped
    if it was stopped.
    """
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    with starting:
        if stopping.is_set():
            raise Stopped
        child = subprocess.Popen([sys.executable, str(ROOT / argv[0]), *argv[1:]], **(piped if prefix else {}))
        children.add(child)
    copying = threading.Thread(target=copy, args=(child.stdout or (), prefix))  # without a pipe it ends at once
    copying.start()
    try:
        code = child.wait()
    finally:
        children.discard(child)
        copying.join()
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):  # it was stopped by a signal, perhaps as it started
        raise Stopped
    if code:
        raise UserError(f"`python {' '.join(argv)}` failed with exit code {code}; run the same command again to resume")


def copy(lines: Iterable[str], prefix: str) -> None:
    """Print lines with a prefix. If they cannot be printed it still reads them: the child would wait."""
    out = Prefixed(sys.stdout, prefix)
    for line in lines:
        with suppress(OSError):
            out.write(line.rstrip("\n") + "\n")


def stop() -> None:
    """Send SIGTERM to the child processes, which then save and end, and let no other be started."""
    with starting:
        stopping.set()
        for child in [*children]:
            child.send_signal(signal.SIGTERM)


# ---- a job ----


def run_job(job: Job, size: Size, runs: str, cache: str, one: bool = True) -> list[StudyRow]:
    """Train and evaluate; returns the job's rows.

    one: no other job runs at the same time; else its name stands before each line that it prints.
    """
    prefix = "" if one else job.name
    folders = f"runs={Path(runs, job.name) if job.model else runs}", f"cache={cache}"
    if not job.model:
        run_script(["train.py", *job.train, f"name={job.name}", *folders], prefix)
    opened = (f"run={job.model or job.name}", *folders, *targets(job, size))
    for evaluation in job.evaluations:
        asked = f"ctx=[{','.join(map(str, evaluation.lengths))}]", f"scaling={','.join(evaluation.methods)}"
        run_script(["eval.py", "-m", *opened, *asked, *evaluation.settings], prefix)
    cfg = checked("eval", compose("eval", *opened, f"ctx={job.longest}"))
    return gather(job, open_run(cfg, torch.device("cpu")), cfg)


def gather(job: Job, run: Run, cfg: EvalConfig) -> list[StudyRow]:
    """The rows of a run: one for each of its curves and each length. cfg: of its evaluations."""
    task = tasks.build(cfg.task, run.corpus, job.longest, cfg.documents)
    curves = select_shared(read_run(run.folder, run.digest), task.texts())
    rows = [(row, c) for c in curves for row in c.overall]
    if lost := {n for evaluation in job.evaluations for n in evaluation.lengths} - {row.n for row, _ in rows}:
        raise UserError(f"{job.name}: n={min(lost)} was evaluated on other texts than n={job.longest}")
    groups = antecedent_groups(task, job.longest) if isinstance(task, Matched) else None
    about: dict[str, Any] = {"base": run.cfg.pos.get("base"), "steps": run.cfg.steps, "run": job.name, "part": job.part}
    about |= {"threads": torch.get_num_threads(), "commit": commit(), "command": "python -m studies.matrix --plan real"}
    if not job.model:
        about |= {"in_window": run.validation["bits_per_byte"], "train_seconds": run.seconds}
        about["tokens_per_second"] = round(run.step * run.cfg.batch_tokens / run.seconds)
        about["command"] = f"python train.py {' '.join(job.train)} name={job.name}"
    return [
        StudyRow(**asdict(row) | about, groups=group_sums(row, c.file, groups), answers=c.answers(row.n))
        for row, c in rows
    ]


def group_sums(row: Row, file: Path | None, groups: Groups | None) -> dict[str, list[list[float]]]:
    """Group of targets -> the sum of their nats, and their number, in each document. Of rows from L on.

    Empty without groups, and where `file`, that of the row's curve, has no losses of single targets: the method changes
    nothing there.
    """
    if not (groups and file) or row.n < row.train_ctx or not losses_file(file, row).exists():
        return {}
    sums = groups.sums(row.scored_windows, target_losses(file, row))
    return {name: [nats.round(3).tolist(), counts.tolist()] for name, counts, (nats,) in sums if counts.any()}
