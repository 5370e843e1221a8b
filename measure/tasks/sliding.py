"""Sliding windows of n tokens: each of the ctx tokens is scored one time (Press et al. 2021, arXiv 2108.12409)."""

import torch
from torch import Tensor

from conf.errors import check
from measure.tasks import Losses, Task


class Sliding(Task):
    def __init__(self, stride: int):
        check(stride >= 1, "task.stride", stride, "at least 1")
        self.stride, self.label = stride, f"sliding stride={stride}"

    def score(self, losses: Losses, text: Tensor, n: int) -> Tensor:
        """The first window scores all of its tokens, each later one its last `stride` tokens -> nats [B, ctx].

        A token of a later window has at least n - stride tokens of context. The last window ends with the text, so the
        first one may be shorter than n. A stride above n counts as n: the windows then do not overlap.
        """
        ctx, stride = text.shape[1] - 1, min(self.stride, n)
        ends = list(range(ctx, n, -stride))[::-1]  # of the windows after the first
        first = ends[0] - stride if ends else ctx
        pieces = [losses(text[:, :first], text[:, 1 : first + 1])]
        for end in ends:
            start = max(0, end - n)
            pieces.append(losses(text[:, start:end], text[:, end - stride + 1 : end + 1]))
        return torch.cat(pieces, dim=1)

    def describe(self, ctx: int) -> str:
        return f"the last {ctx} tokens, by windows of n that move by {self.stride} (n at most),"


build = Sliding
