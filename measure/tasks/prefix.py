"""Prefixes: all of the first n tokens of a document are scored, as in YaRN's tables and figures (its issue 13).

The mean contains the losses of early positions, which hide a failure at the end, and the targets differ between
lengths.
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
