"""Rotary position embedding in plain torch, with exact integer phases.

A frequency is kept as turns per position in 64-bit fixed point: position * phase then wraps modulo 2^64, and that
wrap *is* the exact reduction modulo 2 pi. The angle's error is about 2e-7 at every position up to 2^30, where a
float32 table of angles is already off by 3e-2 at position one million.
"""

import math

import torch
from torch import Tensor


def phase(inv_freq: Tensor) -> Tensor:
    """Frequencies in radians per position, float64 [P] -> turns per position times 2^64, int64 [P]."""
    if inv_freq.dtype != torch.float64:
        raise ValueError(f"inv_freq has dtype {inv_freq.dtype}: must be float64, or the phase is not exact")
    turns = inv_freq / (2 * math.pi)
    turns = turns - turns.round()  # [-1/2, 1/2]: whole turns do nothing
    # In two halves, since a float64 cannot hold 2^63 - 1: the cast of exactly +1/2 turn would overflow.
    high = (turns * 2**32).floor()
    low = ((turns * 2**32 - high) * 2**32).round()
    return (high.to(torch.int64) << 32) + low.to(torch.int64)


def cos_sin(phase: Tensor, positions: Tensor, start: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, float32 [..., T, P], from phase int64 [P] and integer positions [..., T].

    start: a phase, int64 [P], that is added at every position.
    """
    if positions.is_floating_point():
        raise ValueError(
            f"positions have dtype {positions.dtype}: must be int32 or int64 (bfloat16 skips integers past 256)"
        )
    turns = (positions.to(torch.int64).unsqueeze(-1) * phase + start) >> 32  # in units of 2^-32 turn, within an int32
    angle = turns.to(torch.float32) * (2 * math.pi / 2**32)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first 2 P dimensions of x [B, T, H, D] by cos, sin [T, P] or [B, T, P]; the rest passes through.

    interleaved pairs (x_2i, x_2i+1) as RoFormer, GPT-J and Meta's Llama do; otherwise split pairs (x_i, x_i+P) as
    GPT-NeoX and Hugging Face's Llama do. Computed in float32 and rounded once to x's dtype.
    """
    P = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one angle for all heads
    rotary, rest = x[..., : 2 * P], x[..., 2 * P :]
    if interleaved:
        x1, x2 = rotary.unflatten(-1, (P, 2)).unbind(-1)
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    else:
        x1, x2 = rotary.split(P, dim=-1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rope(
    q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float,
    norm_eps: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """kernels.rope in plain torch: what runs without the kernel, and the oracle that it is tested against."""
    if positions is None:
        positions = torch.arange(q.shape[1], device=q.device)
    cos, sin = cos_sin(phase, positions.to(torch.int64) + offset)
    cos, sin = cos * scale, sin * scale
    return tuple(rotate(normed(x, norm_eps), cos, sin, interleaved).to(x.dtype) for x in (q, k))


def normed(x: Tensor, eps: float | None) -> Tensor:
    """x over the root mean square of its last dimension, in at least float32; None: x itself."""
    if eps is None:
        return x
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
