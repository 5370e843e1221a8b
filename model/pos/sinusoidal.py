"""Sinusoidal embeddings (Vaswani et al. 2017, arXiv 1706.03762, section 3.5), scaled to the token embeddings.

PE[p, 2i] = sin(p * 10000^(-2i/C)), PE[p, 2i+1] = cos(p * 10000^(-2i/C)), with C the width of the model.

The RMS of PE is 0.71 and that of a token embedding at initialisation 0.02, so unscaled positions would dominate the
sum. Therefore PE is multiplied by a learned scalar, which is initialised so that both have the same RMS.
"""

import torch
from torch import Tensor, nn

from conf.errors import check
from kernels.angles import cos_sin, phase
from model.pos import Encoding, Shape, constant
from model.spectrum import frequencies


class Sinusoidal(Encoding):
    """Knob: base, 10000 in the paper."""

    relative = False

    def __init__(self, shape: Shape, base: float):
        super().__init__(shape)
        check(shape.width % 2 == 0, "model.width", shape.width, "even with pos=sinusoidal")
        check(base >= 1, "pos.base", base, "at least 1")
        self.base = base
        self.scale = nn.Parameter(torch.tensor(0.02 * 2**0.5))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        phases = constant(phase(frequencies(self.shape.width, self.base)).tolist(), torch.int64, positions.device)
        cos, sin = cos_sin(phases, positions)  # [T, C / 2] or [B, T, C / 2]
        return x + (self.scale * torch.stack((sin, cos), dim=-1).flatten(-2)).to(x.dtype)


build = Sinusoidal
