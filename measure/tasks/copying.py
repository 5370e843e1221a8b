"""Copying: the rest of a passage of real text that occurred once before, in the middle of another document.

Every run and every Hugging Face model can be measured, since the text itself carries the task. Some tokens can be
guessed without the earlier passage, so compare with the window control.
"""

import random

from conf.errors import UserError, check
from data.corpus import HeldOut
from measure.placed_answers import PlacedAnswer


class Copying(PlacedAnswer):
    def __init__(self, corpus: HeldOut, ctx: int, documents: int, cue: int, answer: int, threshold: float):
        """cue, answer: tokens of the passage; the first ones identify it, the others are scored."""
        check(1 <= cue <= 64, "task.cue", cue, "from 1 to 64 tokens")
        check(1 <= answer <= 64, "task.answer", answer, "from 1 to 64 tokens")
        self.size, self.label = cue + answer, f"copying cue={cue} answer={answer}"
        self.scored = [True] * answer
        self.shortest = self.minimum = max(128, 4 * self.size)
        super().__init__(corpus, ctx, documents, threshold)
        self.long = [d.tokens for d in corpus.held_out if len(d.tokens) > ctx + self.size]
        if len(self.long) < 2:
            raise UserError(
                f"ctx={ctx}: task=copying needs two held-out documents of more than {ctx + self.size} tokens"
            )

    def distances(self, n: int) -> list[int]:
        return [d for d in super().distances(n) if self.size < d <= n + 1 - self.size]  # the first one is complete

    def example(self, n: int, distance: int, rng: random.Random) -> list[int]:
        passages, document = rng.sample(self.long, 2)
        start, at = rng.randrange(len(passages) - self.size), rng.randrange(len(document) - n - self.size)
        passage = passages[start : start + self.size].tolist()
        text = document[at : at + n + self.size].tolist()
        cut = len(text) - (distance - self.size)
        before, between = text[:cut], text[cut:]
        return [*before, *passage, *between, *passage][-n - 1 :]


build = Copying
