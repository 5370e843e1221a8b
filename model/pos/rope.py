"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864): rotate each pair i of q and k by m * base^(-2i/D).

Partial: only the first rotary_fraction of the head is rotated, and D is the width of that part (GPT-NeoX, GPT-J).
Proportional (p-RoPE, Barbero et al. 2024, arXiv 2410.06205; Hugging Face's `proportional`): D is the width of the
head, and only its fastest pairs are rotated.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import check
from kernels.angles import cos_sin, phase, rotate
from kernels.rope import rope, rope_packed, uses_triton
from model.pos import Encoding, Shape, constant
from model.regions import Region
from model.scaling import ContextChange
from model.spectrum import frequencies


@dataclass
class Tables:
    """Cosines and sines of q and of k, which all layers share: float32 [2, T, P] or [2, B, T, P]."""

    q: Tensor
    k: Tensor
    far: "list[Tables]" = field(default_factory=list)  # one for each region of ContextChange.position_map

    def rotate(self, q: Tensor, k: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        return rotate(q, *self.q, interleaved), rotate(k, *self.k, interleaved)


@dataclass
class KernelInputs:
    """The angles as phases and positions: the Triton kernel computes cosines and sines itself."""

    phase: Tensor  # int64 [P]
    positions: Tensor  # int64 [T] or [B, T]
    scale: float
    far: list[Tables] = field(default_factory=list)

    def rotate(self, q: Tensor, k: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        return rope(q, k, self.phase, self.positions, interleaved=interleaved, scale=self.scale)

    def rotate_qkv(self, qkv: Tensor, heads: tuple[int, int, int], interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Encoding.rotate_qkv: the kernel reads the packed tensor."""
        H, G, _ = heads
        return rope_packed(qkv, H, G, self.phase, self.positions, interleaved=interleaved, scale=self.scale)


class Rope(Encoding):
    """Knobs: base, interleaved (pairs (2i, 2i + 1) rather than (i, i + P)), rotary_fraction, proportional.

    A subclass may override `frequencies`, `phase`, `adjust` or `rotate`. The kernel would bypass the last two, so it
    runs only if the class overrides neither.
    """

    inv_freq: Any  # always a Tensor

    def __init__(
        self, shape: Shape, base: float, interleaved: bool, rotary_fraction: float = 1.0, proportional: bool = False
    ):
        super().__init__(shape)
        head = shape.head_dim
        check(head % 2 == 0, "head_dim", head, "even, as RoPE rotates pairs: model.width / model.n_heads")
        check(base >= 1, "pos.base", base, "at least 1")
        pairs = int(rotary_fraction * head / 2 + 1e-6)  # a fraction such as 6/22 must give back its 6
        ok = 0 < rotary_fraction <= 1 and pairs >= 1
        check(ok, "pos.rotary_fraction", rotary_fraction, f"at most 1 and leave a pair of head_dim={head}")
        self.interleaved = interleaved
        D = head if proportional else 2 * pairs
        # A plain attribute, not a buffer: .bfloat16(), .to() and state dicts must never touch the frequencies.
        self.inv_freq = frequencies(D, base)[:pairs]
        self.still = D // 2 - pairs  # pairs at frequency 0: part of the rotary width, but not rotated

    def frequencies(self, change: ContextChange) -> Tensor:
        """Those of `change`, or else the trained ones, float64 [pairs]."""
        return self.inv_freq if change.inv_freq is None else change.inv_freq

    def phase(self, inv_freq: Tensor, device: torch.device) -> Tensor:
        """Frequencies, float64 [pairs] -> rotations per position times 2^64, int64 [P] with P = pairs + still.

        To a GPU they are copied once.
        """
        padded = torch.cat((inv_freq, inv_freq.new_zeros(self.still)))
        return constant(phase(padded).tolist(), torch.int64, device)

    def prepare(self, positions: Tensor, change: ContextChange) -> Any:
        """The angles of positions int64 [T] or [B, T]: Tables for plain torch, or KernelInputs."""
        inv_freq = self.frequencies(change)
        plain = type(self).adjust is Rope.adjust and type(self).rotate is Rope.rotate
        if plain and uses_triton(positions.device):
            near = KernelInputs(self.phase(inv_freq, positions.device), positions, change.attention_factor)
        else:
            # On both q and k, so the scores grow by its square (YaRN, arXiv 2309.00071, section 3.4).
            both = self.table(inv_freq, positions, change.attention_factor)
            near = self.adjust(Tables(both, both), positions)
        if change.position_map is not None:
            near.far = [self.region_tables(x, inv_freq, positions, change) for x in change.position_map.regions()]
        return near

    def table(self, inv_freq: Tensor, positions: Tensor, factor: float, start: Tensor | int = 0) -> Tensor:
        """cos and sin times factor, at positions int64 [T] or [B, T]. start: as in cos_sin."""
        return torch.stack(cos_sin(self.phase(inv_freq, positions.device), positions, start)) * factor

    def region_tables(self, region: Region, inv_freq: Tensor, positions: Tensor, change: ContextChange) -> Tables:
        """The angles of a region of change.position_map."""
        slow, factor = inv_freq / region.slow, change.attention_factor
        start = region.start * self.phase(inv_freq - slow, positions.device)
        q = self.table(slow, region.q(positions), factor, start)
        return self.adjust(Tables(q, self.table(slow, region.k(positions), factor)), positions)

    def adjust(self, tables: Tables, positions: Tensor) -> Tables:
        """For subclasses: tables with other numbers in place of these, which are near pairs' or those of a region."""
        return tables

    def rotate(self, q: Tensor, k: Tensor, prepared: Any) -> tuple[Tensor, Tensor]:
        return prepared.rotate(q, k, self.interleaved)

    def rotate_qkv(self, qkv: Tensor, heads: tuple[int, int, int], prepared: Any) -> tuple[Tensor, Tensor, Tensor]:
        if isinstance(prepared, Tables):
            return super().rotate_qkv(qkv, heads, prepared)
        return prepared.rotate_qkv(qkv, heads, self.interleaved)


def in_layers(module: Callable[[Shape], nn.Module]) -> Callable[[Shape, float | None], Encoding]:
    """`build` of an encoding whose layers have this module: Encoding.layer_module."""

    class Plain(Encoding):
        def layer_module(self, layer: int) -> nn.Module:
            return module(self.shape)

    class Rotary(Plain, Rope):
        """And rotates."""

    def build(shape: Shape, base: float | None) -> Encoding:
        """base: of RoPE in addition; None: no rotation."""
        return Plain(shape) if base is None else Rotary(shape, base, interleaved=False)

    return build


build = Rope
