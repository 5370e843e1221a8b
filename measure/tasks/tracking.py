"""Variable tracking: the value of a variable through a chain of assignments.

data=tracking teaches it (data/corpora/tracking.py, which describes the notes and has the source).
"""

import itertools
import random

from conf.errors import check
from data.corpora.tracking import ASSIGNMENT
from data.corpus import HeldOut
from measure.tasks.placed import PlacedAnswer

LINE = 5  # tokens of `# K = a` and the end of the line


class Tracking(PlacedAnswer):
    notes = ASSIGNMENT

    def __init__(self, corpus: HeldOut, ctx: int, documents: int, hops: int, chains: int, threshold: float):
        """hops: assignments from variable to variable. chains: other chains of the same length, as distractors."""
        check(0 <= hops <= 8, "task.hops", hops, "from 0 to 8")
        check(chains >= 0 and (1 + chains) * (1 + hops) <= 26, "task.chains", chains, "few enough for 26 variables")
        self.hops, self.chains, self.label = hops, chains, f"tracking hops={hops} chains={chains}"
        self.scored, self.given = [True], LINE * (1 + hops) * (1 + chains)
        super().__init__(corpus, ctx, documents, threshold)
        self.check_letters((1 + hops) * (1 + chains), 1 + chains)
        self.chance = 1 / (1 + chains)  # of a model that names any of the values in the text

    def example(self, n: int, distance: int, rng: random.Random) -> list[int]:
        """distance: from the assignment of the value to the question, tokens. The other hops are spread between."""
        chains, length = 1 + self.chains, 1 + self.hops
        names = rng.sample(self.capitals, chains * length)
        values = rng.sample(self.letters, chains)
        variables = [names[i * length : (i + 1) * length] for i in range(chains)]  # of each chain; the first is asked
        filler, body = self.filler(rng), []
        gap, rest = divmod(distance - self.given, length)
        for hop in range(length):
            sources = [chain[hop - 1] for chain in variables] if hop else values
            pairs = zip(variables, sources, strict=True)
            lines = [self.one_token_each(f"# {chain[hop]} = {source}\n", LINE) for chain, source in pairs]
            if hop:  # the asked chain comes first at the start, so that its distance is exact
                rng.shuffle(lines)
            body += [*itertools.chain(*lines), *filler(gap + (0 if hop else rest))]
        question = self.one_token_each(f"# {variables[0][-1]} : {values[0]}", LINE - 1)
        return [*filler(n), *body, *question][-n - 1 :]


build = Tracking
