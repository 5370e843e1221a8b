"""A prepared corpus: tokens of the training documents and of the held-out ones, with the tokenizer.

A corpus is prepared once, as files under .cache/ that are memory-mapped from then on. The name of their folder contains
a hash of everything that determines their content: the text, the tokenizer and the number of held-out documents.
data/preparation.py writes them.

    train.bin                       the training stream, uint16 or uint32, with END after every document
    val.bin                         the held-out documents one after another, the longest first
    ranks.tiktoken, pattern.txt     the tokenizer; tokenizer.json, n_vocab.txt if it is that of a foreign checkpoint
    meta.json                       dtype, names and lengths of the held-out documents, sha256 of the other files
    copied.bin                      for each token of val.bin, whether it repeats training text: data/near_copies.py
"""

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from conf.errors import file_errors
from conf.registry import build_from_knobs, load_kind
from data import tokenizer

FORMAT = 1  # version of the files; raise it when their format changes
DAMAGE = (ValueError, LookupError, TypeError, AttributeError)  # by files with other content than was written
TOKENIZER_SETTINGS = ("tokenizer", "vocab_size", "holdout")  # keys of every yaml of conf/data; the others are knobs


@dataclass(frozen=True)
class Document:
    """A held-out document. tokens: an integer array [N], without END."""

    name: str
    tokens: np.ndarray
    copied: np.ndarray | None = None  # bool [N], see data/near_copies.py; None: the training text is not known


@dataclass(frozen=True)
class HeldOut:
    """The text that evaluation scores: complete documents that were not trained on, in tokens of the model."""

    key: str  # identifies the text and its tokens
    vocab_size: int
    held_out: list[Document]  # longest first
    token_bytes: np.ndarray  # int64 [V]: the length in bytes of each token's text
    encode: Callable[[str], list[int]]  # text -> tokens, and back
    decode: Callable[[list[int]], str]


@dataclass(frozen=True)
class Corpus(HeldOut):
    """A prepared corpus: in addition to the held-out documents the tokenizer and the training stream.

    train: an integer array [N], all training documents one after another with END after each.
    """

    encoding: tiktoken.Encoding  # or a data.checkpoint_tokenizer.CheckpointTokenizer, which has the calls used here
    train: np.ndarray  # memory-mapped


def prepare(cfg: dict, cache: str, tokenizer_json: str | None = None) -> Corpus:
    """The corpus of these settings (a yaml of conf/data), from the folder `cache` or else built now and stored there.

    tokenizer_json: the content of that file, with data.tokenizer=checkpoint. The checksums of cached files are compared
    on every call, and a damaged folder is built again. Safe if several processes call it at the same time. UserError if
    the text cannot be read or the cache cannot be written.
    """
    shaping = {name: cfg[name] for name in TOKENIZER_SETTINGS}
    shaping |= {"format": FORMAT, "corpus": call_corpus(cfg, "fingerprint")}
    if cfg["tokenizer"] not in ("bpe", "checkpoint"):  # the other vocabularies have a fixed size
        shaping["vocab_size"] = None
    if tokenizer_json:
        shaping["tokenizer_json"] = hashlib.sha256(tokenizer_json.encode()).hexdigest()
    key = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / f"{cfg['kind']}-{cfg['tokenizer']}-{key}"
    with file_errors(f"cache={cache}: {folder.name}"), contextlib.suppress(FileNotFoundError, *DAMAGE):
        return open_prepared(folder, key, cfg["tokenizer"])
    from data import preparation

    preparation.build(folder, key, cfg, tokenizer_json)
    return open_prepared(folder, key, cfg["tokenizer"])


def call_corpus(cfg: dict, function: str) -> Any:
    """Call `fingerprint` or `documents` of the corpus that cfg names with its knobs; the documents as a list.

    An OSError while the files are read becomes a UserError that names the corpus.
    """
    knobs = {k: v for k, v in cfg.items() if k not in TOKENIZER_SETTINGS}
    with file_errors(f"data={cfg['kind']}"):
        result = build_from_knobs(load_kind("data.corpora", cfg["kind"], function, "data"), knobs, "data")
        return result if isinstance(result, dict) else list(result)  # reads the files


def open_prepared(folder: Path, key: str, kind: str) -> Corpus:
    """The corpus in a folder that data/preparation.py wrote. kind: of the tokenizer.

    An exception of DAMAGE if a file has changed since, FileNotFoundError if one is missing.
    """
    meta = json.loads((folder / "meta.json").read_text())
    for name, digest in meta["sha256"].items():
        if sha256(folder / name) != digest:
            raise ValueError(f"{name} differs from what was written")
    dtype = {"uint16": np.uint16, "uint32": np.uint32}[meta["dtype"]]
    train, val = (np.memmap(folder / name, dtype=dtype, mode="r") for name in ("train.bin", "val.bin"))
    ends = np.cumsum([length for _, length in meta["held_out"]])
    names, copied = [name for name, _ in meta["held_out"]], np.fromfile(folder / "copied.bin", dtype=bool)
    # An earlier version wrote no sum
    if meta.pop("sum", None) not in (None, checksum(meta)) or not ends[-1] == len(val) == len(copied):
        raise ValueError("meta.json differs from what was written")
    held_out = [Document(*x) for x in zip(names, np.split(val, ends[:-1]), np.split(copied, ends[:-1]), strict=True)]
    encoding = tokenizer.load(kind, folder)
    token_bytes = tokenizer.token_bytes(encoding)
    coders = encoding.encode_ordinary, encoding.decode
    return Corpus(key, len(token_bytes), held_out, token_bytes, *coders, encoding, train)


def checksum(meta: dict) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
