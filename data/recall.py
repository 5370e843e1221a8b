"""Key-value recall: a task whose answer stands somewhere in the context and nowhere else.

A document draws some letters and a digit for each of them, then says letters, each followed by its digit:
`c4q0a7c4...`; in random order, or, every other document, round and round, which is easier and teaches to look back.
The digit after a letter that has been said before is certain; after a new one it is anyone's guess. (After the
associative recall of Arora et al. 2023, arXiv 2312.04927.) Needs data.tokenizer=bytes: one byte, one token.
"""

import random
import string
from collections.abc import Iterator

LETTERS, DIGITS = string.ascii_letters, string.digits
# Letters that a document uses. With 52 always, or in random order only, nano learned nothing in 3.8M tokens.
SIZES = (2, 4, 8, 16, 32, 52)
CHANCE = 1 / len(DIGITS)
ANSWER = 1  # tokens


def fingerprint(documents: int, length: int) -> dict:
    sample = "".join(text for _, text in _texts(4, length))  # so that a change of the generator is another corpus
    return {"corpus": "recall", "documents": documents, "length": length, "sample": sample}


def _texts(count: int, length: int, kind: str = "") -> Iterator[tuple[str, str]]:
    for i in range(count):
        rng = random.Random(f"recall {kind}{i}")
        letters = rng.sample(LETTERS, rng.choice(SIZES))
        digit = {letter: rng.choice(DIGITS) for letter in letters}
        said = rng.choices(letters, k=length // 2) if i % 2 else letters * (length // 2 // len(letters) + 1)
        yield f"{i:06}", "".join(x + digit[x] for x in said)[:length]


def documents(documents: int, length: int) -> Iterator[tuple[str, str]]:
    """length: bytes of each. Short ones, and many, or the model learns them by heart; and 96 of 16 KiB, a third of
    which will be held out, so that long contexts can be read."""
    yield from _texts(documents, length)
    yield from ((f"long-{name}", text) for name, text in _texts(96, 16384, "long "))


def probe(length: int, distance: int, seed: int) -> str:
    """A text of length + ANSWER bytes whose last byte is a digit that was said `distance` bytes before.

    Its letter does not occur elsewhere, so no other place gives it away. distance: even, less than length.
    """
    rng = random.Random(f"probe {seed}")
    key, *others = rng.sample(LETTERS, len(LETTERS))
    digit = {letter: rng.choice(DIGITS) for letter in LETTERS}
    said = rng.choices(others, k=(length + 1) // 2)
    said[-(distance // 2)] = key
    text = "".join(x + digit[x] for x in said) + key + digit[key]
    return text[-length - ANSWER :]
