"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): rotate each pair i of q and k by m * base^(-2i/D).

Partial: only the first rotary_fraction of the head is rotated, and D is the width of that part (GPT-NeoX, GPT-J).
Proportional (p-RoPE, Barbero et al. 2024, arXiv 2410.06205; Hugging Face's `proportional`): D is the width of the
head, and only its fastest pairs are rotated.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError, check
from kernels import cos_sin, phase, rotate, uses_triton
from model.pos import Encoding, Shape
from model.scaling import ContextChange

Table = tuple[Tensor, Tensor]  # cos and sin, float32 [T, P] or [B, T, P]


@dataclass
class Tables:
    """Cosines and sines, which all layers share: those of q and of k."""

    q: Table
    k: Table
    far: "list[Tables]" = field(default_factory=list)  # one for each region of ContextChange.position_map

    def rotate(self, q: Tensor, k: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        return rotate(q, *self.q, interleaved), rotate(k, *self.k, interleaved)


class Rope(Encoding):
    """Knobs: base, interleaved (pairs (2i, 2i + 1) rather than (i, i + P)), rotary_fraction, proportional.

    A subclass may override `phase`, `prepare` or `rotate`. The kernel rotates by self.phase(...) and would bypass the
    other two, so it runs only if the class overrides neither `prepare` nor `rotate`.
    """

    def __init__(
        self, shape: Shape, base: float, interleaved: bool, rotary_fraction: float = 1.0, proportional: bool = False
    ):
        super().__init__(shape)
        head = shape.head_dim
        if head % 2:
            raise UserError(f"head_dim={head} (model.width / model.n_heads): RoPE rotates pairs, so it must be even")
        check(base >= 1, "pos.base", base, "at least 1")
        pairs = int(rotary_fraction * head / 2 + 1e-6)  # a fraction such as 6/22 must give back its 6
        ok = 0 < rotary_fraction <= 1 and pairs >= 1
        check(ok, "pos.rotary_fraction", rotary_fraction, f"at most 1 and leave a pair of head_dim={head}")
        self.interleaved = interleaved
        D = head if proportional else 2 * pairs
        # A plain attribute, not a buffer: .bfloat16(), .to() and state dicts must never touch the frequencies.
        self.inv_freq = base ** (-torch.arange(0, 2 * pairs, 2, dtype=torch.float64, device="cpu") / D)  # [pairs]
        self.still = D // 2 - pairs  # pairs at frequency 0: part of the rotary width, but not rotated

    def phase(self, inv_freq: Tensor, device: torch.device) -> Tensor:
        """Frequencies, float64 [pairs] -> rotations per position times 2^64, int64 [P] with P = pairs + still."""
        return phase(torch.cat((inv_freq, inv_freq.new_zeros(self.still)))).to(device)

    def prepare(self, positions: Tensor, change: ContextChange) -> Any:
        """The angles of positions int64 [T] or [B, T], with the frequencies of `change` or else the trained ones.

        Tables of cosines and sines for plain torch, or the KernelInputs of model/rope_kernel.py.
        """
        inv_freq = self.inv_freq if change.inv_freq is None else change.inv_freq
        assert inv_freq is not None  # __init__ sets it
        device = positions.device

        def phase(inv_freq: Tensor) -> Tensor:
            if device.type == "cpu":
                return self.phase(inv_freq, device)
            from model.device_constants import constant

            return constant(self.phase(inv_freq, inv_freq.device).tolist(), torch.int64, device)

        # The kernel would bypass what a subclass overrides
        if uses_triton(device) and type(self).prepare is Rope.prepare and type(self).rotate is Rope.rotate:
            from model.rope_kernel import KernelInputs

            near = KernelInputs(phase(inv_freq), positions, change.attention_factor)
        else:
            cos, sin = cos_sin(phase(inv_freq), positions)
            # On both q and k, so the scores grow by its square (YaRN, arXiv 2309.00071, section 3.4).
            one = cos * change.attention_factor, sin * change.attention_factor
            near = Tables(one, one)
        if change.position_map is not None:
            from model.region_attention import far_tables

            near.far = far_tables(change, inv_freq, positions, phase)
        return near

    def rotate(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        return prepared.rotate(q, k, self.interleaved)

    def rotate_qkv(self, qkv: Tensor, heads: tuple[int, int, int], prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, Tables):
            return super().rotate_qkv(qkv, heads, prepared)
        return prepared.rotate_qkv(qkv, heads, self.interleaved)


build = Rope
