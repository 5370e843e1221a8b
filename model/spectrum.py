"""The spectrum of RoPE: how often each pair rotates within a context.

A pair's wavelength is 2 pi / inv_freq tokens. A pair that does not complete a rotation within the trained context L
meets angles beyond L that it never saw in training.
"""

import math

import torch
from torch import Tensor

from model.scaling import TrainedContext

# A method's threshold, in rotations within L -> pairs above its default in Llama 2 (L 4096, base 10000) or Llama 3
# (L 8192, base 500000)
PUBLISHED = {"beta_fast": ("Llama 2", 21), "beta": ("Llama 2", 21), "high_freq_factor": ("Llama 3", 29)}


def frequencies(rotary_dim: int, base: float) -> Tensor:
    """RoPE's inv_freq, radians per token, float64 [rotary_dim / 2]."""
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim)


def rotations(inv_freq: Tensor, ctx: int) -> Tensor:
    """How many full rotations each pair makes within ctx tokens, float64 [P]."""
    return ctx * inv_freq / (2 * math.pi)


def warning(knobs: dict, trained: TrainedContext) -> str:
    """One line if a scaling method's threshold has fewer than 1/10 or more than 9/10 of the pairs above it; else empty.

    Comparable is the threshold with the share of pairs above it that it has in the published model.
    """
    if trained.frequencies is None:
        return ""
    r = rotations(trained.inv_freq, trained.train_ctx)
    for key, (model, count) in PUBLISHED.items():
        if key in knobs and not len(r) <= 10 * int((r > knobs[key]).sum()) <= 9 * len(r):
            like = f"like {model}'s would be {r.quantile(1 - count / 64):.2g}"
            return f"warning: scaling.{key}={knobs[key]:g} is extreme here; {like}"
    return ""
