"""RoPE with a temperature: queries also grow with a logarithm of their position, in all layers (Ministral 3, 2025).

A query at position m is multiplied by 1 + amount * ln(1 + floor(m / every)), so that attention over many keys stays
concentrated, as in model/pos/none_tempered.py without rotation.
"""

import torch
from torch import Tensor

from conf.errors import check
from model.pos import Shape
from model.pos.rope import Rope, Tables


class TemperedRope(Rope):
    """Knobs: base, interleaved; amount, 0.1 in Ministral 3; every, tokens, 16384 in Ministral 3."""

    relative, tempers = False, True

    def __init__(self, shape: Shape, base: float, interleaved: bool, amount: float, every: int):
        super().__init__(shape, base, interleaved)
        check(amount >= 0, "pos.amount", amount, "at least 0")
        check(every >= 1, "pos.every", every, "at least 1")
        self.amount, self.every = amount, every

    def adjust(self, tables: Tables, positions: Tensor) -> Tables:
        factor = 1 + self.amount * torch.log1p((positions // self.every).clamp(min=0).float())[..., None]
        return Tables(tables.q * factor, tables.k)


build = TemperedRope
