"""Save, load and find trained runs. A run is a folder runs/NAME with config.json and ckpt.pt."""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from conf.schema import TrainConfig, from_dict

FORMAT = 1


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call write(file) on a file aside, then rename it: path is the old file or the new one, never a part of one.

    ValueError in words if it cannot be written (a full disk); the old file is then still there.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    except (OSError, RuntimeError) as e:  # torch.save turns some OSErrors into RuntimeErrors
        reason = getattr(e, "strerror", None) or str(e).splitlines()[0]
        kept = "; the last one saved is kept" if path.exists() else ""
        raise ValueError(f"{path}: cannot be written ({reason}){kept}") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def start(run: Path, cfg: TrainConfig) -> None:
    """Make the run's folder, with its settings in config.json; weights that are there (fresh=true) go."""
    (run / "ckpt.pt").unlink(missing_ok=True)
    shutil.rmtree(run / "shards", ignore_errors=True)
    text = json.dumps(asdict(cfg), indent=1)
    write_atomically(run / "config.json", lambda f: f.write(text.encode()))


def save(run: Path, state: dict[str, Any]) -> None:
    write_atomically(run / "ckpt.pt", lambda f: torch.save({"format": FORMAT, **state}, f))
    shutil.rmtree(run / "shards", ignore_errors=True)  # the parts that a whole replaces: model/shards.py


def load(run: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state that save was given, plus cfg, its TrainConfig. ValueError if the file is not one of ours, whole."""
    return read(run / "ckpt.pt", device)


def read(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError("not written by this version of ropewalk")
        state["cfg"] = from_dict(state["config"])
    except FileNotFoundError:
        raise ValueError(f"{path}: not found") from None
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as e:
        reason = str(e).splitlines()[0][:100] if str(e) else type(e).__name__
        raise ValueError(f"{path}: not a whole ropewalk checkpoint ({reason}): train again with fresh=true") from None
    return state


def digest(run: Path) -> str:
    """What identifies the run's weights, and changes with them."""
    return hashlib.sha256((run / "ckpt.pt").read_bytes()).hexdigest()


def find(runs: str) -> list[tuple[str, TrainConfig]]:
    """(name, settings) of every run under runs/ that has a checkpoint, newest first."""
    found = sorted(Path(runs).glob("*/ckpt.pt"), key=lambda p: p.stat().st_mtime, reverse=True)
    listed = []
    for path in found:
        with contextlib.suppress(OSError, ValueError):  # someone else's folder
            listed.append((path.parent.name, from_dict(json.loads((path.parent / "config.json").read_text()))))
    return listed
