"""Multi-query associative recall: the values of several keys of a table.

data=mqar teaches it (data/corpora/mqar.py, which has the source).
"""

import random

from conf.errors import check
from data.corpora.mqar import TABLE, new_pairs, table
from data.corpus import HeldOut
from measure.tasks.placed import PlacedAnswer


class Mqar(PlacedAnswer):
    notes = TABLE

    def __init__(self, corpus: HeldOut, ctx: int, documents: int, pairs: int, queries: int, threshold: float):
        """pairs: of the table. queries: keys whose values are asked, in another order than in the table."""
        check(1 <= pairs <= 26, "task.pairs", pairs, "from 1 to 26")
        check(1 <= queries <= pairs, "task.queries", queries, f"from 1 to task.pairs={pairs}")
        self.pairs, self.queries = pairs, queries
        self.label = f"mqar pairs={pairs} queries={queries}"
        self.scored = ([False, True] * queries)[1:]  # the first value, then each key and its value
        self.given, self.asked = 2 + 2 * pairs, 1 + 2 * queries
        super().__init__(corpus, ctx, documents, threshold)
        self.check_letters(pairs)
        self.chance = 1 / pairs  # of a model that names any of the values of the table

    def example(self, n: int, distance: int, rng: random.Random) -> list[int]:
        """distance: from the start of the table to the start of the line of queries, tokens."""
        pairs = new_pairs(rng, self.pairs, self.capitals, self.letters)
        given = self.one_token_each(f"{table(pairs, list(pairs))}\n", self.given)
        asked = self.one_token_each(table(pairs, rng.sample(list(pairs), self.queries)), self.asked)
        filler = self.filler(rng)
        between = filler(distance - len(given))
        return [*filler(n), *given, *between, *asked][-n - 1 :]


build = Mqar
