"""Sliding windows of n tokens: each of the ctx tokens is scored one time (Press et al. 2021, arXiv 2108.12409)."""

from conf.errors import check
from data.corpus import HeldOut
from data.held_out import long_documents
from measure.tasks import Piece, Task, stacked


class Sliding(Task):
    def __init__(self, corpus: HeldOut, ctx: int, documents: int, stride: int):
        check(stride >= 1, "task.stride", stride, "at least 1")
        self.stride, self.label = stride, f"sliding stride={stride}"
        cuts = long_documents(corpus, ctx, documents)
        self.names = [f"{d.name}, its last {ctx} tokens" for d in cuts]
        self.text = stacked([d.tokens[-ctx - 1 :] for d in cuts])

    def pieces(self, n: int) -> list[Piece]:
        """The first window scores all of its tokens, each later one its last `stride` tokens: ctx targets together.

        A token of a later window has at least n - stride tokens of context. The last window ends with the text, so the
        first one may be shorter than n. A stride above n counts as n: the windows then do not overlap.
        """
        text, ctx, stride = self.text, self.text.shape[1] - 1, min(self.stride, n)
        ends = list(range(ctx, n, -stride))[::-1]  # of the windows after the first
        first = ends[0] - stride if ends else ctx
        pieces = [Piece(text[:, :first], text[:, 1 : first + 1])]
        for end in ends:
            pieces.append(Piece(text[:, max(0, end - n) : end], text[:, end - stride + 1 : end + 1]))
        return pieces

    def describe(self) -> str:
        ctx = self.text.shape[1] - 1
        return f"the last {ctx} tokens, by windows of n that move by {self.stride} (n at most),"


build = Sliding
