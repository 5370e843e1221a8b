"""Matched targets: the same last tokens of each document at every length, so only the context changes.

The protocol of github.com/bojone/rerope.
"""

from torch import Tensor

from conf.errors import check
from measure.tasks import Losses, Task


class Matched(Task):
    label = "matched"

    def __init__(self, scored_tokens: int):
        check(scored_tokens >= 1, "task.scored_tokens", scored_tokens, "at least 1")
        self.scored_tokens = self.shortest = self.minimum = scored_tokens

    def score(self, losses: Losses, text: Tensor, n: int) -> Tensor:
        windows = text[:, -n - 1 :]  # [B, n + 1]
        return losses(windows[:, :-1], windows[:, -self.scored_tokens :])

    def describe(self, ctx: int) -> str:
        return f"the last {self.scored_tokens} tokens"


build = Matched
