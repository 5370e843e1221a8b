"""Recall in real text: the default corpus with notes between its lines. Most notes repeat an earlier note.

A note is a comment such as `# K a f z c`: capital letters (the key), then small letters (the answer). The answer is
random when a note first occurs, so a model can predict it only from the earlier occurrence. Small models do not learn
this in minutes from texts of notes alone, where attention to earlier tokens lowers the loss for notes only. Between
lines of real code they do, because code rewards copying from the context, too (results/README.md). The idea is that of
passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300), but with notes in the training text as well.
"""

import hashlib
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field

from conf.errors import check
from data.corpora import sympy

NOTE = re.compile(r"# ([A-Z] )+[a-z]( [a-z])*")


@dataclass
class Notes:
    """The notes that can be repeated: at most `size` at a time. Each is equally likely to be written next."""

    rng: random.Random
    size: int
    key: int  # letters of each part
    answer: int
    capitals: str = string.ascii_uppercase  # those that random notes are made of
    letters: str = string.ascii_lowercase
    alive: dict[str, str] = field(default_factory=dict)  # key -> note

    def new(self, first: str | None = None) -> str:
        """The text of a new random note. first: its first capital letter; None draws it."""
        key = [first or self.rng.choice(self.capitals), *self.rng.choices(self.capitals, k=self.key - 1)]
        letters = self.rng.choices(self.letters, k=self.answer)
        return " ".join(["#", *key, *letters])

    def next_note(self) -> str:
        """The note to write next: with probability 0.2 (always while there are fewer than `size`) a new one is added,
        in place of a random one; then one of the current notes is drawn."""
        if len(self.alive) < self.size or self.rng.random() < 0.2:
            while len(self.alive) >= self.size:
                self.alive.pop(self.rng.choice(sorted(self.alive)))
            note = self.new()
            self.alive[note[2 : 2 + 2 * self.key]] = note
        return self.alive[self.rng.choice(sorted(self.alive))]


def interleave(lines: list[str], rng: random.Random, notes: Notes) -> str:
    """The lines as one text, in which a note follows each line with probability 1/2."""
    return "".join(f"{x}\n{notes.next_note()}\n" if rng.random() < 0.5 else f"{x}\n" for x in lines)


def annotate(lines: list[str], rng: random.Random, key: int, answer: int) -> str:
    """The lines with notes between them. The number of notes that can be repeated changes every 64 lines."""
    notes = Notes(rng, 1, key, answer)
    text = ""
    for i in range(0, len(lines), 64):
        notes.size = rng.choice((1, 2, 4, 8, 16))
        text += interleave(lines[i : i + 64], rng, notes)
    return text


def fingerprint(key: int, answer: int) -> dict:
    """key, answer: the number of capital and of small letters of a note."""
    check(1 <= key <= 16, "data.key", key, "from 1 to 16")
    check(1 <= answer <= 64, "data.answer", answer, "from 1 to 64")
    # A sample of notes, so that a change of the code above changes the fingerprint and the corpus is prepared again
    sample = annotate(["x"] * 256, random.Random("recall"), key, answer)
    return {"corpus": "recall", "of": sympy.SHA256, "sample": hashlib.sha256(sample.encode()).hexdigest()}


def documents(key: int, answer: int) -> Iterator[tuple[str, str]]:
    """(name, text) of SymPy's files with notes, the same in every process."""
    for name, text in sympy.documents():
        yield name, annotate(text.splitlines(), random.Random(f"recall {name}"), key, answer)
