"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): turn each pair i of q and k by m * base^(-2i/D).

Partial: only the first rotary_fraction of the head turns, and D is that width (GPT-NeoX, GPT-J). Proportional
(p-RoPE, Barbero et al. 2024, arXiv 2410.06205; Hugging Face's `proportional`): D is the whole head, and only its
fastest pairs turn.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import cos_sin, phase, rotate
from model.pos import Encoding, Shape
from model.scaling import Scaled

Table = tuple[Tensor, Tensor]  # cos and sin, float32 [T, P] or [B, T, P]


@dataclass
class Tables:
    q: Table
    k: Table
    far: "Tables | None" = None  # for pairs at a distance of Scaled.clip and more


class Rope(Encoding):
    def __init__(
        self,
        shape: Shape,
        base: float,
        interleaved: bool,
        rotary_fraction: float = 1.0,
        proportional: bool = False,
    ):
        super().__init__(shape)
        head = shape.head_dim
        if head % 2:
            raise ValueError(f"head_dim={head} (model.width / model.n_heads): RoPE turns pairs, so it must be even")
        if base < 1:
            raise ValueError(f"pos.base={base}: must be at least 1")
        pairs = int(rotary_fraction * head / 2)
        if not (0 < rotary_fraction <= 1 and pairs >= 1):
            raise ValueError(
                f"pos.rotary_fraction={rotary_fraction}: must be at most 1 and leave a pair of head_dim={head}"
            )
        self.interleaved = interleaved
        D = head if proportional else 2 * pairs
        # A plain attribute, not a buffer: .bfloat16(), .to() and state dicts must never touch the frequencies.
        self.inv_freq = base ** (-torch.arange(0, 2 * pairs, 2, dtype=torch.float64, device="cpu") / D)
        self.still = D // 2 - pairs  # pairs that belong to the rotary width and do not turn

    def phase(self, inv_freq: Tensor, device: torch.device) -> Tensor:
        """int64 [D / 2], the still pairs included."""
        return phase(torch.cat((inv_freq, inv_freq.new_zeros(self.still)))).to(device)

    def prepare(self, positions: Tensor, scaled: Scaled) -> Tables:
        inv_freq = self.inv_freq if scaled.inv_freq is None else scaled.inv_freq
        device = positions.device

        def table(inv_freq: Tensor, start: Tensor | int = 0) -> Table:
            cos, sin = cos_sin(self.phase(inv_freq, device), positions, start)
            # On both q and k, so the scores grow by its square (YaRN, arXiv 2309.00071, section 3.4).
            return cos * scaled.attention_factor, sin * scaled.attention_factor

        near = table(inv_freq)
        if scaled.clip is None:
            return Tables(near, near)
        # At distance r >= w the angle is w * theta + (r - w) * theta / leak: the key turns by n * theta / leak, the
        # query by m * theta / leak and w * (theta - theta / leak) more.
        slow = inv_freq / scaled.leak
        start = scaled.clip * self.phase(inv_freq - slow, device)
        return Tables(near, near, Tables(table(slow, start), table(slow)))

    def rotate(self, q: Tensor, k: Tensor, prepared: Tables) -> tuple[Tensor, Tensor]:
        return rotate(q, *prepared.q, self.interleaved), rotate(k, *prepared.k, self.interleaved)

    def rotate_far(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor] | None:
        return None if prepared.far is None else self.rotate(q, k, prepared.far)


build = Rope
