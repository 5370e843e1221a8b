"""Recall: the letters of a note that occurred once before. data=recall teaches it (data/corpora/recall.py).

A note is a comment such as `# K a f z c`. The idea is that of passkey retrieval (Mohtashami and Jaggi 2023, arXiv
2305.16300) and of the needles of RULER (Hsieh et al. 2024, arXiv 2404.06654), with distractors: other notes that are
repeated between the lines.
"""

import itertools
import random

from conf.errors import check
from data.corpora.recall import NOTE, Notes, interleave
from data.corpus import HeldOut
from measure.tasks.placed import PlacedAnswer


class Recall(PlacedAnswer):
    notes = NOTE

    def __init__(
        self,
        corpus: HeldOut,
        ctx: int,
        documents: int,
        key: int,
        answer: int,
        queries: int,
        distractors: int,
        threshold: float,
    ):
        """key, answer: letters of a note. queries: notes to recall. distractors: other notes that can be repeated."""
        check(1 <= key <= 16, "task.key", key, "from 1 to 16 letters")
        check(1 <= answer <= 64, "task.answer", answer, "from 1 to 64 letters")
        check(1 <= queries <= 8, "task.queries", queries, "from 1 to 8")
        check(0 <= distractors <= 64, "task.distractors", distractors, "from 0 to 64")
        self.key, self.answer, self.queries, self.distractors = key, answer, queries, distractors
        self.label = f"recall key={key} answer={answer} queries={queries} distractors={distractors}"
        note = [False] * (1 + key) + [True] * answer + [False]  # the sign, the key, the answer, the end of the line
        self.scored = (note * queries)[1 + key : -1]
        self.given, self.asked = queries * len(note), queries * len(note) - 2
        super().__init__(corpus, ctx, documents, threshold)
        self.check_letters(queries + 2)
        self.chance = 1 / len(self.letters)

    def example(self, n: int, distance: int, rng: random.Random) -> list[int]:
        """The notes to recall follow one another, and are asked in another order `distance` tokens later."""
        firsts = rng.sample(self.capitals, self.queries)  # the other notes do not contain these letters
        capitals = "".join(c for c in self.capitals if c not in firsts)
        others = Notes(rng, self.distractors, self.key, self.answer, capitals, self.letters)
        size = self.given // self.queries
        notes = [self.one_token_each(f"{others.new(first)}\n", size) for first in firsts]
        before, after = (list(itertools.chain(*order)) for order in (notes, rng.sample(notes, len(notes))))
        filler = self.filler(rng, (lambda lines: interleave(lines, rng, others)) if self.distractors else None)
        between = filler(distance - len(before))
        return [*filler(n), *before, *between, *after[:-1]][-n - 1 :]


build = Recall
