"""Resonance RoPE (Wang et al. 2024, arXiv 2403.00071): RoPE whose wavelengths are rounded to whole numbers of tokens.

A pair that rotates once within L then has no angle past L that did not occur in training. An encoding and no scaling
method, because the training has these frequencies, too. Those of a scaling method are rounded in the same way, as in
the paper's Resonance YaRN; it computes them from the ones before rounding, which inv_freq has. Not rounded are those of
a map of positions, whose regions can be slower by any factor (model/regions.py).
"""

import math

from torch import Tensor

from model.pos.rope import Rope
from model.scaling import ContextChange


class ResonanceRope(Rope):
    def frequencies(self, change: ContextChange) -> Tensor:
        return 2 * math.pi / (2 * math.pi / super().frequencies(change)).round().clamp(min=1)


build = ResonanceRope
