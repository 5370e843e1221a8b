"""Nothing is lost, nothing foreign is executed, and every failure is one clear line.

Each test names the defect of an earlier version that it would find. tests/fuzz.py tries random settings and files.
"""

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
import export
import sample
import train
from conf import leftovers
from conf.command_line import answer_early
from conf.errors import UserError
from conf.failures import of_the_machine
from conf.files import locked
from conf.hydra_patches import exp_selects_runs, run_main
from conf.leftovers import remove_leftovers
from conf.run_name import short
from data import corpus as corpora
from engine import checkpoint, device as devices
from engine.newest_run import find_runs
from engine.run import Run
from hf.open import open_foreign
from measure import evaluation
from measure.curves import losses_file, read_curve
from measure.groups import target_losses
from model import gpt
from model.decode import Decoder
from model.scaling import TrainedContext, resolve
from model.spectrum import frequencies
from studies import matrix
from studies.rows import read_rows
from tests.helpers import (
    ROOT,
    command,
    error_of,
    eval_settings,
    one_line_error,
    run_eval,
    run_train,
    train_settings,
    train_smoke_runs,
)
from tests.hf_models import save_random, with_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> Path:
    """A folder with runs/x, a smoke run of two steps with a curve; tests change copies of it."""
    folder = train_smoke_runs(tmp_path_factory.mktemp("trained"), cache, ("steps=2", "name=x"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_eval("run=x", "ctx=128", "documents=2")
    return folder


@pytest.fixture
def x(trained, here) -> Path:
    """runs/x of `trained`, copied into a folder of this test, which is the working folder."""
    shutil.copytree(trained / "runs", here / "runs")
    return here / "runs" / "x"


def line_of(run, *args) -> str:
    """The message of the UserError that this call ends with: one line, which never advises to delete a file."""
    with pytest.raises(UserError) as stop:
        run(*args)
    message = str(stop.value)
    assert "\n" not in message and len(message) < 390 and "delete" not in message, message
    return message


def edit(path: Path, change) -> None:
    """Change the content of a checkpoint in place: change(state)."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


# ---- no foreign code ----


class Malicious:
    """Unpickling this creates the file `executed` in the working folder."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.process
def test_no_file_of_a_run_or_a_cache_is_unpickled(here):
    """R1: .metadata of shards/N was unpickled. Every file of a run, of its shards and of a cache is a pickle here."""
    run_train("steps=2", "name=x", "ctx=16", "batch_tokens=16", "cache=cache", *settings_of(small_corpus(here)))
    run_eval("run=x", "ctx=128", "documents=2", "task.scored_tokens=8", "cache=cache")
    x, shards = Path("runs/x"), Path("runs/x/shards/1")
    shards.mkdir(parents=True)
    for name in (".metadata", "plain.pt", "0.pt", "1.pt", "__0_0.distcp"):
        (shards / name).touch()
    files = [f for folder in (x, Path("cache")) for f in folder.rglob("*") if f.is_file() and f.suffix != ".lock"]
    assert len(files) >= 15
    for kind, suffix in ((pickle.dumps, ""), (torch_pickle, ".pt"), (numpy_pickle, ".npy")):
        for file in (file for file in files if file.suffix == suffix or not suffix):
            before = file.read_bytes()
            file.write_bytes(kind(Malicious()))
            use_everything()
            file.write_bytes(before)
            assert not Path("executed").exists(), file
    (x / "ckpt.pt").unlink()
    for file in shards.iterdir():
        file.write_bytes(pickle.dumps(Malicious()))
    for settings in ((), ("shard=true",)):
        with pytest.raises(UserError):
            run_train("steps=2", "name=x", *settings)
    assert not Path("executed").exists()
    pickle.loads(pickle.dumps(Malicious()))  # the test can fail
    assert Path("executed").exists()


def test_no_file_of_a_hugging_face_folder_is_unpickled(here):
    """R1: every file is a pickle here, one at a time; and so are the names that other libraries unpickle."""
    folder, text = Path("theirs"), settings_of(small_corpus(here))
    for file in here.glob("*.txt"):
        file.write_text(file.read_text().upper())  # this model's vocabulary has 96 bytes
    save_random("llama", {"rope_type": "default"}, folder)
    with_tokenizer(folder)

    def use() -> None:
        cfg = eval_settings("run=hf:theirs", "ctx=64", *text)
        run = open_foreign(cfg, ctx=64, scalings=[], runs="runs", device=torch.device("cpu"))
        run.model(torch.zeros(1, 4, dtype=torch.int64))

    use()
    files = [f for f in folder.iterdir() if f.is_file()]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in files}
    for file in [*files, folder / "pytorch_model.bin", folder / "model.pt", folder / "training_args.bin"]:
        before = file.read_bytes() if file.exists() else None
        for content in (pickle.dumps(Malicious()), torch_pickle(Malicious())):
            file.write_bytes(content)
            with contextlib.suppress(UserError):
                use()
            assert not Path("executed").exists(), file
        file.unlink() if before is None else file.write_bytes(before)
    (folder / "pytorch_model.bin").write_bytes(torch_pickle(Malicious()))
    (folder / "model.safetensors").unlink()
    assert "pytorch_model.bin is a pickle, which is never loaded" in line_of(use)
    assert not Path("executed").exists()


def settings_of(data: dict) -> list[str]:
    return [f"data={data['kind']}", *(f"data.{key}={value}" for key, value in data.items() if key != "kind")]


def torch_pickle(value: object) -> bytes:
    torch.save({"format": checkpoint.FORMAT, "config": value}, "saved")
    return Path("saved").read_bytes()


def numpy_pickle(value: object) -> bytes:
    np.save("saved.npy", np.array([value], dtype=object), allow_pickle=True)
    return Path("saved.npy").read_bytes()


def use_everything() -> None:
    """Open a run, its curves and its corpus, as the commands do; errors of the user do not matter here."""
    for use in (
        lambda: Run.open("x", runs="runs", cache="cache"),
        lambda: Run.open(None, runs="runs", cache="cache"),
        lambda: compare.read_curves("runs", []),
        lambda: [
            target_losses(f, row)
            for f in Path("runs/x/eval").glob("*.jsonl")
            for row in read_curve(f).rows
            if losses_file(f, row).exists()
        ],
        lambda: checkpoint.read(Path("runs/x/shards/1/plain.pt")),
        lambda: checkpoint.read(Path("runs/x/shards/1/0.pt")),
    ):
        with contextlib.suppress(UserError):
            use()


def test_parts_of_an_earlier_version_are_refused_with_the_reason(x):
    """R1: they are pickles, and would be loaded with torch.distributed.checkpoint."""
    from engine import shards

    folder = x / "shards" / "1"
    folder.mkdir(parents=True)
    state = torch.load(x / "ckpt.pt", weights_only=True)
    torch.save({k: v for k, v in state.items() if k not in ("model", "optimizer")}, folder / "plain.pt")
    assert "saved by an earlier version, with pickles, which are not loaded" in line_of(shards.newest, x)


# ---- the truth about failures ----


def test_a_good_checkpoint_is_never_called_damaged(x, monkeypatch):
    """R2: no permission, a wrong device and too little memory all said `train again with fresh=true`."""

    def fail(error):
        def load(*args, **kwargs):
            raise error

        monkeypatch.setattr(torch, "load", load)
        return line_of(checkpoint.load, x)

    denied = fail(PermissionError(errno.EACCES, "Permission denied"))
    assert denied == "runs/x/ckpt.pt: cannot be read (Permission denied)".replace("runs/x", str(x))
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ):
        assert fail(error).startswith("not enough memory (")
    monkeypatch.undo()
    for name in ("cpu:7", "meta", "cuda:99"):
        assert line_of(devices.pick_device, name).startswith(f"device={name}: ")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_no_permission_is_said(x):
    (x / "ckpt.pt").chmod(0)
    assert "ckpt.pt: cannot be read (Permission denied)" in line_of(checkpoint.load, x)


def test_every_flipped_bit_is_noticed(x):
    """R12: torch does not compare the checksums of a file's parts. Bits of all parts, and between them."""
    path, rng = x / "ckpt.pt", np.random.default_rng(0)
    good, tensors = path.read_bytes(), checkpoint.load(x)["model"]
    with zipfile.ZipFile(path) as archive:
        starts = [part.header_offset for part in archive.infolist()]
    unchanged = 0
    for place in [
        *rng.choice(starts, 20),
        *(s + 100 for s in rng.choice(starts, 20)),
        *rng.integers(len(good), size=60),
    ]:
        bad = bytearray(good)
        bad[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        try:
            read = checkpoint.load(x)["model"]  # a bit of the padding between two parts changes nothing
            assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
            unchanged += 1
        except UserError as e:
            assert "ckpt.pt: " in str(e) and "\n" not in str(e)
    assert unchanged < 50
    place = good.index(next(iter(tensors.values())).numpy().tobytes()[:64])
    path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    assert "truncated or damaged (the checksum of " in line_of(checkpoint.load, x)


def test_each_kind_of_damage_has_its_line(x):
    path = x / "ckpt.pt"
    good = path.read_bytes()
    for content, says in (
        (good[: len(good) // 2], "truncated or damaged"),
        (b"", "truncated or damaged"),
        (b"\x89HDF something else", "not a checkpoint that ropewalk wrote"),
        (pickle.dumps(Malicious()), "not a checkpoint that ropewalk wrote"),
    ):
        path.write_bytes(content)
        assert says in line_of(checkpoint.load, x)
    path.unlink()
    assert "ckpt.pt: not found" in line_of(checkpoint.load, x)
    path.mkdir()
    assert "ckpt.pt: cannot be read (Is a directory)" in line_of(checkpoint.load, x)


@pytest.mark.process
def test_a_checkpoint_with_missing_or_other_parts_is_one_line(x):
    """R13: 20 of 52 such files ended in a traceback, in train.py or eval.py."""
    path, tried = x / "ckpt.pt", 0
    good = path.read_bytes()
    keys = [(key,) for key in torch.load(path, weights_only=True) if key != "tokenizer"]
    keys += [("config", "pos"), ("config", "data"), ("config", "model"), ("config", "ctx"), ("validation", "loss")]
    keys += [("model", "tokens.weight"), ("model", "blocks.0.mlp.up.weight"), ("optimizer", "state")]
    keys += [("optimizer", "state", 0), ("optimizer", "state", 1, "exp_avg"), ("optimizer", "state", 0, "step")]
    for key in keys:
        for value in ("removed", "text", {}, torch.ones(3)):

            def change(state, key=key, value=value):
                for part in key[:-1]:
                    state = state[part]
                if value == "removed" if isinstance(value, str) else False:
                    del state[key[-1]]
                else:
                    state[key[-1]] = value

            path.write_bytes(good)
            edit(path, lambda state: state.update(step=1))
            edit(path, change)
            try:
                if key[0] in ("optimizer", "seconds", "corpus"):  # which only a resumed training uses
                    run_train("steps=2", "name=x")
                else:
                    Run.open("x", runs="runs", cache=".cache")
            except UserError as e:
                assert "\n" not in str(e), e
                tried += 1
    assert tried > 60


def test_a_full_disk_is_named(x, monkeypatch):
    """R16: torch.save hides the reason in a RuntimeError. The temporary file is /dev/full here."""
    good = (x / "ckpt.pt").read_bytes()
    state = checkpoint.load(x)
    state.pop("cfg")
    (x / f".ckpt.pt.{os.getpid()}").symlink_to("/dev/full")
    monkeypatch.setattr(leftovers, "remove_leftovers", lambda files: None)
    message = line_of(checkpoint.save, x, state)
    assert message.endswith("ckpt.pt: cannot be written (the disk is full); the previous one is unchanged")
    assert (x / "ckpt.pt").read_bytes() == good
    assert "the disk is full" in str(of_the_machine(OSError(errno.ENOSPC, "No space left on device", "a.png")))
    bug = ValueError("a bug of ours")
    assert of_the_machine(bug) is bug


# ---- runs ----


@pytest.mark.process
def test_a_second_training_of_one_name_is_refused_and_names_the_first(here):
    """R5: both ended well, with the settings of one and the weights of the other."""
    argv = [
        sys.executable,
        str(ROOT / "train.py"),
        "exp=smoke",
        "name=x",
        "steps=100000",
        "save_every=2",
        "compile=false",
    ]
    first = subprocess.Popen(argv, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(Path("runs/x/ckpt.pt"), first)
    second = command("train.py", "exp=smoke", "name=x", "steps=3", "seed=1", "fresh=true", cwd=here)
    assert f"runs/x: in use by process {first.pid} (" in one_line_error(second)
    first.kill()  # ends its lock as well
    first.wait()
    done = command("train.py", "exp=smoke", "name=x", "steps=3", "seed=1", "fresh=true", cwd=here)
    assert done.returncode == 0 and json.loads(Path("runs/x/config.json").read_text())["seed"] == 1
    assert {f.name for f in Path("runs/x").iterdir()} - {"wandb_id"} == {"ckpt.pt", "config.json"}


def wait_for(path: Path, process: subprocess.Popen) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)


def test_a_lock_is_held_by_one_and_leaves_nothing(here):
    folder = Path("new/folder")
    with locked(folder):
        message = line_of(lambda: locked(folder).__enter__())
        assert message.startswith(f"new/folder: in use by process {os.getpid()} (")
    assert not Path("new").exists()
    with locked(folder), locked(Path("new/other")):
        Path("new/folder/file").touch()
    with locked(folder):  # it can be taken again
        pass
    assert Path("new/folder/file").exists() and not Path("new/other").exists()


def test_a_lost_or_damaged_config_is_restored_from_the_checkpoint(x, capsys):
    """R4: it was a dead end, though ckpt.pt has the settings."""
    path = x / "config.json"
    good = path.read_text()
    for content in (None, "", "{", '{"ctx": "many"}', "[]"):
        path.unlink()
        if content is not None:
            path.write_text(content)
        assert find_runs("runs")["x"].ctx == 64 and path.read_text() == good
        assert "config.json: restored from ckpt.pt" in capsys.readouterr().err
    path.unlink()
    run_train("steps=2", "name=x")
    assert path.read_text() == good


def test_leftovers_of_killed_processes_go_and_those_of_others_stay(x):
    """R7: 44 MB were left by every kill at the wrong moment."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for pid in (ended.pid, running.pid, os.getpid()):
            (x / f".ckpt.pt.{pid}").touch()
        (x / ".ckpt.pt.note").touch()
        remove_leftovers(list(x.glob(".ckpt.pt.*")))
        assert sorted(f.name for f in x.glob(".*")) == sorted([f".ckpt.pt.{running.pid}", ".ckpt.pt.note"])
        (x / f".ckpt.pt.{ended.pid}").touch()
        run_train("steps=2", "name=x", "fresh=true")
        assert not (x / f".ckpt.pt.{ended.pid}").exists()
    finally:
        running.kill()
        running.communicate()


@pytest.mark.process
def test_SIGTERM_to_a_study_stops_its_child(here):
    """R6: the child went on training."""
    argv = [sys.executable, "-m", "studies.matrix", "smoke", "--runs", "runs", "--out", "rows.jsonl"]
    study = subprocess.Popen(argv, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=-1, stdout=-1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if number == signal.SIGKILL:
            study = subprocess.Popen(argv, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=-1, stdout=-1)
        child = wait_for_child(study)
        study.send_signal(number)
        study.communicate(timeout=60)
        until = time.monotonic() + 60
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < until, "the child is still running"
            time.sleep(0.05)


@pytest.mark.process
def test_SIGTERM_to_a_sweep_saves_its_job_and_begins_no_other(here):
    argv = [sys.executable, str(ROOT / "train.py"), "-m", "exp=smoke", "steps=100000", "seed=0,1", "save_every=100000"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    sweep = subprocess.Popen(argv, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert sweep.stdout is not None
    for line in sweep.stdout:
        if "runs/rope-smoke-seed0: " in line or "% step" in line:
            break
    sweep.send_signal(signal.SIGTERM)
    out, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 143 and "stopped: runs/" in out
    assert len(list(Path("runs").glob("*/ckpt.pt"))) == 1 == len(list(Path("runs").glob("[!.]*")))


def wait_for_child(process: subprocess.Popen) -> int:
    """The process id of the first child, of any thread."""

    def children() -> list[str]:
        return [pid for f in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in f.read_text().split()]

    until = time.monotonic() + 120
    while not (found := [p for p in children() if "train.py" in cmdline(p)]):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    return int(found[0])


def cmdline(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("seconds", [0, 0.5])
@pytest.mark.process
def test_ctrl_c_while_a_command_starts_is_silent(here, seconds):
    """R18: 30 lines. It comes so many seconds after the import of torch has begun."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, as do its children
    argv = [sys.executable, str(ROOT / "train.py"), "exp=smoke", "name=x"]
    process = subprocess.Popen(argv, cwd=here, stdout=-1, stderr=-1)
    until = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err == b""


def add(file: str, first: int) -> None:
    """Add the rows of 8 lengths to a file of curves, as an evaluation does. Runs in a process of its own."""
    row = read_curve(ROOT / "tests/data/curve_format2.jsonl").first
    for n in range(first, first + 8):
        row_of_n = dataclasses.replace(row, n=n)
        evaluation.add_rows(Path(file), [row_of_n], np.zeros((row.documents, 1)))


@pytest.mark.process
def test_two_processes_add_to_one_curve_and_no_row_is_lost(here):
    file = here / "eval" / "none-0.jsonl"
    processes = [multiprocessing.get_context("spawn").Process(target=add, args=(str(file), 64 + 8 * i)) for i in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [row.n for row in read_curve(file).rows] == [*range(64, 80)]
    assert sorted(f.name for f in file.parent.iterdir()) == ["losses", "none-0.jsonl"]


# ---- numbers ----


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "setting",
    ["pos.base", "pos.rotary_fraction", "model.norm_eps", "optim.lr", "optim.beta1", "optim.weight_decay", "optim.clip",
     "optim.final_lr"],
)  # fmt: skip
def test_numbers_that_are_not_finite_are_refused_in_training(setting, value):
    """R14: pos.base=nan was accepted, and never resumable."""
    right = "must be of type float, and finite" if "pos." in setting else "must be a finite number below 2^63"
    argument = f"{setting}={value}"
    assert line_of(lambda: gpt.build_encoding(train_settings(argument))) == f"{argument}: {right}"


@pytest.mark.parametrize(
    "argv",
    [("scaling=pi", "scaling.factor={}"), ("scaling=rerope_leaky", "scaling.leak={}"), ("multiples=[{}]",),
     ("scaling=yarn", "scaling.beta_fast={}"), ("scaling=longrope", "scaling.long=[{}]"),
     ("scaling=dynamic_hf", "scaling.hf_factor={}")],
)  # fmt: skip
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused_in_evaluation(argv, value):
    """R3: scaling.factor=inf got a verdict and exit code 0."""

    def use() -> None:
        cfg = eval_settings(*(a.format(value) for a in argv))
        resolve(cfg.scaling, TrainedContext("rope", 256, frequencies(64, 1e4)), 512, 512)

    assert re.search(rf"=\[?{value}\]?: must be ", line_of(use))


@pytest.mark.parametrize(
    "setting, right",
    [
        ("project=a/b", "1 to 128 characters"),  # R9: a traceback
        ("project=", "1 to 128 characters"),
        ("runs=", "the path of a folder"),  # R19: wrote into the working folder
        ("cache=", "the path of a folder"),
        ("~pos", "chosen"),  # R15: tracebacks
        ("~data", "chosen"),
        ("~data.holdout", "a whole number"),
        ("seed=99999999999999999999", "a finite number below 2^63"),
        ("seed=-1", "from 0 to"),
        ("model.n_layers=100000000", "from 1 to 1024"),
        (f"name={'x' * 250}", "at most 200"),
        ("batch_tokens=1000000000000000000000000", "a finite number below 2^63"),
    ],
)
def test_settings_that_led_to_tracebacks_are_refused(setting, right):
    assert right in line_of(train_settings, setting)


def test_a_model_that_cannot_fit_is_refused_before_it_is_built(here):
    """R15: model.width=1e11 was a traceback; others are killed by the system."""
    assert "GB of memory, and " in line_of(run_train, "name=x", "model.width=1000000", "model.n_heads=1000")
    assert not Path("runs/x/ckpt.pt").exists()


def test_a_number_of_400_digits_is_one_line(here, monkeypatch):
    error = error_of(lambda: run_main(train.main), ["exp=smoke", f"optim.lr=1{'0' * 400}"], monkeypatch)
    assert error == "error: optim.lr: must be a finite number below 2^63"


def test_a_finished_run_without_its_held_out_loss_is_one_line(x):
    edit(x / "ckpt.pt", lambda state: state["validation"].clear())
    assert "it is finished, and has no held-out loss" in line_of(run_train, "steps=2", "name=x")


@pytest.mark.parametrize("argv", [["exp=[smoke,gpt2]"], ["model=[nano,tiny]"], ["pos=[rope]"]])
def test_a_list_for_a_single_choice_is_refused(argv, here, monkeypatch):
    """R20: Hydra merged the files silently."""
    error = error_of(lambda: answer_early("train"), argv, monkeypatch)
    assert error == f"error: {argv[0]}: must be one name, not a list"


def test_a_path_that_needs_quotes_is_shown_with_them(here, monkeypatch):
    """R17: `LexerNoViableAltException`."""
    error = error_of(lambda: run_main(train.main), ["data=text", "data.files=~/ü/*.txt"], monkeypatch)
    assert error == """error: data.files=~/ü/*.txt: has a character that needs quotes: "data.files='~/ü/*.txt'\""""
    error = error_of(lambda: run_main(train.main), ["data=text", "data.files='~/ü/*.txt'"], monkeypatch)
    assert "data.files=~/ü/*.txt: matches no file" in error


@pytest.mark.parametrize(
    "world, rank, wrong",
    [("2", "abc", "RANK=abc"), ("0", "0", "WORLD_SIZE=0"), ("2", "2", "RANK=2"), ("x", "0", "WORLD")],
)
def test_wrong_numbers_of_processes_are_one_line(world, rank, wrong, monkeypatch):
    """R15: tracebacks."""
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", rank)
    assert wrong in error_of(lambda: run_main(train.main), [], monkeypatch)


def test_weights_that_are_not_finite_are_refused_everywhere(x, monkeypatch):
    """R3: NaN weights got a verdict and exit code 0."""
    edit(x / "ckpt.pt", lambda state: state["model"]["tokens.weight"].index_fill_(0, torch.tensor([3]), float("nan")))
    says = "tokens.weight has values that are not finite"
    assert says in line_of(run_eval, "run=x", "ctx=128")
    for run, argv in (
        (lambda: run_main(sample.main, exp_selects_runs), ["run=x"]),
        (export.main, ["run=x", "out=exported"]),
        (lambda: run_main(train.main), ["exp=smoke", "init=x", "name=y"]),
    ):
        assert says in error_of(run, argv, monkeypatch)


def test_losses_and_logits_that_are_not_finite_are_errors(x, monkeypatch):
    real = evaluation.Evaluation.losses
    monkeypatch.setattr(evaluation.Evaluation, "losses", lambda *args: real(*args) * float("nan"))
    before = {f: f.read_text() for f in (x / "eval").glob("*.jsonl")}
    assert "none at n=64: the loss is not finite" in line_of(run_eval, "run=x", "ctx=128", "documents=3", "fresh=true")
    assert before == {f: f.read_text() for f in (x / "eval").glob("*.jsonl")}
    monkeypatch.setattr(Decoder, "logits", lambda self, text: torch.full((1, 2048), float("nan")))
    error = error_of(lambda: run_main(sample.main, exp_selects_runs), ["run=x", "tokens=2"], monkeypatch)
    assert "the logits after 1 tokens are not finite" in error


@pytest.mark.parametrize("temperature", ["1e-300", "-1", "nan", "inf"])
def test_temperatures_that_divide_to_infinity_are_refused(temperature, x, monkeypatch):
    argv = ["run=x", "tokens=2", f"temperature={temperature}"]
    assert "temperature=" in error_of(lambda: run_main(sample.main, exp_selects_runs), argv, monkeypatch)


def test_long_names_are_hashed_where_they_become_files(x):
    """R8: longrope with real divisors: file name too long."""
    divisors = ",".join(str(1.0 + i / 7) for i in range(16))
    run_eval("run=x", "ctx=128", "documents=2", "scaling=longrope", f"scaling.long=[{divisors}]")
    (file,) = (x / "eval").glob("longrope*.jsonl")
    assert len(file.name) < 140 and len(read_curve(file).rows) == 2
    names = {short("a" * n) for n in range(100, 400)}
    assert len(names) == 300 and max(map(len, names)) == 120 and short("rope-seed1") == "rope-seed1"


# ---- rows, curves and caches ----


@pytest.mark.parametrize(
    "change",
    [lambda m: m.update(dtype="uint32"), lambda m: m.update(dtype="int16"), lambda m: m.update(dtype=3),
     lambda m: m.update(held_out=[]), lambda m: m.update(held_out={}), lambda m: m["held_out"][0].pop(),
     lambda m: m["held_out"][0].__setitem__(1, 7), lambda m: m.update(sha256=[]), lambda m: m.pop("sha256"),
     lambda m: m["held_out"][0].__setitem__(0, "another name")],
)  # fmt: skip
@pytest.mark.parametrize("with_sum", [True, False])
def test_a_reshaped_meta_json_is_prepared_again(change, with_sum, here, capsys):
    """R10: a traceback at every call; an edited dtype was accepted. without a sum: of an earlier version."""
    settings = small_corpus(here)
    first = corpora.prepare(settings, "mine")
    (path,) = Path("mine").glob("*/meta.json")
    meta = json.loads(path.read_text())
    if not with_sum:
        del meta["sum"]
        path.write_text(json.dumps(meta))
        corpora.prepare(settings, "mine")
        assert "damaged" not in capsys.readouterr().err  # it is read as before
    change(meta)
    path.write_text(json.dumps(meta))
    again = corpora.prepare(settings, "mine")
    renamed = not with_sum and again.held_out[0].name == "another name"  # which only a sum can show
    assert renamed or "is damaged (" in capsys.readouterr().err
    assert np.array_equal(again.train, first.train) and again.held_out[0].tokens.dtype == np.uint16


def small_corpus(here: Path) -> dict:
    for i in range(4):
        (here / f"{i}.txt").write_text(f"some words of the text {i}, and more of them. " * (20 + i))
    return {"kind": "text", "files": "*.txt", "tokenizer": "bytes", "vocab_size": 257, "holdout": 2}


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "{}", "", "\x00"])
def test_a_meta_json_of_another_shape_is_prepared_again(content, here, capsys):
    settings = small_corpus(here)
    corpora.prepare(settings, "mine")
    (path,) = Path("mine").glob("*/meta.json")
    path.write_text(content)
    corpora.prepare(settings, "mine")
    assert "is damaged (" in capsys.readouterr().err and corpora.prepare(settings, "mine").held_out


def test_leftovers_of_a_killed_preparation_go(here):
    settings = small_corpus(here)
    key = corpora.prepare(settings, "mine").key
    (folder,) = Path("mine").iterdir()
    shutil.rmtree(folder)
    Path(f"{folder}.abcdefgh/corpus").mkdir(parents=True)
    Path(f"{folder}.lock").mkdir()
    assert corpora.prepare(settings, "mine").key == key and list(Path("mine").iterdir()) == [folder]


def test_damaged_losses_of_a_curve_are_one_line(x):
    file = next((x / "eval").glob("none-*.jsonl"))
    row = read_curve(file).first
    (path,) = (x / "eval/losses").glob(f"{file.stem}-n{row.n}-*.npy")
    good = path.read_bytes()
    assert target_losses(file, row).shape == (row.documents, len(row.windows), 64)
    flipped = bytearray(good)
    flipped[-1] ^= 0x40  # the exponent of the last loss
    for content in (b"", good[:-50], good[:20], b"PK\x03\x04", bytes(flipped), pickle.dumps(Malicious())):
        path.write_bytes(content)
        assert "no losses of single targets: evaluate again with fresh=true" in line_of(target_losses, file, row)
    assert not Path("executed").exists()


@pytest.mark.parametrize("content", ["", "[1]\n", "3\n", '{"n": 1}\n', "{", "\x00\n"])
def test_damaged_rows_of_a_study_are_one_line(content, here):
    """R15: tracebacks of studies.tables and studies.claims with empty or reshaped --rows."""
    Path("rows.jsonl").write_bytes(content.encode())
    assert line_of(read_rows, Path("rows.jsonl")) == "rows.jsonl: not rows that studies.matrix wrote"


def test_out_is_checked_before_the_work(x, monkeypatch):
    """R21: after minutes of work."""
    monkeypatch.setattr(compare, "read_curves", None)
    monkeypatch.setattr(export, "Run", None)
    monkeypatch.setattr(matrix, "run_job", None)
    Path("file").touch()
    Path("folder.png").mkdir()
    assert "--out file/a.png: cannot be written, file is a file" in error_of(
        compare.main, ["--out", "file/a.png"], monkeypatch
    )
    assert "--out ./folder.png" in error_of(compare.main, ["--out", "./folder.png"], monkeypatch).replace(
        " folder.png", " ./folder.png"
    )
    assert "--runs: must be" in error_of(compare.main, ["--runs", ""], monkeypatch)
    assert "out file/a: cannot be written" in error_of(export.main, ["run=x", "out=file/a"], monkeypatch)
    monkeypatch.setattr(sys, "argv", ["matrix", "smoke", "--out", "file/rows.jsonl"])
    assert "--out file/rows.jsonl: cannot be written" in line_of(matrix.main)
