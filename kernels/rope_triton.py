"""Rotary position embedding as one Triton kernel: forward, backward, both layouts, q and k in one launch.

What is new about it, each with its evidence in results/README.md: angles are exact at any position (integer phases, as
in rope_torch.py, so no table and no longest position); sine and cosine are short polynomials in registers; the tile is
[tokens, heads, dim], so that all global access is 128 bits wide; the backward pass is the same kernel with negated
phases; nothing is in place; and the QK-norm, if any, rides along for free.

Letters: B batch, T time, H heads of q, G heads of k, D head width, P rotary pairs.
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

BLOCK_H = 4  # heads of a tile
HEADS = 16  # heads of a program: they share the tile's sines and cosines


@triton.jit
def _cos_sin(turn):
    """cos and sin of turn * 2^-32 turns (int32), float32: polynomials around the nearest quarter turn."""
    quarter = (turn + (1 << 29)) >> 30
    x = (turn - (quarter << 30)).to(tl.float32) * 1.4629180792671596e-09  # 2 pi / 2^32
    z = x * x
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    c = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    odd = (quarter & 1) != 0
    sin, cos = tl.where(odd, c, s), tl.where(odd, s, c)
    sin = tl.where((quarter & 2) != 0, -sin, sin)
    cos = tl.where(((quarter + 1) & 2) != 0, -cos, cos)
    return cos, sin


@triton.jit
def _turn_heads(
    x_ptr, x_sb, x_st, x_sh, y_ptr, y_sb, y_st, y_sh, r_ptr, g_ptr, g_sb, g_st, g_sh,
    b, first, t, T, N, cos, sin, scale,
    D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Heads first .. first + HEADS - 1 of x [B, T, N, D] at tokens t -> y. cos, sin [BLOCK_T, BLOCK_P].

    NORM 1: y = R(x / rms(x)), and 1 / rms goes to r [B, T, N]. NORM 2, its gradient: x is dy, g is y, and
    dx = r (R^-1(dy - y mean(y . dy))).
    """
    pair = tl.arange(0, BLOCK_P)
    tail = tl.arange(0, BLOCK_TAIL)
    in_pair, in_tail = pair < P, tail < D - 2 * P
    for block in tl.static_range(HEADS // BLOCK_H):
        h = first + block * BLOCK_H + tl.arange(0, BLOCK_H)
        rows = (t < T)[:, None] & (h < N)[None, :]
        x_row = x_ptr + b * x_sb + t[:, None] * x_st + h[None, :] * x_sh
        y_row = y_ptr + b * y_sb + t[:, None] * y_st + h[None, :] * y_sh
        r_row = r_ptr + (b * T + t[:, None]) * N + h[None, :]
        mask = rows[:, :, None] & in_pair[None, None, :]
        tail_mask = rows[:, :, None] & in_tail[None, None, :]
        # The whole tile is loaded before anything is stored.
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
        if NORM == 1:
            square = tl.sum(x1 * x1 + x2 * x2, axis=2)
            if 2 * P < D:
                square += tl.sum(rest * rest, axis=2)
            r = tl.rsqrt(square / D + EPS)
            tl.store(r_row, r, mask=rows)
            x1, x2 = x1 * r[:, :, None], x2 * r[:, :, None]
            if 2 * P < D:
                rest = rest * r[:, :, None]
        if NORM == 2:
            g_row = g_ptr + b * g_sb + t[:, None] * g_st + h[None, :] * g_sh
            if INTERLEAVED:
                g = tl.load(g_row[:, :, None] + both[None, None, :], mask=wide, other=0.0).to(tl.float32)
                g1, g2 = tl.split(tl.reshape(g, (BLOCK_T, BLOCK_H, BLOCK_P, 2)))
            else:
                g1 = tl.load(g_row[:, :, None] + pair[None, None, :], mask=mask, other=0.0).to(tl.float32)
                g2 = tl.load(g_row[:, :, None] + P + pair[None, None, :], mask=mask, other=0.0).to(tl.float32)
            dot = tl.sum(x1 * g1 + x2 * g2, axis=2)
            if 2 * P < D:
                g_rest = tl.load(g_row[:, :, None] + rest_at, mask=tail_mask, other=0.0).to(tl.float32)
                dot += tl.sum(rest * g_rest, axis=2)
            r = tl.load(r_row, mask=rows, other=0.0)[:, :, None]
            mean = (dot / D)[:, :, None]
            turned = mean / (scale * scale)  # what was turned was also scaled, the rest was not
            x1, x2 = (x1 - g1 * turned) * r, (x2 - g2 * turned) * r
            if 2 * P < D:
                rest = (rest - g_rest * mean) * r
        c, s = cos[:, None, :], sin[:, None, :]
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
    q_ptr, q_sb, q_st, q_sh, k_ptr, k_sb, k_st, k_sh,
    yq_ptr, yq_sb, yq_st, yq_sh, yk_ptr, yk_sb, yk_st, yk_sh,
    rq_ptr, rk_ptr, gq_ptr, gq_sb, gq_st, gq_sh, gk_ptr, gk_sb, gk_st, gk_sh,
    phase_ptr, positions_ptr, p_sb, offset, scale, T, H, G, k_program,
    D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_TAIL: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Program (time block, head block, batch row); head blocks from k_program on are k's."""
    b = tl.program_id(2).to(tl.int64)  # int64 from here on: a packed view outgrows 2^31 elements first
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    pair = tl.arange(0, BLOCK_P)
    phase = tl.load(phase_ptr + pair, mask=pair < P, other=0)
    if HAS_POSITIONS:
        position = tl.load(positions_ptr + b * p_sb + t, mask=t < T, other=0).to(tl.int64) + offset
    else:
        position = t + offset
    # The product wraps modulo 2^64: that is the reduction modulo whole turns.
    cos, sin = _cos_sin(((position[:, None] * phase[None, :]) >> 32).to(tl.int32))
    cos, sin = cos * scale, sin * scale
    program = tl.program_id(1)
    if program < k_program:
        _turn_heads(
            q_ptr, q_sb, q_st, q_sh, yq_ptr, yq_sb, yq_st, yq_sh, rq_ptr, gq_ptr, gq_sb, gq_st, gq_sh,
            b, program * HEADS, t, T, H, cos, sin, scale,
            D, P, BLOCK_P, BLOCK_TAIL, BLOCK_T, BLOCK_H, HEADS, INTERLEAVED, NORM, EPS)  # fmt: skip
    else:
        _turn_heads(
            k_ptr, k_sb, k_st, k_sh, yk_ptr, yk_sb, yk_st, yk_sh, rk_ptr, gk_ptr, gk_sb, gk_st, gk_sh,
            b, (program - k_program) * HEADS, t, T, G, cos, sin, scale,
            D, P, BLOCK_P, BLOCK_TAIL, BLOCK_T, BLOCK_H, HEADS, INTERLEAVED, NORM, EPS)  # fmt: skip


def tile(P: int, itemsize: int, warps: int = 4) -> dict[str, int]:
    """A static rule: two tokens' worth of 128-bit accesses in flight for each lane and head; 80 registers on sm_90."""
    BLOCK_P = triton.next_power_of_2(P)
    BLOCK_T = max(1, 32 * warps * 16 // (2 * BLOCK_P * itemsize))
    return {"BLOCK_P": BLOCK_P, "BLOCK_T": triton.next_power_of_2(min(32, BLOCK_T)), "num_warps": warps}


def launch(
    q: Tensor, k: Tensor, yq: Tensor, yk: Tensor, phase: Tensor, positions: Tensor | None, offset: int,
    interleaved: bool, scale: float, *, norm: int = 0, eps: float = 0.0,
    rq: Tensor | None = None, rk: Tensor | None = None, gq: Tensor | None = None, gk: Tensor | None = None,
    wrap: Callable = lambda kernel: kernel,
) -> None:  # fmt: skip
    """q [B, T, H, D] and k [B, T, G, D], any strides with a unit last one, turned into yq and yk."""
    B, T, H, D = q.shape
    G, P = k.shape[2], len(phase)
    if q.numel() + k.numel() == 0:
        return
    rq, rk, gq, gk = (y if x is None else x for x, y in ((rq, q), (rk, k), (gq, q), (gk, k)))  # some unused pointer
    block = tile(P, q.element_size())
    k_program = triton.cdiv(H, HEADS)
    grid = (triton.cdiv(T, block["BLOCK_T"]), k_program + triton.cdiv(G, HEADS), B)
    p_sb = 0 if positions is None or positions.dim() == 1 else positions.stride(0)
    wrap(_rope_kernel)[grid](
        q, *q.stride()[:3], k, *k.stride()[:3], yq, *yq.stride()[:3], yk, *yk.stride()[:3],
        rq, rk, gq, *gq.stride()[:3], gk, *gk.stride()[:3],
        phase, phase if positions is None else positions, p_sb, offset, scale, T, H, G, k_program,
        D=D, P=P, BLOCK_TAIL=triton.next_power_of_2(max(1, D - 2 * P)), BLOCK_H=BLOCK_H, HEADS=HEADS,
        INTERLEAVED=interleaved, NORM=norm, EPS=eps, HAS_POSITIONS=positions is not None, **block,
    )  # fmt: skip
