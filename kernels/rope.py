"""The rotary op: rope(q, k, phase) and rope_packed(qkv, ...), exact at any position, twice differentiable.

One name, two implementations (kernels/choice.py): kernels/rope_triton.py for CUDA tensors (and, with TRITON_INTERPRET=1
and kernel=triton, on any device), kernels/rope_torch.py otherwise. Both compute in float32 from the same integer phases
and round one time.
"""

from types import ModuleType

import torch
from torch import Tensor

from kernels import rope_torch
from kernels.choice import uses_triton

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the kernel


def _implementation(x: Tensor) -> ModuleType:
    """The module whose rope and rope_packed take tensors like x."""
    if x.dtype in DTYPES and uses_triton(x.device):
        from kernels import rope_triton

        return rope_triton
    return rope_torch


def rope(
    q: Tensor,
    k: Tensor,
    phase: Tensor,
    positions: Tensor | None = None,
    *,
    offset: int = 0,
    interleaved: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Rotate q [B, T, H, D] and k [B, T, G, D] by their positions -> new tensors of the same shapes and dtype.

    phase: int64 [P], rotations per position times 2^64 (see angles.phase). The first 2 P of the D dimensions are
    rotated, the rest is copied. positions: int32 or int64 [T] or [B, T] (None: 0, 1, ...); positions + offset must be
    within +-2^30. interleaved: pairs (2i, 2i + 1) rather than (i, i + P). scale: factor on the rotated dimensions.
    The kernel's results are contiguous. ValueError: a shape, dtype or device is wrong; the message names it.
    """
    check(q, k, phase, positions)
    return _implementation(q).rope(q, k, phase, positions, offset, interleaved, scale)


def rope_packed(
    qkv: Tensor,
    n_q: int,
    n_k: int,
    phase: Tensor,
    positions: Tensor | None = None,
    *,
    offset: int = 0,
    interleaved: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection's output qkv [B, T, n_q + 2 n_k, D] into q, k, v and rotate q and k as rope does.

    Returns q [B, T, n_q, D], k and v [B, T, n_k, D]; v is a view of qkv. The kernel writes the gradient straight into
    one tensor of qkv's shape, which saves autograd's concatenation.
    """
    if qkv.dim() != 4 or qkv.shape[2] != n_q + 2 * n_k:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: must be [B, T, n_q + 2 n_k = {n_q + 2 * n_k}, D]")
    q, k, _ = qkv.split((n_q, n_k, n_k), dim=2)
    check(q, k, phase, positions)
    return _implementation(qkv).rope_packed(qkv, n_q, n_k, phase, positions, offset, interleaved, scale)


def check(q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None) -> None:
    """ValueError that names the wrong argument, its value and what is right."""

    def need(ok: bool, name: str, value: object, right: str) -> None:
        if not ok:
            raise ValueError(f"{name}={value}: must be {right}")

    for name, x in (("q", q), ("k", k)):
        need(x.dim() == 4, f"{name}.shape", tuple(x.shape), "[B, T, heads, D]")
        ok = x.dtype in (*DTYPES, torch.float64)
        need(ok, f"{name}.dtype", x.dtype, "float32, float16 or bfloat16 (float64 in plain torch)")
    right = f"[{q.shape[0]}, {q.shape[1]}, heads, {q.shape[3]}] as q is"
    need(k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3], "k.shape", tuple(k.shape), right)
    need(k.dtype == q.dtype, "k.dtype", k.dtype, f"{q.dtype} as q's")
    need(k.device == q.device, "k.device", k.device, f"{q.device} as q's")
    need(phase.dtype == torch.int64 and phase.dim() == 1, "phase", f"{phase.dtype} {tuple(phase.shape)}", "int64 [P]")
    need(1 <= len(phase) <= q.shape[3] // 2, "len(phase)", len(phase), f"from 1 to D / 2 = {q.shape[3] / 2:g}")
    need(phase.device == q.device, "phase.device", phase.device, f"{q.device} as q's")
    if positions is not None:
        need(positions.dtype in (torch.int32, torch.int64), "positions.dtype", positions.dtype, "int32 or int64")
        shapes = ((q.shape[1],), (q.shape[0], q.shape[1]))
        need(tuple(positions.shape) in shapes, "positions.shape", tuple(positions.shape), f"{shapes[0]} or {shapes[1]}")
        need(positions.device == q.device, "positions.device", positions.device, f"{q.device} as q's")
