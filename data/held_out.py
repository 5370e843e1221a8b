"""Held-out text: the windows of the validation loss, the long documents that are evaluated, and what they repeat.

Near-copies are tokens of the held-out documents that repeat training text, as generated or copied source files do.
Their loss tells how well the model remembers its training text, so evaluation scores other tokens of the document
(measure/tasks/matched.py).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from conf.errors import ensure
from data.tokenizer import AnyTokenizer

NGRAM = 8
CHUNK = 2**24  # tokens of the training stream that are compared at a time


@dataclass(frozen=True)
class Document:
    """A held-out document. tokens: an integer array [N], without the token that ends a document."""

    name: str
    tokens: np.ndarray
    copied: np.ndarray | None = None  # bool [N], of find_copies; None: the training text is not known


@dataclass(frozen=True)
class HeldOut:
    """The text that evaluation scores: complete documents that were not trained on, in tokens of the model."""

    key: str  # identifies the text and its tokens
    vocab_size: int
    held_out: list[Document]  # longest first
    token_bytes: np.ndarray  # int64 [V]: the length in bytes of each token's text
    encoding: AnyTokenizer


def validation_windows(corpus: HeldOut, ctx: int, windows: int) -> Tensor:
    """Windows of the held-out documents for the validation loss, int64 [at most `windows`, ctx + 1].

    Every document is cut into consecutive windows, and `windows` of them are taken at equal intervals. Short ends are
    left out. UserError if no document has more than ctx tokens.
    """
    cuts = [(d, i) for d in corpus.held_out for i in range(0, len(d.tokens) - ctx, ctx)]
    ensure(cuts, f"ctx={ctx}: the longest held-out document has {len(corpus.held_out[0].tokens)} tokens")
    picked = [cuts[i] for i in np.linspace(0, len(cuts) - 1, min(windows, len(cuts))).round().astype(int)]
    return torch.from_numpy(np.stack([d.tokens[i : i + ctx + 1] for d, i in picked]).astype(np.int64))


def long_documents(corpus: HeldOut, ctx: int, documents: int) -> list[Document]:
    """At most `documents` held-out documents with more than ctx tokens, the longest first. UserError if none is."""
    longest = max(len(d.tokens) for d in corpus.held_out)
    ensure(longest > ctx, f"ctx={ctx}: the longest held-out document of this corpus allows {longest - 1}")
    return [d for d in corpus.held_out if len(d.tokens) > ctx][:documents]


# ---- near-copies ----


def find_copies(train: np.ndarray, documents: list[np.ndarray]) -> list[np.ndarray]:
    """For each document bool [N]: whether the n-gram that ends here occurs in the training stream. Integer arrays [N].

    The first n - 1 tokens of a document complete no n-gram and count as not copied.
    """
    wanted = [ngram_hashes(tokens) for tokens in documents]
    known = np.unique(np.concatenate(wanted))
    found = np.zeros(len(known), dtype=bool)
    for start in range(0, len(train), CHUNK):
        found |= np.isin(known, ngram_hashes(train[start : start + CHUNK + NGRAM - 1]))
    pairs = zip(documents, wanted, strict=True)
    return [np.pad(found[np.searchsorted(known, h)], (len(tokens) - len(h), 0)) for tokens, h in pairs]


def ngram_hashes(tokens: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """uint64 [N - n + 1]: a polynomial modulo 2^64. Equal n-grams have equal hashes, others nearly always not."""
    count = max(0, len(tokens) - n + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for i in range(n):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + tokens[i : i + count].astype(np.uint64) + np.uint64(1)
    return hashes
