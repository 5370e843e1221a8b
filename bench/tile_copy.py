"""A Triton copy by the tiles of the rotation: how fast the kernel would be if arithmetic were free."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import rope_triton


@triton.jit
def _copy_kernel(x_ptr, y_ptr, T, N, BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr):
    """Copy x [T, N, 2 BLOCK_P], contiguous: BLOCK_T tokens and HEADS heads a program, one head at a time."""
    t = (tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    pair = tl.arange(0, BLOCK_P)[None, :]
    h = tl.program_id(1) * HEADS
    at = (t * N + h) * 2 * BLOCK_P + pair
    inside = (t < tl.where(h < N, T, 0)) & (pair < BLOCK_P)
    x1 = tl.load(x_ptr + at, mask=inside)
    x2 = tl.load(x_ptr + at + BLOCK_P, mask=inside)
    for i in tl.static_range(HEADS):
        y1, y2, this_inside = x1, x2, inside
        if i + 1 < HEADS:
            inside = (t < tl.where(h + i + 1 < N, T, 0)) & (pair < BLOCK_P)
            x1 = tl.load(x_ptr + at + (i + 1) * 2 * BLOCK_P, mask=inside)
            x2 = tl.load(x_ptr + at + (2 * i + 3) * BLOCK_P, mask=inside)
        tl.store(y_ptr + at + i * 2 * BLOCK_P, y1, mask=this_inside)
        tl.store(y_ptr + at + (2 * i + 1) * BLOCK_P, y2, mask=this_inside)


def tile_copy(x: Tensor) -> Tensor:
    """A copy of x [B, T, N, D], contiguous, made with the tile of the rotary kernel; D is rounded up in heads."""
    y = torch.empty_like(x)
    width = triton.next_power_of_2(x.shape[-1])
    rows, N = x.shape[0] * x.shape[1], x.shape[2] * x.shape[3] // width
    assert N * width == x.shape[2] * x.shape[3], f"{tuple(x.shape)}: the heads cannot be cut into heads of {width}"
    block = rope_triton.tile(width // 2, x.element_size())
    warps, heads = block.pop("num_warps"), block["HEADS"]
    grid = (triton.cdiv(rows, block["BLOCK_T"]), triton.cdiv(N, heads))
    _copy_kernel[grid](x, y, rows, N, **block, num_warps=warps)  # ty: ignore[unknown-argument]
    return y
