"""Training batches: which windows of the training stream one step sees, and at which positions.

Everything here is a pure function of (seed, step), so a resumed run sees what an uninterrupted one sees.
"""

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Generator, Tensor

from conf.errors import ensure


def batch(tokens: np.ndarray, step: int, *, seed: int, size: int, ctx: int) -> Tensor:
    """The training windows of one step, int64 [size, ctx + 1].

    tokens: the training stream, uint16 or uint32 [N]. Neighbouring windows share one token, which is the last target of
    one and the first input of the next. Each epoch cuts the stream into windows at a new random offset and visits each
    window once, in a new random order; a step can contain the end of one epoch and the start of the next. UserError if
    the stream is too short for one epoch.
    """
    per_epoch = (len(tokens) - 1) // ctx - 1  # one fewer, since the offset can take ctx - 1 tokens
    ensure(per_epoch >= 1, f"ctx={ctx}: the training split has {len(tokens)} tokens and must have more than {2 * ctx}")
    rows = []
    for window in range(step * size, (step + 1) * size):
        offset, order = _epoch(seed, window // per_epoch, per_epoch, ctx)
        start = offset + int(order[window % per_epoch]) * ctx
        rows.append(tokens[start : start + ctx + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, windows: int, ctx: int) -> tuple[int, Tensor]:
    """(offset of the first window, 0 .. ctx - 1; order of the windows, int64 [windows]) of one epoch."""
    g = _generator(f"{seed} {epoch}")
    return int(torch.randint(ctx, (), generator=g)), torch.randperm(windows, generator=g)


def _generator(name: str) -> Generator:
    return Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))


# ---- positions=: training positions from a longer range than the window, so that large ones are known ----

PARTS = 1024  # of a token: positions=random_float counts in them, because the angles of whole positions are exact


def training_positions(kind: str, step: int, *, seed: int, rows: int, ctx: int, longest: int) -> Tensor:
    """Training positions of one step, int64 [rows, ctx], each row sorted.

    kind: random, a sample of 0 .. longest - 1 without repetition (Ruoss et al. 2023, arXiv 2305.16843); or pose, the
    window is cut in two at a random place, and the positions of the second part are increased by a random number, to at
    most longest - 1 (PoSE, Zhu et al. 2023, arXiv 2309.10400); or random_float, real numbers from [0, longest),
    independent and uniform, which are counted in PARTS of a token and so can be equal (Shimizu et al. 2026, arXiv
    2602.14050).
    """
    g = _generator(f"positions {seed} {step}")
    if kind == "random_float":
        return torch.randint(longest * PARTS, (rows, ctx), generator=g).sort().values
    if kind == "random":
        return torch.stack([torch.randperm(longest, generator=g)[:ctx].sort().values for _ in range(rows)])
    cut = torch.randint(1, max(ctx, 2), (rows, 1), generator=g)
    skip = torch.randint(longest - ctx + 1, (rows, 1), generator=g)
    place = torch.arange(ctx).expand(rows, ctx)
    return place + skip * (place >= cut)
