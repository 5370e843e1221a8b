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

from conf.errors import OneRankError, UserError, file_errors
from conf.schema import TrainConfig, from_dict

FORMAT = 1  # version of ckpt.pt; raise it when its keys change


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call write(file) on a temporary file, then rename it: path is the old file or the new one, never a part of one.

    UserError if it cannot be written (a full disk, no permission); the old file is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as e:  # torch.save turns some OSErrors into RuntimeErrors
        reason = getattr(e, "strerror", None) or str(e).splitlines()[0]
        unchanged = "; the previous one is unchanged" if path.exists() else ""
        raise OneRankError(f"{path}: cannot be written ({reason}){unchanged}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def start(run: Path, cfg: TrainConfig) -> None:
    """Create the folder of a new run and write its settings to config.json.

    Weights of an earlier run in this folder (fresh=true) are removed first, so that they never appear next to settings
    that they do not belong to.
    """
    with file_errors(run):
        (run / "ckpt.pt").unlink(missing_ok=True)
    shutil.rmtree(run / "shards", ignore_errors=True)
    write_atomically(run / "config.json", lambda f: f.write(json.dumps(asdict(cfg), indent=1).encode()))


def save(run: Path, state: dict[str, Any]) -> None:
    """Write ckpt.pt of the run in folder `run`, atomically. state: config, model, optimizer, step, corpus, ..."""
    write_atomically(run / "ckpt.pt", lambda f: torch.save({"format": FORMAT, **state}, f))
    shutil.rmtree(run / "shards", ignore_errors=True)  # ckpt.pt replaces them: engine/shards.py


def load(run: Path, device: torch.device | str = "cpu", file: str = "ckpt.pt") -> dict[str, Any]:
    """The state that `save` wrote, with its tensors on `device`, and under the key cfg its TrainConfig.

    torch unpickles only tensors and plain values (weights_only=True). UserError if the file is missing, damaged or from
    another version.
    """
    path = run / file
    try:
        state = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise UserError("not written by this version of ropewalk")
        state["cfg"] = from_dict(state["config"])
    except FileNotFoundError:
        raise UserError(f"{path}: not found") from None
    except (OSError, ValueError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as e:
        reason = str(e).splitlines()[0][:100] if str(e) else type(e).__name__
        raise UserError(f"{path}: not a complete ropewalk checkpoint ({reason}): train again with fresh=true") from None
    return state


def digest(run: Path) -> str:
    """The sha256 of the checkpoint in hexadecimal. Curves and fine-tuned runs store it to identify the weights."""
    return hashlib.sha256((run / "ckpt.pt").read_bytes()).hexdigest()
