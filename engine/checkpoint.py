"""Save, load and find trained runs. A run is a folder runs/NAME with config.json and ckpt.pt."""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from conf.errors import OneRankError, UserError, file_errors
from conf.registry import has_type
from conf.schema import TrainConfig, from_dict

FORMAT = 1  # version of ckpt.pt; raise it when its keys change
# Types of the parts of a checkpoint
PARTS = {"config": dict, "model": dict[str, torch.Tensor], "optimizer": dict, "step": int, "corpus": str,
         "tokenizer": str | None, "seconds": float, "validation": dict[str, float]}  # fmt: skip


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call write(file) on a temporary file, then rename it: path is the old file or the new one, never a part of one.

    UserError if it cannot be written (a full disk, no permission); the old file is then unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if leftovers := list(path.parent.glob(f".{path.name}.*")):
            from conf.leftovers import remove_leftovers

            remove_leftovers(leftovers)
        with temporary.open("wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError) as e:  # torch.save turns some OSErrors into RuntimeErrors
        from conf.failures import reason

        unchanged = "; the previous one is unchanged" if path.exists() else ""
        raise OneRankError(f"{path}: cannot be written ({reason(e)}){unchanged}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def start(run: Path, cfg: TrainConfig) -> None:
    """Create the folder of a new run and write its settings to config.json.

    Weights of an earlier run in this folder (fresh=true) are removed first, so that they never appear next to settings
    that they do not belong to.
    """
    with file_errors(run):
        (run / "ckpt.pt").unlink(missing_ok=True)
    shutil.rmtree(run / "shards", ignore_errors=True)
    write_settings(run, cfg)


def write_settings(run: Path, cfg: TrainConfig) -> None:
    """Write config.json of the run in folder `run`."""
    write_atomically(run / "config.json", lambda f: f.write(json.dumps(asdict(cfg), indent=1).encode()))


def save(run: Path, state: dict[str, Any]) -> None:
    """Write ckpt.pt of the run in folder `run`, atomically. state: config, model, optimizer, step, corpus, ..."""
    write_atomically(run / "ckpt.pt", lambda f: torch.save({"format": FORMAT, **state}, f))
    shutil.rmtree(run / "shards", ignore_errors=True)  # ckpt.pt replaces them: engine/shards.py


def load(run: Path) -> dict[str, Any]:
    """The state that `save` wrote, with its tensors on the CPU, and under the key cfg its TrainConfig.

    torch unpickles only tensors and plain values (weights_only=True). UserError if the file is missing or damaged (the
    checksum of every part is compared), from another version, or if its weights are not finite.
    """
    state = read(run / "ckpt.pt")
    with reading(run / "ckpt.pt"):
        for name, x in state["model"].items():
            if x.dtype != torch.float32 or not x.isfinite().all():
                raise UserError(f"{name} has values that are not finite float32 numbers (NaN or Inf)")
    return state


def read(path: Path, parts: dict[str, Any] = PARTS) -> dict[str, Any]:
    """The content of a file of a checkpoint with these parts, and the key cfg. UserError as of `load`."""
    with reading(path):
        with zipfile.ZipFile(path) as archive:  # torch writes the CRC-32 of each part, but does not compare it
            if part := archive.testzip():
                raise zipfile.BadZipFile(f"the checksum of {part} differs")
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise UserError("not written by this version of ropewalk")
        if wrong := [key for key, hint in parts.items() if not has_type(state.get(key), hint)]:
            raise UserError(f"not a checkpoint that ropewalk wrote: its {wrong[0]} is missing or of a wrong type")
        state["cfg"] = from_dict(state["config"]) if "config" in parts else None
    return state


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Context manager: an error inside it is due to the content of the file at path, or to the machine: UserError."""
    try:
        yield
    except Exception as e:
        from engine.failures import explain_reading

        raise explain_reading(path, e) from None


def digest(run: Path) -> str:
    """The sha256 of the checkpoint in hexadecimal. Curves and fine-tuned runs store it to identify the weights."""
    with (run / "ckpt.pt").open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
