"""Matched targets: the same tokens of each document at every length, so only the context changes.

The protocol of github.com/bojone/rerope, with several windows for each document. Windows are spread over the document,
because its end is not typical: there, few tokens repeat anything further back than a short context.
"""

import itertools

import numpy as np

from conf.errors import check
from data.corpus import Document, HeldOut
from data.held_out import long_documents
from measure.tasks import Piece, Task, stacked

NEAR = 2048  # tokens: up to this length all windows are scored, at longer ones `far_windows` of them
COPIED = 0.5  # a window is moved if a larger share of its targets ends an 8-gram of the training text


class Matched(Task):
    label = "matched"

    def __init__(self, corpus: HeldOut, ctx: int, documents: int, scored_tokens: int, windows: int, far_windows: int):
        """scored_tokens: at the end of each window. windows, far_windows: the number of windows of a document."""
        for knob, value in (("scored_tokens", scored_tokens), ("windows", windows), ("far_windows", far_windows)):
            check(value >= 1, f"task.{knob}", value, "at least 1")
        self.ctx, self.scored_tokens, self.far_windows = ctx, scored_tokens, far_windows
        self.shortest = self.minimum = scored_tokens
        self.documents = long_documents(corpus, ctx, documents)
        self.names = [d.name for d in self.documents]
        shortest = min(len(d.tokens) for d in self.documents)
        # So many that windows do not overlap in the shortest document
        self.planned = max(1, min(windows, (shortest - min(NEAR, shortest // 2)) // scored_tokens))
        self.ends = np.array([self._ends(d, self.planned, ctx) for d in self.documents])  # [documents, windows]
        self.near = self._fitting(min(ctx, NEAR))

    def _ends(self, document: Document, windows: int, ctx: int) -> list[int]:
        """The end of each window in a document, evenly spread, without near-copies of training text."""
        N, s, copied = len(document.tokens), self.scored_tokens, document.copied
        planned = np.linspace(min(NEAR, N // 2), N, windows + 1).round().astype(int)
        ends = []
        for previous, planned_end in itertools.pairwise(planned):
            end = int(planned_end)
            # So that no target is scored twice, and a long document stays long enough
            lowest = max(previous + s, ctx + 1 if end > ctx else 0) + s
            while copied is not None and end >= lowest and copied[end - s : end].mean() > COPIED:
                end -= s
            ends.append(end)
        return ends

    def identity(self) -> str:
        return f"{super().identity()} {self.scored_tokens} {self.ends.tolist()}"

    def _fitting(self, n: int) -> list[int]:
        """The windows that have n tokens before their end in every document."""
        return np.flatnonzero((self.ends > n).all(axis=0)).tolist()

    def windows(self, n: int) -> list[int]:
        if n <= NEAR:
            return self.near
        # In an order that does not depend on n, so that lengths share windows: first those that fit at all lengths, and
        # of these every other one from the last but one, because the end of a document is not typical
        order = [*range(self.planned - 2, -1, -2), *range(self.planned - 1, -1, -2)]
        order.sort(key=lambda i: i not in self._fitting(self.ctx))
        return sorted([i for i in order if i in self._fitting(n)][: self.far_windows])

    def pieces(self, n: int) -> list[Piece]:
        ends = self.ends[:, self.windows(n)]
        cuts = [d.tokens[e - n - 1 : e] for d, row in zip(self.documents, ends, strict=True) for e in row]
        text = stacked(cuts)  # [documents x windows, n + 1]
        return [Piece(text[:, :-1], text[:, -self.scored_tokens :])]

    def describe(self) -> str:
        far = f" ({len(self.windows(self.ctx))} at n={self.ctx})" if self.ctx > NEAR else ""
        planned = f" of {self.planned} planned" if len(self.near) < self.planned else ""
        return f"the last {self.scored_tokens} tokens of {len(self.near)}{planned} windows{far}"


build = Matched
