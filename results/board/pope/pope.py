"""PoPE (Gopalakrishnan et al. 2025, arXiv 2509.10534): magnitudes from content, angles from positions alone.

The score of query m and key n is the sum over c = 0 .. D - 1 of softplus(q_c) softplus(k_c) cos((n - m) theta_c +
delta_c) / sqrt(D), theta_c = base^(-c/D). So this is RoPE of heads of width 2 D, whose pair c is (softplus(x_c), 0).
The bias delta_c is learned, for each head of each layer. Scores cost twice as much as RoPE's.

The authors clamp delta to -2 pi .. 0. Here it is free: as an angle it needs no limits, and at 0, where it starts, the
clamp would end the training of every delta whose first step is upward.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.angles import rotate
from model import attention
from model.attention import Heads, Where
from model.pos import Shape
from model.pos.rope import Rope


class AngleBias(nn.Module):
    """The delta of one layer. It starts at 0, as in x-transformers."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(shape.n_heads, shape.head_dim))

    def turned(self, q: Tensor) -> Tensor:
        """Rotated queries [B, H, S, 2 D] by -delta: the same as the keys by delta, but fewer keys may be shared."""
        return rotate(q, self.delta.cos(), -self.delta.sin()) * math.sqrt(2)  # attention divides by sqrt(2 D)

    def forward(self, x: Tensor, heads: Heads, where: Where) -> Tensor:
        D = heads.v.shape[-1]
        wide = replace(heads.map_queries(self.turned), v=F.pad(heads.v, (0, D)))  # fused kernels want one width for all
        return attention.attend(wide, where.encoding, where.positions, where.change)[..., :D]


class Pope(Rope):
    """Knob: base."""

    def __init__(self, shape: Shape, base: float):
        super().__init__(replace(shape, head_dim=2 * shape.head_dim), base, interleaved=False)

    def rotate(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        """[B, T, H or G, D] -> [B, T, H or G, 2 D]"""
        # Autocast computes softplus in float32 on a GPU
        q, k = (F.pad(F.softplus(x).to(x.dtype), (0, x.shape[-1])) for x in (q, k))
        return super().rotate(q, k, prepared)

    def layer_module(self, layer: int) -> nn.Module:
        return AngleBias(replace(self.shape, head_dim=self.shape.head_dim // 2))


build = Pope
