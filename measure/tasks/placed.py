"""What the tasks with an answer share: texts of n tokens that end in an answer, which occurred before at a distance.

The texts are made of the lines of held-out documents, so that a run of any corpus can be measured. It does well if its
training text taught the task, or if it has learned in general to use what occurred before.
"""

import functools
import itertools
import random
import re
import string
from collections.abc import Callable

import torch

from conf.errors import UserError, check
from data.corpus import HeldOut
from data.held_out import long_documents
from measure.tasks import Piece, Task

NOTHING = re.compile("(?!)")  # matches no line


class PlacedAnswer(Task):
    """A task whose texts are built by the method `example` of a subclass."""

    accuracy = True
    notes = NOTHING  # lines of the held-out documents that the texts leave out: notes like those of the task
    scored: list[bool]  # which of the last len(scored) tokens of a text are the answer
    given: int  # tokens of what occurs before, from which the distance is counted
    nearest = 64  # the shortest distance that is measured, tokens
    asked = 0  # tokens of the question and its answer that have to lie after it

    def __init__(self, corpus: HeldOut, ctx: int, documents: int, threshold: float):
        """documents: the number of texts for each distance. threshold: the accuracy that counts as solved."""
        check(0 < threshold <= 1, "task.threshold", threshold, "above 0 and at most 1")
        self.corpus, self.encode, self.threshold = corpus, corpus.encoding.encode_ordinary, threshold
        self.shortest = self.minimum = max(128, 4 * self.given, 2 * self.nearest)
        self.names = [f"example {i}" for i in range(documents)]
        self.documents = long_documents(corpus, ctx, len(corpus.held_out))  # shorter ones would have to be repeated
        texts = [corpus.encoding.decode(d.tokens.tolist()) for d in self.documents]
        self.lines = [[x for x in text.splitlines() if not self.notes.fullmatch(x)] for text in texts]
        # Letters that are one token after a space: of a corpus that teaches the task all, of others some
        one = [c for c in string.ascii_letters if len(self.encode(f"# {c}")) == len(self.encode("#")) + 1]
        self.capitals, self.letters = "".join(filter(str.isupper, one)), "".join(filter(str.islower, one))
        self.pieces = functools.cache(self.pieces)  # they are made only once

    def identity(self) -> str:
        return f"{super().identity()} {self.nearest} {self.corpus.key} {[d.name for d in self.documents]}"

    def example(self, n: int, distance: int, rng: random.Random) -> list[int]:
        """n + 1 tokens that end in the answer, which occurs `distance` tokens before."""
        raise NotImplementedError

    def distances(self, n: int) -> list[int]:
        """The distances that are measured at length n: of nearest, twice it, ... n / 2, and 7 / 8 n, those that fit."""
        doubled = (self.nearest * 2**k for k in range(n.bit_length()))
        planned = [*(d for d in doubled if d <= n // 2), n * 7 // 8]
        return [d for d in planned if self.given < d <= n - self.asked]

    def pieces(self, n: int) -> list[Piece]:
        scored, pieces = torch.tensor(self.scored), []
        for distance in self.distances(n):
            seeds = range(len(self.names))  # the same text whatever the number of examples
            texts = [self.example(n, distance, random.Random(f"{self.label} {n} {distance} {i}")) for i in seeds]
            tokens = torch.tensor(texts)
            pieces.append(Piece(tokens[:, :-1], tokens[:, -len(scored) :], scored, distance))
        return pieces

    def describe(self) -> str:
        return f"the answer at the end of {len(self.names)} texts for each distance"

    # ---- for the subclasses ----

    def filler(self, rng: random.Random, add: Callable[[list[str]], str] | None = None) -> Callable[[int], list[int]]:
        """A function that returns the next tokens of a held-out document, as many as asked for.

        add: makes the text of a group of lines with other lines between them; None: only the lines.
        """
        lines = rng.choice(self.lines)
        following = itertools.islice(itertools.cycle(lines), rng.randrange(len(lines)), None)

        def next_tokens(count: int) -> list[int]:
            tokens: list[int] = []
            while len(tokens) < count:
                group = list(itertools.islice(following, 16))
                tokens += self.encode(add(group) if add else "".join(f"{line}\n" for line in group))
            return tokens[len(tokens) - count :]

        return next_tokens

    def check_letters(self, capitals: int) -> None:
        """UserError if fewer capital letters, or fewer than two small ones, are one token each of the tokenizer."""
        if len(self.capitals) < capitals or len(self.letters) < 2:
            few = f"fewer than {capitals} capital and 2 small letters that are one token each"
            raise UserError(f"task={self.label}: this tokenizer has {few}: use data.tokenizer=bpe in training")

    def one_token_each(self, line: str, symbols: int) -> list[int]:
        """The tokens of a line of `symbols` parts, each of which must be one token. UserError if it is not."""
        tokens = self.encode(line)
        if len(tokens) != symbols:
            raise UserError(f"task={self.label}: the tokenizer of this run does not give {symbols} tokens to {line!r}")
        return tokens
