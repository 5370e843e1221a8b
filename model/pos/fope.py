"""FoPE (Hua et al. 2024, arXiv 2412.17739): RoPE whose pairs see sums of frequencies, and no untrained ones.

Pairs without a full rotation within L have frequency 0. The cosine of another pair i at position m is cos(m theta_i) +
sum_j a_ij cos(m theta_j), its sine the same with other coefficients: random and not trained. So scores also depend on
the absolute positions.

The authors' code differs in three details. There, each head of each layer has its own coefficients; here all heads
share them. There, a pair of frequency 0 has cos = sin = 1, which doubles its weight; here cos = 1 and sin = 0, so it
does not rotate. There, at most half of the pairs rotate; here all with a full rotation within L.
"""

import math

import torch
from torch import Tensor

from conf.errors import check
from model.pos import Shape
from model.pos.rope import Rope, Tables


class Fope(Rope):
    """Knobs: base; context, L in tokens; gain, 0.3 to 0.6 in the paper's models."""

    relative = False
    sums: Tensor  # [2, P, P]

    def __init__(self, shape: Shape, base: float, context: int, gain: float):
        super().__init__(shape, base, interleaved=False)
        check(context >= 7, "pos.context", context, "at least 7, or no pair rotates once within it")
        P = len(self.inv_freq)
        self.inv_freq = self.inv_freq[self.inv_freq >= 2 * math.pi / context]
        M = len(self.inv_freq)
        self.still = P - M
        sums = torch.eye(P).repeat(2, 1, 1)  # of cosines and of sines: [.., P] @ [P, P]
        std = gain * math.sqrt(2 / (M * (M + shape.n_heads)))  # theirs: Xavier's, of [n_heads, M, M]
        sums[:, :M, :M] += torch.randn(2, M, M) * std
        self.register_buffer("sums", sums)

    def adjust(self, tables: Tables, positions: Tensor) -> Tables:
        sums = self.sums.to(tables.q)
        with torch.autocast(positions.device.type, enabled=False):
            q, k = ((x.flatten(1, -2) @ sums).view_as(x) for x in (tables.q, tables.k))
        return Tables(q, k)


build = Fope
