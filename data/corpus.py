"""A prepared corpus: tokens of the training documents and of the held-out ones, with the tokenizer.

A corpus is prepared once, as files under .cache/ that are memory-mapped from then on. The name of their folder contains
a hash of everything that determines their content: the text, the tokenizer and the number of held-out documents.

    train.bin                       the training stream, uint16 or uint32, with END after every document
    val.bin                         the held-out documents one after another, the longest first
    ranks.tiktoken, pattern.txt     the tokenizer
    meta.json                       dtype, names and lengths of the held-out documents, sha256 of the other files
    copied.bin                      written at the first evaluation, see data/near_copies.py
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from conf.errors import UserError, file_errors
from conf.registry import build_from_knobs, load_kind
from data import tokenizer

FORMAT = 1  # version of the files; raise it when their format changes
DOCUMENTS_AT_ONCE = 1024  # tokenised together: in Python's lists tokens take 10 times the memory of those in the file
FILES = ("train.bin", "val.bin", "ranks.tiktoken", "pattern.txt")
TOKENIZER_SETTINGS = ("tokenizer", "vocab_size", "holdout")  # keys of every yaml of conf/data; the others are knobs


@dataclass(frozen=True)
class Document:
    """A held-out document. tokens: an integer array [N], without END."""

    name: str
    tokens: np.ndarray


@dataclass(frozen=True)
class HeldOut:
    """The text that evaluation scores: complete documents that were not trained on, in tokens of the model."""

    key: str  # identifies the text and its tokens
    vocab_size: int
    held_out: list[Document]  # longest first
    token_bytes: np.ndarray  # int64 [V]: the length in bytes of each token's text; 0 for END
    encode: Callable[[str], list[int]]  # text -> tokens, and back
    decode: Callable[[list[int]], str]


@dataclass(frozen=True)
class Corpus(HeldOut):
    """A prepared corpus: in addition to the held-out documents the tokenizer and the training stream.

    train: an integer array [N], all training documents one after another with END after each.
    """

    encoding: tiktoken.Encoding
    train: np.ndarray  # memory-mapped
    folder: Path


def prepare(cfg: dict, cache: str) -> Corpus:
    """The corpus of these settings (a yaml of conf/data), from the folder `cache` or else built now and stored there.

    The checksums of cached files are compared on every call, and a damaged folder is built again. Safe if several
    processes call it at the same time. UserError if the text cannot be read or the cache cannot be written.
    """
    shaping = {name: cfg[name] for name in TOKENIZER_SETTINGS}
    shaping |= {"format": FORMAT, "corpus": _call_corpus(cfg, "fingerprint")}
    if cfg["tokenizer"] != "bpe":  # the other vocabularies have a fixed size
        shaping["vocab_size"] = None
    key = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / f"{cfg['kind']}-{cfg['tokenizer']}-{key}"
    if folder.exists():
        try:
            return _open(folder, key, cfg["tokenizer"])
        except (OSError, ValueError, KeyError) as e:
            print(f"cache: {folder} is damaged ({e}): preparing it again", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
    documents = _call_corpus(cfg, "documents")
    # Built in a temporary folder and renamed, so that a killed process or a full disk leaves no incomplete folder.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as temporary:
            _build(Path(temporary, "corpus"), cfg, documents)
            Path(temporary, "corpus").rename(folder)
    except OSError as e:
        if not folder.exists():  # else another process was first with the same files
            raise UserError(f"cache={cache}: cannot write {folder}: {e.strerror or e}") from None
    return _open(folder, key, cfg["tokenizer"])


def split(documents: list[tuple[str, str]], holdout: int) -> tuple[list, list]:
    """Split (name, text) pairs into (training documents, held-out documents); no document is cut.

    In the order of decreasing length, every third document is held out, until there are `holdout`. So many held-out
    documents are long enough for long contexts, and the training documents have similar lengths and content.
    """
    longest_first = sorted(documents, key=lambda d: (-len(d[1]), d[0]))
    held_out = longest_first[0::3][:holdout]
    names = {name for name, _ in held_out}
    return [d for d in documents if d[0] not in names], held_out


def held_out_texts(cfg: dict) -> list[tuple[str, str]]:
    """(name, text) of the documents that the corpus of cfg holds out."""
    return split(_call_corpus(cfg, "documents"), cfg["holdout"])[1]


def _call_corpus(cfg: dict, function: str) -> Any:
    """Call `fingerprint` or `documents` of the corpus that cfg names with its knobs; the documents as a list.

    An OSError while the files are read becomes a UserError that names the corpus.
    """
    knobs = {k: v for k, v in cfg.items() if k not in TOKENIZER_SETTINGS}
    with file_errors(f"data={cfg['kind']}"):
        result = build_from_knobs(load_kind("data.corpora", cfg["kind"], function, "data"), knobs, "data")
        return result if isinstance(result, dict) else list(result)  # reads the files


def _build(folder: Path, cfg: dict, documents: list[tuple[str, str]]) -> None:
    """Split and tokenise the documents and write the files of the corpus to a new folder."""
    train, held_out = split(documents, cfg["holdout"])
    if not train or not held_out:
        n = len(documents)
        raise UserError(f"data: {n} documents with text: at least 2 are needed, as whole ones are held out")
    encoding = tokenizer.build(cfg["tokenizer"], cfg["vocab_size"], (text for _, text in train))
    dtype = np.dtype(np.uint16 if encoding.n_vocab <= 2**16 else np.uint32)
    folder.mkdir()
    with (folder / "train.bin").open("wb") as f:
        for start in range(0, len(train), DOCUMENTS_AT_ONCE):
            texts = [text for _, text in train[start : start + DOCUMENTS_AT_ONCE]]
            for tokens in encoding.encode_ordinary_batch(texts):
                f.write(np.array([*tokens, encoding.eot_token], dtype=dtype).tobytes())
        n_tokens = f.tell() // dtype.itemsize
    held_out_tokens = [np.array(t, dtype=dtype) for t in encoding.encode_ordinary_batch([text for _, text in held_out])]
    np.concatenate(held_out_tokens).tofile(folder / "val.bin")
    tokenizer.save(encoding, folder)
    meta = {
        "dtype": dtype.name,
        "held_out": [[name, len(tokens)] for (name, _), tokens in zip(held_out, held_out_tokens, strict=True)],
        "sha256": {name: _sha256(folder / name) for name in FILES},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    print(
        f"data: {len(train)} training documents ({n_tokens:,} tokens), "
        f"{len(held_out)} held out ({sum(map(len, held_out_tokens)):,} tokens), vocabulary {encoding.n_vocab}",
        file=sys.stderr,
    )


def _open(folder: Path, key: str, kind: str) -> Corpus:
    """The corpus in a folder that `_build` wrote. kind: of the tokenizer. ValueError if a file has changed since."""
    meta = json.loads((folder / "meta.json").read_text())
    for name in FILES:
        if _sha256(folder / name) != meta["sha256"][name]:
            raise ValueError(f"{name} differs from what was written")
    train, val = (np.memmap(folder / name, dtype=meta["dtype"], mode="r") for name in ("train.bin", "val.bin"))
    ends = np.cumsum([length for _, length in meta["held_out"]])[:-1]
    held_out = [Document(name, tokens) for (name, _), tokens in zip(meta["held_out"], np.split(val, ends), strict=True)]
    encoding = tokenizer.load(kind, folder)
    vocab_size = -(-encoding.n_vocab // 64) * 64  # a multiple of 64 suits matrix units; the extra tokens never occur
    token_bytes = np.zeros(vocab_size, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        token_bytes[rank] = len(token)
    coders = encoding.encode_ordinary, encoding.decode
    return Corpus(key, vocab_size, held_out, token_bytes, *coders, encoding, train, folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
