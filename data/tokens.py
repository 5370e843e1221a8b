"""From a corpus to token files, training batches and evaluation targets.

A corpus is prepared once into memory-mapped files under .cache/, in a folder keyed by everything that shapes them.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

from conf.registry import call, load
from data import tokenizer

FORMAT = 1  # of the files; raise it when they change
AT_ONCE = 1024  # documents tokenised at a time: tokens in Python's lists take 10 times the room of those in the file
FILES = ("train.bin", "val.bin", "ranks.tiktoken", "pattern.txt")


@dataclass(frozen=True)
class Document:
    name: str
    tokens: np.ndarray


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus. train is one stream with END after every document; held-out documents stay apart."""

    key: str
    encoding: tiktoken.Encoding
    train: np.ndarray  # memory-mapped
    held_out: list[Document]  # longest first
    bytes_per_token: float  # of the held-out documents

    @property
    def vocab_size(self) -> int:
        """Padded to a multiple of 64, which matrix units like; the extra tokens never occur."""
        return -(-self.encoding.n_vocab // 64) * 64

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """The length in bytes of each token's text, int64 [V]; 0 for END."""
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, rank in self.encoding._mergeable_ranks.items():
            sizes[rank] = len(token)
        return sizes


def prepare(cfg: dict, cache: str) -> Corpus:
    """The corpus that cfg (a yaml of conf/data) names: from the cache if it is there and whole, else built now."""
    kind = cfg["kind"]
    fingerprint, documents = (load("data", kind, f) for f in ("fingerprint", "documents"))
    own = {k: v for k, v in cfg.items() if k not in ("tokenizer", "vocab_size", "holdout")}
    shaping = {
        "format": FORMAT,
        "corpus": call(fingerprint, own, "data"),
        "tokenizer": cfg["tokenizer"],
        "vocab_size": cfg["vocab_size"] if cfg["tokenizer"] == "bpe" else None,
        "holdout": cfg["holdout"],
    }
    key = hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(cache) / f"{kind}-{cfg['tokenizer']}-{key}"
    if folder.exists():
        try:
            return _open(folder, key, cfg["tokenizer"])
        except (OSError, ValueError, KeyError) as e:
            print(f"cache: {folder} is damaged ({e}): preparing it again", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
    # Built aside and renamed, so that a kill or a full disk leaves nothing that looks finished.
    aside = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        _build(aside, cfg, list(call(documents, own, "data")))
        aside.rename(folder)
    except OSError as e:
        if not folder.exists():  # else another process was first with the same files
            raise ValueError(f"cache={cache}: cannot write {folder}: {e.strerror or e}") from None
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
    return _open(folder, key, cfg["tokenizer"])


def split(documents: list[tuple[str, str]], holdout: int) -> tuple[list, list]:
    """(train, held out). Whole documents: every third one from the longest down is held out, `holdout` at most, so
    that the held-out ones have room for long contexts and the training ones are like them."""
    longest_first = sorted(documents, key=lambda d: (-len(d[1]), d[0]))
    held_out = longest_first[0::3][:holdout]
    names = {name for name, _ in held_out}
    return [d for d in documents if d[0] not in names], held_out


def held_out(cfg: dict) -> list[tuple[str, str]]:
    """(name, text) of the documents that the corpus of cfg holds out."""
    own = {k: v for k, v in cfg.items() if k not in ("tokenizer", "vocab_size", "holdout")}
    return split(list(call(load("data", cfg["kind"], "documents"), own, "data")), cfg["holdout"])[1]


def _build(folder: Path, cfg: dict, documents: list[tuple[str, str]]) -> None:
    train, held_out = split(documents, cfg["holdout"])
    if not train or not held_out:
        raise ValueError(
            f"data: {len(documents)} documents with text: at least 2 are needed, since whole ones are held out"
        )
    encoding = tokenizer.build(cfg["tokenizer"], cfg["vocab_size"], (text for _, text in train))
    dtype = np.uint16 if encoding.n_vocab <= 2**16 else np.uint32
    n_tokens, end = 0, np.array([encoding.eot_token], dtype=dtype)
    with (folder / "train.bin").open("wb") as f:
        for start in range(0, len(train), AT_ONCE):
            for tokens in encoding.encode_ordinary_batch([text for _, text in train[start : start + AT_ONCE]]):
                f.write(np.array(tokens, dtype=dtype).tobytes() + end.tobytes())
                n_tokens += len(tokens) + 1
    kept = [np.array(t, dtype=dtype) for t in encoding.encode_ordinary_batch([text for _, text in held_out])]
    np.concatenate(kept).tofile(folder / "val.bin")
    tokenizer.save(encoding, folder)
    meta = {
        "dtype": np.dtype(dtype).name,
        "held_out": [[name, len(tokens)] for (name, _), tokens in zip(held_out, kept, strict=True)],
        "held_out_bytes": sum(len(text.encode()) for _, text in held_out),
        "sha256": {name: _sha256(folder / name) for name in FILES},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    print(
        f"data: {len(train)} training documents ({n_tokens:,} tokens), "
        f"{len(held_out)} held out ({sum(map(len, kept)):,} tokens), vocabulary {encoding.n_vocab}",
        file=sys.stderr,
    )


def _open(folder: Path, key: str, kind: str) -> Corpus:
    meta = json.loads((folder / "meta.json").read_text())
    for name in FILES:
        if _sha256(folder / name) != meta["sha256"][name]:
            raise ValueError(f"{name} is not what was written")
    train, val = (np.memmap(folder / name, dtype=meta["dtype"], mode="r") for name in ("train.bin", "val.bin"))
    ends = np.cumsum([length for _, length in meta["held_out"]])[:-1]
    documents = [
        Document(name, tokens) for (name, _), tokens in zip(meta["held_out"], np.split(val, ends), strict=True)
    ]
    return Corpus(key, tokenizer.load(kind, folder), train, documents, meta["held_out_bytes"] / len(val))


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def batch(tokens: np.ndarray, step: int, *, seed: int, size: int, ctx: int) -> Tensor:
    """The training windows of one step, int64 [size, ctx + 1]: a pure function of (seed, step).

    Each epoch cuts the stream at a new offset and goes through all windows once, in a new order.
    """
    per_epoch = (len(tokens) - 1) // ctx - 1
    if per_epoch < 1:
        raise ValueError(f"ctx={ctx}: the training split has {len(tokens)} tokens and must have more than {2 * ctx}")
    rows = []
    for j in range(step * size, (step + 1) * size):
        offset, order = _epoch(seed, j // per_epoch, per_epoch, ctx)
        start = offset + int(order[j % per_epoch]) * ctx
        rows.append(tokens[start : start + ctx + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, ctx: int) -> tuple[int, Tensor]:
    g = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7]))
    return int(torch.randint(ctx, (), generator=g)), torch.randperm(windows, generator=g)


def validation(corpus: Corpus, ctx: int, windows: int) -> Tensor:
    """Windows of the held-out documents for the in-window loss, int64 [windows or fewer, ctx + 1], evenly spread."""
    cuts = [d.tokens[i : i + ctx + 1] for d in corpus.held_out for i in range(0, len(d.tokens) - ctx, ctx)]
    if not cuts:
        raise ValueError(f"ctx={ctx}: the longest held-out document has {len(corpus.held_out[0].tokens)} tokens")
    picked = np.linspace(0, len(cuts) - 1, min(windows, len(cuts))).round().astype(int)
    return torch.from_numpy(np.stack([cuts[i] for i in picked]).astype(np.int64))


def long_documents(corpus: Corpus, ctx: int, documents: int, start: bool = False) -> tuple[list[str], Tensor]:
    """(names, int64 [documents or fewer, ctx + 1]): the ends, or the starts, of the held-out documents that hold
    ctx + 1 tokens.

    Scoring the last k tokens of an end given its last n, for any n <= ctx, keeps the targets and changes the context
    alone.
    """
    fit = [d for d in corpus.held_out if len(d.tokens) > ctx]
    if not fit:
        longest = max(len(d.tokens) for d in corpus.held_out)
        raise ValueError(f"ctx={ctx}: the longest held-out document of this corpus allows {longest - 1}")
    fit = fit[:documents]
    cuts = [d.tokens[: ctx + 1] if start else d.tokens[-ctx - 1 :] for d in fit]
    return [d.name for d in fit], torch.from_numpy(np.stack(cuts).astype(np.int64))
