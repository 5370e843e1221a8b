"""A Triton copy by the tiles of the rotation: how fast the kernel would be if arithmetic were free."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import rope_triton


@triton.jit
def _copy_kernel(x_ptr, y_ptr, rows, W, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr, WIDTH: tl.constexpr):
    """Copy x [rows, W], contiguous, by the tiles of the rotation: WIDTH columns a program, BLOCK_W at a time."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    for block in tl.static_range(WIDTH // BLOCK_W):
        column = tl.program_id(1) * WIDTH + block * BLOCK_W + tl.arange(0, BLOCK_W)
        mask = (row < rows)[:, None] & (column < W)[None, :]
        at = row[:, None] * W + column[None, :]
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=mask), mask=mask)


def tile_copy(x: Tensor) -> Tensor:
    """A copy of x [B, T, N, D], contiguous, made with the tile of the rotary kernel."""
    x = x.contiguous()
    (B, T, N, D), y = x.shape, torch.empty_like(x)
    block = rope_triton.tile(triton.next_power_of_2(D) // 2, x.element_size())
    width = triton.next_power_of_2(D)
    grid = (triton.cdiv(B * T, block["BLOCK_T"]), triton.cdiv(N * D, rope_triton.HEADS * width))
    _copy_kernel[grid](x, y, B * T, N * D, BLOCK_T=block["BLOCK_T"], BLOCK_W=rope_triton.BLOCK_H * width,  # ty: ignore[invalid-argument-type]
                       WIDTH=rope_triton.HEADS * width, num_warps=block["num_warps"])  # fmt: skip  # ty: ignore[unknown-argument]
    return y
