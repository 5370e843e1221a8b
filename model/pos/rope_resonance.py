"""Resonance RoPE (Wang et al. 2024, arXiv 2403.00071): RoPE whose wavelengths are rounded to whole numbers of tokens.

A pair that rotates once within L then has no angle past L that did not occur in training. An encoding and no scaling
method, because the training has these frequencies, too. Those of a scaling method are rounded in the same way, as in
the paper's Resonance YaRN; it computes them from the ones before rounding, which inv_freq has.
"""

import math
from dataclasses import replace
from typing import Any

from torch import Tensor

from model.pos.rope import Rope
from model.scaling import ContextChange


class ResonanceRope(Rope):
    def prepare(self, positions: Tensor, change: ContextChange) -> Any:
        inv_freq = self.inv_freq if change.inv_freq is None else change.inv_freq
        assert inv_freq is not None  # Rope sets it
        wavelengths = (2 * math.pi / inv_freq).round()
        return super().prepare(positions, replace(change, inv_freq=2 * math.pi / wavelengths))


build = ResonanceRope
