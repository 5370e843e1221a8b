"""Tokenizers of corpora: a byte-pair vocabulary that is trained here, bytes, GPT-2's, or a tokenizer.json.

The first three are used through tiktoken, and the last one has the calls of tiktoken that a corpus uses.
"""

import base64
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import rustbpe
import tiktoken
import tokenizers

from conf.errors import UserError, ensure

END = "<|endoftext|>"  # after every training document
NAMES_OF_END = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")  # in foreign checkpoints


def train(kind: str, vocab_size: int, texts: Iterable[str]) -> tiktoken.Encoding:
    """The tokenizer of this kind, with END as its last token.

    bpe: byte-pair encoding, trained on `texts` to vocab_size tokens, END included. bytes: one token for each byte, and
    END (257 tokens). gpt2: GPT-2's 50,257 tokens, which tiktoken downloads and caches; UserError without a network.
    """
    if kind == "bpe":
        trainer = rustbpe.Tokenizer()  # ty: ignore[missing-attribute] (rustbpe has no type stubs)
        trainer.train_from_iterator(iter(texts), vocab_size - 1)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        return _encoding(kind, ranks, trainer.get_pattern())
    if kind == "bytes":
        return _encoding(kind, {bytes([b]): b for b in range(256)}, r"[\s\S]")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # requests' errors, of many classes
        error = f"data.tokenizer=gpt2: its ranks could not be downloaded ({type(e).__name__})"
        raise UserError(f"{error}: go online one time (tiktoken caches them), or use data.tokenizer=bpe") from None


def _encoding(name: str, ranks: dict[bytes, int], pattern: str) -> tiktoken.Encoding:
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: len(ranks)})


class CheckpointTokenizer:
    """A tokenizer.json, of a foreign checkpoint or the user's own. A run that was trained with it has it in ckpt.pt.

    n_vocab: the number of rows of the model's embedding, of which some may never occur.
    """

    def __init__(self, content: str, n_vocab: int | None):
        """content: of tokenizer.json. Its settings for truncation, padding and special tokens have no effect.

        n_vocab: None of the user's own, which has the tokens of the file, and one more if none of them ends a document.
        """
        self.content = content
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as e:  # the tokenizers package raises Exception itself
            raise UserError(f"data.tokenizer: not a tokenizer.json ({str(e)[:80]})") from None
        ids = {name: i for name, i in self.tokenizer.get_vocab().items() if n_vocab is None or i < n_vocab}
        end, new = next((ids[name] for name in NAMES_OF_END if name in ids), -1), max(ids.values(), default=-1) + 1
        self.eot_token = new if end < 0 and n_vocab is None else end  # between documents; -1: none
        self.n_vocab = n_vocab or max(new, self.eot_token + 1)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # names of control tokens in a text are text

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which need not be complete characters."""
        return self._bytes_of_tokens.get(token, b"")

    @functools.cached_property
    def _bytes_of_tokens(self) -> dict[int, bytes]:
        """In byte-level vocabularies, as GPT-2's, each character of a token stands for one byte. In SentencePiece's, ▁
        stands for a space, and <0x41> for a single byte.
        """
        byte_level = "ByteLevel" in json.dumps(json.loads(self.content).get("decoder"))
        letters = {letter: byte for byte, letter in enumerate(byte_letters())}

        def spell(token: str) -> bytes:
            if byte_level:
                return bytes(letters.get(letter, ord("?")) for letter in token)
            single = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            return bytes.fromhex(single[1]) if single else token.replace("▁", " ").encode()

        added = {i: token.content.encode() for i, token in self.tokenizer.get_added_tokens_decoder().items()}
        return {i: spell(token) for token, i in self.tokenizer.get_vocab().items()} | added

    def check(self, name: str, text: str, ids: Sequence[int], sizes: np.ndarray) -> None:
        """UserError unless these tokens of a document are in the model's vocabulary and have the bytes of its text.

        sizes: of `token_bytes`. Tokenizers that put a space before the text are some bytes off; ones that normalise or
        drop characters are refused.
        """
        last = max(ids, default=0)
        ensure(last < self.n_vocab, f"the tokenizer has token {last}, and the model's vocabulary has {self.n_vocab}")
        n, counted = len(text.encode()), int(sizes[np.asarray(ids, dtype=np.int64)].sum())
        ensure(abs(counted - n) <= 1 + n // 1000, f"the tokens of {name} do not add up to the {n} bytes of the text")


def byte_letters() -> list[str]:
    """The character for each byte 0 .. 255 in byte-level vocabularies, as in GPT-2.

    A printable byte is its Latin-1 character; the others are the characters from code point 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


# ---- either kind ----

AnyTokenizer = tiktoken.Encoding | CheckpointTokenizer


def padded(n_vocab: int) -> int:
    """The model's vocabulary for so many tokens: a multiple of 64 suits matrix units; the extra ones never occur."""
    return -(-n_vocab // 64) * 64


def token_bytes(encoding: AnyTokenizer) -> np.ndarray:
    """The length in bytes of each token's text, int64 [vocabulary of the model]; 0 for an END of ours."""
    if isinstance(encoding, CheckpointTokenizer):
        return np.array([len(encoding.decode_single_token_bytes(i)) for i in range(encoding.n_vocab)], dtype=np.int64)
    sizes = np.zeros(padded(encoding.n_vocab), dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        sizes[rank] = len(token)
    return sizes


def save(encoding: tiktoken.Encoding, folder: Path) -> None:
    """Write ranks.tiktoken (tiktoken's format: base64 token and rank a line) and pattern.txt."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks)
    (folder / "ranks.tiktoken").write_bytes(b"".join(lines))
    (folder / "pattern.txt").write_text(encoding._pat_str, encoding="utf-8")


def load(kind: str, folder: Path) -> tiktoken.Encoding:
    """The tokenizer that `save` wrote to folder. kind: its name."""
    # Not tiktoken's load_tiktoken_bpe: that caches by path, and a rebuilt vocabulary has the same path.
    lines = (line.split() for line in (folder / "ranks.tiktoken").read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return _encoding(kind, ranks, (folder / "pattern.txt").read_text(encoding="utf-8"))
