"""Exact angles from integer phases, and the rotation by them, in plain torch.

A frequency is stored as rotations per position in 64-bit fixed point. The integer product position * phase overflows
modulo 2^64, which is one rotation, so the overflow is the exact reduction modulo 2 pi. The error of an angle is about
2e-7 at every position up to 2^30. A float32 table of angles has an error of 3e-2 at position one million.

Letters: B batch, T time, H heads of q, G heads of k, D head width, P rotary pairs.
"""

import math

import torch
from torch import Tensor


def phase(inv_freq: Tensor) -> Tensor:
    """Frequencies in radians per position, float64 [P] -> rotations per position times 2^64, int64 [P].

    ValueError: inv_freq is not float64, whose 53 bits the phase needs.
    """
    if inv_freq.dtype != torch.float64:
        raise ValueError(f"inv_freq has dtype {inv_freq.dtype}: must be float64, or the phase is not exact")
    rotations = inv_freq / (2 * math.pi)
    rotations = rotations - rotations.round()  # in [-1/2, 1/2]: a full rotation changes nothing
    # Converted in two halves of 32 bits: a float64 cannot represent 2^63 - 1, so the cast of +1/2 would overflow.
    high = (rotations * 2**32).floor()
    low = ((rotations * 2**32 - high) * 2**32).round()
    return (high.to(torch.int64) << 32) + low.to(torch.int64)


def cos_sin(phase: Tensor, positions: Tensor, start: Tensor | int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, float32 [..., T, P], from phase int64 [P] and integer positions [..., T].

    start: a phase, int64 [P], that is added at every position. ValueError: positions are not integers.
    """
    if positions.is_floating_point():
        raise ValueError(f"positions have dtype {positions.dtype}: must be int32 or int64 (others skip integers)")
    # The product overflows modulo 2^64, that is modulo full rotations. Shifted by 32 bits it counts 2^-32 rotations.
    rotations = (positions.to(torch.int64).unsqueeze(-1) * phase + start) >> 32
    angle = rotations.to(torch.float32) * (2 * math.pi / 2**32)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first 2 P dimensions of x [B, T, H, D] by cos, sin [T, P] or [B, T, P]; the rest passes through.

    interleaved pairs (x_2i, x_2i+1) as RoFormer, GPT-J and Meta's Llama do; otherwise split pairs (x_i, x_i+P) as
    GPT-NeoX and Hugging Face's Llama do. Computed in float32 and rounded once to x's dtype. Returns a new tensor.
    """
    P = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # [..., T, 1, P]: one angle for all heads
    rotary, rest = x[..., : 2 * P], x[..., 2 * P :]
    if interleaved:
        x1, x2 = rotary.unflatten(-1, (P, 2)).unbind(-1)
        rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    else:
        x1, x2 = rotary.split(P, dim=-1)
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated
