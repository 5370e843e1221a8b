"""Prefixes: all of the first n tokens of a document are scored, as in YaRN's tables and figures (its issue 13).

The mean contains the losses of early positions, which hide a failure at the end, and the targets differ between
lengths.
"""

from data.corpus import HeldOut
from data.held_out import long_documents
from measure.tasks import Piece, Task, stacked


class Prefix(Task):
    label = "prefix"

    def __init__(self, corpus: HeldOut, ctx: int, documents: int):
        cuts = long_documents(corpus, ctx, documents)
        self.names = [d.name for d in cuts]
        self.text = stacked([d.tokens[: ctx + 1] for d in cuts])

    def pieces(self, n: int) -> list[Piece]:
        return [Piece(self.text[:, :n], self.text[:, 1 : n + 1])]

    def describe(self) -> str:
        return "the first n tokens (other targets at every n)"


build = Prefix
