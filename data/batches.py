"""Training batches: which windows of the training stream one step sees. A pure function of (seed, step)."""

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError


def batch(tokens: np.ndarray, step: int, *, seed: int, size: int, ctx: int) -> Tensor:
    """The training windows of one step, int64 [size, ctx + 1]: a pure function of (seed, step).

    tokens: the training stream, uint16 or uint32 [N]. Neighbouring windows share one token, which is the last target of
    one and the first input of the next. Each epoch cuts the stream into windows at a new random offset and visits each
    window once, in a new random order; a step can contain the end of one epoch and the start of the next. UserError if
    the stream is too short for one epoch.
    """
    per_epoch = (len(tokens) - 1) // ctx - 1
    if per_epoch < 1:
        raise UserError(f"ctx={ctx}: the training split has {len(tokens)} tokens and must have more than {2 * ctx}")
    rows = []
    for j in range(step * size, (step + 1) * size):
        offset, order = _epoch(seed, j // per_epoch, per_epoch, ctx)
        start = offset + int(order[j % per_epoch]) * ctx
        rows.append(tokens[start : start + ctx + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, ctx: int) -> tuple[int, Tensor]:
    """(offset of the first window, 0 .. ctx - 1; order of the windows, int64 [windows]) of one epoch."""
    g = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:7]))
    return int(torch.randint(ctx, (), generator=g)), torch.randperm(windows, generator=g)
