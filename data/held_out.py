"""Which held-out text is scored: windows for the in-window validation loss, long documents for the evaluation."""

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from data.corpus import HeldOut


def validation_windows(corpus: HeldOut, ctx: int, windows: int) -> Tensor:
    """Windows of the held-out documents for the validation loss, int64 [at most `windows`, ctx + 1].

    Every document is cut into consecutive windows, and `windows` of them are taken at equal intervals. Short ends are
    left out. UserError if no document has more than ctx tokens.
    """
    cuts = [d.tokens[i : i + ctx + 1] for d in corpus.held_out for i in range(0, len(d.tokens) - ctx, ctx)]
    if not cuts:
        raise UserError(f"ctx={ctx}: the longest held-out document has {len(corpus.held_out[0].tokens)} tokens")
    picked = np.linspace(0, len(cuts) - 1, min(windows, len(cuts))).round().astype(int)
    return torch.from_numpy(np.stack([cuts[i] for i in picked]).astype(np.int64))


def long_documents(corpus: HeldOut, ctx: int, documents: int, start: bool = False) -> tuple[list[str], Tensor]:
    """(names, tokens int64 [at most `documents`, ctx + 1]) of held-out documents with more than ctx tokens.

    The tokens are the last ctx + 1 of each document, or with start=True the first ctx + 1. From the last ones, any
    context length n <= ctx can be evaluated on the same targets at the end. UserError if no document is long enough.
    """
    fit = [d for d in corpus.held_out if len(d.tokens) > ctx]
    if not fit:
        longest = max(len(d.tokens) for d in corpus.held_out)
        raise UserError(f"ctx={ctx}: the longest held-out document of this corpus allows {longest - 1}")
    fit = fit[:documents]
    cuts = [d.tokens[: ctx + 1] if start else d.tokens[-ctx - 1 :] for d in fit]
    return [d.name for d in fit], torch.from_numpy(np.stack(cuts).astype(np.int64))
