"""Nothing is lost, nothing foreign is executed, NaN is never a result, and every failure is one clear line."""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
import sample
import train
from conf.cli import short
from engine import checkpoint
from engine.run import find_runs
from hf.open import open_foreign
from measure import evaluation
from measure.breakdowns import target_losses
from measure.curves import losses_file, read_curve, write_jsonl
from model.decode import Decoder
from tests import helpers
from tests.helpers import ROOT, error_of, eval_settings, line_of, run_command, run_eval, run_train, start, wait_until
from tests.hf_models import save_random, with_tokenizer

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> Path:
    """A folder with runs/x, a smoke run of two steps with a curve; tests change copies of it."""
    folder = helpers.train_smoke_runs(tmp_path_factory.mktemp("trained"), cache, ("steps=2", "name=x"))
    with contextlib.chdir(folder):
        run_eval("run=x", "ctx=128", "documents=2")
    return folder


@pytest.fixture
def x(trained, here) -> Path:
    """runs/x of `trained`, copied into a folder of this test, which is the working folder."""
    shutil.copytree(trained / "runs", here / "runs")
    return here / "runs" / "x"


# ---- damaged and foreign checkpoints ----


class Malicious:
    """Unpickling this creates the file `executed` in the working folder."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def edited(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the content of a checkpoint of an unfinished run in place."""

    def edit(path: Path) -> None:
        state = {**torch.load(path, weights_only=True), "step": 1}
        change(state)
        torch.save(state, path)

    return edit


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5000]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pickle": lambda path: torch.save({"format": checkpoint.FORMAT, "config": Malicious()}, path),
    "another version": edited(lambda state: state.update(format=1)),
    "other settings": edited(lambda state: state.update(config={"n_layer": 4})),
    "weights of another shape": edited(lambda state: state["model"].update({"norm.weight": torch.ones(3)})),
    "a lost weight": edited(lambda state: state["model"].pop("norm.weight")),
    "an unknown scaling": edited(lambda state: state["config"].update(plus=["nope"])),
    "lost moments": edited(lambda state: state["optimizer"]["state"].pop("norm.weight")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_not_whole_is_refused(damage, x):
    DAMAGES[damage](x / "ckpt.pt")
    refused = "runs/x/ckpt.pt: cannot be read as a checkpoint of this version ("
    assert line_of(run_train, "steps=2", "name=x").startswith(refused)
    if damage != "lost moments":  # which only a resumed training reads
        assert line_of(lambda: helpers.opened("x")).startswith(refused)
    assert not Path("executed").exists()


def test_a_run_whose_config_cannot_be_read_is_left_out(x, capsys):
    for content in ("", "{", '{"ctx": "many"}', "[]", "[" * 100_000):
        (x / "config.json").write_text(content)
        assert not find_runs("runs") and "; x is left out" in capsys.readouterr().err


# ---- no foreign code ----


def torch_pickle() -> bytes:
    torch.save({"format": checkpoint.FORMAT, "config": Malicious()}, "saved")
    return Path("saved").read_bytes()


def numpy_pickle() -> bytes:
    np.save("saved.npy", np.array([Malicious()], dtype=object), allow_pickle=True)
    return Path("saved.npy").read_bytes()


def assert_none_is_executed(files: Iterable[Path], *uses: Callable[[], object]) -> None:
    """Replace each file by a pickle, one at a time, and use everything; what else goes wrong does not matter here."""
    for file in files:
        before = file.read_bytes() if file.exists() else None
        for content in (pickle.dumps(Malicious()), torch_pickle(), numpy_pickle()):
            file.write_bytes(content)
            for use in uses:
                with contextlib.suppress(Exception):
                    use()
            assert not Path("executed").exists(), file
        file.unlink() if before is None else file.write_bytes(before)


TEXT = ["data=text", "data.files=*.txt", "data.tokenizer=bytes", "data.vocab_size=257", "data.holdout=2"]


def write_texts(text: str) -> None:
    for i in range(4):
        Path(f"{i}.txt").write_text(text * (20 + i))


def losses_of_curves() -> None:
    for file in Path("runs/x/eval").glob("*.jsonl"):
        for row in read_curve(file).rows:
            if losses_file(file, row).exists():
                target_losses(file, row)


def test_no_file_of_a_run_or_a_cache_is_unpickled(here):
    write_texts("some words of the text, and more of them. ")
    run_train("steps=2", "name=x", "ctx=16", "batch_tokens=16", "cache=cache", *TEXT)
    run_eval("run=x", "ctx=128", "documents=2", "task.scored_tokens=8", "cache=cache")
    files = [
        f for folder in ("runs/x", "cache") for f in Path(folder).rglob("*") if f.is_file() and f.suffix != ".lock"
    ]
    assert len(files) >= 10
    uses = (lambda: helpers.opened("x", cache="cache"), lambda: helpers.opened(None, cache="cache"))
    assert_none_is_executed(files, *uses, lambda: compare.read_curves("runs", [], {}), losses_of_curves)


def test_no_file_of_a_hugging_face_folder_is_unpickled(here):
    """Nor those with names that other libraries unpickle."""
    write_texts("SOME WORDS OF THE TEXT. ")  # this model's vocabulary has 96 bytes
    folder = Path("theirs")
    save_random("llama", {"rope_type": "default"}, folder)
    with_tokenizer(folder)

    def use() -> None:
        cfg = eval_settings("run=hf:theirs", "ctx=64", *TEXT)
        run = open_foreign(cfg, torch.device("cpu"))
        run.model(torch.zeros(1, 4, dtype=torch.int64))

    use()
    others = [folder / name for name in ("pytorch_model.bin", "model.pt", "training_args.bin")]
    assert_none_is_executed([*(f for f in folder.iterdir() if f.is_file()), *others], use)
    others[0].write_bytes(torch_pickle())
    (folder / "model.safetensors").unlink()
    assert "pickles are not read" in line_of(use)


# ---- several processes, and their ends ----


def test_a_second_training_of_one_name_is_refused_until_the_first_is_killed(here):
    """Both would end well, with the settings of one and the weights of the other. A lock ends with its process."""
    first = start("train.py", "exp=smoke", "name=x", "steps=100000", "save_every=2", "compile=false")
    wait_until(Path("runs/x/ckpt.pt").exists)
    again = ("name=x", "steps=3", "seed=1", "fresh=true")
    assert line_of(run_train, *again).startswith("runs/x: another process trains this run")
    first.kill()
    first.wait()
    run_train(*again)
    assert json.loads(Path("runs/x/config.json").read_text())["seed"] == 1
    assert {f.name for f in Path("runs/x").iterdir()} - {"wandb_id", ".lock"} == {"ckpt.pt", "config.json"}


def children_of(process: subprocess.Popen) -> list[str]:
    """The process ids of the trainings that any thread of a process has started."""
    found = [pid for f in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in f.read_text().split()]
    return [pid for pid in found if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_study_that_is_stopped_stops_its_child(here):
    study = start("-m=studies.matrix", "smoke", "--runs", "runs", "--out", "rows.jsonl")
    wait_until(lambda: children_of(study))
    (child,) = children_of(study)
    study.send_signal(signal.SIGTERM)
    assert "stopped: 0 jobs done" in study.communicate(timeout=60)[1] and not Path(f"/proc/{child}").exists()
    assert study.returncode == 143


# ---- evaluations beside other processes ----


def test_an_evaluation_beside_a_training_that_saves_names_the_weights_that_it_measured(x, monkeypatch):
    load, first = checkpoint.load, checkpoint.load(x)["model"]

    def load_before_a_save(run: Path) -> dict:
        state, saved = load(run), torch.load(run / "ckpt.pt", weights_only=True)
        saved["model"]["norm.weight"] *= 2
        torch.save(saved, run / "ckpt.pt")
        return state

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "load", load_before_a_save)
        run_eval("run=x", "ctx=128", "documents=2", "fresh=true")
    (file,) = (x / "eval").glob("none-*.jsonl")
    assert {row.weights for row in read_curve(file).rows} == {checkpoint.digest(first)[:12]}
    code, _, err = run_command(compare.main, [], monkeypatch)
    assert code == 1 and "left out: runs/x: no curve of its present weights: python eval.py run=x" in err


def test_eight_evaluations_of_one_run_at_once(x, monkeypatch):
    """They write the same rows, groups and figure; each write takes so long that they overlap."""
    fsync = os.fsync
    monkeypatch.setattr("engine.files.os.fsync", lambda f: (fsync(f), time.sleep(0.05)))
    settings = ("run=x", "ctx=128", "documents=2", "fresh=true", "by_antecedent=true")
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_eval, args=settings) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    files = {file.name for file in (x / "eval").rglob("*") if file.is_file()}
    assert len([name for name in files if name.startswith("antecedent")]) == 1 and "ctx128.png" in files
    assert not any(name.endswith(".tmp") for name in files)
    assert all(len(read_curve(file).rows) == 2 for file in (x / "eval").glob("*.jsonl"))


def test_SIGTERM_to_a_sweep_saves_its_job_and_begins_no_other(here):
    argv = ["-m", "exp=smoke", "steps=100000", "seed=0,1", "save_every=100000"]
    sweep = start("train.py", *argv)
    assert sweep.stderr is not None
    next(line for line in sweep.stderr if "% step" in line)
    sweep.send_signal(signal.SIGTERM)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 143 and "stopped: runs/" in out
    assert len(list(Path("runs").glob("*/ckpt.pt"))) == 1 == len(list(Path("runs").glob("[!.]*")))


def test_two_evaluations_add_to_one_curve_and_no_row_is_lost(here):
    file, row = here / "eval" / "none-0.jsonl", read_curve(ROOT / "tests/data/rope-s0/eval/curve.jsonl").first

    def add(n: int) -> None:
        evaluation.add_rows(file, [dataclasses.replace(row, n=n)], np.zeros((row.documents, 1)))

    with ThreadPoolExecutor(2) as pool:  # the lock of a folder holds between threads, too
        list(pool.map(add, range(64, 96)))
    assert sorted(row.n for row in read_curve(file).rows) == [*range(64, 96)]
    assert sorted(f.name for f in file.parent.iterdir() if f.name != ".lock") == ["losses", "none-0.jsonl"]


WITHOUT_POSIX = """
import os, runpy, sys
for name in ("fcntl", "resource", "termios", "tty", "pty"):
    sys.modules[name] = None
for name in ("fork", "killpg", "mkfifo", "sched_getaffinity", "setsid"):
    vars(os).pop(name, None)
from pathlib import Path
from engine.files import locked
if sys.argv[1] == "lock":
    with locked(Path(sys.argv[2])):
        print("inside", flush=True)
        input()
else:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_platform_without_posix_trains_evaluates_and_locks(here):
    """Without the modules and functions that Windows lacks; there filelock has another lock than here."""

    def python(*args: str) -> subprocess.Popen:
        words = [sys.executable, "-W", "ignore", "-c", WITHOUT_POSIX, *args]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        return subprocess.Popen(words, env=env, stdin=-1, stdout=-1, stderr=-1, text=True)

    holder = python("lock", "runs/x")
    assert holder.stdout.readline() == "inside\n"
    train = [str(ROOT / "train.py"), "exp=smoke", "steps=2", "name=x"]
    _, err = python(*train).communicate(timeout=120)
    assert "error: runs/x: another process trains this run" in err
    holder.communicate("\n", timeout=60)
    for args in (train, [str(ROOT / "eval.py"), "run=x", "ctx=128", "documents=4"]):
        child = python(*args)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
    assert "rows: " in out and Path("runs/x/ckpt.pt").exists()


# ---- numbers and names ----


def test_what_is_not_finite_is_never_a_result(x, monkeypatch):
    """Losses of an evaluation, logits, losses of a training."""
    measured, rate = evaluation.Evaluation.losses, train.schedule
    monkeypatch.setattr(evaluation.Evaluation, "losses", lambda *args: measured(*args) * math.nan)
    before = {f: f.read_text() for f in (x / "eval").glob("*.jsonl")}
    assert "none at n=64: the loss is not finite" in line_of(run_eval, "run=x", "ctx=128", "documents=3", "fresh=true")
    assert before == {f: f.read_text() for f in (x / "eval").glob("*.jsonl")}
    monkeypatch.setattr(Decoder, "logits", lambda self, text: torch.full((1, 2048), math.nan))
    error = error_of(sample.main, ["run=x", "tokens=2"], monkeypatch)
    assert "the logits after 1 tokens are not finite" in error
    monkeypatch.setattr(train, "schedule", lambda step, *a: math.inf if step == 12 else rate(step, *a))
    assert "not finite by step 15: runs/y/ckpt.pt has step 10" in line_of(run_train, "name=y")
    assert checkpoint.load(Path("runs/y"))["step"] == 10


def test_the_curves_of_a_renamed_run_have_its_new_name(here):
    write_jsonl(here / "old/eval/none-0.jsonl", read_curve(ROOT / "tests/data/rope-s0/eval/curve.jsonl").rows)
    (here / "old").rename(here / "new")
    assert read_curve(here / "new/eval/none-0.jsonl").run == "new"


def test_long_names_are_hashed_where_they_become_files(x):
    divisors = ",".join(str(1.0 + i / 7) for i in range(16))
    run_eval("run=x", "ctx=128", "documents=2", "scaling=longrope", f"scaling.long=[{divisors}]")
    (file,) = (x / "eval").glob("longrope*.jsonl")
    assert len(file.name) < 140 and len(read_curve(file).rows) == 2
    names = {short("a" * n) for n in range(100, 400)}
    assert len(names) == 300 and max(map(len, names)) == 120 and short("rope-seed1") == "rope-seed1"
