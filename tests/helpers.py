"""What several test files use: small models, commands in this process, and commands as a user runs them."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import importlib.util
import io
import itertools
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import eval as evaluation
import train
from conf import cli
from conf.errors import UserError
from conf.registry import ROOT, choices, yaml_values
from conf.schema import EvalConfig, TrainConfig, TrainedRunConfig
from data.corpus import Document, HeldOut
from engine.compile import compile_blocks
from engine.run import Run
from measure.curves import Curve, read_curve
from measure.evaluation import Evaluation
from model import attention, gpt, spectrum
from model.pos import Encoding
from model.scaling import ContextChange, TrainedContext
from studies import plan
from studies.rows import Rows, StudyRow

__all__ = ["ROOT", "choices", "eval_settings", "train_settings"]

# ---- settings ----


@functools.cache
def _composed(config: str, *overrides: str) -> tuple[DictConfig, Any]:
    """What Hydra knows of a command line, and the checked settings. Not to be changed: they are cached."""
    cfg = cli.compose(config, *overrides)
    return HydraConfig.instance().cfg, cli.checked(config, cfg)


def _settings(config: str, *overrides: str) -> Any:
    HydraConfig.instance().cfg, settings = _composed(config, *overrides)  # fine-tuning asks Hydra what was chosen
    return copy.deepcopy(settings)


def train_settings(*overrides: str) -> TrainConfig:
    """The settings of `python train.py OVERRIDES`; every call gets its own copy."""
    return _settings("train", *overrides)


def eval_settings(*overrides: str) -> EvalConfig:
    """The settings of `python eval.py OVERRIDES`; every call gets its own copy."""
    return _settings("eval", *overrides)


# ---- small models ----

SMALL = ("model.n_layers=2", "model.n_heads=4", "model.width=64", "ctx=32", "batch_tokens=32")
# Encodings without a last position; found by the knob, so a new encoding with a table needs no edit here
UNLIMITED = [pos for pos in choices("pos") if "max_positions" not in yaml_values("pos", pos)]


def more_positions(pos: str, count: int) -> list[str]:
    """The override that gives an encoding with a table this many positions; nothing for the others."""
    return [] if pos in UNLIMITED else [f"pos.max_positions={count}"]


def encoding_of(pos: str, *overrides: str) -> Encoding:
    """An encoding of a model with 4 heads of 16 dimensions, trained at ctx 32."""
    return gpt.build_encoding(train_settings(f"pos={pos}", *SMALL, *overrides))


def rope_context(L: int = 256, D: int = 64, base: float = 10000.0) -> TrainedContext:
    """Of a run with RoPE, trained at L."""
    return TrainedContext("rope", L, base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D))


def scaling_knobs(name: str, pairs: int) -> dict:
    """The knobs of a yaml of conf/scaling; one divisor for each rotary pair where the yaml leaves `long` open."""
    knobs = yaml_values("scaling", name)
    return {**knobs, "long": [1.0 + i / 4 for i in range(pairs)]} if "long" in knobs else knobs


def model_of(pos: str, *overrides: str, std: float = 0.3) -> gpt.GPT:
    """A small float64 model with large weights: at an initialisation of 0.02 positions hardly move the logits."""
    model = gpt.build(train_settings(f"pos={pos}", *SMALL, *overrides), vocab_size=50).double().eval()
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=std)
        if name == "pos.scale":
            torch.nn.init.constant_(p, 0.3)
    return model


def random_tokens(batch: int = 2, time: int = 24) -> torch.Tensor:
    """int64 [batch, time], the same at every call."""
    return torch.randint(50, (batch, time), generator=torch.Generator().manual_seed(1))


def attention_output(
    model: gpt.GPT, tokens: torch.Tensor, change: ContextChange, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """What the first layer's attention hands to its output projection for tokens [1, T]: [T, H * D]."""
    seen = []
    handle = model.blocks[0].attention.out.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(tokens, positions, change)
    handle.remove()
    return seen[0][0].detach()


Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def dense(model: gpt.GPT, x: torch.Tensor, scores: Scores) -> torch.Tensor:
    """One layer's attention output with scores(q, k) [H, T, T] given in full, as an independent reference."""
    block = model.blocks[0]
    h = block.norm1(model.tokens(x))
    q, k, v = block.attention.qkv(h).unflatten(-1, (-1, 16)).split(4, dim=2)
    s = scores(q[0].transpose(0, 1), k[0].transpose(0, 1)) / 4
    T = x.shape[1]
    s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    return (s.softmax(-1) @ v[0].transpose(0, 1)).transpose(0, 1).flatten(1)


def rotated_scores(inv_freq: torch.Tensor, relative: torch.Tensor) -> Scores:
    """q . R(relative) k for any matrix of relative positions, which may be fractions, in float64."""

    def scores(q, k):
        angle = relative[..., None] * inv_freq
        q, k = (torch.view_as_complex(t.unflatten(-1, (2, 8)).transpose(-1, -2).contiguous()) for t in (q, k))
        return torch.einsum("hqi,hki,qki->hqk", q, k.conj(), torch.polar(torch.ones_like(angle), angle)).real

    return scores


def compile_for(monkeypatch: pytest.MonkeyPatch, model: gpt.GPT, backend="inductor", fallback: bool = False) -> None:
    """Compile a model as training does, until the end of the test. Without the fallback an error is raised."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for name in ("attend_blocks", "linear_attention"):  # which compile_blocks replaces
        monkeypatch.setattr(attention, name, getattr(attention, name))
    compile_blocks(model, fallback)


# ---- text, and stand-ins for trained runs ----


class Characters:
    """A tokenizer: a character is the token of its number."""

    def encode_ordinary(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def held_out(documents: Iterable[Sequence[int]]) -> HeldOut:
    """Documents of these tokens, in this order."""
    cut = [Document(f"document {i}", np.array(tokens)) for i, tokens in enumerate(documents)]
    token_bytes = np.ones(max(int(d.tokens.max()) for d in cut) + 1, dtype=np.int64)

    return HeldOut("characters", len(token_bytes), cut, token_bytes, Characters())


class Words:
    """A tokenizer: a word or a sign with the space before it is one token, but for these letters after a space."""

    def __init__(self, two_tokens: str = ""):
        self.two_tokens = two_tokens
        self.numbers: dict[str, int] = {}

    def encode_ordinary(self, text: str) -> list[int]:
        words = re.findall(r" ?\w+| ?[^\w\s]|\s", text)
        cut = [(" ", w[1]) if len(w) == 2 and w[0] == " " and w[1] in self.two_tokens else (w,) for w in words]
        return [self.numbers.setdefault(part, len(self.numbers)) for parts in cut for part in parts]

    def decode(self, tokens: Sequence[int]) -> str:
        words = list(self.numbers)
        return "".join(words[token] for token in tokens)


def random_lines(seed: int, count: int) -> list[str]:
    """Lines of nine words, drawn from the same 300 words of four letters."""
    words = random.Random("words")
    known = ["".join(words.choices("bcdfghjk", k=4)) for _ in range(300)]
    rng = random.Random(seed)
    return [" ".join(rng.choices(known, k=9)) for _ in range(count)]


def held_out_text(texts: Iterable[str], words: Words | None = None) -> HeldOut:
    """Documents of these texts, in tokens of `words`, of which there are less than 1024."""
    words = words or Words()
    cut = [Document(f"text {i}", np.array(words.encode_ordinary(text))) for i, text in enumerate(texts)]
    return HeldOut("words", 1024, cut, np.full(1024, 4), words)


@functools.cache
def any_task_corpus() -> HeldOut:
    """Four documents of 2000 words that every task can be built from."""
    return held_out_text("".join(f"{line}\n" for line in random_lines(seed, 200)) for seed in range(4))


class StubModel:
    """Token t costs t / 100 nats, 1 more if it sees fewer than `needs` tokens, and `window_costs` more if the window
    hides some.

    seen: the length of the input of every call.
    """

    def __init__(self, needs: int = 0, window_costs: float = 0.0):
        self.needs, self.window_costs = needs, window_costs
        self.seen: list[int] = []

    def losses(self, tokens: torch.Tensor, targets: torch.Tensor, change: ContextChange) -> torch.Tensor:
        T, S = tokens.shape[1], targets.shape[1]
        self.seen.append(T)
        sees = torch.arange(T - S + 1, T + 1).clamp(max=change.window or T)
        hidden = change.window is not None and change.window < T
        return targets / 100 + (sees < self.needs).float() + self.window_costs * hidden


def stub_evaluation(model: object, corpus: HeldOut, folder: Path, *overrides: str, L: int = 64) -> Evaluation:
    """The evaluation of runs/stub in `folder`: this object as the model of a run that was trained at L tokens."""
    context = TrainedContext("rope", L, spectrum.frequencies(8, 10000.0))
    run = Run("stub", "as named", folder / "runs" / "stub", train_settings("exp=smoke"), model, corpus, context, 0, "0")
    return Evaluation(run, eval_settings(*overrides), torch.device("cpu"))


# ---- curves ----

A_ROW = read_curve(ROOT / "tests/data/rope-s0/eval/curve.jsonl").first


def curve_of(run: str, label: str, losses: dict[int, float], pos: str = "rope", L: int = 64, **values: Any) -> Curve:
    """A curve of 32 documents that differ by a few percent. losses: n -> nats per token. values: of all its rows"""
    rows = []
    wave = np.sin(np.arange(32) * (2 + len(label)))
    for n, loss in losses.items():
        nll = (loss * A_ROW.tokens / 32 * (1 + 0.01 * (wave - wave.mean()))).tolist()
        row = {"run": run, "label": label, "pos": pos, "n": n, "train_ctx": L, "longest_trained_ctx": L, "nll": nll}
        row |= {"window": L if label == "window" else None, "loss": loss, "low": loss - 0.1, "high": loss + 0.1}
        row |= {"ppl": math.exp(loss), "bits_per_byte": loss * A_ROW.tokens / math.log(2) / A_ROW.bytes}
        rows.append(dataclasses.replace(A_ROW, **row, **values))
    return Curve(rows)


def study_row(run: str, label: str, n: int, seed: int, nats: dict[int, list[float]] | list[float], **more) -> StudyRow:
    """A row of windows of two tokens: window -> nats per token of each document, or these of one window. L = 256."""
    by_window = nats if isinstance(nats, dict) else {0: nats}
    by_document = np.array(list(by_window.values())).T  # [documents, windows]
    values = {"run": f"{run}-s{seed}", "label": label, "n": n, "seed": seed, "train_ctx": 256, "part": "rope"}
    values |= {"longest_trained_ctx": 256, "loss": float(by_document.mean()), "documents": len(by_document)}
    values |= {"nll": (2 * by_document.ravel()).tolist(), "tokens": 2 * by_document.size}
    return StudyRow(**dataclasses.asdict(A_ROW) | values | {"scored_windows": list(by_window)} | more)


def encoding_rows(seeds: tuple[int, ...] = (0,), loss_of: Callable[[str, str, int], float] | None = None) -> Rows:
    """Rows of the plan `encodings` of studies.matrix, without a training: of every job, method and length.

    loss_of: of (run, label of the method, n). Otherwise the loss rises past L with the logarithm of n by another amount
    for each run, less with a scaling method, and not at all for alibi and with the window control.
    """
    rows, jobs = [], [job for seed in seeds for job in plan.encoding_jobs(plan.load_size("default"), seed)]
    slopes = dict(zip(dict.fromkeys(job.name[:-3] for job in jobs), itertools.count(1), strict=False))
    noise = np.random.default_rng(0)
    for job in jobs:
        run, L = job.name[:-3], 1024 if job.name.startswith("abf") else 256
        labels = dict.fromkeys(("none", "window", *(method for x in job.evaluations for method in x.methods)))
        for label, n in itertools.product(labels, job.evaluations[0].lengths):
            rise = {"none": 0.03, "window": 0.0}.get(label, 0.002) * slopes[run] * (run != "alibi")
            loss = 2.5 + 0.02 * slopes[run] + rise * max(0.0, math.log2(n / L))
            spread = noise.normal(0, 0.01, 8)  # of documents
            if loss_of:
                loss, spread = loss_of(run, label, n), np.arange(8) / 1000 + 0.001 * job.seed
            more = {"part": job.part, "base": 500.0, "command": " ".join(job.train)}
            rows.append(study_row(run, label, n, job.seed, (loss + spread).tolist(), **more))
    return Rows(rows)


# ---- what this machine may lack ----


def skip_unless_ci(reason: str) -> NoReturn:
    """Skips the test, or the whole file when it is imported; a failure in CI, where everything is installed."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must not skip this: {reason}")
    pytest.skip(reason, allow_module_level=True)


def import_or_skip(module: str) -> ModuleType:
    """pytest.importorskip for what CI must not skip."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        skip_unless_ci(f"{module} cannot be imported: {e}")


# ---- commands ----


def run_train(*overrides: str) -> None:
    """`python train.py exp=smoke OVERRIDES` in this process; a UserError is raised."""
    train.train(train_settings("exp=smoke", *overrides))


def run_eval(*overrides: str) -> None:
    """`python eval.py OVERRIDES` in this process; a UserError is raised."""
    evaluation.evaluate(eval_settings(*overrides))


def train_smoke_runs(folder: Path, cache: str, *runs: tuple[str, ...]) -> Path:
    """Train smoke runs with these overrides in folder/runs, and return the folder. For fixtures of a whole module."""
    (folder / ".cache").symlink_to(cache)
    with contextlib.chdir(folder):
        for overrides in runs:
            run_train(*overrides)
    return folder


def opened(name: str | None, **settings: str) -> Run:
    """The run of this name."""
    return Run.open(TrainedRunConfig(run=name, **settings))


def start(script: str, *args: str, cwd: Path | None = None, **env: str) -> subprocess.Popen:
    """`python SCRIPT ARGS` in a new process, as a user starts it; SCRIPT may be -m=MODULE."""
    full = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT), **env}
    what = ["-m", script.removeprefix("-m=")] if script.startswith("-m=") else [str(ROOT / script)]
    return subprocess.Popen([sys.executable, *what, *args], cwd=cwd, env=full, stdout=-1, stderr=-1, text=True)


def command(script: str, *args: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """The same until it ends."""
    process = start(script, *args, cwd=cwd, **env)
    out, err = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_until(happened: Callable[[], object], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def run_command(main: Callable[[], None], argv: list[str], patch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """A command's main function with this command line, in this process: (exit code, stdout, stderr)."""
    code, out, err = 0, io.StringIO(), io.StringIO()
    GlobalHydra.instance().clear()
    patch.setattr(sys, "argv", ["command.py", *argv])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def error_of(main: Callable[[], None], argv: list[str], patch: pytest.MonkeyPatch) -> str:
    """The one error line that a command ends with for this command line, in this process."""
    code, _, err = run_command(main, argv, patch)
    assert code == 1 and "Traceback" not in err, err
    (message,) = (line for line in err.splitlines() if line.startswith("error: "))
    assert len(message) < 400
    return message


def line_of(call: Callable, *args: Any) -> str:
    """The message of the UserError that this call ends with, which a command shows as its one line."""
    with pytest.raises(UserError) as stop:
        call(*args)
    message = str(stop.value)
    assert "\n" not in message, message
    return message


def write_documents(folder: Path) -> None:
    """A small corpus for data=text: the beginnings of the source files of sympy.combinatorics as folder/docs/*.txt."""
    (folder / "docs").mkdir()
    spec = importlib.util.find_spec("sympy")
    assert spec and spec.origin
    for i, path in enumerate(sorted(Path(spec.origin).parent.glob("combinatorics/*.py"))):
        (folder / "docs" / f"{i}.txt").write_text(path.read_text()[:12_000])


def copy_of_the_repo(folder: Path, cache: str) -> None:
    """The files that git tracks (or would track), copied to folder, with the shared corpus cache."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".cache").symlink_to(cache)
