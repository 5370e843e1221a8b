"""Sweeps, train.py -m and eval.py -m: a failing job fails alone, and finished work is skipped."""

from pathlib import Path

import pytest

from tests.helpers import command

pytestmark = pytest.mark.process


def files(pattern: str) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in Path().glob(pattern)}


def test_one_failing_job_does_not_lose_the_others_and_finished_ones_are_skipped(here):
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

    again = command("train.py", *batches, cwd=here)
    assert again.returncode == 1 and again.stdout.count("already trained, loss ") == 2
    assert files("runs/*/ckpt.pt") == before

    evaluate = ("-m", f"run={names[0]},nobody,{names[1]}", "ctx=128", "documents=3")
    done = command("eval.py", *evaluate, cwd=here)
    assert done.returncode == 1 and "error: 1 of 3 jobs failed with the errors above: run=nobody" in done.stderr
    curves = files("runs/*/eval/*.jsonl")
    assert sorted(Path(f).parts[1] for f in curves) == sorted(2 * names)  # none and window of each
    done = command("eval.py", "-m", f"run={','.join(names)}", "scaling=none,pi", *evaluate[2:], cwd=here)
    assert done.returncode == 0, done.stderr
    after = files("runs/*/eval/*.jsonl")
    assert {f: after[f] for f in curves} == curves  # not evaluated again
    new = {(Path(f).parts[1], Path(f).name.split("-ctx")[0]) for f in after.keys() - curves.keys()}
    assert new == {(name, "pi") for name in names}
    assert sorted(p.name for p in here.iterdir() if p.name not in ("wandb", ".cache")) == ["runs"]


def test_a_typo_in_a_sweep_is_found_before_any_job(here):
    done = command("train.py", "-m", "exp=smoke", "pos=rope,swirl", cwd=here)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1 and "Could not find 'pos/swirl'" in done.stderr
    assert not list(here.glob("runs/*/ckpt.pt"))


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
