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
from hf.config import Config


@dataclass(frozen=True)
class Checkpoint:
    """Where a model comes from. Tensors and tokenizer are loaded when they are called for."""

    name: str  # of the run, such as hf-FOLDER
    path: Path  # for messages
    config: Config
    tensors: dict[str, Callable[[], Tensor]]  # by their names in a Hugging Face checkpoint
    tokenizer: Callable[[], Tokenizer]  # UserError if there is none, or a damaged one
    files: list[Path]  # those that determine the model
    n_parameters: int
    notes: tuple[str, ...] = ()  # what a reader of its curves should know

    def digest(self, pretrained: dict) -> str:
        """The sha256 of the files, and of the trained context (TrainConfig.pretrained), which train_ctx= can set."""
        result = hashlib.sha256(str(pretrained).encode())
        for path in self.files:
            with file_errors(path), path.open("rb") as f:
                result.update(hashlib.file_digest(f, "sha256").digest())
        return result.hexdigest()


def run_name(prefix: str, path: Path) -> str:
    """A folder's name for the curves of a model: letters, digits, . _ and - only."""
    return f"{prefix}-" + re.sub(r"[^A-Za-z0-9._-]+", "_", path.resolve().name)


def open_folder(folder: Path) -> Checkpoint:
    """The Hugging Face checkpoint in a local folder. UserError for anything in it that is missing or damaged."""
    if not folder.is_dir():
        raise UserError(f"run=hf:{folder}: no such folder; it must be a local Hugging Face checkpoint")
    config, files = Config.of_folder(folder), weight_files(folder)
    opened = open_tensors(files)
    tensors: dict[str, Callable[[], Tensor]] = {
        name: functools.partial(file.get_tensor, name) for name, file in opened.items()
    }
    n_parameters = sum(math.prod(file.get_slice(name).get_shape()) for name, file in opened.items())
    path = folder / "tokenizer.json"

    def tokenizer() -> Tokenizer:
        if not path.exists():
            raise UserError(f"{path}: not found: the text to score needs the checkpoint's tokenizer")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:  # the tokenizers package raises Exception itself
            raise UserError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None

    name, read_files = run_name("hf", folder), [config.path, *files]
    return Checkpoint(name, folder, config, tensors, tokenizer, read_files, n_parameters)


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
    raise UserError(f"run=hf:{folder}: no model.safetensors there, and no {index.name}{hint}")


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
