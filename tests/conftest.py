"""Shared by all tests: settings composed as the command line does, and commands run as a user runs them."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

# Before anything imports wandb or torch
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("WANDB_SILENT", "true")
# The models here are tiny: a second thread would only wait for the first. Also for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():  # the kernel is then tested in Triton's interpreter; read when it is decorated
    os.environ["TRITON_INTERPRET"] = "1"

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import open_dict

from conf.schema import EvalConfig, TrainConfig, eval_config, train_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> str:
    """One corpus cache for all tests."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def here(tmp_path, monkeypatch, cache) -> Path:
    """An empty working folder; runs land in here/runs, the corpus cache is shared."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["test"])
    (tmp_path / ".cache").symlink_to(cache)
    return tmp_path


def composed(config: str, *overrides: str):
    """The config that `python CONFIG.py OVERRIDES` would run with."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose(config, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def train_settings(*overrides: str) -> TrainConfig:
    return train_config(composed("train", *overrides))


def eval_settings(*overrides: str) -> EvalConfig:
    return eval_config(composed("eval", *overrides))


def run_train(*overrides: str) -> None:
    """train.py in this process."""
    import train

    inspect.unwrap(train.main)(composed("train", "exp=smoke", *overrides))


def run_eval(*overrides: str) -> None:
    import eval

    inspect.unwrap(eval.main)(composed("eval", *overrides))


def command(script: str, *args: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    """`python SCRIPT ARGS` in a process of its own, as a user runs it; SCRIPT may be -m=MODULE."""
    full = {**os.environ, "COLUMNS": "120", "PYTHONPATH": str(ROOT), **env}
    start = ["-m", script.removeprefix("-m=")] if script.startswith("-m=") else [str(ROOT / script)]
    return subprocess.run(
        [sys.executable, *start, *args], cwd=cwd, env=full, capture_output=True, text=True, timeout=240
    )


def choices(group: str) -> list[str]:
    """Every yaml of conf/GROUP: a new entry is tested without editing a test."""
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))
