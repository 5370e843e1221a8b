"""NoPE with a temperature: queries grow with a logarithm of their position, as in the NoPE layers of Llama 4 (iRoPE).

A query at position m is multiplied by 1 + amount * ln(1 + floor((m + 1) / every)), so that attention over many keys
stays concentrated. Nothing else depends on positions.
"""

import torch
from torch import Tensor

from conf.errors import check
from model.pos import Encoding, Shape
from model.scaling import ContextChange


class TemperedNone(Encoding):
    """Knobs: amount, 0.1 in Llama 4; every, tokens, 8192 in Llama 4."""

    relative, tempers = False, True

    def __init__(self, shape: Shape, amount: float, every: int):
        super().__init__(shape)
        check(amount >= 0, "pos.amount", amount, "at least 0")
        check(every >= 1, "pos.every", every, "at least 1")
        self.amount, self.every = amount, every

    def prepare(self, positions: Tensor, change: ContextChange) -> Tensor:
        """The factor of each query, float32 [T, 1, 1] or [B, T, 1, 1]."""
        steps = ((positions + 1) // self.every).clamp(min=0)
        return (1 + self.amount * torch.log1p(steps.float()))[..., None, None]

    def rotate(self, q: Tensor, k: Tensor, prepared: Tensor) -> tuple[Tensor, Tensor]:
        return (q * prepared).to(q.dtype), k


build = TemperedNone
