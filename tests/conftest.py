"""Fixtures and the environment of all tests. Helpers to import are in tests/helpers.py."""

import gc
import os
from pathlib import Path

# Before anything imports wandb or torch
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("WANDB_SILENT", "true")
# The models here are tiny: a second thread would only wait for the first. Also for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
# Figures are drawn at a low resolution, also by child processes
os.environ["MATPLOTLIBRC"] = str(Path(__file__).parent / "data" / "matplotlibrc")

import pytest
from filelock import FileLock


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. The process that only starts the workers imports nothing large."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    if not torch.cuda.is_available():  # the kernel is then tested in Triton's interpreter; read when triton is imported
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked gpu or slow run only where -m names them; those marked both need gpu alone.

    Long tests come first, so that no worker ends with one.
    """
    named = config.getoption("-m")
    markers = [next((m for m in ("gpu", "slow") if item.get_closest_marker(m)), None) for item in items]
    config.hook.pytest_deselected(items=[x for x, m in zip(items, markers, strict=True) if m and m not in named])
    items[:] = [x for x, m in zip(items, markers, strict=True) if not m or m in named]
    items.sort(key=lambda item: not (item.get_closest_marker("process") or item.get_closest_marker("distributed")))


def pytest_collection_finish() -> None:
    """What the imports have made lives to the end: the garbage collector need not go through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cache(request, tmp_path_factory) -> str:
    """One corpus cache for all tests of all workers, with the corpus of exp=smoke in it.

    The first worker prepares that corpus; the lock makes the others wait instead of doing the same work.
    """
    from data import corpus as corpora
    from tests.helpers import train_settings

    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a worker of pytest-xdist: its folder lies in that of all workers
        folder = folder.parent
    with FileLock(folder / "cache.lock"):
        corpora.prepare(train_settings("exp=smoke").data, str(folder / "cache"))
    return str(folder / "cache")


@pytest.fixture
def here(tmp_path, monkeypatch, cache) -> Path:
    """An empty working folder; runs land in here/runs, the corpus cache is shared."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".cache").symlink_to(cache)
    return tmp_path
