"""Multi-query associative recall in real text: the default corpus with tables of keys and values between its lines.

A table is a comment such as `# K a Q f B z`: each capital letter (the key) is followed by its value. Most tables repeat
some of the current pairs in another order, so a value can be predicted only by looking up its own key. The task is MQAR
(Arora et al. 2023, "Zoology", arXiv 2312.04927), between lines of code for the reason given in recall.py.
"""

import hashlib
import random
import re
import string
from collections.abc import Iterator

from conf.errors import check
from data.corpora import sympy

TABLE = re.compile(r"#( [A-Z] [a-z])+")


def table(pairs: dict[str, str], keys: list[str]) -> str:
    """The text of a table with the pairs of these keys: `# K a Q f`."""
    return " ".join(["#", *(f"{key} {pairs[key]}" for key in keys)])


def new_pairs(
    rng: random.Random, count: int, capitals: str = string.ascii_uppercase, letters: str = string.ascii_lowercase
) -> dict[str, str]:
    """`count` different keys, of capitals, with random values, of letters."""
    return {key: rng.choice(letters) for key in rng.sample(capitals, count)}


def annotate(lines: list[str], rng: random.Random, pairs: int) -> str:
    """The lines with tables between them; the pairs are replaced after about 16 lines, by at most `pairs` new ones."""
    text, current = "", new_pairs(rng, pairs)
    for line in lines:
        text += f"{line}\n"
        if rng.random() < 1 / 16:
            current = new_pairs(rng, rng.randint(1, pairs))
        if rng.random() < 1 / 3:
            text += table(current, rng.sample(sorted(current), rng.randint(1, len(current)))) + "\n"
    return text


def fingerprint(pairs: int) -> dict:
    """pairs: at most so many are current at a time."""
    check(1 <= pairs <= 26, "data.pairs", pairs, "from 1 to 26, as keys are capital letters")
    # A sample of tables, so that a change of the code above changes the fingerprint and the corpus is prepared again
    sample = annotate(["x"] * 256, random.Random("mqar"), pairs)
    return {"corpus": "mqar", "pairs": pairs, "of": sympy.SHA256, "sample": hashlib.sha256(sample.encode()).hexdigest()}


def documents(pairs: int) -> Iterator[tuple[str, str]]:
    """(name, text) of SymPy's files with tables, the same in every process."""
    for name, text in sympy.documents():
        yield name, annotate(text.splitlines(), random.Random(f"mqar {name}"), pairs)
