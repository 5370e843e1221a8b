"""Key-value recall: a task whose answer stands somewhere in the context and nowhere else.

A document draws a four-digit number for each of some letters, then says letters in random order, each followed by its
number: `c4093q0071c4093...`. The number after a letter that has been said before is certain; after a new one it is
anyone's guess. (After the associative recall of Arora et al. 2023, arXiv 2312.04927, whose values are single tokens: of
those our small models learned nothing in 5M tokens.) Needs data.tokenizer=bytes: one byte, one token.
"""

import random
import string
from collections.abc import Iterator

LETTERS, DIGITS = string.ascii_letters, string.digits
SIZES = (2, 4, 8, 16, 32, 52)  # letters that a document uses
CHANCE = 1 / len(DIGITS)
ANSWER = 4  # tokens of a number


def numbers(rng: random.Random, letters: str | list[str]) -> dict[str, str]:
    return {letter: "".join(rng.choices(DIGITS, k=ANSWER)) for letter in letters}


def fingerprint(documents: int, length: int) -> dict:
    sample = "".join(text for _, text in _texts(4, length))  # so that a change of the generator is another corpus
    return {"corpus": "recall", "documents": documents, "length": length, "sample": sample}


def _texts(count: int, length: int, kind: str = "") -> Iterator[tuple[str, str]]:
    for i in range(count):
        rng = random.Random(f"recall {kind}{i}")
        letters = rng.sample(LETTERS, rng.choice(SIZES))
        number = numbers(rng, letters)
        yield f"{i:06}", "".join(x + number[x] for x in rng.choices(letters, k=length // 5 + 1))[:length]


def documents(documents: int, length: int) -> Iterator[tuple[str, str]]:
    """length: bytes of each. Short ones, and many, or the model learns them by heart; and 96 of 16 KiB, a third of
    which will be held out, so that long contexts can be read."""
    yield from _texts(documents, length)
    yield from ((f"long-{name}", text) for name, text in _texts(96, 16384, "long "))


def probe(length: int, distance: int, seed: int) -> str:
    """A text of length + ANSWER bytes whose last four are a number that was said about `distance` bytes before (its
    letter stands distance rounded down to a multiple of 5 before the last one).

    Its letter does not occur elsewhere, so no other place gives it away. distance: at least 5, at most length - 5.
    """
    rng = random.Random(f"probe {seed}")
    key, *others = rng.sample(LETTERS, len(LETTERS))
    number = numbers(rng, LETTERS)
    said = rng.choices(others, k=length // 5 + 1)
    said[-(distance // 5)] = key
    return ("".join(x + number[x] for x in said) + key + number[key])[-length - ANSWER :]
