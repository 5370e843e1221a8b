"""The spectrum of RoPE: how often each pair rotates within a trained context, and two published rules for the base.

A pair's wavelength is 2 pi / inv_freq tokens. A pair that does not complete a rotation within the trained context L
meets angles beyond L that it never saw in training.
"""

import math

import torch
from torch import Tensor

from model.scaling import TrainedContext

LLAMA2_SLOWEST = 0.075  # rotations of Llama 2's slowest pair within its 4096 tokens (head_dim 128, base 10000)


def frequencies(rotary_dim: int, base: float) -> Tensor:
    """RoPE's inv_freq, radians per token, float64 [rotary_dim / 2]."""
    return base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def rotations(inv_freq: Tensor, ctx: int) -> Tensor:
    """How many full rotations each pair makes within ctx tokens, float64 [P]."""
    return ctx * inv_freq / (2 * math.pi)


def base_bound(rotary_dim: int, ctx: int) -> float:
    """The smallest base at which B(m) = sum_i cos(m theta_i) >= 0 for all m < ctx (Men et al. 2024, arXiv 2405.14591).

    With a smaller base, two similar tokens at a large distance can have a lower expected score than two random tokens.
    Accurate to 0.1 %; inf if it is above 1e9. Near the bound the condition can hold for one base and fail for a larger
    one, so bases are tried in order on a fine grid from 1 up, instead of by bisection.
    """
    exponents = -torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    grid = torch.exp(torch.arange(0, math.log(1e9), 0.001, dtype=torch.float64))
    for bases in grid.split(512):
        for m in torch.arange(ctx, dtype=torch.float64).split(64):  # most bases fail early
            angle = m[:, None] * (bases[:, None] ** exponents)[:, None, :]
            bases = bases[(angle.cos().sum(-1) >= 0).all(-1)]
        if len(bases):
            return bases[0].item()
    return math.inf


def scale_matched_base(rotary_dim: int, ctx: int) -> float:
    """The base at which the slowest pair rotates as often within ctx as Llama 2's does within 4096 tokens."""
    if rotary_dim < 4:
        return math.nan
    return (ctx / (2 * math.pi * LLAMA2_SLOWEST)) ** (rotary_dim / (rotary_dim - 2))


def card(trained: TrainedContext) -> str:
    """Three lines about a run's spectrum, for the start of train.py and eval.py; empty without rotation."""
    if trained.frequencies is None:
        return ""
    r, L, D = rotations(trained.inv_freq, trained.train_ctx), trained.train_ctx, trained.rotary_dim
    bound = f"{base_bound(D, L):,.0f}" if L <= 2048 else "takes a while: python -m studies.spectrum"
    return (
        f"spectrum: {len(r)} pairs rotate {r[0]:.3g} .. {r[-1]:.2g} times within {L} tokens; "
        f"{int((r < 1).sum())} never complete a rotation\n"
        f"  smallest base that keeps B(m) >= 0 up to {L} (arXiv 2405.14591): {bound}\n"
        f"  base whose slowest pair rotates as in Llama 2: {scale_matched_base(D, L):,.0f}"
    )


def warning(knobs: dict, trained: TrainedContext) -> str:
    """One line if a method's threshold, in rotations within L, is more than any pair makes; else empty."""
    if trained.frequencies is None:
        return ""
    most = rotations(trained.inv_freq, trained.train_ctx).max().item()
    for key in ("beta_fast", "beta", "high_freq_factor"):
        if key in knobs and knobs[key] > most:
            return (
                f"warning: scaling.{key}={knobs[key]:g} rotations is more than any pair makes in {trained.train_ctx} "
                f"tokens ({most:.3g} at most), so no pair counts as fast: try scaling.{key}=4"
            )
    return ""
