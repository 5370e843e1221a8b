"""The rotary op: rope(q, k, phase) and rope_packed(qkv, ...), exact at any position, twice differentiable.

One name, two implementations, chosen here: the Triton kernel for CUDA tensors (and, under TRITON_INTERPRET=1, wherever
KERNEL asks for it), plain torch otherwise. Both compute in float32 from the same integer phases and round once.
"""

import os

import torch
from torch import Tensor
from torch import library as torch_ops

from kernels import rope_torch

try:
    from kernels import rope_triton
except ImportError:  # triton has no wheel for this platform
    rope_triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KERNELS = ("auto", "triton", "torch")
kernel = "auto"  # for the whole process; choose() sets it


def choose(name: str, device: torch.device) -> None:
    """kernel=auto, triton or torch for what follows. ValueError if triton cannot run on this device."""
    global kernel
    if name not in KERNELS:
        raise ValueError(f"kernel={name}: must be auto, triton or torch")
    if name == "triton" and (rope_triton is None or not (device.type == "cuda" or INTERPRETED)):
        why = "triton is not installed" if rope_triton is None else f"device={device.type} is not a CUDA device"
        raise ValueError(f"kernel=triton: {why}: use kernel=auto")
    kernel = name


def by_triton(device: torch.device) -> bool:
    """Whether rope runs the kernel there (for float32, float16 and bfloat16)."""
    if kernel == "torch" or rope_triton is None:
        return False
    return device.type == "cuda" or (kernel == "triton" and INTERPRETED)


def _by_triton(x: Tensor) -> bool:
    return x.dtype in DTYPES and by_triton(x.device)


def rope(
    q: Tensor,
    k: Tensor,
    phase: Tensor,
    positions: Tensor | None = None,
    *,
    offset: int = 0,
    interleaved: bool = False,
    scale: float = 1.0,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn q [B, T, H, D] and k [B, T, G, D] at positions + offset; new tensors, contiguous with the kernel.

    phase: int64 [P], turns per position times 2^64 (rope_torch.phase); the first 2 P of D dimensions turn, the rest is
    copied. positions: int32 or int64 [T] or [B, T], within +-2^30 (None: 0, 1, ...). scale multiplies what turns.
    norm_eps: divide each head by its root mean square first (QK-norm without weights). ValueError in words.
    """
    check(q, k, phase, positions)
    if not _by_triton(q):
        return rope_torch.rope(q, k, phase, positions, offset, interleaved, scale, norm_eps)
    q, k = _unit_stride(q), _unit_stride(k)
    if norm_eps is None:
        return _turn(q, k, phase, positions, offset, interleaved, scale)
    return _norm_turn(q, k, phase, positions, offset, interleaved, scale, norm_eps)[:2]


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
    """(q', k', v) from the projection's own output qkv [B, T, n_q + 2 n_k, D], as rope has it; v is a view.

    The gradient is written straight into one packed tensor, which saves autograd's concatenation.
    """
    if qkv.dim() != 4 or qkv.shape[2] != n_q + 2 * n_k:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)}: must be [B, T, n_q + 2 n_k = {n_q + 2 * n_k}, D]")
    q, k, v = qkv.split((n_q, n_k, n_k), dim=2)
    check(q, k, phase, positions)
    if not _by_triton(qkv):
        return *rope_torch.rope(q, k, phase, positions, offset, interleaved, scale, None), v
    return _Packed.apply(_unit_stride(qkv), n_q, n_k, phase, positions, offset, interleaved, scale)


def check(q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None) -> None:
    """ValueError that names the argument, its value and what is right."""

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


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


# ---- the kernel as functional ops: no output aliases an input, so autograd and torch.compile may do as they like ----

if rope_triton is not None:
    # Inductor sees through a triton_op; under the interpreter there is nothing to see, and it fails.
    if INTERPRETED or not torch.cuda.is_available():
        _op, _wrap = torch_ops.custom_op, lambda kernel: kernel
    else:
        _op, _wrap = torch_ops.triton_op, torch_ops.wrap_triton

    def _like(x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @_op("ropewalk::turn", mutates_args=())
    def _turn(
        q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        yq, yk = _like(q), _like(k)
        rope_triton.launch(q, k, yq, yk, phase, positions, offset, interleaved, scale, wrap=_wrap)
        return yq, yk

    @_turn.register_fake
    def _(q, k, phase, positions, offset, interleaved, scale):
        return _like(q), _like(k)

    def _save(ctx, inputs, output) -> None:
        _, _, phase, positions, *ctx.how = inputs
        ctx.save_for_backward(phase, positions)

    def _turn_back(ctx, dq: Tensor, dk: Tensor) -> tuple:
        """R(theta)^T = R(-theta): the same op, so it can be differentiated again."""
        phase, positions = ctx.saved_tensors
        return *_turn(_unit_stride(dq), _unit_stride(dk), -phase, positions, *ctx.how), None, None, None, None, None

    _turn.register_autograd(_turn_back, setup_context=_save)

    @_op("ropewalk::turn_into_packed", mutates_args=())
    def _turn_into_packed(
        q: Tensor, k: Tensor, v: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """[B, T, H + 2 G, D]: q and k turned and v copied, side by side."""
        B, T, H, D = q.shape
        packed = torch.empty(B, T, H + 2 * k.shape[2], D, dtype=q.dtype, device=q.device)
        yq, yk, yv = packed.split((H, k.shape[2], k.shape[2]), dim=2)
        rope_triton.launch(q, k, yq, yk, phase, positions, offset, interleaved, scale, wrap=_wrap)
        yv.copy_(v)
        return packed

    @_turn_into_packed.register_fake
    def _(q, k, v, phase, positions, offset, interleaved, scale):
        return q.new_empty(q.shape[0], q.shape[1], q.shape[2] + 2 * k.shape[2], q.shape[3])

    def _save_packed(ctx, inputs, output) -> None:
        q, k, _, phase, positions, *ctx.how = inputs
        ctx.heads = (q.shape[2], k.shape[2], k.shape[2])
        ctx.save_for_backward(phase, positions)

    def _unpack_back(ctx, d: Tensor) -> tuple:
        phase, positions = ctx.saved_tensors
        dq, dk, dv = _unit_stride(d).split(ctx.heads, dim=2)
        return *_turn(dq, dk, -phase, positions, *ctx.how), dv, None, None, None, None, None

    _turn_into_packed.register_autograd(_unpack_back, setup_context=_save_packed)

    class _Packed(torch.autograd.Function):
        """q and k turned out of the packed tensor, v as a view of it; one packed gradient."""

        @staticmethod
        def forward(ctx, qkv: Tensor, n_q: int, n_k: int, phase: Tensor, positions: Tensor | None, *how):
            ctx.save_for_backward(phase, positions)
            ctx.how = how
            q, k, v = qkv.split((n_q, n_k, n_k), dim=2)
            return *_turn(q, k, phase, positions, *how), v

        @staticmethod
        def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple:
            phase, positions = ctx.saved_tensors
            d = _turn_into_packed(_unit_stride(dq), _unit_stride(dk), dv, -phase, positions, *ctx.how)
            return d, None, None, None, None, None, None, None

    @_op("ropewalk::norm_turn", mutates_args=())
    def _norm_turn(
        q: Tensor, k: Tensor, phase: Tensor, positions: Tensor | None, offset: int, interleaved: bool, scale: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Normed and turned q and k, and 1 / rms of each head, float32 [B, T, H] and [B, T, G]."""
        yq, yk = _like(q), _like(k)
        rq, rk = (torch.empty(x.shape[:3], dtype=torch.float32, device=x.device) for x in (q, k))
        rope_triton.launch(
            q, k, yq, yk, phase, positions, offset, interleaved, scale, norm=1, eps=eps, rq=rq, rk=rk, wrap=_wrap
        )
        return yq, yk, rq, rk

    @_norm_turn.register_fake
    def _(q, k, phase, positions, offset, interleaved, scale, eps):
        rows = (x.new_empty(x.shape[:3], dtype=torch.float32) for x in (q, k))
        return _like(q), _like(k), *rows

    @_op("ropewalk::norm_turn_back", mutates_args=())
    def _norm_turn_back_op(
        dq: Tensor, dk: Tensor, yq: Tensor, yk: Tensor, rq: Tensor, rk: Tensor, phase: Tensor,
        positions: Tensor | None, offset: int, interleaved: bool, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        oq, ok = _like(dq), _like(dk)
        rope_triton.launch(
            dq, dk, oq, ok, phase, positions, offset, interleaved, scale, norm=2, rq=rq, rk=rk, gq=yq, gk=yk, wrap=_wrap
        )
        return oq, ok

    @_norm_turn_back_op.register_fake
    def _(dq, dk, yq, yk, rq, rk, phase, positions, offset, interleaved, scale):
        return _like(dq), _like(dk)

    def _save_norm(ctx, inputs, output) -> None:
        _, _, phase, positions, *how, _ = inputs
        ctx.how = how
        ctx.save_for_backward(*output, phase, positions)
        ctx.mark_non_differentiable(output[2], output[3])

    def _norm_turn_back(ctx, dq: Tensor, dk: Tensor, *rest) -> tuple:
        yq, yk, rq, rk, phase, positions = ctx.saved_tensors
        back = _norm_turn_back_op(_unit_stride(dq), _unit_stride(dk), yq, yk, rq, rk, -phase, positions, *ctx.how)
        return *back, None, None, None, None, None, None

    _norm_turn.register_autograd(_norm_turn_back, setup_context=_save_norm)
