"""Matched targets: the same tokens of each document at every length, so only the context changes.

The protocol of github.com/bojone/rerope, with several windows for each document. Windows are spread over the document,
because its end is not typical: there, few tokens repeat anything further back than a short context.
"""

import itertools

import numpy as np
import torch

from conf.errors import check
from data.corpus import Document, HeldOut
from data.held_out import long_documents
from measure.tasks import Piece, Task

NEAR = 2048  # tokens: up to this length all windows are scored, at longer ones `far_windows` of them
COPIED = 0.5  # a window is moved if a larger share of its targets ends an 8-gram of the training text


class Matched(Task):
    label = "matched"

    def __init__(
        self, corpus: HeldOut, ctx: int, documents: int, scored_tokens: int, windows: int, far_windows: int
    ):  # fmt: skip
        """scored_tokens: at the end of each window. windows, far_windows: the number of windows of a document."""
        for knob, value in (("scored_tokens", scored_tokens), ("windows", windows), ("far_windows", far_windows)):
            check(value >= 1, f"task.{knob}", value, "at least 1")
        self.ctx, self.scored_tokens, self.shortest, self.minimum = ctx, scored_tokens, scored_tokens, scored_tokens
        self.documents = long_documents(corpus, ctx, documents)
        self.names = [d.name for d in self.documents]
        self.ends = np.array(
            [self._ends(document, windows, ctx) for document in self.documents]
        )  # [documents, windows]
        near, far = (np.flatnonzero((self.ends > n).all(axis=0)) for n in (min(ctx, NEAR), ctx))
        middle = (np.arange(far_windows) + 0.5) / far_windows * len(far)  # of far_windows equal parts
        self.near, self.far = near.tolist(), sorted({int(far[int(i)]) for i in middle})

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

    def windows(self, n: int) -> list[int]:
        return self.near if n <= NEAR else self.far

    def pieces(self, n: int) -> list[Piece]:
        ends = self.ends[:, self.windows(n)]
        cuts = [d.tokens[e - n - 1 : e] for d, row in zip(self.documents, ends, strict=True) for e in row]
        text = torch.from_numpy(np.stack(cuts).astype(np.int64))  # [documents x windows, n + 1]
        return [Piece(text[:, :-1], text[:, -self.scored_tokens :])]

    def describe(self) -> str:
        far = f" ({len(self.far)} at n > {NEAR})" if self.ctx > NEAR else ""
        return f"the last {self.scored_tokens} tokens of {len(self.near)} windows{far}"


build = Matched
