"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): turn each pair i of q and k by m * base^(-2i/D).

Partial: only the first rotary_fraction of the head turns, and D is that width (GPT-NeoX, GPT-J). Proportional
(p-RoPE, Barbero et al. 2024, arXiv 2410.06205; Hugging Face's `proportional`): D is the whole head, and only its
fastest pairs turn.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import by_triton, cos_sin, phase, rope, rope_packed, rotate
from model.pos import Encoding, Shape
from model.scaling import Scaled

Table = tuple[Tensor, Tensor]  # cos and sin, float32 [T, P] or [B, T, P]


@dataclass
class Tables:
    """What the layers share: sines and cosines, or, where the kernel makes them itself, phases and positions."""

    q: Table | None
    k: Table | None
    far: "Tables | None" = None  # for pairs at a distance of Scaled.clip and more
    phase: Tensor | None = None
    positions: Tensor | None = None
    scale: float = 1.0


class Rope(Encoding):
    by_kernel = True  # a subclass that changes the tables says False

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
        pairs = int(rotary_fraction * head / 2 + 1e-6)  # a fraction such as 6/22 must give back its 6
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

        kernel = self.by_kernel and by_triton(device)
        near = None if kernel else table(inv_freq)
        tables = Tables(near, near)
        if kernel:
            tables.phase, tables.positions = self.phase(inv_freq, device), positions
            tables.scale = scaled.attention_factor
        if scaled.clip is None:
            return tables
        # At distance r >= w the angle is w * theta + (r - w) * theta / leak: the key turns by n * theta / leak, the
        # query by m * theta / leak and w * (theta - theta / leak) more.
        slow = inv_freq / scaled.leak
        start = scaled.clip * self.phase(inv_freq - slow, device)
        tables.far = Tables(table(slow, start), table(slow))
        return tables

    def rotate_qkv(
        self, qkv: Tensor, heads: tuple[int, int, int], prepared: Tables, norm_eps: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = prepared
        if p.phase is None:
            return super().rotate_qkv(qkv, heads, p, norm_eps)
        how = {"interleaved": self.interleaved, "scale": p.scale}
        if norm_eps is None:
            return rope_packed(qkv, heads[0], heads[1], p.phase, p.positions, **how)
        q, k, v = qkv.split(heads, dim=2)
        return *rope(q, k, p.phase, p.positions, **how, norm_eps=norm_eps), v

    def rotate(self, q: Tensor, k: Tensor, prepared: Tables) -> tuple[Tensor, Tensor]:
        p = prepared
        if p.phase is not None:
            return rope(q, k, p.phase, p.positions, interleaved=self.interleaved, scale=p.scale)
        return rotate(q, *prepared.q, self.interleaved), rotate(k, *prepared.k, self.interleaved)

    def rotate_far(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor] | None:
        return None if prepared.far is None else self.rotate(q, k, prepared.far)


build = Rope
