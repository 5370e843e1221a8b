"""The rotary op: the Triton kernel (interpreted without a GPU) against float64, mpmath, transformers, algebra."""

import json
import os
import re
import subprocess
import sys

import mpmath
import pytest
import torch
from torch import library as torch_ops
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from kernels import choice, cos_sin, phase, rope_torch
from kernels.rope import rope, rope_packed
from model import device_constants, gpt
from model.pos.rope import Rope, Tables
from model.position_maps import Clipped
from model.rope_kernel import KernelInputs
from model.scaling import ContextChange
from tests.helpers import ROOT, SMALL, command, import_or_skip, random_tokens, skip_unless_ci, train_settings

rope_triton = import_or_skip("kernels.rope_triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Triton's interpreter truncates where it stores bfloat16, so there an error of a whole unit in the last place is right.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def use_triton(monkeypatch, request):
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        skip_unless_ci("for Triton's interpreter, which is switched off where there is a GPU")
    monkeypatch.setattr(choice, "kernel", "triton")
    if choice.INTERPRETED and "whole_programs" not in request.fixturenames:
        # Fewer heads for each program: the interpreter would go through all of them, also where they are empty
        monkeypatch.setattr(rope_triton, "HEADS", 4)


@pytest.fixture
def whole_programs():
    """The test runs with as many heads in one program as on a GPU."""


def frequencies(P: int, base: float = 10000.0) -> torch.Tensor:
    return base ** (-torch.arange(P, dtype=torch.float64) / P)


def data(B=2, T=17, H=4, G=2, D=64, dtype=torch.float32, device="cpu", seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(B, T, N, D, generator=g).to(device, dtype) for N in (H, G))
    return q, k


def exact(x: torch.Tensor, inv_freq: torch.Tensor, positions: torch.Tensor, interleaved: bool, scale: float = 1.0):
    """The rotation in float64, by complex multiplication with float64 angles."""
    x, P = x.double().cpu(), len(inv_freq)
    rotary, rest = x[..., : 2 * P], x[..., 2 * P :]
    pairs = rotary.unflatten(-1, (P, 2)) if interleaved else rotary.unflatten(-1, (2, P)).transpose(-1, -2)
    angle = (positions.double().cpu()[..., None] * inv_freq).unsqueeze(-2)
    y = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.full_like(angle, scale), angle)
    y = torch.view_as_real(y)
    y = y.flatten(-2) if interleaved else y.transpose(-1, -2).flatten(-2)
    return torch.cat((y, rest), dim=-1)


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return bool(((got - want).abs() <= TOLERANCE[dtype] * (want.abs() + (dtype == torch.float32))).all())


# ---- forward ----


SHAPES = [(64, 64), (128, 128), (96, 96), (64, 32), (256, 256), (40, 24)]  # D and its rotary part
# Every shape in float32, and every dtype with two shapes
FORWARD = [(*shape, dtype) for shape in SHAPES for dtype in (DTYPES if shape in ((64, 64), (40, 24)) else DTYPES[:1])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, R, dtype", FORWARD)
def test_forward_against_float64(D, R, dtype, interleaved, device):
    f = frequencies(R // 2)
    # One token in two rows; a full block of tokens and a partial one; a full block. Heads: also no multiple of a tile's
    block = rope_triton.tile(R // 2, dtype.itemsize)["BLOCK_T"]
    for (H, G), B, T in (((4, 4), 2, 1), ((6, 2), 1, block + 1), ((3, 1), 1, block)):
        q, k = data(B=B, T=T, H=H, G=G, D=D, dtype=dtype, device=device)
        for x, y in zip((q, k), rope(q, k, phase(f).to(device), interleaved=interleaved), strict=True):
            assert y.dtype == dtype and y.shape == x.shape
            want = exact(x, f, torch.arange(T), interleaved)
            # a sum of two products: what counts as the last place is that of the larger input
            size = torch.maximum(want.abs(), exact(x.abs(), f, torch.zeros(T), interleaved))
            assert ((y.double().cpu() - want).abs() <= TOLERANCE[dtype] * (size + 1e-3)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_many_heads(interleaved, device, whole_programs):
    """More heads than one program rotates, and not a multiple of a tile's."""
    q, k = data(B=1, T=5, H=73, G=5, D=32, device=device)
    f = frequencies(16)
    for x, y in zip((q, k), rope(q, k, phase(f).to(device), interleaved=interleaved), strict=True):
        assert close(y, exact(x, f, torch.arange(5), interleaved), torch.float32)


# ---- backward ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, P", [(64, 32), (96, 16)])
def test_gradients_against_float64_and_of_gradients(D, P, interleaved, device):
    f = frequencies(P)
    T = rope_triton.tile(P, 4)["BLOCK_T"] + 1  # a full block of tokens and a partial one
    q, k = (x.requires_grad_() for x in data(T=T, D=D, device=device))
    p = torch.arange(T) + 100
    weights = data(T=T, D=D, device=device, seed=1)
    y = rope(q, k, phase(f).to(device), p.to(device), interleaved=interleaved, scale=1.3)
    got = torch.autograd.grad([(a * a * b).sum() for a, b in zip(y, weights, strict=True)], [q, k], create_graph=True)
    again = torch.autograd.grad([g.square().sum() for g in got], [q, k])
    x64 = [x.detach().double().cpu().requires_grad_() for x in (q, k)]
    y64 = [exact64(x, f, p, interleaved, 1.3) for x in x64]
    want = torch.autograd.grad(
        [(a * a * b.double().cpu()).sum() for a, b in zip(y64, weights, strict=True)], x64, create_graph=True
    )
    want_again = torch.autograd.grad([g.square().sum() for g in want], x64)
    for a, b in zip([*got, *again], [*want, *want_again], strict=True):
        assert (a.cpu() - b).abs().max() < 1e-5 * (1 + b.abs().max())


def exact64(x, f, p, interleaved, scale):
    """exact, but differentiable in x."""
    P = len(f)
    rotary, rest = x[..., : 2 * P], x[..., 2 * P :]
    angle = (p.double()[:, None] * f)[:, None]
    c, s = angle.cos() * scale, angle.sin() * scale
    x1, x2 = (rotary[..., 0::2], rotary[..., 1::2]) if interleaved else rotary.split(P, dim=-1)
    y = (x1 * c - x2 * s, x2 * c + x1 * s)
    y = torch.stack(y, dim=-1).flatten(-2) if interleaved else torch.cat(y, dim=-1)
    return torch.cat((y, rest), dim=-1)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_sum_have_stride_zero(device):
    q, k = (x.requires_grad_() for x in data(device=device))
    f = frequencies(32)
    sum(y.sum() for y in rope(q, k, phase(f).to(device))).backward()
    want = exact(torch.ones_like(q), -f, torch.arange(17), False)
    assert close(q.grad, want, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_equals_separate_forward_and_backward(interleaved, device):
    f = phase(frequencies(16)).to(device)
    packed = data(H=8, D=64, device=device)[0].requires_grad_()
    plain = packed.detach().clone().requires_grad_()
    options = {"offset": 3, "interleaved": interleaved, "scale": 0.7}
    got = rope_packed(packed, 4, 2, f, **options)
    q, k, v = plain.split((4, 2, 2), dim=2)
    want = (*rope(q, k, f, **options), v)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    weights = [torch.randn_like(y) for y in want]
    for x, ys in ((packed, got), (plain, want)):
        torch.autograd.grad([(a * a * w).sum() for a, w in zip(ys, weights, strict=True)], x, create_graph=True)[
            0
        ].square().sum().backward()
    assert torch.allclose(packed.grad, plain.grad, atol=1e-5)


def moved_by(function) -> tuple[list[str], int]:
    """The ops that a function calls, and the elements that they read and write. Views move nothing."""

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if not func.is_view and func is not torch.ops.aten.detach.default:
                tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
                calls.append((func._schema.name, sum(x.numel() for x in tensors)))
            return result

    calls: list[tuple[str, int]] = []
    with Recorder():
        function()
    return [name for name, _ in calls], sum(count for _, count in calls)


def test_the_packed_gradient_moves_six_units_of_memory():
    """A unit is the size of q. Three gradients are read and three are written: no copy, no concatenation, no -phase."""
    B, T, H, D = 2, 33, 4, 64
    f = phase(frequencies(32))
    packed = torch.randn(B, T, 3 * H, D, requires_grad=True)
    y = rope_packed(packed, H, H, f)
    gradients = [torch.randn(B, H, T, D).transpose(1, 2) for _ in y]  # as attention returns them
    names, elements = moved_by(lambda: torch.autograd.grad(y, packed, gradients))
    assert names == ["ropewalk::rotate_into_packed"] and elements == 6 * B * T * H * D + len(f)


@pytest.mark.process
def test_the_compiled_packed_gradient_moves_six_units_of_memory():
    """Inductor's code for a projection and its rotation: the gradient is one call of the op and one matrix product."""
    f = phase(frequencies(32))
    x, w = torch.randn(2, 33, 16), torch.randn(16, 12 * 64, requires_grad=True)
    torch._dynamo.reset()
    layer = torch.compile(lambda x, w: rope_packed((x @ w).unflatten(-1, (12, 64)), 4, 4, f), fullgraph=True)
    gradients = [torch.randn(2, 4, 33, 64).transpose(1, 2) for _ in range(3)]
    _, (forward, backward) = run_and_get_code(lambda: torch.autograd.backward(layer(x, w), gradients))
    for code, op in ((forward, "rotate"), (backward, "rotate_into_packed")):
        called = re.findall(
            r"(?:= |^ +)((?:torch\.ops|extern_kernels|aten|cpp_fused|triton_)[\w.]*)\(", code, flags=re.M
        )
        assert sorted(called) == ["extern_kernels.mm", f"torch.ops.ropewalk.{op}.default"], called


def test_views_of_any_strides():
    x = torch.randn(2, 4, 9, 2 * 64)
    f = frequencies(32)
    views = [x[..., :64].transpose(1, 2), x[..., ::2].transpose(1, 2), x[..., :64].transpose(1, 2).flip(1)]
    for view in views:
        got, _ = rope(view, view[:, :, :1], phase(f))
        assert close(got, exact(view, f, torch.arange(9), False), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_positions_and_phases_of_any_strides(device):
    q, k = data(T=9, device=device)
    f, p = phase(frequencies(32)).to(device), torch.arange(18, device=device)
    for strided in (p[::2], p[::2].expand(2, -1), p.int()[1::2], p[:1].expand(9), p.view(9, 2).T):
        assert strided.stride(-1) != 1
        for a, b in zip(rope(q, k, f, strided), rope(q, k, f, strided.contiguous()), strict=True):
            assert torch.equal(a, b)
    for strided in (f.repeat_interleave(2)[::2], f[:1].expand(32)):
        for a, b in zip(rope(q, k, strided), rope(q, k, strided.contiguous()), strict=True):
            assert torch.equal(a, b)


def test_heads_that_are_two_to_the_31_elements_apart(tmp_path):
    """With offsets of 32 bits, head 2 would be read at -2^31, where the file holds zeros. Untouched pages are free."""
    half = 2**31  # elements of two bytes before and after the start of q
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2 * half + 16, dtype=torch.float16)
    q = file.as_strided((1, 1, 3, 16), (1, 1, half // 2, 1), half)
    q.copy_(torch.randn(q.shape))
    f = frequencies(8)
    got, _ = rope(q, q[:, :, :1], phase(f), torch.tensor([7]))
    assert close(got, exact(q, f, torch.tensor([7]), False), torch.float16)


# ---- angles ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("position", [0, 2**13, 2**17, 10**6, 2**20, 2**30, -1, -(2**20), -(2**30)])
def test_angles_of_the_kernel_against_200_bits(position, device):
    """x = (1, 0) in every pair becomes (cos, sin), with no larger an error at one million than at zero."""
    f = frequencies(32)
    q = torch.zeros(1, 1, 1, 64, device=device)
    q[..., :32] = 1
    y = rope(q, q, phase(f).to(device), torch.tensor([position], device=device))[0].flatten().cpu()
    with mpmath.workprec(200):
        angles = [mpmath.mpf(position) * mpmath.mpf(float(x)) for x in f]
        want = torch.tensor([*(float(mpmath.cos(a)) for a in angles), *(float(mpmath.sin(a)) for a in angles)])
    assert (y - want).abs().max() < 1e-6


def test_every_quarter_turn_and_its_borders():
    """The polynomials and quadrants at exact eighths of a turn and one unit to each side of them."""
    eighths = [i * 2**61 for i in range(-4, 4)]
    turns = torch.tensor([e + d for e in eighths for d in (-(2**32), 0, 2**32) if -(2**63) <= e + d < 2**63])
    q = torch.zeros(1, 2, 1, 2 * len(turns))
    q[..., : len(turns)] = 1
    y = rope(q, q, turns)[0][0, 1, 0]
    angle = turns.double() * (2 * torch.pi / 2.0**64)
    assert (y - torch.cat((angle.cos(), angle.sin()))).abs().max() < 3e-7


# ---- algebra of rotations ----


def test_algebra():
    f, g = phase(frequencies(32)), phase(frequencies(32, 500.0))
    q, k = data(T=9)
    both = rope(*rope(q, k, f), g)  # rotations by f and then by g are one by f + g, in wrapping integers
    for a, b in zip(both, rope(q, k, f + g), strict=True):
        assert (a - b).abs().max() < 2e-6
    assert torch.equal(phase(torch.tensor([0.25, 0.5]).double()) * 2, phase(torch.tensor([0.5, 1.0]).double()))
    back = rope(*rope(q, k, f, offset=10**6), -f, offset=10**6)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(back, (q, k), strict=True))
    assert torch.allclose(rope(q, k, f)[0].norm(dim=-1), q.norm(dim=-1), rtol=1e-6)
    scores = [
        torch.einsum("bqhd,bkhd->bhqk", *(x[:, :, :2].double() for x in rope(q, k, f, offset=c))) for c in (0, 10**6)
    ]
    assert (scores[0] - scores[1]).abs().max() < 2e-5


def test_cached_keys_are_rebased_by_a_phase_difference():
    """Keys rotated with one base and then by the difference of phases equal keys rotated with the other base."""
    old, new = phase(frequencies(32)), phase(frequencies(32, 80000.0))
    q, k = data(T=9)
    p = torch.tensor([0, 5, 100, 8191, 131071, 10**6, 2**30, 7, 3])
    cached = rope(q, k, old, p)[1]
    rebased, afresh = rope(q, cached, new - old, p)[1], rope(q, k, new, p)[1]
    assert (rebased - afresh).abs().max() < 2e-6
    assert (cached - afresh).abs().max() > 0.1


# ---- positions and layouts ----


@pytest.mark.parametrize("device", DEVICES)
def test_equal_positions_give_equal_bits_in_every_form(device):
    q, k = data(T=9, device=device)
    f = phase(frequencies(32)).to(device)
    want = rope(q, k, f, offset=40)
    p = torch.arange(9, device=device) + 40
    for positions, offset in ((p, 0), (p.int(), 0), (p.expand(2, -1), 0), (p - 100, 100), (p.repeat(2, 1).int(), 0)):
        assert all(torch.equal(a, b) for a, b in zip(want, rope(q, k, f, positions, offset=offset), strict=True))
    rows = torch.stack((p, p.flip(0)))  # other positions in each row of the batch
    got = rope(q, k, f, rows)[0]
    assert torch.equal(got[0], want[0][0]) and torch.equal(got[1], rope(q, k, f, p.flip(0))[0][1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_is_split_after_a_permutation_to_the_bit(dtype, device):
    q, k = data(D=64, dtype=dtype, device=device)
    f = phase(frequencies(32)).to(device)
    order = torch.arange(64).view(32, 2).T.reshape(-1)
    split = rope(q[..., order], k[..., order], f)
    interleaved = rope(q, k, f, interleaved=True)
    assert all(torch.equal(a, b[..., order]) for a, b in zip(split, interleaved, strict=True))


# ---- transformers, for every scaling type ----


def test_equals_transformers_with_every_frozen_frequency():
    """apply_rotary_pos_emb with the inv_freq that transformers computed for each type (tests/goldens.json)."""
    llama = import_or_skip("transformers.models.llama.modeling_llama")
    rows = json.loads((ROOT / "tests" / "goldens.json").read_text())
    # One case for each type and D; with a factor of 8, since 1 would change nothing
    chosen = {}
    for row in sorted(rows, key=lambda row: row["case"].get("factor") == 8.0):
        chosen[row["case"]["type"], row["case"]["D"]] = row
    for row in chosen.values():
        case = row["case"]
        f = torch.tensor(row["inv_freq"], dtype=torch.float64)
        q, k = data(B=1, T=6, H=2, G=1, D=2 * len(f))
        p = torch.tensor([0, 1, 2, 50, 100, 200])
        angle = torch.cat((p[:, None] * f,) * 2, dim=-1)[None]  # float64: transformers' float32 angles err more
        scale = row["attention_factor"]
        expected = llama.apply_rotary_pos_emb(
            q.transpose(1, 2), k.transpose(1, 2), (angle.cos() * scale).float(), (angle.sin() * scale).float()
        )
        for a, b in zip(rope(q, k, phase(f), p, scale=scale), expected, strict=True):
            assert (a - b.transpose(1, 2)).abs().max() < 5e-6, case
    assert len(chosen) > 15


# ---- a functional op that composes ----


def test_inputs_are_not_modified_and_outputs_are_new():
    q, k = data()
    before = q.clone(), k.clone()
    y = rope(q, k, phase(frequencies(32)))
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])
    assert len({t.untyped_storage().data_ptr() for t in (q, k, *y)}) == 4
    assert all(
        t.is_contiguous() for t in rope(q.transpose(1, 2).contiguous().transpose(1, 2), k, phase(frequencies(32)))
    )


def test_opcheck():
    q, k = (x.requires_grad_() for x in data(B=1, T=5, H=2, G=1))
    f = phase(frequencies(32))
    for positions in (None, torch.arange(5)):
        torch_ops.opcheck(rope_triton._rotate, (q, k, f, positions, 2, False, 1.0, False))
    v = k.detach().clone().requires_grad_()
    torch_ops.opcheck(rope_triton._rotate_into_packed, (q, k, v, f, None, 0, True, 1.0, False))


@pytest.mark.parametrize("device", DEVICES)
# inductor starts a C++ compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_graph_breaks_and_with_dynamic_shapes(backend, device):
    f = phase(frequencies(32)).to(device)

    def layer(x, w):
        qkv = (x @ w).unflatten(-1, (8, 64))
        q, k, v = rope_packed(qkv, 4, 2, f, offset=3)
        q, k = rope(q, k, f, interleaved=True)
        return q.sum(dim=2) + k.sum(dim=2) * v.sum(dim=2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    w = torch.randn(16, 512, device=device)
    for T in (5, 9):
        x = torch.randn(2, T, 16, device=device)
        results = []
        for function in (layer, compiled):
            leaf = x.clone().requires_grad_()
            y = function(leaf, w)
            y.square().sum().backward()
            results.append((y.detach(), leaf.grad))
        for a, b in zip(*results, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * a.abs().max().item())


def test_under_checkpointing_and_autocast():
    q, k = (x.requires_grad_() for x in data())
    f = phase(frequencies(32))
    plain = torch.autograd.grad(sum(y.square().sum() for y in rope(q * 2, k * 2, f)), [q, k])

    def again(q, k):
        return sum(y.square().sum() for y in rope(q * 2, k * 2, f))

    checkpointed = torch.autograd.grad(torch.utils.checkpoint.checkpoint(again, q, k, use_reentrant=False), [q, k])
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        y = rope(q @ torch.eye(64), k @ torch.eye(64), f)[0]
    assert y.dtype == torch.bfloat16


# ---- sizes, compiles and rounding ----


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_more_than_two_to_the_31_elements(device):
    packed = torch.randn(1, 2**17 + 64, 132, 128, device=device, dtype=torch.bfloat16)
    q, *_ = rope_packed(packed, 128, 2, phase(frequencies(64)).to(device))
    end = packed[:, -2:, :128]
    want = exact(end, frequencies(64), torch.arange(2**17 + 62, 2**17 + 64), False)
    assert (q[:, -2:].double().cpu() - want).abs().max() < 0.05


@pytest.mark.gpu
def test_one_compile_for_forward_and_backward_over_all_shapes():
    kernel = rope_triton._rope_kernel
    kernel.device_caches.clear()
    f = phase(frequencies(64)).cuda()
    for B, T, H, offset in ((1, 1, 16, 0), (2, 17, 16, 5), (3, 2048, 16, 10**6), (1, 4096, 4, 16)):
        q, k = (x.requires_grad_() for x in data(B=B, T=T, H=H, G=H, D=128, dtype=torch.bfloat16, device="cuda"))
        sum(y.square().sum() for y in rope(q, k, f, offset=offset)).backward()
    assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 10**6])
def test_bfloat16_is_correctly_rounded(offset):
    q, k = data(B=1, T=512, H=16, G=2, D=128, dtype=torch.bfloat16, device="cuda")
    y = rope(q, k, phase(frequencies(64)).cuda(), offset=offset)[0]
    want = exact(q, frequencies(64), torch.arange(512) + offset, False).bfloat16()
    assert (y.cpu() != want).float().mean() < 5e-4


def test_wrongly_rounded_share_of_the_same_arithmetic_in_torch():
    """The torch path has the kernel's arithmetic and rounds properly; the interpreter truncates."""
    q, k = data(B=1, T=256, H=4, G=2, D=128, dtype=torch.bfloat16)
    for offset in (0, 10**6):
        y = rope_torch.rope(q, k, phase(frequencies(64)), None, offset, False, 1.0)[0]
        want = exact(q, frequencies(64), torch.arange(256) + offset, False).bfloat16()
        assert (y != want).float().mean() < 5e-4


# ---- bad input ----


def test_bad_input_is_one_line():
    q, k = data()
    f = phase(frequencies(32))
    for args, message in [
        ((q[0], k, f), r"q\.shape=\(17, 4, 64\): must be \[B, T, heads, D\]"),
        ((q, k[:, :5], f), r"k\.shape=\(2, 5, 2, 64\): must be \[2, 17, heads, 64\]"),
        ((q, k.half(), f), r"k\.dtype=torch\.float16: must be torch\.float32 as q's"),
        ((q.int(), k.int(), f), r"q\.dtype=torch\.int32: must be float32, float16 or bfloat16"),
        ((q, k, f.float()), r"phase=torch\.float32 .*: must be int64 \[P\]"),
        ((q, k, torch.cat((f, f))), r"len\(phase\)=64: must be from 1 to D / 2 = 32"),
        ((q, k, f[:0]), r"len\(phase\)=0"),
        ((q, k, f, torch.arange(17.0)), r"positions\.dtype=torch\.float32: must be int32 or int64"),
        ((q, k, f, torch.arange(16)), r"positions\.shape=\(16,\): must be \(17,\) or \(2, 17\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            rope(*args)
    with pytest.raises(ValueError, match=r"qkv has shape .*: must be \[B, T, n_q \+ 2 n_k = 8, D\]"):
        rope_packed(q, 4, 2, f)
    with pytest.raises(ValueError, match=r"k\.device=meta"):
        rope(q, k.to("meta"), f)


def test_empty_inputs_give_empty_outputs():
    f = phase(frequencies(32))
    for B, T in ((0, 5), (2, 0)):
        q, k = torch.empty(B, T, 4, 64), torch.empty(B, T, 2, 64)
        assert [tuple(y.shape) for y in rope(q, k, f)] == [(B, T, 4, 64), (B, T, 2, 64)]


# ---- choice of the kernel ----


def test_choosing_a_kernel(monkeypatch):
    monkeypatch.setattr(choice, "INTERPRETED", False)
    with pytest.raises(ValueError, match="kernel=triton: device=cpu is not a CUDA device: use kernel=auto"):
        kernels.choose("triton", torch.device("cpu"))
    kernels.choose("torch", torch.device("cpu"))
    assert choice.kernel == "torch"


def test_without_triton_plain_torch_runs(monkeypatch):
    monkeypatch.setattr(choice, "TRITON_INSTALLED", False)
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="kernel=triton: triton is not installed: use kernel=auto"):
            kernels.choose("triton", torch.device(device))
        assert not kernels.uses_triton(torch.device(device))


@pytest.mark.process
def test_a_cpu_process_does_not_import_the_kernel():
    program = (
        "import sys, torch, kernels; from kernels.rope import rope_packed\n"
        "kernels.choose('auto', torch.device('cpu'))\n"
        "rope_packed(torch.ones(1, 2, 3, 4), 1, 1, torch.ones(2, dtype=torch.int64))\n"
        "assert not {'triton', 'kernels.rope_triton'} & {*sys.modules}"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- machine code for a Hopper GPU, compiled without one ----


# Columns of results/sass.jsonl that together name a variant of the kernel
VARIANT = ("dtype", "interleaved", "D", "P", "scale")


def stored_machine_code() -> dict[tuple, dict]:
    """The rows of results/sass.jsonl by (triton, whether it is the kernel before this tile, *VARIANT)."""
    rows = map(json.loads, (ROOT / "results/sass.jsonl").read_text().splitlines())
    return {
        (row["triton"], row["commit"].startswith("01b96d0"), *(row[name] for name in VARIANT)): row
        for row in rows if "registers" in row
    }  # fmt: skip


@pytest.mark.process
def test_machine_code_for_sm_90_and_one_compile_for_all_shapes():
    """Tokens and heads are read and written in 128 bits each, once.

    In bfloat16 with split pairs the first head is read before the angles are computed; docs/kernel.md has the other
    variants. No shared memory, shuffles, spills, stack or float64; in every version of Triton the same layout. The rows
    of this version in results/sass.jsonl are of this kernel.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "bench.sass"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    first, *lines = done.stdout.splitlines()
    assert json.loads(first)["compiles"] == 1
    if done.returncode == 3:
        skip_unless_ci(lines[0])
    assert done.returncode == 0, done.stderr
    for row in map(json.loads, lines):
        assert row["local"] == row["stack"] == row["shared"] == row["shuffles"] == 0, row
        whole, lane = row["D"] == 2 * row["P"], 16 // getattr(torch, row["dtype"]).itemsize  # elements in 128 bits
        accesses = 2 * 16 * (1 if whole else 2)  # both halves of 16 heads, and the rest of the head
        phases = (lane if not row["interleaved"] else lane // 2) // 2  # 64 bits each
        assert row["stores"] == row["stores_128"] == accesses and row["loads_128"] == accesses + phases, row
        assert row["phase_loads"] == phases and f"sizePerThread [1, {lane}]" in row["layout"], row
        first_head = 2 if row["dtype"] == "bfloat16" and not row["interleaved"] else 0  # both halves
        assert row["loads_before_angles"] >= first_head, row
        assert row["registers"] <= (64 if whole else 96), row
        assert row["fp64"] == 0 and row["fp64_conversions"] <= (row["scale"] == "fp64"), row  # it is rounded
        assert row["bytes_per_element"] == 2 * getattr(torch, row["dtype"]).itemsize, row  # one read, one write
        kept = stored_machine_code().get((row["triton"], False, *(row[name] for name in VARIANT)))
        assert kept is None or {**kept, "commit": row["commit"]} == row, "another kernel: write results/sass.jsonl anew"
    assert len(lines) == 6


def test_the_table_of_machine_code_in_the_documentation_is_that_of_the_stored_rows():
    rows, text = stored_machine_code(), (ROOT / "docs/kernel.md").read_text()
    versions = ("3.6.0", "3.7.1", "3.9.0")
    assert len(rows) == len(versions) * 2 * 6 and {key[0] for key in rows} == {*versions}

    def cell(row: dict) -> str:
        shared = f"; {row['shared'] // 1024} KB of shared memory" if row["shared"] else ""
        doubles = f"; {row['fp64']} in float64" if row["fp64"] else ""
        return f"{row['instructions']}, {row['registers']}{shared}{doubles}"

    for name, interleaved, P, scale in (
        ("split pairs", False, 64, "fp32"), ("interleaved pairs", True, 64, "fp32"),
        ("half of each head", False, 32, "fp32"), ("split pairs, float64 scale", False, 64, "fp64"),
    ):  # fmt: skip
        for before in (True, False):
            variant = [rows[version, before, "bfloat16", interleaved, 128, P, scale] for version in versions]
            (moved,) = {row["bytes_per_element"] for row in variant}
            cells = (name + ", before" * before, *map(cell, variant), f"{moved:.0f}")
            assert f"| {' | '.join(cells)} |" in text, cells
            assert before or len({row["layout"] for row in variant}) == 1
            assert before or name.startswith("half") or f"`{variant[0]['layout']}`" in text
    for name, *variant in (
        ("bfloat16, split pairs", "bfloat16", False, 128, 64),
        ("bfloat16, half of each head", "bfloat16", False, 128, 32),
        ("bfloat16, interleaved pairs", "bfloat16", True, 128, 64),
        ("float32, split pairs", "float32", False, 64, 32),
        ("float32, interleaved pairs", "float32", True, 64, 32),
    ):
        loads = [str(rows[version, False, *variant, "fp32"]["loads_before_angles"]) for version in versions]
        assert f"| {' | '.join((name, *loads))} |" in text, (name, loads)
    for key, row in rows.items():
        assert row["bytes_per_element"] == 2 * getattr(torch, row["dtype"]).itemsize
        assert not key[1] or row["loads_before_angles"] == 0
        assert key[1] or row["layout"] == rows[(versions[0], *key[1:])]["layout"]
        assert key[1] or row["fp64"] == row["shared"] == row["shuffles"] == row["local"] == row["stack"] == 0


# ---- inside the GPT ----


def test_phases_are_copied_to_a_gpu_once_for_equal_frequencies(monkeypatch):
    """Here to the meta device. What an evaluation copies in inference mode can be used in training."""
    monkeypatch.setattr("model.pos.rope.uses_triton", lambda device: True)
    pos, positions = gpt.build_encoding(train_settings("pos=rope", *SMALL)), torch.arange(3, device="meta")
    with torch.inference_mode():
        first = pos.prepare(positions, ContextChange())
    again = pos.prepare(positions[:2], ContextChange(inv_freq=pos.inv_freq.clone()))
    assert isinstance(first, KernelInputs) and again.phase is first.phase and not first.phase.is_inference()
    assert pos.prepare(positions, ContextChange(inv_freq=pos.inv_freq / 3)).phase is not first.phase
    for factor in range(100):  # dynamic NTK: other frequencies at every length
        pos.prepare(positions, ContextChange(inv_freq=pos.inv_freq / (1 + factor)))
    assert len(device_constants._kept) <= 64
    f = phase(pos.inv_freq)
    assert torch.equal(device_constants.constant(f.tolist(), torch.int64, torch.device("cpu")), f)


@pytest.mark.parametrize("pos", ["rope", "rope_interleaved", "rope_partial", "rope_proportional"])
def test_the_gpt_is_the_same_model_by_either_implementation(pos, monkeypatch):
    """Losses, gradients, and a scaling with an attention factor, in float32: they differ in its rounding only."""
    model = gpt.build(train_settings(f"pos={pos}", *SMALL), 50)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    x, f = random_tokens(), model.pos.inv_freq
    results = []
    for name in ("torch", "triton"):
        monkeypatch.setattr(choice, "kernel", name)
        prepared = model.pos.prepare(torch.arange(3), ContextChange())
        assert isinstance(prepared, KernelInputs if name == "triton" else Tables)
        model.zero_grad()
        loss = model.losses(x[:, :-1], x[:, 1:])
        loss.mean().backward()
        with torch.no_grad():
            change = [
                model(x, change=s)
                for s in (ContextChange(inv_freq=f / 3, attention_factor=1.2), ContextChange(position_map=Clipped(4)))
            ]
        results.append([loss.detach(), *change, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 2e-4 * (1 + a.abs().max())


class RotateOverridden(Rope):
    """Rotates only the keys of the first head."""

    def rotate(self, q, k, prepared):
        rotated_q, rotated_k = super().rotate(q, k, prepared)
        return rotated_q, torch.cat((rotated_k[:, :, :1], k[:, :, 1:]), dim=2)


class PrepareOverridden(Rope):
    """Rotates the queries by other angles than the keys."""

    def prepare(self, positions, change):
        tables = super().prepare(positions, change)
        tables.q = cos_sin(self.phase(self.inv_freq, positions.device), positions, start=2**61)
        return tables


class PhaseOverridden(Rope):
    """Rotates in the other direction, more slowly with every pair."""

    def phase(self, inv_freq, device):
        return -super().phase(inv_freq, device) // torch.arange(1, len(inv_freq) + 1, device=device)


@pytest.mark.parametrize("subclass", [RotateOverridden, PrepareOverridden, PhaseOverridden])
def test_the_kernel_does_not_bypass_a_subclass(subclass, monkeypatch):
    """A subclass of Rope gives the same logits with kernel=triton as with kernel=torch, and not those of Rope."""
    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    x, plain = random_tokens(), model.pos
    logits = {}
    for name, encoding in (("rope", plain), ("subclass", subclass(plain.shape, 10000.0, interleaved=False))):
        model.pos = encoding
        for kernel in ("torch", "triton"):
            monkeypatch.setattr(choice, "kernel", kernel)
            changes = (ContextChange(), ContextChange(position_map=Clipped(4)))
            with torch.no_grad():
                logits[name, kernel] = torch.cat([model(x, change=change) for change in changes])
    assert (logits["subclass", "triton"] - logits["subclass", "torch"]).abs().max() < 2e-4
    assert (logits["subclass", "torch"] - logits["rope", "torch"]).abs().max() > 0.1


def test_the_gpt_with_the_kernel_under_ddp(tmp_path, monkeypatch):
    """One process is enough for DDP's hooks and buckets: the gradients are those of the model without DDP."""
    monkeypatch.setattr(choice, "kernel", "triton")
    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    x = random_tokens()
    model(x).square().mean().backward()
    alone = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.nn.parallel.DistributedDataParallel(model)(x).square().mean().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), alone, strict=True))


# ---- benchmarks ----


def test_accuracy_table():
    """Our error at a million is that at 0, below 1e-6 in float32; that of float32 angles grows with the position."""
    from bench.accuracy import accuracy

    rows = {(r["arithmetic"], r["position"]): r for r in accuracy()}
    for position in (0, 8192, 131_072, 1_000_000):
        assert rows["ours", position]["error"] < 1e-6 and rows["ours", position]["wrong"] < 5e-4
        assert rows["Liger (emulated)", position]["wrong"] > 0.2
    assert rows["ours", 10**6]["rms"] < 1.5 * rows["ours", 0]["rms"]
    assert rows["float32 angles", 10**6]["error"] > 1e-2


def test_the_errors_that_the_benchmark_measures(monkeypatch):
    """In plain torch, since the interpreter truncates: ours in both layouts, Hugging Face's with bfloat16 tables."""
    from bench import peers as bench_peers

    monkeypatch.setattr(choice, "kernel", "torch")
    for name in ("ours", "ours, interleaved"):
        wrong, at_0, at_1m = bench_peers.errors(name, 2, 1, 64, 64, "cpu")
        assert wrong < 5e-4 and max(at_0, at_1m) < 0.02  # half a step of bfloat16 near 4
    others = bench_peers.peers(64, torch.arange(8), "cpu")
    assert "torch.compile(complex), interleaved" in others
    if "Hugging Face, eager" in others:
        wrong, at_0, at_1m = bench_peers.errors("Hugging Face, eager", 2, 1, 64, 64, "cpu")
        assert wrong > 0.2 and at_1m > 2 * at_0


@pytest.mark.parametrize("N, D", [(3, 64), (17, 128), (4, 96)])
def test_the_benchmarks_tile_copy_copies(N, D):
    from bench.tile_copy import tile_copy

    x = torch.randn(2, 33, N, D)
    assert torch.equal(tile_copy(x), x)


def test_every_row_named_compiled_is_compiled_and_rows_are_on_the_disk_as_they_come(tmp_path, monkeypatch):
    """In a rehearsal on a CPU, in which torch.compile would give up on one function after the first shape or two."""
    from bench import peers as bench_peers, rope as bench_rope

    compiles, table = [], tmp_path / "rows.csv"
    rows_at_compile = []

    def backend(graph, inputs):
        compiles.append(graph)
        rows_at_compile.append(len(table.read_text().splitlines()))
        return graph.forward

    monkeypatch.setattr(choice, "kernel", "torch")
    monkeypatch.setattr(bench_peers, "compiled", lambda f: torch.compile(f, backend=backend, dynamic=False))
    monkeypatch.setattr(bench_rope, "errors", lambda *args: (None, None, None))
    rows = bench_rope.Rows(table)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        for T in range(4, 8):
            before = len(compiles)
            bench_rope.measure_shape((1, T, 2, 1, 8, 8), "cpu", "torch.compile(ours", rows)
            assert len(compiles) >= before + 3  # one for each layout at least
    lines = table.read_text().splitlines()
    assert lines[0].startswith("gpu,driver,torch,") and len(lines) == 1 + rows.count == 1 + 4 * (1 + 6 + 2)
    assert rows_at_compile[-1] > len(lines) - 12
    with pytest.raises(ValueError, match="has other columns: choose another file"):
        rows.append({"other": 1})


def test_a_row_that_cannot_be_measured_is_a_line(tmp_path, monkeypatch, capsys):
    from bench import rope as bench_rope

    def fails(q, k):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench_rope, "peers", lambda *args: {"ours": fails})
    rows = bench_rope.Rows(tmp_path / "rows.csv")
    bench_rope.measure_shape(bench_rope.TOY, "cpu", "", rows)
    assert capsys.readouterr().out.count("failed (RuntimeError: out of memory)") == 6 and rows.count == 3


@pytest.mark.process
def test_benchmark_without_a_gpu_says_so():
    done = command("-m=bench.rope", cwd=ROOT)
    if not torch.cuda.is_available():
        assert done.returncode == 1 and done.stderr.startswith("error: bench.rope gpu: needs a CUDA GPU")
