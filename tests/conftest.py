"""Fixtures and the environment of all tests. Helpers to import are in tests/helpers.py."""

import os
import sys
from pathlib import Path

# Before anything imports wandb or torch
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("WANDB_SILENT", "true")
# The models here are tiny: a second thread would only wait for the first. Also for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

if not torch.cuda.is_available():  # the kernel is then tested in Triton's interpreter; read when triton is imported
    os.environ["TRITON_INTERPRET"] = "1"


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
