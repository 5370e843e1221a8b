"""The rotary op: kernels.rope.rope by a Triton kernel or in plain torch, and the parts that it is made of."""

from kernels.angles import cos_sin, phase, rotate
from kernels.rope import choose, uses_triton

__all__ = ["choose", "cos_sin", "phase", "rotate", "uses_triton"]
