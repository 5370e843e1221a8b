"""The rotary op: rope(q, k, phase) and rope_packed(qkv, ...), exact at any position, twice differentiable.

One name, two implementations: kernels/rope_triton.py for CUDA tensors (and, with TRITON_INTERPRET=1
and kernel=triton, on any device), kernels/rope_torch.py otherwise. Both compute in float32 from the same integer phases
and round one time.
"""

import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

from kernels import rope_torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the kernel
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None  # triton has no wheel for some platforms
kernel = "auto"  # or triton or torch, for the whole process; choose() sets it


def choose(name: str, device: torch.device) -> None:
    """Set the implementation for the rest of this process: auto, triton or torch.

    ValueError if triton is chosen and cannot run on this device.
    """
    global kernel
    if name == "triton" and not (TRITON_INSTALLED and (device.type == "cuda" or INTERPRETED)):
        reason = f"device={device.type} is not a CUDA device" if TRITON_INSTALLED else "triton is not installed"
        raise ValueError(f"kernel=triton: {reason}: use kernel=auto")
    kernel = name
    uses_triton(device)  # loads the kernel


def uses_triton(device: torch.device) -> bool:
    """Whether rope runs the kernel on this device (for float32, float16 and bfloat16). Imports it if so."""
    return implementation(device) is not rope_torch


def implementation(device: torch.device, dtype: torch.dtype = torch.float32) -> ModuleType:
    """The module whose rope and rope_packed take tensors of this device and dtype."""
    runs_here = TRITON_INSTALLED and (device.type == "cuda" or (kernel == "triton" and INTERPRETED))
    if kernel == "torch" or not runs_here or dtype not in DTYPES:
        return rope_torch
    from kernels import rope_triton  # loads triton, and registers the ops: before anything is compiled

    return rope_triton


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
    return implementation(q.device, q.dtype).rope(q, k, phase, positions, offset, interleaved, scale)


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
    options = (phase, positions, offset, interleaved, scale)
    return implementation(qkv.device, qkv.dtype).rope_packed(qkv, n_q, n_k, *options)


def check(q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None) -> None:
    """ValueError that names the wrong argument, what it is and what is right."""
    D, like_q = q.shape[-1], f"as q is {list(q.shape)}"
    k_fits = k.dim() == 4 and k.shape[:2] == q.shape[:2] and k.shape[3] == D
    rules = [  # argument, its name, right dtypes, whether its shape is right, right shapes
        (q, "q", (*DTYPES, torch.float64), q.dim() == 4, "[B, T, heads, D]"),
        (k, "k", (q.dtype,), k_fits, f"[B, T, heads, D] {like_q}"),
        (phase, "phase", (torch.int64,), phase.dim() == 1 and 1 <= len(phase) <= D // 2, f"[1 .. D / 2 = {D // 2}]"),
    ]
    if positions is not None:
        fits = positions.shape in (q.shape[1:2], q.shape[:2])
        rules.append((positions, "positions", (torch.int32, torch.int64), fits, f"[T] or [B, T] {like_q}"))
    for x, name, dtypes, fits, shape in rules:
        if not (fits and x.dtype in dtypes and x.device == q.device):
            right = f"{' or '.join(map(str, dtypes))} {shape} on {q.device}"
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)} on {x.device}: must be {right}")
