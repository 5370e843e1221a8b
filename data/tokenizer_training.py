"""Build the tokenizer of a corpus while it is prepared: train a byte-pair vocabulary here, take GPT-2's, or bytes."""

import base64
from collections.abc import Iterable
from pathlib import Path

import rustbpe
import tiktoken

from conf.errors import UserError
from data.tokenizer import make_encoding


def build(kind: str, vocab_size: int, texts: Iterable[str]) -> tiktoken.Encoding:
    """The tokenizer of this kind, with END as its last token.

    bpe: byte-pair encoding, trained on `texts` to vocab_size tokens, END included. bytes: one token for each byte, and
    END (257 tokens). gpt2: GPT-2's 50,257 tokens, which tiktoken downloads and caches; UserError without a network.
    """
    if kind == "bpe":
        trainer = rustbpe.Tokenizer()  # ty: ignore[missing-attribute] (rustbpe has no type stubs)
        trainer.train_from_iterator(iter(texts), vocab_size - 1)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        return make_encoding(kind, ranks, trainer.get_pattern())
    if kind == "bytes":
        return make_encoding(kind, {bytes([b]): b for b in range(256)}, r"[\s\S]")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # requests' errors, of many classes
        raise UserError(
            f"data.tokenizer=gpt2: its ranks could not be downloaded ({type(e).__name__}): "
            "connect to the network one time (tiktoken caches them), or use data.tokenizer=bpe"
        ) from None


def save(encoding: tiktoken.Encoding, folder: Path) -> None:
    """Write ranks.tiktoken (tiktoken's format: base64 token and rank a line) and pattern.txt."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
    (folder / "ranks.tiktoken").write_bytes(b"".join(lines))
    (folder / "pattern.txt").write_text(encoding._pat_str)
