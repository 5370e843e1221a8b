"""Copying: random letters, a bar, the same letters again, a bar, then new ones.

The second copy is certain from its first letters on, the first is anyone's guess. Needs data.tokenizer=bytes.
"""

import random
import string
from collections.abc import Iterator

LETTERS = string.ascii_letters
CHANCE = 1 / len(LETTERS)
CUE, ANSWER = 8, 16  # tokens that say which place to go on from, and tokens that are scored


def fingerprint(documents: int, length: int) -> dict:
    sample = "".join(text for _, text in _texts(4, length))  # so that a change of the generator is another corpus
    return {"corpus": "copy", "documents": documents, "length": length, "sample": sample}


def _texts(count: int, length: int, kind: str = "") -> Iterator[tuple[str, str]]:
    for i in range(count):
        rng = random.Random(f"copy {kind}{i}")
        text = ""
        while len(text) < length:
            passage = "".join(rng.choices(LETTERS, k=rng.randint(CUE, 100)))
            text += f"{passage}|{passage}|"
        yield f"{i:06}", text[:length]


def documents(documents: int, length: int) -> Iterator[tuple[str, str]]:
    """length: bytes of each. Short ones, and many, or the model learns them by heart; and 96 of 16 KiB, a third of
    which will be held out, so that long contexts can be read."""
    yield from _texts(documents, length)
    yield from ((f"long-{name}", text) for name, text in _texts(96, 16384, "long "))


def probe(length: int, distance: int, seed: int) -> str:
    """A text of length + ANSWER bytes that ends with a passage of CUE + ANSWER letters that began `distance` bytes
    before its second beginning. The letters between are new. distance: more than CUE + ANSWER."""
    rng = random.Random(f"probe {seed}")
    passage = "".join(rng.choices(LETTERS, k=CUE + ANSWER))
    between = "|" + "".join(rng.choices(LETTERS, k=max(0, distance - CUE - ANSWER - 2))) + "|"
    before = "".join(rng.choices(LETTERS, k=length))
    return (before + passage + between + passage)[-length - ANSWER :]
