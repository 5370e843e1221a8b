"""The rotary op. For now the exact reference in plain torch."""

from kernels.rope_torch import cos_sin, phase, rotate

__all__ = ["cos_sin", "phase", "rotate"]
