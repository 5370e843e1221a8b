"""Training runs that can be trusted: resume, signals, kills, full disks; init=; and every yaml of conf/ trains."""

import math
import platform
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from conf.schema import OptimConfig
from data import corpus as corpora
from engine import checkpoint
from engine.optimizer import schedule
from hf.tokenizer import of_run
from measure.curves import read_curve
from tests.helpers import (
    choices,
    command,
    line_of,
    opened,
    run_eval,
    run_train,
    start,
    train_settings,
    wait_until,
    write_documents,
)

pytestmark = pytest.mark.process


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
EACH += [f"layers={x}" for x in choices("layers")]
EACH += ["model.n_kv_heads=1", "model.mlp=swiglu model.attention_gate=head", "model.tied_head=false", "dtype=float32"]
EACH += ["positions=random", "positions=random_float", "positions=pose longest=128", "attention=linear"]
EACH += ["micro_tokens=128"]


@pytest.mark.parametrize("settings", EACH)
def test_every_yaml_composes_and_trains_two_steps(settings, here):
    small = [] if settings.startswith("model=") else ["model.width=32"]
    cfg = train_settings("exp=smoke", *settings.split(), "steps=2", "name=x", *small)
    if settings.startswith("model="):  # exp=smoke makes every model small: undo that
        cfg.model, cfg.batch_tokens, cfg.val_windows = train_settings(settings).model, 128, 2
    train.train(cfg)
    state = weights("x")
    assert state["step"] == 2 and math.isfinite(state["validation"]["loss"])
    if settings.startswith(("positions", "attention")):
        run_eval("run=x", "ctx=128", "scaling=ntk", "documents=3")


def test_every_exp_composes():
    for exp in choices("train/exp"):
        assert train_settings(f"exp={exp}").exp == exp


def test_training_learns_and_accumulation_is_the_same_step(here, capsys):
    for name, more in (("whole", ()), ("parts", ("micro_tokens=64",))):
        run_train("steps=40", "optim.lr=5e-3", "optim.warmup=2", "dtype=float32", f"name={name}", *more)
    whole, parts = (weights(name)["validation"]["loss"] for name in ("whole", "parts"))
    assert whole < math.log(512) - 0.6 and parts == pytest.approx(whole, rel=1e-4)
    assert "bits/byte" in capsys.readouterr().out


def test_schedule():
    o = OptimConfig(lr=1.0, warmup=10, final_lr=0.1)
    shares = [schedule(s, 100, o) for s in range(100)]
    assert shares[0] == pytest.approx(0.1) and shares[9] == shares[10] == 1
    assert shares[55] == pytest.approx(0.55) and shares[99] == pytest.approx(0.11)
    assert max(shares) == 1 and shares[10:] == sorted(shares[10:], reverse=True)


# ---- stopping and resuming ----


def train_until(step: int, *settings: str, number: int = signal.SIGTERM) -> None:
    """`python train.py exp=smoke SETTINGS`, which gets this signal during this step."""

    def with_signal(done: int, *rest: Any) -> float:
        if done == step - 1:
            signal.raise_signal(number)
        return schedule(done, *rest)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(train, "schedule", with_signal)
        run_train(*settings)
    assert stop.value.code == 128 + number


def assert_resumes_to_the_bit(step: int, *settings: str) -> None:
    """runs/parts, stopped after this step and resumed, is runs/whole."""
    run_train(*settings, "name=whole")
    train_until(step, *settings, "name=parts")
    assert weights("parts")["step"] == step
    run_train(*settings, "name=parts")
    whole, parts = weights("whole"), weights("parts")
    assert same(whole["model"], parts["model"]) and same(whole["optimizer"], parts["optimizer"])
    assert not same(whole["model"], {k: v + 1 for k, v in parts["model"].items()})


@pytest.mark.parametrize("more", [(), ("positions=random",), ("pos=t5_bias", "optim=muon")])
def test_ten_steps_equal_five_and_five_more(more, here):
    """T5's bias has a learning rate of its own."""
    assert_resumes_to_the_bit(5, "steps=10", *more)
    run_train("steps=10", "name=plain")
    assert same(weights("plain")["model"], weights("whole")["model"]) == (not more)


@pytest.mark.slow
def test_compiled_training_is_the_same_to_rounding_and_resumes_exactly(here):
    """About a minute: the compiler. 16 steps cross COMPILE_AT."""
    settings = ("steps=16", "dtype=float32")
    assert_resumes_to_the_bit(12, *settings, "compile=true")
    run_train(*settings, "name=plain", "compile=false")
    compiled, plain = weights("whole")["model"], weights("plain")["model"]
    assert all((compiled[k] - plain[k]).abs().max() < 1e-3 for k in plain) and not same(compiled, plain)


def test_a_finished_run_is_kept_unless_it_shall_start_over(here, capsys):
    run_train("steps=2", "name=x")
    before = Path("runs/x/ckpt.pt").read_bytes()
    error = line_of(run_train, "steps=2", "name=x", "optim.lr=0.5", "pos.base=7.0")
    assert "optim.lr=0.5 (the run has 0.016), pos.base=7.0 (the run has 10000.0)" in error
    run_train("steps=2", "name=x", "save_every=7", "log_every=1", "compile=false")  # run control may differ
    assert "already trained" in capsys.readouterr().out and Path("runs/x/ckpt.pt").read_bytes() == before
    run_train("steps=2", "name=x", "fresh=true", "seed=1")
    assert weights("x")["cfg"].seed == 1 and Path("runs/x/ckpt.pt").read_bytes() != before


def test_a_text_corpus_trains_until_it_changes(here):
    write_documents(here)
    settings = ("data=text", "data.files=docs/*.txt", "data.vocab_size=270", "ctx=16", "batch_tokens=16", "name=x")
    train_until(1, *settings, "steps=2")
    (here / "docs" / "0.txt").write_text("other words " * 90)
    assert "the corpus has changed since this run began" in line_of(run_train, *settings, "steps=2")


@pytest.mark.parametrize(
    "number, more, again", [(signal.SIGTERM, (), "again"), (signal.SIGINT, ("fresh=true",), "without")]
)
def test_signals_save_and_exit(number, more, again, here, capsys):
    train_until(3, "steps=9", "name=x", *more, number=number)
    assert f"runs/x is saved at step 3 of 9; run the same command {again}" in capsys.readouterr().out
    assert weights("x")["step"] == 3


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint_to_resume_from(here):
    """Saving at every step, one kill in a few hits a save."""
    process = start("train.py", "exp=smoke", "name=x", "steps=100", "save_every=1")
    wait_until(Path("runs/x/ckpt.pt").exists)
    time.sleep(0.3)
    process.kill()
    process.communicate()
    for name in ("x", "straight"):
        run_train("steps=100", "save_every=1000", f"name={name}")
    assert same(weights("x")["model"], weights("straight")["model"])
    assert [f.name for f in Path("runs/x").glob("*.pt*")] == ["ckpt.pt"]


def test_a_full_disk_is_one_line_and_keeps_the_last_checkpoint(here):
    resource = pytest.importorskip("resource", reason="limits of POSIX")
    train_until(5, "steps=6", "name=x")
    before, limits = Path("runs/x/ckpt.pt").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        assert line_of(run_train, "steps=6", "name=x").startswith("runs/x/ckpt.pt: ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Path("runs/x/ckpt.pt").read_bytes() == before
    assert {f.name for f in Path("runs/x").iterdir()} <= {"ckpt.pt", "config.json", ".lock"}


@pytest.mark.parametrize(
    "settings, name",
    [
        ("", "rope"),
        ("pos=alibi seed=1 device=cpu", "alibi-seed1"),
        ("seed=1 exp=smoke", "rope-smoke-seed1"),
        ("pos.base=500 optim.lr=1e-3", "rope-lr1e-3-base500"),
        ("data=text data.files=docs/**/*.txt", "rope-text-filesdocs_.txt"),
        ("init=rope pos=none", "rope-to-none"),
        ("init=rope layers=swan", "rope-swan"),
        ("init=rope layers=gemma3 layers.L.base=500 ctx=128", "rope-gemma3-ctx128-L.base500"),
    ],
)
def test_run_names_come_from_what_the_command_line_changed(settings, name):
    assert train_settings(*settings.split()).name == name


# ---- fine-tuning to a longer context ----


def test_init_starts_from_the_parents_weights_and_keeps_both_contexts_apart(here, capsys):
    run_train("steps=4", "pos=rope_interleaved", "name=short")
    run_train("init=short", "ctx=256", "scaling=pi", "steps=2", "name=long")
    state, parent = weights("long"), weights("short")
    assert state["cfg"].pos["interleaved"] and state["cfg"].ctx == 256  # pos, model and data are the parent's
    assert state["cfg"].pretrained["ctx"] == 64 and state["cfg"].pretrained["run"] == "short"
    assert not torch.equal(state["model"]["tokens.weight"], parent["model"]["tokens.weight"])

    run_train("init=short", "ctx=64", "steps=1", "optim.lr=1e-12", "optim.warmup=0", "name=same")
    assert torch.allclose(weights("same")["model"]["tokens.weight"], parent["model"]["tokens.weight"])
    run_train("init=long", "ctx=512", "scaling=yarn", "steps=1", "name=longer")  # the root's context stays L
    assert weights("longer")["cfg"].pretrained["ctx"] == 64
    assert "scaling=yarn (factor 8)" in capsys.readouterr().out

    run_eval("run=long", "ctx=512", "scaling=ntk", "documents=3")
    curves = {c.label: c.rows for c in map(read_curve, Path("runs/long/eval").glob("*.jsonl"))}
    assert {(row.factor, row.window) for row in curves["none"]} == {(4, None)}  # as fine-tuned
    assert {(row.factor, row.window) for row in curves["window"]} == {(4, 256)}
    assert [(row.n, row.factor) for row in curves["ntk"]] == [(64, 4), (128, 4), (256, 4), (512, 8)]
    assert all(row.train_ctx == 64 and row.longest_trained_ctx == 256 for row in curves["ntk"])


def test_a_parent_that_has_changed(here):
    run_train("steps=1", "name=a")
    train_until(1, "init=a", "steps=4", "name=b")
    run_train("steps=1", "seed=1", "name=a", "fresh=true")
    assert "runs/b has other settings: pretrained.weights=" in line_of(run_train, "init=a", "steps=4", "name=b")


def test_a_run_with_a_tokenizer_of_ones_own_needs_its_file_no_more(here, capsys):
    of_run(corpora.prepare(train_settings("exp=smoke").data, ".cache").encoding).save("own.json")
    write_documents(here)
    settings = ("data=text", "data.files=docs/*.txt", "data.tokenizer=own.json")
    train_until(1, *settings, "steps=2", "name=b")
    few = r"held out: \d+ documents, never trained on; data.holdout=32 needs a larger corpus"
    assert re.search(few, capsys.readouterr().out)
    Path("own.json").unlink()
    run_train(*settings, "steps=2", "name=b")
    run_train("init=b", "steps=1", "name=c")
    run = opened("c", cache="another")
    assert run.step == 1 and run.corpus.encoding.eot_token == 511 == run.corpus.vocab_size - 1


# ---- memory, and numbers that a CPU is slow with ----

ON_A_CPU = """
import ctypes, resource, torch, train
from conf.cli import train_settings

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        block = libc.malloc(2**26)
        ctypes.memset(block, 1, 2**26)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def tiny_numbers():
    x = torch.full((2**22,), 1e-20)
    return (x * x).count_nonzero().item()


def before_the_start(*_):
    print(torch.get_num_threads(), tiny_numbers(), new_pages())
    torch.set_flush_denormal(False)


def after_the_start(*_):
    print(tiny_numbers(), new_pages())
    raise SystemExit


train.check_settings, train.Training = before_the_start, after_the_start
train.train(train_settings("name=x"))
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="mallopt is glibc's")
def test_training_on_a_cpu_keeps_freed_memory_and_makes_slow_numbers_zero(here):
    """Of ten blocks, one after the other, only the first takes new pages.

    Numbers below 1e-38 are zero in all threads: those that were started before the setting would not have it. It is
    made before init= reads weights, and by devices.start for the other commands.
    """
    Path("on_a_cpu.py").write_text(ON_A_CPU)
    done = command(f"{here}/on_a_cpu.py", OMP_NUM_THREADS="2")
    threads, tiny, usual, tiny_after, kept = map(int, done.stdout.split())
    assert (threads, tiny, tiny_after) == (2, 0, 0) and kept < usual / 5
