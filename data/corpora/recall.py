"""Recall in real text: the default corpus, with notes between its lines, most of which were said before.

A note is a comment, `# K a f z c`: capital letters, then small ones. The small letters are drawn when a note is first
said, so they can be known from its earlier saying and from nothing else. Notes alone are not learned by small models in
minutes (nothing but their recall is to be gained from looking back); among real code they are, since code teaches it.
After passkey retrieval (Mohtashami and Jaggi 2023, arXiv 2305.16300), with the notes in training as well.
"""

import hashlib
import random
import re
import string
from collections.abc import Callable, Iterator

from conf.errors import UserError
from data.corpora import sympy

CHANCE = 1 / 26
NOTE = re.compile(r"# ([A-Z] )+[a-z]( [a-z])*")


class Notes:
    """Notes that are alive: at most `size`, each said again with equal chance until it is replaced."""

    def __init__(self, rng: random.Random, size: int, key: int, answer: int, never: str = ""):
        self.rng, self.size, self.key, self.answer = rng, size, key, answer
        self.capitals = [c for c in string.ascii_uppercase if c != never]
        self.alive: dict[str, str] = {}

    def new(self, first: str | None = None) -> str:
        """A new note. first: its first capital; None draws it."""
        key = [first or self.rng.choice(self.capitals), *self.rng.choices(self.capitals, k=self.key - 1)]
        letters = self.rng.choices(string.ascii_lowercase, k=self.answer)
        return " ".join(["#", *key, *letters])

    def say(self) -> str:
        if len(self.alive) < self.size or self.rng.random() < 0.2:
            while len(self.alive) >= self.size:
                self.alive.pop(self.rng.choice(sorted(self.alive)))
            note = self.new()
            self.alive[note[2 : 2 + 2 * self.key]] = note
        return self.alive[self.rng.choice(sorted(self.alive))]


def interleave(lines: list[str], rng: random.Random, notes: Notes) -> str:
    """lines, about every second one followed by a note."""
    return "".join(f"{x}\n{notes.say()}\n" if rng.random() < 0.5 else f"{x}\n" for x in lines)


def annotate(lines: list[str], rng: random.Random, key: int, answer: int) -> str:
    """lines with notes between them; how many are alive changes every 64 lines."""
    notes = Notes(rng, 1, key, answer)
    text = ""
    for i in range(0, len(lines), 64):
        notes.size = rng.choice((1, 2, 4, 8, 16))
        text += interleave(lines[i : i + 64], rng, notes)
    return text


def fingerprint(key: int, answer: int) -> dict:
    """key, answer: letters of each note."""
    if not (1 <= key <= 16 and 1 <= answer <= 64):
        raise UserError(f"data.key={key}, data.answer={answer}: must be 1 to 16 and 1 to 64 letters")
    sample = annotate(["x"] * 256, random.Random("recall"), key, answer)  # another generator, another corpus
    return {"corpus": "recall", "of": sympy.SHA256, "sample": hashlib.sha256(sample.encode()).hexdigest()}


def documents(key: int, answer: int) -> Iterator[tuple[str, str]]:
    for name, text in sympy.documents():
        yield name, annotate(text.splitlines(), random.Random(f"recall {name}"), key, answer)


def probe(
    texts: list[str], encode: Callable[[str], list[int]], n: int, distance: int, seed: int, key: int, answer: int
) -> list[int]:
    """n + 1 tokens whose last `answer` are those of a note first said `distance` tokens before, and not in between.

    texts: documents to take lines from, their own notes left out; eight other notes are said between the lines.
    distance: more than a note's own length.
    """
    rng = random.Random(f"probe {seed}")
    first = rng.choice(string.ascii_uppercase)
    others = Notes(rng, 8, key, answer, never=first)
    lines = [x for x in rng.choice(texts).splitlines() if not NOTE.fullmatch(x)]
    at = rng.randrange(len(lines))

    def filler(count: int) -> list[int]:
        nonlocal at
        tokens: list[int] = []
        while len(tokens) < count:
            part = [*lines[at : at + 16], *lines[: max(0, at + 16 - len(lines))]]
            at = (at + 16) % len(lines)
            tokens += encode(interleave(part, rng, others))
        return tokens[len(tokens) - count :]

    note = others.new(first)
    said = encode(note + "\n")
    if len(said) != 2 + key + answer:
        raise UserError("data.tokenizer: must give one token to each letter of a note: bpe with a larger vocab_size")
    between = filler(distance - len(said))
    return [*filler(n), *said, *between, *said[:-1]][-n - 1 :]
