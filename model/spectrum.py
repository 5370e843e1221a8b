"""The spectrum of RoPE: how often each pair rotates within a trained context.

A pair's wavelength is 2 pi / inv_freq tokens. A pair that does not complete a rotation within the trained context L
meets angles beyond L that it never saw in training.
"""

import math

import torch
from torch import Tensor

from model.scaling import TrainedContext


def frequencies(rotary_dim: int, base: float) -> Tensor:
    """RoPE's inv_freq, radians per token, float64 [rotary_dim / 2]."""
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def rotations(inv_freq: Tensor, ctx: int) -> Tensor:
    """How many full rotations each pair makes within ctx tokens, float64 [P]."""
    return ctx * inv_freq / (2 * math.pi)


def card(trained: TrainedContext) -> str:
    """One line about a run's spectrum, for the start of train.py and eval.py; empty without rotation."""
    if trained.frequencies is None:
        return ""
    r = rotations(trained.inv_freq, trained.train_ctx)
    return (
        f"spectrum: {len(r)} pairs rotate {r[0]:.3g} .. {r[-1]:.2g} times within {trained.train_ctx} tokens; "
        f"{int((r < 1).sum())} never complete a rotation"
    )
