"""Copying: the rest of a passage of real text that occurred once before, in the middle of another document.

Every run and every Hugging Face model can be measured, since the text itself carries the task. Some tokens can be
guessed without the earlier passage, so compare with the window control.
"""

import random

from conf.errors import UserError, check
from data.corpus import HeldOut
from measure.tasks.placed import PlacedAnswer


class Copying(PlacedAnswer):
    def __init__(
        self, corpus: HeldOut, ctx: int, documents: int, cue: int, answer: int, nearest: int, threshold: float
    ):
        """cue, answer: tokens of the passage; the first ones identify it, the others are scored.

        nearest: the shortest distance that is measured, tokens.
        """
        check(nearest >= 1, "task.nearest", nearest, "at least 1 token")
        check(1 <= cue <= 64, "task.cue", cue, "from 1 to 64 tokens")
        check(1 <= answer <= 64, "task.answer", answer, "from 1 to 64 tokens")
        size, self.label = cue + answer, f"copying cue={cue} answer={answer}"
        self.scored, self.given, self.asked = [True] * answer, size, size - 1
        self.nearest = nearest
        super().__init__(corpus, ctx, documents, threshold)
        self.long = [d.tokens for d in corpus.held_out if len(d.tokens) > ctx + size]
        if len(self.long) < 2:
            raise UserError(f"ctx={ctx}: task=copying needs two held-out documents of more than {ctx + size} tokens")

    def example(self, n: int, distance: int, rng: random.Random) -> list[int]:
        passages, document = rng.sample(self.long, 2)
        start, at = rng.randrange(len(passages) - self.given), rng.randrange(len(document) - n - self.given)
        passage = passages[start : start + self.given].tolist()
        text = document[at : at + n + self.given].tolist()
        cut = len(text) - (distance - self.given)
        before, between = text[:cut], text[cut:]
        return [*before, *passage, *between, *passage][-n - 1 :]


build = Copying
