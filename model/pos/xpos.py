"""xPos (Sun et al. 2022, arXiv 2212.10554): RoPE whose pair i also decays, as zeta_i^((m - n) / scale_base).

zeta_i = (2i/D + gamma) / (1 + gamma). Queries are multiplied by zeta^((m - c) / scale_base), keys by the inverse, with
one constant c for both, or the scores would depend on it.
"""

import torch
from torch import Tensor

from model.pos import Shape
from model.pos.rope import Rope, Table, Tables
from model.scaling import Scaled


class XPos(Rope):
    by_kernel = False  # its tables decay

    def __init__(self, shape: Shape, base: float, interleaved: bool, gamma: float, scale_base: float):
        super().__init__(shape, base, interleaved)
        for name, value in (("gamma", gamma), ("scale_base", scale_base)):
            if value <= 0:
                raise ValueError(f"pos.{name}={value}: must be above 0")
        P = len(self.inv_freq)
        zeta = (torch.arange(P, dtype=torch.float64, device="cpu") / P + gamma) / (1 + gamma)
        self.log_zeta = (zeta.log() / scale_base).tolist()  # for each token; a list, which no cast can touch

    def prepare(self, positions: Tensor, scaled: Scaled) -> Tables:
        tables = super().prepare(positions, scaled)
        # The middle as c: the powers then reach twice as far before they leave float32's range (70,000 tokens).
        centred = positions.float() - (positions.amin() + positions.amax()).float() / 2
        log_zeta = torch.tensor(self.log_zeta, dtype=torch.float32, device=positions.device)
        decay = (centred.unsqueeze(-1) * log_zeta).exp()

        def times(table: Table, by: Tensor) -> Table:
            return table[0] * by, table[1] * by

        far = tables.far and Tables(times(tables.far.q, decay), times(tables.far.k, 1 / decay))
        return Tables(times(tables.q, decay), times(tables.k, 1 / decay), far)


build = XPos
