"""The rotary op: rope and rope_packed, by a Triton kernel or in plain torch, and its parts."""

from kernels.rope import by_triton, choose, rope, rope_packed
from kernels.rope_torch import cos_sin, normed, phase, rotate

__all__ = ["by_triton", "choose", "cos_sin", "normed", "phase", "rope", "rope_packed", "rotate"]
