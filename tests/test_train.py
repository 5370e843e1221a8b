"""Training runs that can be trusted: resume, signals, kills, full disks, bad losses; and every yaml of conf/ trains."""

import math
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from conf.compose import compose
from conf.errors import UserError
from conf.schema import OptimConfig, train_config
from engine import checkpoint
from engine.optimizer import learning_rate
from engine.signals import StopSignal
from measure.curves import read_curve
from tests.helpers import ROOT, choices, composed, run_eval, run_train, train_settings


def weights(name: str) -> dict:
    return checkpoint.load(Path("runs") / name)


def same(a: object, b: object) -> bool:
    """Equal to the bit, through tensors, dicts and lists."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


# ---- what trains ----

EACH = [f"pos={p}" for p in choices("pos")] + [f"model={m}" for m in choices("model") if m != "gpt2"]
EACH += ["model.n_kv_heads=1", "model.mlp=swiglu", "model.tied_head=false", "dtype=float32"]
EACH += [f"layers={x}" for x in choices("layers")]
EACH += ["micro_tokens=128"]  # 4 forward passes for each step


@pytest.mark.parametrize("setting", EACH)
def test_every_yaml_composes_and_trains_two_steps(setting, here):
    small = [] if setting.startswith("model=") else ["model.width=32"]
    cfg = composed("train", "exp=smoke", setting, "steps=2", "name=x", *small)
    if setting.startswith("model="):  # exp=smoke makes every model small: undo that
        shape = composed("train", setting)
        cfg.model, cfg.batch_tokens, cfg.val_windows = shape.model, 128, 2
    train.train(train_config(cfg))
    state = weights("x")
    assert state["step"] == 2 and math.isfinite(state["validation"]["loss"])


def test_gpt2_and_every_exp_compose():
    assert train_settings("model=gpt2").model.n_layers == 12
    for exp in choices("exp"):
        assert train_settings(f"exp={exp}").exp == exp


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_text_corpus_trains(tokenizer, here):
    (here / "docs").mkdir()
    for i, path in enumerate(sorted((ROOT / "tests").glob("*.py"))):
        (here / "docs" / f"{i}.txt").write_text(path.read_text())
    run_train(
        "data=text",
        "data.files=docs/*.txt",
        "data.vocab_size=400",
        f"data.tokenizer={tokenizer}",
        "steps=2",
        "ctx=32",
        "name=mine",
    )
    assert weights("mine")["step"] == 2


def test_training_learns_and_accumulation_is_the_same_step(here, capsys):
    run_train("steps=40", "optim.lr=5e-3", "optim.warmup=2", "name=whole", "dtype=float32")
    run_train("steps=40", "optim.lr=5e-3", "optim.warmup=2", "name=parts", "dtype=float32", "micro_tokens=64")
    whole, parts = weights("whole"), weights("parts")
    assert whole["validation"]["loss"] < math.log(512) - 0.6
    assert parts["validation"]["loss"] == pytest.approx(whole["validation"]["loss"], rel=1e-4)
    out = capsys.readouterr().out
    assert "next: python eval.py run=whole ctx=1024 scaling=yarn" in out and "bits/byte" in out


def test_learning_rate():
    o = OptimConfig(lr=1.0, warmup=10, final_lr=0.1)
    rates = [learning_rate(s, 100, o) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1
    assert rates[55] == pytest.approx(0.55) and rates[99] == pytest.approx(0.11)
    assert max(rates) == 1 and rates[10:] == sorted(rates[10:], reverse=True)


# ---- stopping and resuming ----


def stop_at(run: str, step: int) -> type:
    """A StopSignal that comes as soon as the run has saved this step."""

    class StopAt(StopSignal):
        exit_code = 143

        def __bool__(self):
            return Path(run, "ckpt.pt").exists() and checkpoint.load(Path(run))["step"] >= step

    return StopAt


def test_ten_steps_equal_five_and_five_more(here, monkeypatch, capsys):
    run_train("steps=10", "name=whole")
    with monkeypatch.context() as patch:
        patch.setattr(train, "StopSignal", stop_at("runs/parts", 5))
        with pytest.raises(SystemExit) as stopped:
            run_train("steps=10", "name=parts")
    assert stopped.value.code == 143 and 5 <= weights("parts")["step"] < 10
    run_train("steps=10", "name=parts")
    a, b = weights("whole"), weights("parts")
    assert same(a["model"], b["model"]) and same(a["optimizer"], b["optimizer"])
    assert not same(a["model"], {k: v + 1 for k, v in b["model"].items()})
    capsys.readouterr()
    run_train("steps=10", "name=parts")
    assert "runs/parts: already trained, loss " in capsys.readouterr().out
    run_train("steps=10", "name=parts", "fresh=true", "seed=1")
    assert weights("parts")["cfg"].seed == 1 and not same(weights("parts")["model"], a["model"])


def start(here: Path, *settings: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "exp=smoke", "name=x", *settings],
        cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 120
    while not Path("runs/x/ckpt.pt").exists():
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.process
def test_signals_save_and_exit(here, number, code):
    process = start(here, "steps=100000")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err
    step = weights("x")["step"]
    assert f"stopped: runs/x is saved at step {step} of 100000; run the same command again to resume" in out


@pytest.mark.process
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint_to_resume_from(here):
    settings = ("steps=150", "save_every=1")
    process = start(here, *settings)
    for _ in range(2):  # at two moments; saving at every step, one in a few hits a save
        time.sleep(0.3)
        process.kill()
        process.communicate()
        weights("x")
        process = start(here, *settings) if weights("x")["step"] < 150 else process
    process.communicate(timeout=120)
    assert process.returncode == 0 and weights("x")["step"] == 150
    run_train("steps=150", "save_every=1000", "name=straight")
    assert same(weights("x")["model"], weights("straight")["model"])
    assert not [f for f in Path("runs/x").iterdir() if f.name.endswith(".pt") and f.name != "ckpt.pt"]


@pytest.mark.process
def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(here):
    run_train("steps=6", "save_every=5", "name=x")  # fills the corpus cache, too
    before = Path("runs/x/ckpt.pt").read_bytes()

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    for name, kept in (("x", True), ("y", False)):
        args = [sys.executable, str(ROOT / "train.py"), "exp=smoke", "steps=6", "save_every=5", f"name={name}"]
        args += ["fresh=true"] if name == "y" else []
        if kept:  # make it want to save again
            state = torch.load("runs/x/ckpt.pt", weights_only=True)
            torch.save({**state, "step": 5}, "runs/x/ckpt.pt")
            before = Path("runs/x/ckpt.pt").read_bytes()
        done = subprocess.run(args, cwd=here, preexec_fn=small_files, capture_output=True, text=True, timeout=120)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and last.startswith(f"error: runs/{name}/ckpt.pt: cannot be written (")
        assert ("the previous one is unchanged" in last) == kept and "Traceback" not in done.stderr
        assert not list(Path(f"runs/{name}").glob(".*"))
    assert Path("runs/x/ckpt.pt").read_bytes() == before


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(here, monkeypatch):
    real = train.learning_rate
    monkeypatch.setattr(train, "learning_rate", lambda step, *a: math.inf if step == 12 else real(step, *a))
    with pytest.raises(UserError, match=r"not finite by step 15: runs/x/ckpt\.pt has step 10; try optim\.lr below"):
        run_train("name=x")
    state = weights("x")
    assert state["step"] == 10 and all(p.isfinite().all() for p in state["model"].values())


def test_another_config_under_the_same_name_is_refused_by_key(here, two_steps):
    shutil.copytree(two_steps, "runs/x")
    before = Path("runs/x/ckpt.pt").read_bytes()
    with pytest.raises(
        UserError, match=r"optim\.lr=0\.5 \(the run has 0\.002\), pos\.base=7\.0 \(the run has 10000\.0\)"
    ):
        run_train("steps=2", "name=x", "optim.lr=0.5", "pos.base=7.0")
    run_train("steps=2", "name=x", "save_every=7", "log_every=1", "compile=false")  # run control may differ
    assert Path("runs/x/ckpt.pt").read_bytes() == before


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, cache) -> Path:
    """The folder of a run of two steps, name=x; tests change copies of it."""
    folder = tmp_path_factory.mktemp("two_steps")
    run_train("steps=2", "name=x", f"runs={folder}", f"cache={cache}")
    return folder / "x"


@pytest.mark.parametrize(
    "damage, says",
    [
        ("truncated", r"truncated or damaged \(.*\): restore it from a copy, or train again with fresh=true"),
        ("foreign", "not written by this version of ropewalk"),
        ("pickle", "not a checkpoint that ropewalk wrote: it has more than tensors and plain values"),
        ("empty", "truncated or damaged"),
        ("old", "not a checkpoint that ropewalk wrote|n_layer=4: no such setting"),
    ],
)
def test_damaged_and_foreign_checkpoints_are_one_clear_line(here, damage, says, two_steps):
    shutil.copytree(two_steps, "runs/x")
    path = Path("runs/x/ckpt.pt")
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5000])
    elif damage == "foreign":
        torch.save({"state_dict": torch.ones(3)}, path)
    elif damage == "pickle":
        torch.save({"format": checkpoint.FORMAT, "config": Path("x")}, path)  # would run code if it were loaded
    elif damage == "old":
        torch.save({**torch.load(path), "config": {"n_layer": 4}}, path)
    else:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=rf"runs/x/ckpt\.pt: {says}"):
        run_train("steps=2", "name=x")


def test_a_changed_corpus_is_noticed(here):
    (here / "docs").mkdir()
    for i in range(3):
        (here / "docs" / f"{i}.txt").write_text("some words to train on, and again. " * (40 + i))
    settings = ("data=text", "data.files=docs/*.txt", "data.vocab_size=270", "ctx=16", "batch_tokens=16", "name=x")
    run_train(*settings, "steps=2")
    (here / "docs" / "0.txt").write_text("other words " * 90)
    state = torch.load("runs/x/ckpt.pt", weights_only=True)
    torch.save({**state, "step": 1}, "runs/x/ckpt.pt")
    with pytest.raises(UserError, match="the corpus has changed since this run began"):
        run_train(*settings, "steps=2")


def test_run_names_come_from_what_the_command_line_changed():
    def name(*overrides):
        return train_config(compose("train", *overrides)).name

    assert name() == name("pos=rope") == "rope"
    assert name("pos=alibi", "seed=1", "device=cpu") == "alibi-seed1"
    assert name("seed=1", "exp=smoke") == name("exp=smoke", "seed=1") == "rope-smoke-seed1"
    assert name("pos.base=500", "optim.lr=1e-3") == "rope-lr1e-3-base500"
    assert name("data=text", "data.files=docs/**/*.txt") == "rope-text-filesdocs_.txt"


@pytest.mark.slow
def test_compiled_training_is_the_same_to_rounding_and_resumes_exactly(here, monkeypatch):
    """About a minute: the compiler. 16 steps cross COMPILE_AT."""
    settings = ("steps=16", "save_every=4", "dtype=float32")
    run_train(*settings, "name=a", "compile=true")
    with monkeypatch.context() as patch:
        patch.setattr(train, "StopSignal", stop_at("runs/b", 12))
        with pytest.raises(SystemExit):
            run_train(*settings, "name=b", "compile=true")
    assert weights("b")["step"] < 16
    run_train(*settings, "name=b", "compile=true")
    run_train(*settings, "name=c", "compile=false")
    a, b, c = (weights(name)["model"] for name in "abc")
    assert same(a, b)
    assert all((a[k] - c[k]).abs().max() < 1e-3 for k in a) and not same(a, c)


# ---- fine-tuning to a longer context ----


def test_init_starts_from_the_parents_weights_and_keeps_both_contexts_apart(here, capsys):
    run_train("steps=4", "pos=rope_interleaved", "name=short")
    capsys.readouterr()
    longer = ("init=short", "ctx=256", "scaling=pi", "steps=2", "name=long")
    run_train(*longer)
    out = capsys.readouterr().out
    assert "from runs/short: pre-trained at ctx 64 on 2,048 tokens" in out and "scaling=pi (factor 4)" in out
    assert "fine-tuning took 1,024 tokens, 50 % of the pre-training's 2,048" in out
    state, parent = weights("long"), weights("short")
    assert state["cfg"].pos["interleaved"] and state["cfg"].ctx == 256  # pos, model and data are the parent's
    assert state["cfg"].pretrained["ctx"] == 64 and state["cfg"].pretrained["run"] == "short"
    assert not torch.equal(state["model"]["tokens.weight"], parent["model"]["tokens.weight"])

    run_train("init=short", "ctx=64", "steps=1", "optim.lr=1e-12", "optim.warmup=0", "name=same")
    assert torch.allclose(weights("same")["model"]["tokens.weight"], parent["model"]["tokens.weight"])

    run_train(*longer)
    assert "already trained" in capsys.readouterr().out
    run_train("init=long", "ctx=512", "scaling=yarn", "steps=1", "name=longer")  # the root's context stays L
    assert weights("longer")["cfg"].pretrained["ctx"] == 64
    assert "scaling=yarn (factor 8)" in capsys.readouterr().out

    run_eval("run=long", "ctx=512", "scaling=ntk", "documents=3")
    out = capsys.readouterr().out
    assert "pre-trained at ctx 64 (short), extended to 256 by scaling=pi" in out
    rows = {
        label: read_curve(next(Path("runs/long/eval").glob(f"{label}-*.jsonl"))).rows
        for label in ("none", "window", "ntk")
    }
    assert {row.factor for row in rows["none"]} == {4}  # as fine-tuned
    assert {row.window for row in rows["window"]} == {256} and {row.factor for row in rows["window"]} == {4}
    assert [(row.n, row.factor) for row in rows["ntk"]] == [(64, 4), (128, 4), (256, 4), (512, 8)]
    assert all(row.train_ctx == 64 and row.extended_ctx == 256 for row in rows["ntk"])


def test_what_init_refuses(here):
    with pytest.raises(
        UserError, match=r"init=nobody: no trained run of that name in runs/: first: python train\.py pos=rope"
    ):
        run_train("init=nobody", "name=x")
    run_train("steps=1", "pos=learned", "name=table")
    for argv, right in [
        (["model.width=32"], r"init=table: model\.width=32 cannot be chosen"),
        (["data=text"], r"init=table: data=text cannot be chosen"),
        (["name=table"], r"init=table: the new run needs another name: name=NEW"),
        (["ctx=128"], r"pos\.max_positions=64: must be at least ctx=128"),
        (["scaling=pi"], r"scaling=pi is not applicable: .*pos=learned has none"),
    ]:
        name = [] if argv[0].startswith("name=") else ["name=new"]
        with pytest.raises(UserError, match=right):
            run_train("init=table", *argv, *name)
    assert not Path("runs/new").exists()


def test_a_run_whose_parent_has_changed_is_not_resumed(here):
    run_train("steps=1", "name=a")
    run_train("init=a", "ctx=128", "steps=4", "name=b")
    run_train("steps=1", "seed=1", "name=a", "fresh=true")
    with pytest.raises(UserError, match=r"runs/b has other settings: pretrained\.weights="):
        run_train("init=a", "ctx=128", "steps=4", "name=b")


# ---- memory ----

BLOCKS = """
import ctypes, resource
from engine.device import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        block = libc.malloc(2**26)
        ctypes.memset(block, 1, 2**26)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = new_pages()
keep_freed_memory()
print(usual, new_pages())
"""


@pytest.mark.process
@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="mallopt is glibc's")
def test_training_on_a_cpu_keeps_freed_memory(here, monkeypatch):
    """Of ten blocks, one after the other, only the first takes new pages."""
    done = subprocess.run([sys.executable, "-c", BLOCKS], cwd=ROOT, capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept < usual / 5, done.stdout
    calls = []
    monkeypatch.setattr("engine.device.keep_freed_memory", lambda: calls.append(1))
    run_train("steps=1", "name=x")
    assert calls == [1]


DENORMAL = """
import torch
from engine import device as devices
devices.start("cpu", "auto")
x = torch.full((2**22,), 1e-20)
print(torch.get_num_threads(), (x * x).count_nonzero().item())
"""
AFTER_INIT = """
import torch, train
from conf.compose import train_settings
from engine import finetune
def inherit(cfg):
    x = torch.full((2**22,), 1e-20)
    print(torch.get_num_threads(), (x * x).count_nonzero().item())
    raise SystemExit
finetune.inherit = inherit
train.train(train_settings("name=x", "init=y"))
"""


@pytest.mark.process
@pytest.mark.parametrize("code", [DENORMAL, AFTER_INIT])
def test_numbers_that_slow_a_cpu_down_are_zero_in_all_threads(code):
    """Threads that were started before the setting would not have it."""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0"], done.stdout


# ---- training positions and attention ----


@pytest.mark.parametrize("settings", [("positions=random",), ("positions=pose", "longest=128"), ("attention=linear",)])
def test_other_ways_to_train(settings, here):
    run_train(*settings, "steps=2", "name=x")
    assert weights("x")["step"] == 2
    run_eval("run=x", "ctx=128", "scaling=ntk", "documents=3")


def test_positions_are_drawn_in_training(here):
    for name, settings in (("ordered", ()), ("random", ("positions=random",))):
        run_train(*settings, "steps=2", f"name={name}")
    assert weights("random")["cfg"].longest == 512
    assert not torch.equal(*(weights(n)["model"]["tokens.weight"] for n in ("ordered", "random")))
    with pytest.raises(UserError, match="longest=512: must be at most 64, the positions of pos=learned"):
        run_train("pos=learned", "positions=random", "name=x")
