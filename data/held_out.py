"""Which held-out text is scored: windows for the in-window validation loss, long documents for the evaluation."""

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.corpus import Document, HeldOut


def validation_windows(corpus: HeldOut, ctx: int, windows: int) -> Tensor:
    """Windows of the held-out documents for the validation loss, int64 [at most `windows`, ctx + 1].

    Every document is cut into consecutive windows, and `windows` of them are taken at equal intervals. Short ends are
    left out. UserError if no document has more than ctx tokens.
    """
    cuts = [(d, i) for d in corpus.held_out for i in range(0, len(d.tokens) - ctx, ctx)]
    if not cuts:
        raise UserError(f"ctx={ctx}: the longest held-out document has {len(corpus.held_out[0].tokens)} tokens")
    picked = [cuts[i] for i in np.linspace(0, len(cuts) - 1, min(windows, len(cuts))).round().astype(int)]
    return torch.from_numpy(np.stack([d.tokens[i : i + ctx + 1] for d, i in picked]).astype(np.int64))


def long_documents(corpus: HeldOut, ctx: int, documents: int) -> list[Document]:
    """At most `documents` held-out documents with more than ctx tokens, the longest first. UserError if none is."""
    fit = [d for d in corpus.held_out if len(d.tokens) > ctx]
    if not fit:
        longest = max(len(d.tokens) for d in corpus.held_out)
        raise UserError(f"ctx={ctx}: the longest held-out document of this corpus allows {longest - 1}")
    return fit[:documents]
