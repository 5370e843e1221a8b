"""xPos (Sun et al. 2022, arXiv 2212.10554): RoPE whose pair i also decays, as zeta_i^((m - n) / scale_base).

zeta_i = (2i/D + gamma) / (1 + gamma). Queries are multiplied by zeta^((m - c) / scale_base), keys by the inverse, with
one constant c for both, or the scores would depend on it.
"""

import torch
from torch import Tensor

from conf.errors import check
from model.pos import Shape, constant
from model.pos.rope import Rope, Table, Tables
from model.scaling import ContextChange


class XPos(Rope):
    """Knobs: base and interleaved as in Rope; gamma; scale_base, in tokens."""

    def __init__(self, shape: Shape, base: float, interleaved: bool, gamma: float, scale_base: float):
        super().__init__(shape, base, interleaved)
        for name, value in (("gamma", gamma), ("scale_base", scale_base)):
            check(value > 0, f"pos.{name}", value, "above 0")
        P = shape.head_dim // 2
        zeta = (torch.arange(P, dtype=torch.float64, device="cpu") / P + gamma) / (1 + gamma)
        self.log_zeta = (zeta.log() / scale_base).tolist()  # [P], per token; a list, because no cast can touch it

    def prepare(self, positions: Tensor, change: ContextChange) -> Tables:
        """Rope's tables, those of q times the decay and those of k divided by it."""
        tables = super().prepare(positions, change)
        assert isinstance(tables, Tables)  # the kernel does not run for a subclass that overrides prepare
        # With the middle position as c, contexts can be twice as long (70,000 tokens) before a power leaves float32.
        centred = positions.float() - (positions.amin() + positions.amax()).float() / 2
        log_zeta = constant(self.log_zeta, torch.float32, positions.device)
        decay = (centred.unsqueeze(-1) * log_zeta).exp()  # [T, P] or [B, T, P]

        def times(table: Table, factor: Tensor) -> Table:
            return table[0] * factor, table[1] * factor

        def decayed(tables: Tables) -> Tables:
            return Tables(times(tables.q, decay), times(tables.k, 1 / decay))

        result = decayed(tables)
        result.far = [decayed(far) for far in tables.far]
        return result


build = XPos
