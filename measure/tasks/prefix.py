"""Prefixes: the document cut after n tokens, all of it scored, as YaRN's tables and figures do (its issue 13).

The mean contains the easy and the hard early positions, so a collapse at the end is diluted, and every n has different
targets.
"""

from torch import Tensor

from measure.tasks import Losses, Task


class Prefix(Task):
    label = "prefix"
    from_start = True
    same_targets = False

    def score(self, losses: Losses, text: Tensor, n: int) -> Tensor:
        return losses(text[:, :n], text[:, 1 : n + 1])

    def describe(self, ctx: int) -> str:
        return "the first n tokens (other targets at every n)"


build = Prefix
