"""RoPE through the rotary op of kernels/: what Rope.prepare returns where the Triton kernel runs."""

from dataclasses import dataclass, field

from torch import Tensor

from kernels.rope import rope, rope_packed
from model.pos.rope import Tables


@dataclass
class KernelInputs:
    """The angles as phases and positions: the kernel computes cosines and sines itself."""

    phase: Tensor  # int64 [P]
    positions: Tensor  # int64 [T] or [B, T]
    scale: float
    far: list[Tables] = field(default_factory=list)  # one for each region of ContextChange.position_map

    def rotate(self, q: Tensor, k: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        return rope(q, k, self.phase, self.positions, interleaved=interleaved, scale=self.scale)

    def rotate_qkv(self, qkv: Tensor, heads: tuple[int, int, int], interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Encoding.rotate_qkv: the kernel reads the packed tensor."""
        H, G, _ = heads
        return rope_packed(qkv, H, G, self.phase, self.positions, interleaved=interleaved, scale=self.scale)
