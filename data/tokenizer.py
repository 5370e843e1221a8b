"""Tokenizers of prepared corpora: byte-pair vocabularies, used through tiktoken, or that of a foreign checkpoint."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

END = "<|endoftext|>"


def make_encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: len(ranks)})


def load(kind: str, folder: Path) -> Any:
    """The tokenizer that `save` wrote to folder. kind: its name."""
    if kind == "checkpoint":
        from data import checkpoint_tokenizer

        return checkpoint_tokenizer.load(folder)
    # Not tiktoken's load_tiktoken_bpe: that caches by path, and a rebuilt vocabulary has the same path.
    lines = (line.split() for line in (folder / "ranks.tiktoken").read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return make_encoding(kind, ranks, (folder / "pattern.txt").read_text())


def token_bytes(encoding: Any) -> np.ndarray:
    """The length in bytes of each token's text, int64 [vocabulary of the model]; 0 for END."""
    if not isinstance(encoding, tiktoken.Encoding):
        return encoding.token_bytes()
    # A multiple of 64 tokens suits matrix units; the extra ones never occur
    sizes = np.zeros(-(-encoding.n_vocab // 64) * 64, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        sizes[rank] = len(token)
    return sizes
