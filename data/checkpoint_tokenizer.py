"""The tokenizer of a foreign checkpoint (tokenizer.json), with the calls of tiktoken that a corpus uses.

A run that starts from such a checkpoint (init=hf:FOLDER) keeps its tokenizer.json in ckpt.pt.
"""

import json
import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

NAMES_OF_END = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class CheckpointTokenizer:
    """A tokenizer of n_vocab tokens: as many as the model has rows, of which some may never occur."""

    def __init__(self, content: str, n_vocab: int):
        """content: of tokenizer.json. Its settings for truncation, padding and special tokens have no effect."""
        self.content, self.n_vocab = content, n_vocab
        self.tokenizer = Tokenizer.from_str(content)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = (self.tokenizer.token_to_id(name) for name in NAMES_OF_END)
        self.eot_token = next((i for i in ids if i is not None), 0)  # between documents

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """The length in bytes of each token's text, int64 [n_vocab], for bits per byte.

        In byte-level vocabularies each character of a token stands for one byte. In SentencePiece's, ▁ stands for a
        space, and <0x41> for a single byte.
        """
        byte_level = "ByteLevel" in json.dumps(json.loads(self.tokenizer.to_str())["decoder"])
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
