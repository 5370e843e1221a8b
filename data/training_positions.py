"""positions=random and pose: training positions from a longer range than the training window.

The model then knows large positions from training when it is evaluated beyond its training context.

random: a sorted sample without repetition (Ruoss et al. 2023, arXiv 2305.16843). pose: the window is cut in two at a
random place, and the positions of the second part are increased by a random number (PoSE, Zhu et al. 2023, arXiv
2309.10400).
"""

import hashlib

import torch
from torch import Tensor


def sample(kind: str, step: int, *, seed: int, rows: int, ctx: int, longest: int) -> Tensor:
    """Training positions of one step, int64 [rows, ctx], each row increasing and within 0 .. longest - 1.

    kind: random or pose. A pure function of (seed, step), so a resumed run has the same positions.
    """
    key = hashlib.sha256(f"positions {seed} {step}".encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(key[:7]))
    if kind == "random":
        return torch.stack([torch.randperm(longest, generator=g)[:ctx].sort().values for _ in range(rows)])
    cut = torch.randint(1, max(ctx, 2), (rows, 1), generator=g)
    skip = torch.randint(longest - ctx + 1, (rows, 1), generator=g)
    place = torch.arange(ctx).expand(rows, ctx)
    return place + skip * (place >= cut)
