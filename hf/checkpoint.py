"""What a model is read from, in the form of a Hugging Face checkpoint: settings, tensors and tokenizer.

Of a folder the weights are model.safetensors or else the files of model.safetensors.index.json; no other file is read,
and never a pickle. A GGUF file takes the same form in hf/gguf_file.py.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from tokenizers import Tokenizer
from torch import Tensor

from conf.errors import UserError, file_errors
from conf.run_name import short
from hf.config import Config


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint, which `load` reads."""

    load: Callable[[], Tensor]
    size: int  # number of elements


@dataclass(frozen=True)
class Checkpoint:
    """Where a model comes from. Only the settings are read at once, so that a mistake in them is found first."""

    name: str  # of the run, such as hf-FOLDER
    path: Path  # for messages
    config: Config
    open_tensors: Callable[[], dict[str, LazyTensor]]  # by their names in a Hugging Face checkpoint
    tokenizer: Callable[[], Tokenizer]  # UserError if there is none, or a damaged one
    files: Callable[[], list[Path]]  # those that determine the model
    notes: tuple[str, ...] = ()  # what a reader of its curves should know

    def digest(self, pretrained: dict) -> str:
        """The sha256 of the files, and of the trained context (TrainConfig.pretrained), which train_ctx= can set."""
        result = hashlib.sha256(str(pretrained).encode())
        for path in self.files():
            with file_errors(path), path.open("rb") as f:
                result.update(hashlib.file_digest(f, "sha256").digest())
        return result.hexdigest()


def run_name(prefix: str, path: Path) -> str:
    """A folder's name for the curves of a model: letters, digits, . _ and - only."""
    return short(f"{prefix}-" + re.sub(r"[^A-Za-z0-9._-]+", "_", path.resolve().name))


def open_folder(folder: Path) -> Checkpoint:
    """The Hugging Face checkpoint in a local folder. UserError for anything in it that is missing or damaged."""
    if not folder.is_dir():
        raise UserError(f"hf:{folder}: no such folder; it must be a local Hugging Face checkpoint")
    config, path = Config.of_folder(folder), folder / "tokenizer.json"

    def tensors() -> dict[str, LazyTensor]:
        return {
            name: LazyTensor(functools.partial(file.get_tensor, name), math.prod(file.get_slice(name).get_shape()))
            for name, file in open_tensors(weight_files(folder)).items()
        }

    def tokenizer() -> Tokenizer:
        if not path.exists():
            raise UserError(f"{path}: not found: the text to score needs the checkpoint's tokenizer")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:  # the tokenizers package raises Exception itself
            raise UserError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None

    def files() -> list[Path]:
        return [config.path, *weight_files(folder)]

    return Checkpoint(run_name("hf", folder), folder, config, tensors, tokenizer, files)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: model.safetensors, or else the files that the index names, as transformers.

    Never any other: a folder may also contain an adapter, or the same weights in another format. UserError if there is
    neither, or if the index names a file outside the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("not names of files in the folder")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UserError(f"{index}: not an index of safetensors files") from None
        return [folder / name for name in names]
    hint = ""
    if others := sorted(folder.glob("*.safetensors")):
        hint = f" ({others[0].name} is not read: it may be an adapter or another format)"
    elif pickles := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        hint = f" ({pickles[0].name} is a pickle, which is never loaded: convert it)"
    raise UserError(f"hf:{folder}: no model.safetensors there, and no {index.name}{hint}")


def open_tensors(paths: list[Path]) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it. UserError if a file is missing or incomplete."""
    tensors = {}
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="pt")
            tensors |= dict.fromkeys(file.keys(), file)
        except (OSError, safetensors.SafetensorError) as e:
            raise UserError(f"{path}: not a complete safetensors file ({str(e).splitlines()[0][:80]})") from None
    return tensors


def check_memory(path: Path, n_parameters: int, copies: int) -> None:
    """UserError if so many float32 copies of the weights need more memory than there is. Only Linux can be asked."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return
    (kilobytes,) = re.findall(r"MemAvailable: +(\d+) kB", text)
    available, needed = 1024 * int(kilobytes), 4 * copies * n_parameters
    if needed > available:
        raise UserError(
            f"{path}: {n_parameters / 1e9:.1f} billion parameters need {needed / 1e9:.1f} GB of memory, "
            f"and {available / 1e9:.1f} GB are available"
        )
