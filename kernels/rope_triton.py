"""Rotary position embedding as one Triton kernel: forward, backward, both layouts, q and k in one launch.

Differences from other rotary kernels; results/README.md has the measurements:
* Angles are exact at any position: integer phases as in angles.py, so there is no table and no longest position.
* Sine and cosine are short polynomials, computed in registers while memory is being read.
* The tile is [tokens, heads, dim], so that every global load and store is 128 bits wide.
* The backward pass is the same kernel with negated phases. No operation is in place.

Only kernels/rope.py imports this file, and only when the kernel runs: it is the one file that needs triton.

Letters: B batch, T time, H heads of q, G heads of k, D head width, P rotary pairs.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, library as torch_ops

BLOCK_H = 4  # heads in one tile
HEADS = 16  # heads in one program, as a loop over tiles that share their sines and cosines


# ---- the kernel ----


@triton.jit
def _cos_sin(turn):
    """cos and sin, float32, of an angle of `turn` * 2^-32 rotations (int32), by polynomials around the nearest quarter.

    The coefficients are those of the Cephes library's sinf and cosf, for |x| <= pi / 4.
    """
    quarter = (turn + (1 << 29)) >> 30
    x = (turn - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32: radians, within +-pi / 4
    z = x * x
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    c = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    # An odd number of quarter rotations swaps sine and cosine; the quadrant determines their signs.
    odd = (quarter & 1) != 0
    sin, cos = tl.where(odd, c, s), tl.where(odd, s, c)
    sin = tl.where((quarter & 2) != 0, -sin, sin)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    return cos, sin


@triton.jit
def _rotate_heads(
    x_ptr, x_sb, x_st, x_sh, y_ptr, y_sb, y_st, y_sh, b, first, t, T, N, cos, sin,
    D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Heads first .. first + HEADS - 1 of x [B, T, N, D], rotated, -> y, at tokens t. cos, sin [BLOCK_T, BLOCK_P]."""
    pair = tl.arange(0, BLOCK_P)
    tail = tl.arange(0, BLOCK_TAIL)
    in_pair, in_tail = pair < P, tail < D - 2 * P
    for block in tl.static_range(HEADS // BLOCK_H):
        h = first + block * BLOCK_H + tl.arange(0, BLOCK_H)
        rows = (t < T)[:, None] & (h < N)[None, :]  # [BLOCK_T, BLOCK_H]
        x_row = x_ptr + b * x_sb + t[:, None] * x_st + h[None, :] * x_sh
        y_row = y_ptr + b * y_sb + t[:, None] * y_st + h[None, :] * y_sh
        mask = rows[:, :, None] & in_pair[None, None, :]
        tail_mask = rows[:, :, None] & in_tail[None, None, :]
        # The tile is loaded completely before anything is stored.
        if INTERLEAVED:
            both = tl.arange(0, 2 * BLOCK_P)
            wide = rows[:, :, None] & (both < 2 * P)[None, None, :]
            x = tl.load(x_row[:, :, None] + both[None, None, :], mask=wide, other=0.0).to(tl.float32)
            x1, x2 = tl.split(tl.reshape(x, (BLOCK_T, BLOCK_H, BLOCK_P, 2)))
        else:
            x1 = tl.load(x_row[:, :, None] + pair[None, None, :], mask=mask, other=0.0).to(tl.float32)
            x2 = tl.load(x_row[:, :, None] + P + pair[None, None, :], mask=mask, other=0.0).to(tl.float32)
        if 2 * P < D:
            rest_at = 2 * P + tail[None, None, :]
            rest = tl.load(x_row[:, :, None] + rest_at, mask=tail_mask, other=0.0).to(tl.float32)
        c, s = cos[:, None, :], sin[:, None, :]  # one angle for all heads
        y1, y2 = x1 * c - x2 * s, x2 * c + x1 * s
        out = y_ptr.dtype.element_ty
        if INTERLEAVED:
            y = tl.reshape(tl.join(y1, y2), (BLOCK_T, BLOCK_H, 2 * BLOCK_P))
            tl.store(y_row[:, :, None] + both[None, None, :], y.to(out), mask=wide)
        else:
            tl.store(y_row[:, :, None] + pair[None, None, :], y1.to(out), mask=mask)
            tl.store(y_row[:, :, None] + P + pair[None, None, :], y2.to(out), mask=mask)
        if 2 * P < D:
            tl.store(y_row[:, :, None] + rest_at, rest.to(out), mask=tail_mask)


@triton.jit(do_not_specialize=["T", "H", "G", "p_sb", "offset", "k_program"])
def _rope_kernel(
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh, yq_ptr, yq_sb, yq_st, yq_sh, yk_ptr, yk_sb, yk_st, yk_sh,
    phase_ptr, positions_ptr, p_sb, offset, scale, T, H, G, k_program,
    D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Program (time block, head block, batch row). Head blocks 0 .. k_program - 1 rotate q, the others k.

    *_sb, *_st, *_sh: strides of batch, time and head in elements; the stride of the last dimension is 1. p_sb: stride
    of the batch in positions, 0 if all rows share them.
    """
    b = tl.program_id(2).to(tl.int64)  # int64 from here on: a packed view outgrows 2^31 elements first
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    pair = tl.arange(0, BLOCK_P)
    phase = tl.load(phase_ptr + pair, mask=pair < P, other=0)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + b * p_sb + t, mask=t < T, other=0).to(tl.int64) + offset
    else:
        position = t + offset
    # The product overflows modulo 2^64, which is the reduction modulo full rotations.
    cos, sin = _cos_sin(((position[:, None] * phase[None, :]) >> 32).to(tl.int32))
    cos, sin = cos * scale, sin * scale
    program = tl.program_id(1)
    if program < k_program:
        _rotate_heads(
            q_ptr, q_sb, q_st, q_sh, yq_ptr, yq_sb, yq_st, yq_sh, b, program * HEADS, t, T, H, cos, sin,
            D, P, BLOCK_P, BLOCK_TAIL, BLOCK_T, BLOCK_H, HEADS, INTERLEAVED)  # fmt: skip
    else:
        _rotate_heads(
            k_ptr, k_sb, k_st, k_sh, yk_ptr, yk_sb, yk_st, yk_sh, b, (program - k_program) * HEADS, t, T, G, cos, sin,
            D, P, BLOCK_P, BLOCK_TAIL, BLOCK_T, BLOCK_H, HEADS, INTERLEAVED)  # fmt: skip


# ---- the launch ----


def tile(P: int, itemsize: int, warps: int = 4) -> dict[str, int]:
    """Block sizes for P rotary pairs and elements of `itemsize` bytes: a fixed rule, no autotuning.

    Each lane has two 128-bit accesses in flight for each head, and the kernel needs at most 80 registers on sm_90.
    """
    BLOCK_P = triton.next_power_of_2(P)
    BLOCK_T = max(1, 32 * warps * 16 // (2 * BLOCK_P * itemsize))
    return {"BLOCK_P": BLOCK_P, "BLOCK_T": triton.next_power_of_2(min(32, BLOCK_T)), "num_warps": warps}


def launch(
    q: Tensor, k: Tensor, yq: Tensor, yk: Tensor, phase: Tensor, positions: Tensor | None, offset: int,
    interleaved: bool, scale: float, wrap: Callable = lambda kernel: kernel,
) -> None:  # fmt: skip
    """Rotate q [B, T, H, D] and k [B, T, G, D] into yq and yk of the same shapes.

    All four may have any strides, as long as the last one is 1. wrap: applied to the kernel before the launch, such as
    wrap_triton (of torch). The other arguments are those of kernels.rope.rope.
    """
    B, T, H, D = q.shape
    G, P = k.shape[2], len(phase)
    if q.numel() + k.numel() == 0:
        return
    block = tile(P, q.element_size())
    k_program = triton.cdiv(H, HEADS)
    grid = (triton.cdiv(T, block["BLOCK_T"]), k_program + triton.cdiv(G, HEADS), B)
    p_sb = 0 if positions is None or positions.dim() == 1 else positions.stride(0)
    wrap(_rope_kernel)[grid](
        q, *q.stride()[:3], k, *k.stride()[:3], yq, *yq.stride()[:3], yk, *yk.stride()[:3],
        phase, phase if positions is None else positions, p_sb, offset, scale, T, H, G, k_program,
        D=D, P=P, BLOCK_TAIL=triton.next_power_of_2(max(1, D - 2 * P)), BLOCK_H=BLOCK_H, HEADS=HEADS,
        INTERLEAVED=interleaved, HAS_POSITIONS=positions is not None, **block,
    )  # fmt: skip


# ---- functional ops: no output shares memory with an input, which autograd and torch.compile require ----

# Inductor can look inside a triton_op and fuse around it. Under Triton's interpreter triton_op fails, so there the ops
# are opaque custom_ops.
if triton.knobs.runtime.interpret or not torch.cuda.is_available():  # ty: ignore[possibly-missing-submodule]
    _op, _wrap = torch_ops.custom_op, lambda kernel: kernel
else:
    _op, _wrap = torch_ops.triton_op, torch_ops.wrap_triton


@_op("ropewalk::rotate", mutates_args=())
def _rotate(
    q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    yq, yk = _empty(q), _empty(k)
    launch(q, k, yq, yk, phase, positions, offset, interleaved, scale, wrap=_wrap)
    return yq, yk


@_op("ropewalk::rotate_into_packed", mutates_args=())
def _rotate_into_packed(
    q: Tensor, k: Tensor, v: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    """[B, T, H + 2 G, D]: q and k rotated and v copied, side by side."""
    B, T, H, D = q.shape
    packed = torch.empty(B, T, H + 2 * k.shape[2], D, dtype=q.dtype, device=q.device)
    yq, yk, yv = packed.split((H, k.shape[2], k.shape[2]), dim=2)
    launch(q, k, yq, yk, phase, positions, offset, interleaved, scale, wrap=_wrap)
    yv.copy_(v)
    return packed


@_rotate.register_fake
def _(q, k, phase, positions, offset, interleaved, scale):
    return _empty(q), _empty(k)


@_rotate_into_packed.register_fake
def _(q, k, v, phase, positions, offset, interleaved, scale):
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] + 2 * k.shape[2], q.shape[3])


def _empty(x: Tensor) -> Tensor:
    """A new contiguous tensor: empty_like would copy the strides of a packed view."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


# ---- gradients: R(theta)^T = R(-theta), so backward is the same op and can be differentiated again ----


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, _, phase, positions, *ctx.options = inputs
    ctx.save_for_backward(phase, positions)


def _backward(ctx, dq: Tensor, dk: Tensor) -> tuple:
    phase, positions = ctx.saved_tensors
    return *_rotate(_unit_stride(dq), _unit_stride(dk), -phase, positions, *ctx.options), None, None, None, None, None


def _save_packed(ctx, inputs: tuple, output: Tensor) -> None:
    q, k, _, phase, positions, *ctx.options = inputs
    ctx.heads = (q.shape[2], k.shape[2], k.shape[2])
    ctx.save_for_backward(phase, positions)


def _backward_packed(ctx, d: Tensor) -> tuple:
    phase, positions = ctx.saved_tensors
    dq, dk, dv = _unit_stride(d).split(ctx.heads, dim=2)
    return *_rotate(dq, dk, -phase, positions, *ctx.options), dv, None, None, None, None, None


_rotate.register_autograd(_backward, setup_context=_save)
_rotate_into_packed.register_autograd(_backward_packed, setup_context=_save_packed)


class _RotatePacked(torch.autograd.Function):
    """q and k rotated out of the packed tensor, v as a view of it; one packed gradient."""

    @staticmethod
    def forward(ctx, qkv: Tensor, n_q: int, n_k: int, phase: Tensor, positions: Tensor | None, *options):
        ctx.save_for_backward(phase, positions)
        ctx.options = options
        q, k, v = qkv.split((n_q, n_k, n_k), dim=2)
        return *_rotate(q, k, phase, positions, *options), v

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:  # ty: ignore[incompatible-method-override]
        phase, positions = ctx.saved_tensors
        d = _rotate_into_packed(_unit_stride(dq), _unit_stride(dk), dv, -phase, positions, *ctx.options)
        return d, None, None, None, None, None, None, None


# ---- what kernels/rope.py calls ----


def rope(
    q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """kernels.rope by the kernel."""
    return _rotate(_unit_stride(q), _unit_stride(k), phase, positions, offset, interleaved, scale)


def rope_packed(
    qkv: Tensor, n_q: int, n_k: int, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """kernels.rope_packed by the kernel."""
    return _RotatePacked.apply(_unit_stride(qkv), n_q, n_k, phase, positions, offset, interleaved, scale)
