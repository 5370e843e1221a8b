"""What a model is read from, in the form of a Hugging Face checkpoint: settings, tensors and tokenizer.

Of a folder the weights are model.safetensors or else the files of model.safetensors.index.json; no other file is read,
and never a pickle. A GGUF file takes the same form in hf/gguf_file.py.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors
from tokenizers import Tokenizer
from torch import Tensor

from conf.cli import short
from conf.errors import UserError, file_errors
from hf.config import Config


@dataclass(frozen=True)
class Checkpoint:
    """Where a model comes from. Only the settings are read at once, so that a mistake in them is found first."""

    name: str  # of the run, such as hf-FOLDER
    path: Path  # for messages
    config: Config
    open_tensors: Callable[[], dict[str, Callable[[], Tensor]]]  # name -> what loads it
    tokenizer: Callable[[], Tokenizer]  # UserError if there is none, or a damaged one
    files: Callable[[], list[Path]]  # those that determine the model
    notes: tuple[str, ...] = ()  # what a reader of its curves should know
    rename: Callable[[str], str] = str  # a tensor's name in the family -> in these tensors
    tokens: int = 0  # of the pre-training; 0: unknown

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

    def tokenizer() -> Tokenizer:
        if not path.exists():
            raise UserError(f"{path}: not found: the text to score needs the checkpoint's tokenizer")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as e:  # the tokenizers package raises Exception itself
            raise UserError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None

    return Checkpoint(
        name=run_name("hf", folder),
        path=folder,
        config=config,
        open_tensors=lambda: open_tensors(weight_files(folder)),
        tokenizer=tokenizer,
        files=lambda: [config.path, *weight_files(folder)],
    )


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
    raise UserError(f"hf:{folder}: no {single.name} there, and no {index.name}; adapters and pickles are not read")


def open_tensors(paths: list[Path]) -> dict[str, Callable[[], Tensor]]:
    """The tensors of these safetensors files. UserError if a file is missing or incomplete."""
    tensors: dict[str, Callable[[], Tensor]] = {}
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="pt")
            tensors |= {name: functools.partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as e:
            raise UserError(f"{path}: not a complete safetensors file ({str(e).splitlines()[0][:80]})") from None
    return tensors
