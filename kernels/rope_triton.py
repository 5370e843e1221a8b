"""Rotary position embedding as one Triton kernel: forward, backward, both layouts, q and k in one launch.

Differences from other rotary kernels; results/README.md has the measurements:
* Angles are exact at every position within +-2^30: integer phases as in angles.py, so there is no table.
* Sine and cosine are short polynomials, computed in registers.
* The tile is one head of some tokens, and the heads are a loop. Every load and store of q and k is 128 bits wide if
  the strides are multiples of 16 elements and the parts of a head (both halves, the rest) multiples of 16 bytes.
* The backward pass is the same kernel with the sign -1. No operation is in place.

Only kernels/rope.py imports this file, and only when the kernel runs: it is the one file that needs triton.

Letters: B batch, T time, H heads of q, G heads of k, D head width, P rotary pairs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, library as torch_ops
from triton.language import constexpr

HEADS = 8  # heads in one program, as a loop over heads that share their sines and cosines
WARPS = 4


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
def _angles(phase_ptr, p_row, t, T, offset, sign, scale, P: constexpr, BLOCK_P: constexpr, HAS_POSITIONS: constexpr):
    """cos and sin times scale, float32 [BLOCK_T, BLOCK_P], of the tokens t. p_row: the positions of this batch row."""
    pair = tl.arange(0, BLOCK_P)
    phase = tl.load(phase_ptr + pair, mask=pair < P, other=0)
    position = t
    if HAS_POSITIONS:
        position = tl.load(p_row + t, mask=t < T, other=0).to(tl.int64)
    # The product overflows modulo 2^64, which is the reduction modulo full rotations.
    signed = (position + offset) * sign
    cos, sin = _cos_sin(((signed[:, None] * phase[None, :]) >> 32).to(tl.int32))
    factor = tl.full((1, 1), scale, tl.float32)  # a caller that types scale as float64 would make all of this float64
    return cos * factor, sin * factor


@triton.jit
def _load_head(
    x_row, t, T, h, N, D: constexpr, P: constexpr, BLOCK_P: constexpr, BLOCK_TAIL: constexpr, INTERLEAVED: constexpr
):
    """Head h of tokens t, float32: both halves of the pairs [BLOCK_T, BLOCK_P], the rest [BLOCK_T, BLOCK_TAIL]; inside.

    x_row: pointers [BLOCK_T, 1] to it. inside: bool [BLOCK_T, 1], whether it exists: of T tokens and N heads.
    """
    inside = t[:, None] < tl.where(h < N, T, 0)  # Triton 3.9's interpreter takes no mask & scalar as a mask
    pair = tl.arange(0, BLOCK_P)[None, :]
    mask = inside & (pair < P)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_P)[None, :]
        x = tl.load(x_row + both, mask=inside & (both < 2 * P), other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (x_row.shape[0], BLOCK_P, 2)))
    else:
        x1 = tl.load(x_row + pair, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_row + P + pair, mask=mask, other=0.0).to(tl.float32)
    rest = x1
    if 2 * P < D:
        tail = tl.arange(0, BLOCK_TAIL)[None, :]
        rest = tl.load(x_row + 2 * P + tail, mask=inside & (tail < D - 2 * P), other=0.0).to(tl.float32)
    return x1, x2, rest, inside


@triton.jit
def _store_head(y_row, inside, y1, y2, rest, D: constexpr, P: constexpr, INTERLEAVED: constexpr):
    """The inverse of _load_head: y1, y2, rest, inside are what it returns; the tiles are rounded to the dtype of y."""
    out = y_row.dtype.element_ty
    pair = tl.arange(0, y1.shape[1])[None, :]
    mask = inside & (pair < P)
    if INTERLEAVED:
        both = tl.arange(0, 2 * y1.shape[1])[None, :]
        y = tl.reshape(tl.join(y1, y2), (y1.shape[0], 2 * y1.shape[1]))
        tl.store(y_row + both, y.to(out), mask=inside & (both < 2 * P))
    else:
        tl.store(y_row + pair, y1.to(out), mask=mask)
        tl.store(y_row + P + pair, y2.to(out), mask=mask)
    if 2 * P < D:
        tail = tl.arange(0, rest.shape[1])[None, :]
        tl.store(y_row + 2 * P + tail, rest.to(out), mask=inside & (tail < D - 2 * P))


@triton.jit(do_not_specialize=["T", "H", "G", "p_sb", "offset", "sign", "k_program"])
def _rope_kernel(
    q_ptr,
    q_sb,
    q_st,
    q_sh,
    k_ptr,
    k_sb,
    k_st,
    k_sh,
    yq_ptr,
    yq_sb,
    yq_st,
    yq_sh,
    yk_ptr,
    yk_sb,
    yk_st,
    yk_sh,
    phase_ptr,
    positions_ptr,
    p_sb,
    offset,
    sign,
    scale,
    T,
    H,
    G,
    k_program,
    D: constexpr,
    P: constexpr,
    BLOCK_P: constexpr,
    BLOCK_TAIL: constexpr,
    BLOCK_T: constexpr,
    HEADS: constexpr,
    INTERLEAVED: constexpr,
    HAS_POSITIONS: constexpr,
):
    """Program (time block, head block, batch row). Head blocks 0 .. k_program - 1 rotate q, the others k.

    *_sb, *_st, *_sh: strides of batch, time and head in elements; the stride of the last dimension is 1. p_sb: stride
    of the batch in positions, 0 if all rows share them. sign: 1, or -1 for the inverse rotation.
    """
    is_k = tl.program_id(1) >= k_program
    b = tl.program_id(2).to(tl.int64)  # int64, as all offsets below: heads can be 2^31 elements apart
    h = (tl.program_id(1) - tl.where(is_k, k_program, 0)).to(tl.int64) * HEADS
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    # A choice of pointers, not of code: the compiler puts no load of a branch before the angles. And not by `if`, which
    # does not compile where a stride of q needs 64 bits and k's 32
    x_ptr, y_ptr, N = tl.where(is_k, k_ptr, q_ptr), tl.where(is_k, yk_ptr, yq_ptr), tl.where(is_k, G, H)
    x_sb, x_st, x_sh = tl.where(is_k, k_sb, q_sb), tl.where(is_k, k_st, q_st), tl.where(is_k, k_sh, q_sh)
    y_sb, y_st, y_sh = tl.where(is_k, yk_sb, yq_sb), tl.where(is_k, yk_st, yq_st), tl.where(is_k, yk_sh, yq_sh)
    x_row = x_ptr + b * x_sb + h * x_sh + t[:, None] * x_st
    y_row = y_ptr + b * y_sb + h * y_sh + t[:, None] * y_st
    head = _load_head(x_row, t, T, h, N, D, P, BLOCK_P, BLOCK_TAIL, INTERLEAVED)
    x_row += x_sh  # not + i * x_sh, a product of 32 bits
    next_head = _load_head(x_row, t, T, h + 1, N, D, P, BLOCK_P, BLOCK_TAIL, INTERLEAVED)

    # ptxas reorders loads, so it decides whether the angles are computed while the first head is being read;
    # docs/kernel.md says where they are.
    p_row = positions_ptr + b * p_sb
    cos, sin = _angles(phase_ptr, p_row, t, T, offset, sign, scale, P, BLOCK_P, HAS_POSITIONS)

    for i in tl.static_range(HEADS):
        x1, x2, rest, inside = head
        head = next_head
        if i + 2 < HEADS:  # two heads are read before this one is written
            x_row += x_sh
            next_head = _load_head(x_row, t, T, h + i + 2, N, D, P, BLOCK_P, BLOCK_TAIL, INTERLEAVED)
        _store_head(y_row, inside, x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest, D, P, INTERLEAVED)
        y_row += y_sh


# ---- the launch ----


def tile(P: int, itemsize: int) -> dict[str, Any]:
    """Block sizes for P rotary pairs and elements of `itemsize` bytes: a fixed rule, no autotuning.

    Each lane loads 128 bits of each half of a head, so all versions of Triton choose the same layout: a lane holds
    neighbouring elements of one token.
    """
    BLOCK_P = triton.next_power_of_2(P)
    BLOCK_T = max(1, 32 * WARPS * 16 // (BLOCK_P * itemsize))
    return {"BLOCK_P": BLOCK_P, "BLOCK_T": min(64, BLOCK_T), "HEADS": HEADS, "num_warps": WARPS}


def launch(q, k, yq, yk, phase, positions, offset, interleaved, scale, inverse) -> None:
    """Rotate q [B, T, H, D] and k [B, T, G, D] into yq and yk of the same shapes, which may be parts of one tensor.

    All may have any strides, but those of yq and yk must be 1 in the last dimension. inverse: rotate by the negative
    angles. The other arguments are those of kernels.rope.rope.
    """
    B, T, H, D = q.shape
    G, P = k.shape[2], len(phase)
    if q.numel() + k.numel() == 0:
        return
    q, k, phase = _unit_stride(q), _unit_stride(k), _unit_stride(phase)
    positions = None if positions is None else _unit_stride(positions)
    block = tile(P, q.element_size())
    k_program = triton.cdiv(H, block["HEADS"])
    grid = (triton.cdiv(T, block["BLOCK_T"]), k_program + triton.cdiv(G, block["HEADS"]), B)
    p_sb = 0 if positions is None or positions.dim() == 1 else positions.stride(0)
    kernel: Any = _rope_kernel  # plain numbers may stand for its constexpr parameters
    heads = [argument for x in (q, k, yq, yk) for argument in (x, *x.stride()[:3])]
    at = (phase, phase if positions is None else positions, p_sb, offset, -1 if inverse else 1, scale)
    block["BLOCK_TAIL"] = triton.next_power_of_2(max(1, D - 2 * P))
    kernel[grid](
        *heads, *at, T, H, G, k_program, D=D, P=P, INTERLEAVED=interleaved, HAS_POSITIONS=positions is not None, **block
    )


def _unit_stride(x: Tensor) -> Tensor:
    """x with neighbouring elements of its last dimension side by side: a copy where they are not.

    Only called where no compiler traces, in the bodies of the ops: a question about strides in a backward function
    makes Dynamo trace it again with three copies.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


# ---- functional ops: no output shares memory with an input, which autograd and torch.compile require ----

# custom_op, into which torch.compile does not look: of a triton_op it copies the two views of one packed gradient, and
# its cache does not notice an edited kernel. Nothing around the rotation could be fused with it but copies.
# `angles` are the arguments of `launch` after yk.
ANGLES = "Tensor phase, Tensor? positions, int offset, bool interleaved, float scale, bool inverse"


@torch_ops.custom_op("ropewalk::rotate", mutates_args=(), schema=f"(Tensor q, Tensor k, {ANGLES}) -> (Tensor, Tensor)")
def _rotate(q, k, *angles):
    yq, yk = _empty(q), _empty(k)
    launch(q, k, yq, yk, *angles)
    return yq, yk


@torch_ops.custom_op(
    "ropewalk::rotate_into_packed", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {ANGLES}) -> Tensor"
)
def _rotate_into_packed(q, k, v, *angles):
    """[B, T, H + 2 G, D]: q and k rotated and v copied, side by side."""
    packed = _packed(q, k)
    yq, yk, yv = packed.split((q.shape[2], k.shape[2], k.shape[2]), dim=2)
    launch(q, k, yq, yk, *angles)
    yv.copy_(v)
    return packed


_rotate.register_fake(lambda q, k, *angles: (_empty(q), _empty(k)))
_rotate_into_packed.register_fake(lambda q, k, v, *angles: _packed(q, k))


def _packed(q: Tensor, k: Tensor) -> Tensor:
    """A new tensor [B, T, H + 2 G, D]."""
    B, T, H, D = q.shape
    return q.new_empty(B, T, H + 2 * k.shape[2], D)


def _empty(x: Tensor) -> Tensor:
    """A new contiguous tensor: empty_like would copy the strides of a packed view."""
    return x.new_empty(x.shape)


# ---- gradients: R(theta)^T = R(-theta), so backward is the same op and can be differentiated again ----


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    _, _, phase, positions, *ctx.options, ctx.inverse = inputs
    ctx.save_for_backward(phase, positions)


def _backward(ctx, dq: Tensor, dk: Tensor) -> tuple:
    dq, dk = _rotate(dq, dk, *ctx.saved_tensors, *ctx.options, not ctx.inverse)
    return dq, dk, None, None, None, None, None, None


def _save_packed(ctx, inputs: tuple, output: Tensor) -> None:
    q, k, _, phase, positions, *ctx.options, ctx.inverse = inputs
    ctx.heads = (q.shape[2], k.shape[2], k.shape[2])
    ctx.save_for_backward(phase, positions)


def _backward_packed(ctx, d: Tensor) -> tuple:
    dq, dk, dv = d.split(ctx.heads, dim=2)
    dq, dk = _rotate(dq, dk, *ctx.saved_tensors, *ctx.options, not ctx.inverse)
    return dq, dk, dv, None, None, None, None, None, None


_rotate.register_autograd(_backward, setup_context=_save)
_rotate_into_packed.register_autograd(_backward_packed, setup_context=_save_packed)


class _RotatePacked(torch.autograd.Function):
    """q and k rotated out of the packed tensor, v as a view of it; one packed gradient."""

    @staticmethod
    def forward(ctx, qkv: Tensor, n_q: int, n_k: int, phase: Tensor, positions: Tensor | None, *options):
        ctx.save_for_backward(phase, positions)
        ctx.options = options
        q, k, v = qkv.split((n_q, n_k, n_k), dim=2)
        return *_rotate(q, k, phase, positions, *options, False), v

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:  # ty: ignore[incompatible-method-override]
        d = _rotate_into_packed(dq, dk, dv, *ctx.saved_tensors, *ctx.options, True)
        return d, None, None, None, None, None, None, None


# ---- what kernels/rope.py calls ----


def rope(
    q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """kernels.rope.rope by the kernel."""
    return _rotate(q, k, phase, positions, offset, interleaved, scale, False)


def rope_packed(qkv: Tensor, n_q: int, n_k: int, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """kernels.rope.rope_packed by the kernel. options: those of rope after q and k."""
    return _RotatePacked.apply(qkv, n_q, n_k, *options)
