"""The tokenizer of a foreign checkpoint (tokenizer.json), with the calls of tiktoken that a corpus uses.

A run that starts from such a checkpoint (init=hf:FOLDER) keeps its tokenizer.json in ckpt.pt.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from conf.errors import UserError

NAMES_OF_END = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class CheckpointTokenizer:
    """A tokenizer of n_vocab tokens: as many as the model has rows, of which some may never occur."""

    def __init__(self, content: str, n_vocab: int):
        """content: of tokenizer.json. Its settings for truncation, padding and special tokens have no effect."""
        self.content, self.n_vocab = content, n_vocab
        try:
            self.tokenizer = Tokenizer.from_str(content)
        except Exception as e:  # the tokenizers package raises Exception itself
            raise UserError(f"the checkpoint's tokenizer.json is not a tokenizer ({str(e)[:80]})") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True  # names of control tokens in a text are text
        ids = (self.tokenizer.token_to_id(name) for name in NAMES_OF_END)
        self.eot_token = next((i for i in ids if i is not None and i < n_vocab), -1)  # between documents; -1: none

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which need not be complete characters."""
        if token in (added := self.tokenizer.get_added_tokens_decoder()):
            return added[token].content.encode()
        text = self.tokenizer.id_to_token(token) or ""
        if self.is_byte_level():
            letters = {letter: byte for byte, letter in enumerate(byte_letters())}
            return bytes(letters[letter] for letter in text)
        if re.fullmatch(r"<0x[0-9A-F]{2}>", text):
            return bytes([int(text[1:-1], 16)])
        return text.replace("▁", " ").encode()

    def is_byte_level(self) -> bool:
        """Whether each character of a token stands for one byte, as in GPT-2's vocabulary."""
        return "ByteLevel" in json.dumps(json.loads(self.content)["decoder"])

    def check(self, name: str, text: str, ids: Sequence[int], sizes: np.ndarray) -> None:
        """UserError unless these tokens of a document are in the model's vocabulary and have the bytes of its text.

        sizes: of `token_bytes`. Tokenizers that put a space before the text are some bytes off; ones that normalise or
        drop characters are refused.
        """
        if len(ids) and max(ids) >= self.n_vocab:
            raise UserError(f"the tokenizer has token {max(ids)}, and the model's vocabulary has {self.n_vocab}")
        n = len(text.encode())
        if abs(int(sizes[np.asarray(ids, dtype=np.int64)].sum()) - n) > 1 + n // 1000:
            raise UserError(f"the tokens of {name} do not add up to the {n} bytes of the text")

    def token_bytes(self) -> np.ndarray:
        """The length in bytes of each token's text, int64 [n_vocab], for bits per byte.

        In byte-level vocabularies each character of a token stands for one byte. In SentencePiece's, ▁ stands for a
        space, and <0x41> for a single byte.
        """
        byte_level = self.is_byte_level()
        sizes = np.zeros(self.n_vocab, dtype=np.int64)
        for token, i in self.tokenizer.get_vocab().items():
            if i >= self.n_vocab:
                continue
            if byte_level:
                sizes[i] = len(token)
            elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                sizes[i] = 1
            else:
                sizes[i] = len(token.replace("▁", " ").encode())
        for i, token in self.tokenizer.get_added_tokens_decoder().items():
            if i < self.n_vocab:
                sizes[i] = len(token.content.encode())
        return sizes

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(self.content)
        (folder / "n_vocab.txt").write_text(str(self.n_vocab))


def load(folder: Path) -> CheckpointTokenizer:
    """The tokenizer that `save` wrote."""
    return CheckpointTokenizer((folder / "tokenizer.json").read_text(), int((folder / "n_vocab.txt").read_text()))


def byte_letters() -> list[str]:
    """The character for each byte 0 .. 255 in byte-level vocabularies, as in GPT-2.

    A printable byte is its Latin-1 character; the others are the characters from code point 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]
