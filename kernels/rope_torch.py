"""The rotary op in plain torch."""

from typing import Any

import torch
from torch import Tensor

from kernels.angles import cos_sin, rotate


def rope(
    q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """kernels.rope.rope: the arguments and results are the same."""
    if positions is None:
        positions = torch.arange(q.shape[1], device=q.device)
    cos, sin = cos_sin(phase, positions.to(torch.int64) + offset)
    cos, sin = cos * scale, sin * scale
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def rope_packed(qkv: Tensor, n_q: int, n_k: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """kernels.rope.rope_packed: the arguments and results are the same. options: those of rope after q and k."""
    q, k, v = qkv.split((n_q, n_k, n_k), dim=2)
    return *rope(q, k, *options), v
