"""What several test files use: small models, commands in this process, and commands as a user runs them."""

import copy
import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from conf import compose
from conf.eval_schema import EvalConfig
from conf.registry import ROOT, choices, yaml_values
from conf.schema import TrainConfig
from model import gpt
from model.pos import Encoding

__all__ = ["ROOT", "choices", "eval_settings", "train_settings"]

# ---- settings ----

# Composing takes a tenth of a second, so the same overrides are composed one time
_composed_train_settings = functools.cache(compose.train_settings)
_composed_eval_settings = functools.cache(compose.eval_settings)


def train_settings(*overrides: str) -> TrainConfig:
    """The settings of `python train.py OVERRIDES`; every call gets its own copy."""
    return copy.deepcopy(_composed_train_settings(*overrides))


def eval_settings(*overrides: str) -> EvalConfig:
    """The settings of `python eval.py OVERRIDES`; every call gets its own copy."""
    return copy.deepcopy(_composed_eval_settings(*overrides))


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
    import train

    # Not the settings composed before: fine-tuning asks Hydra what this command line chose
    train.train(compose.train_settings("exp=smoke", *overrides))


def run_eval(*overrides: str) -> None:
    """`python eval.py OVERRIDES` in this process; a UserError is raised."""
    import eval as evaluation_command

    evaluation_command.evaluate(eval_settings(*overrides))


def command(script: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGS` in a new process, as a user runs it; SCRIPT may be -m=MODULE."""
    full = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT), **env}
    start = ["-m", script.removeprefix("-m=")] if script.startswith("-m=") else [str(ROOT / script)]
    return subprocess.run(
        [sys.executable, *start, *args], cwd=cwd, env=full, capture_output=True, text=True, timeout=240
    )


def error_of(run: Callable[[], None], argv: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The one error line that a command's main function ends with for this command line, in this process."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", ["script.py", *argv])
    with pytest.raises(SystemExit) as stop:
        run()
    message = stop.value.code
    assert isinstance(message, str), message  # sys.exit(text) prints it to stderr and exits with 1
    assert message.startswith("error: ") and "\n" not in message and len(message) < 400, message
    return message


def one_line_error(done: subprocess.CompletedProcess) -> str:
    """The one line by which a command ended with exit code 1; no traceback."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in re.split(r"[\r\n]+", done.stderr) if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("error: ")


def write_documents(folder: Path) -> None:
    """A small corpus for data=text: the source files of model/ as folder/docs/*.txt."""
    (folder / "docs").mkdir()
    for i, path in enumerate(sorted((ROOT / "model").rglob("*.py"))):
        (folder / "docs" / f"{i}.txt").write_text(path.read_text())


def copy_of_the_repo(folder: Path, cache: str) -> None:
    """The files that git tracks (or would track), copied to folder, with the shared corpus cache."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / ".cache").symlink_to(cache)
