"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): turn each pair i of q and k by m * base^(-2i/D)."""

import torch
from torch import Tensor

from kernels import cos_sin, phase, rotate
from model.pos import Encoding, Shape
from model.scaling import Scaled


class Rope(Encoding):
    def __init__(self, shape: Shape, base: float, interleaved: bool):
        super().__init__(shape)
        D = shape.head_dim
        if D % 2:
            raise ValueError(f"head_dim={D} (model.width / model.n_heads): pos=rope turns pairs, so it must be even")
        if base < 1:
            raise ValueError(f"pos.base={base}: must be at least 1")
        self.interleaved = interleaved
        # A plain attribute, not a buffer: .bfloat16(), .to() and state dicts must never touch the frequencies.
        self.inv_freq = base ** (-torch.arange(0, D, 2, dtype=torch.float64, device="cpu") / D)

    def prepare(self, positions: Tensor, scaled: Scaled) -> tuple[Tensor, Tensor]:
        inv_freq = self.inv_freq if scaled.inv_freq is None else scaled.inv_freq
        cos, sin = cos_sin(phase(inv_freq).to(positions.device), positions)
        # On both q and k, so the scores grow by its square (YaRN, arXiv 2309.00071, section 3.4).
        return cos * scaled.attention_factor, sin * scaled.attention_factor

    def rotate(self, q: Tensor, k: Tensor, prepared: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return rotate(q, *prepared, self.interleaved), rotate(k, *prepared, self.interleaved)


build = Rope
