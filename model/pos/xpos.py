"""xPos (Sun et al. 2022, arXiv 2212.10554): RoPE whose pair i also decays, as zeta_i^((m - n) / scale_base).

zeta_i = (2i/D + gamma) / (1 + gamma). Queries are multiplied by zeta^((m - c) / scale_base), keys by the inverse, with
one constant c for both, or the scores would depend on it.
"""

import torch
from torch import Tensor

from conf.errors import check
from model.pos import Shape, constant
from model.pos.rope import Rope, Tables


class XPos(Rope):
    """Knobs: base and interleaved as in Rope; gamma; scale_base, in tokens."""

    def __init__(self, shape: Shape, base: float, interleaved: bool, gamma: float, scale_base: float):
        super().__init__(shape, base, interleaved)
        for name, value in (("gamma", gamma), ("scale_base", scale_base)):
            check(value > 0, f"pos.{name}", value, "above 0")
        P = shape.head_dim // 2
        zeta = (torch.arange(P, dtype=torch.float64, device="cpu") / P + gamma) / (1 + gamma)
        self.log_zeta = (zeta.log() / scale_base).tolist()  # [P], per token; a list, because no cast can touch it

    def adjust(self, tables: Tables, positions: Tensor) -> Tables:
        """Those of q times the decay and those of k divided by it."""
        # With the middle position as c, contexts can be twice as long (70,000 tokens) before a power leaves float32.
        centred = positions.float() - (positions.amin() + positions.amax()).float() / 2
        log_zeta = constant(self.log_zeta, torch.float32, positions.device)
        decay = (centred.unsqueeze(-1) * log_zeta).exp()  # [T, P] or [B, T, P]
        return Tables(tables.q * decay, tables.k * (1 / decay))


build = XPos
