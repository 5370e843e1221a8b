"""Sweeps, train.py -m and eval.py -m: a failing job fails alone, and finished work is skipped."""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import OmegaConf

import eval as evaluation
import train
from conf.errors import OneRankError, UserError, file_errors
from conf.hydra_patches import JobFailed, run_main, sweep_job
from conf.sweeps import raise_failures
from tests.helpers import command

pytestmark = pytest.mark.process


def files(pattern: str) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in Path().glob(pattern)}


def test_one_failing_job_does_not_lose_the_others_and_finished_ones_are_skipped(here, monkeypatch, capsys):
    """The first sweep in a new process, as a user runs it, and the ones after it in this one."""

    def sweep(main: Callable[[], None], *args: str) -> tuple[str, str, str | None]:
        """stdout, stderr and the line of the error that it ends with."""
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["script.py", *args])
        capsys.readouterr()
        error = None
        try:
            run_main(main)
        except SystemExit as end:
            error = str(end.code)
        return *capsys.readouterr(), error

    batches = ("-m", "exp=smoke", "steps=2", "batch_tokens=128,100,256")
    done = command("train.py", *batches, cwd=here)
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert lines == [
        "error: exp=smoke steps=2 batch_tokens=100: batch_tokens=100: must be a multiple of ctx=64",
        "error: 1 of 3 jobs failed with the errors above: exp=smoke steps=2 batch_tokens=100",
    ]
    names = [f"rope-smoke-batch_tokens{n}-steps2" for n in (128, 256)]
    before = files("runs/*/ckpt.pt")
    assert sorted(Path(f).parent.name for f in before) == names

    out, _, error = sweep(train.main, *batches)
    assert error == lines[1] and out.count("already trained, loss ") == 2
    assert files("runs/*/ckpt.pt") == before

    evaluate = ("-m", f"run={names[0]},nobody,{names[1]}", "ctx=128", "documents=3")
    _, err, error = sweep(evaluation.main, *evaluate)
    assert error is not None and error.startswith("error: 1 of 3 jobs failed with the errors above: run=nobody")
    assert err.count("error: run=nobody") == 1
    curves = files("runs/*/eval/*.jsonl")
    assert sorted(Path(f).parts[1] for f in curves) == sorted(2 * names)  # none and window of each
    _, err, error = sweep(evaluation.main, "-m", f"run={','.join(names)}", "scaling=none,pi", *evaluate[2:])
    assert error is None, err
    after = files("runs/*/eval/*.jsonl")
    assert {f: after[f] for f in curves} == curves  # not evaluated again
    new = {(Path(f).parts[1], Path(f).name.split("-")[0]) for f in after.keys() - curves.keys()}
    assert new == {(name, "pi") for name in names}
    assert sorted(p.name for p in here.iterdir() if p.name not in ("wandb", ".cache")) == ["runs"]


def test_lists_that_are_no_results_of_a_sweep_fail_nothing():
    """hydra-core 1.4 parses the overrides in a launch of its own, which returns their list."""
    raise_failures([OverridesParser.create().parse_override("x=1")])
    raise_failures([])


@pytest.mark.parametrize("bug", [False, True])
def test_the_errors_of_a_sweep_keep_no_tensors_and_a_bug_keeps_its_traceback(bug, monkeypatch, capsys):
    def job() -> object:
        tensor = torch.zeros(3)
        alive.append(weakref.ref(tensor))
        if bug:
            raise ZeroDivisionError("of ours")
        raise UserError("x=1: must be 2")

    alive: list[weakref.ref] = []
    hydra = {"mode": RunMode.MULTIRUN, "overrides": {"task": ["x=1"]}}
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create(hydra))
    failed = sweep_job(job)()
    gc.collect()
    assert alive[0]() is None
    assert ("Traceback" in (err := capsys.readouterr().err)) == bug
    assert bug or err == "error: x=1: x=1: must be 2\n"
    with pytest.raises(RuntimeError if bug else UserError, match=r"^1 of 2 jobs failed with the errors above: x=1$"):
        raise_failures([[JobReturn(_return_value=x, status=JobStatus.COMPLETED) for x in (None, failed)]])


def test_an_error_of_one_rank_ends_the_sweep(monkeypatch):
    """The other ranks wait for this one in the middle of a job."""
    monkeypatch.setattr(HydraConfig, "get", lambda: OmegaConf.create({"mode": RunMode.MULTIRUN}))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(JobFailed) as end:
        sweep_job(full_disk)()
    assert isinstance(end.value.__cause__, OneRankError)


def full_disk() -> None:
    with file_errors("runs"):
        raise OSError(28, "No space left on device")


def test_a_typo_in_a_sweep_is_found_before_any_job(here):
    done = command("train.py", "-m", "exp=smoke", "pos=rope,swirl", cwd=here)
    assert (
        done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "pos=rope,swirl: must be one of" in done.stderr
    )
    assert not list(here.glob("runs/*/ckpt.pt"))


@pytest.mark.slow
def test_the_joblib_launcher_spreads_jobs_over_processes(here):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="not installed: pip install -e '.[sweep]'")
    sweep = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "exp=smoke", "steps=2")
    done = command("train.py", *sweep, "batch_tokens=128,100,256", cwd=here)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: 1 of 3 jobs failed with the errors above: exp=smoke steps=2 batch_tokens=100" in done.stderr
    names = {p.parent.name for p in here.glob("runs/*/ckpt.pt")}
    assert names == {f"rope-smoke-batch_tokens{n}-steps2" for n in (128, 256)}
    evaluate = ("-m", *sweep[1:3], f"run={','.join(sorted(names))}", "ctx=128", "documents=3")
    done = command("eval.py", *evaluate, cwd=here)
    assert done.returncode == 0, done.stderr
    assert len(list(here.glob("runs/*/eval/none-*.jsonl"))) == 2
