"""The rotary op, by the Triton kernel (interpreted without a GPU) and in plain torch, against float64 and mpmath."""

import re
from collections.abc import Iterable

import mpmath
import pytest
import torch
from torch import library as torch_ops
from torch._inductor.utils import run_and_get_code

import kernels
from kernels import cos_sin, phase, rope as choice
from kernels.rope import rope, rope_packed
from model import gpt, pos as encodings
from model.pos.rope import KernelInputs, Rope, Tables
from model.regions import Clipped
from model.scaling import ContextChange
from tests.helpers import SMALL, import_or_skip, model_of, random_tokens, skip_unless_ci, train_settings

rope_triton = import_or_skip("kernels.rope_triton")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Triton's interpreter truncates where it stores bfloat16, so there an error of a whole unit in the last place is right.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def use_triton(monkeypatch, request):
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        skip_unless_ci("for Triton's interpreter, which is switched off where there is a GPU")
    monkeypatch.setattr(choice, "kernel", "triton")
    if choice.INTERPRETED:
        # Fewer heads for each program: the interpreter would go through all of them, also where they are empty
        monkeypatch.setattr(rope_triton, "HEADS", 4)


@pytest.fixture(params=["triton", "torch"])
def either_kernel(monkeypatch, request):
    monkeypatch.setattr(choice, "kernel", request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


def frequencies(P: int, base: float = 10000.0) -> torch.Tensor:
    return base ** (-torch.arange(P, dtype=torch.float64) / P)


def phases(P: int = 32, device: str = "cpu", base: float = 10000.0) -> torch.Tensor:
    return phase(frequencies(P, base)).to(device)


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


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    return bool(((got - want).abs() <= TOLERANCE[dtype] * (want.abs() + (dtype == torch.float32))).all())


def equal(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- forward ----


SHAPES = [(64, 64), (128, 128), (96, 96), (64, 32), (256, 256), (40, 24)]  # D and its rotary part
# Every shape in float32, and every dtype with two shapes
FORWARD = [(*shape, dtype) for shape in SHAPES for dtype in (DTYPES if shape in ((64, 64), (40, 24)) else DTYPES[:1])]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, R, dtype", FORWARD)
def test_forward_against_float64(D, R, dtype, interleaved, device, either_kernel):
    f = frequencies(R // 2)
    # One token in two rows; a full block of tokens and a partial one; a full block. Heads: also no multiple of a tile's
    block = rope_triton.tile(R // 2, dtype.itemsize)["BLOCK_T"]
    for (H, G), B, T in (((4, 4), 2, 1), ((6, 2), 1, block + 1), ((3, 1), 1, block)):
        q, k = data(B=B, T=T, H=H, G=G, D=D, dtype=dtype, device=device)
        for x, y in zip((q, k), rope(q, k, phases(R // 2, device), interleaved=interleaved), strict=True):
            assert y.dtype == dtype and y.shape == x.shape
            want = exact(x, f, torch.arange(T), interleaved)
            # a sum of two products: what counts as the last place is that of the larger input
            size = torch.maximum(want.abs(), exact(x.abs(), f, torch.zeros(T), interleaved))
            angle_error = 4e-7 * x.abs().max().item()
            assert ((y.double().cpu() - want).abs() <= TOLERANCE[dtype] * (size + 1e-3) + angle_error).all()


# ---- backward ----


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("D, P", [(64, 32), (96, 16)])
def test_gradients_against_float64_and_of_gradients(D, P, interleaved, device):
    f, T = frequencies(P), rope_triton.tile(P, 4)["BLOCK_T"] + 1  # a full block of tokens and a partial one
    inputs, weights, p = data(T=T, D=D, device=device), data(T=T, D=D, device=device, seed=1), torch.arange(T) + 100

    def gradients(inputs, weights, rotated) -> tuple[torch.Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = [(y * y * w).sum() for y, w in zip(rotated(*leaves), weights, strict=True)]
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return (*first, *torch.autograd.grad([g.square().sum() for g in first], leaves))

    at = phases(P, device), p.to(device)
    got = gradients(inputs, weights, lambda q, k: rope(q, k, *at, interleaved=interleaved, scale=1.3))
    inputs, weights = ([x.double().cpu() for x in tensors] for tensors in (inputs, weights))
    want = gradients(inputs, weights, lambda q, k: [exact(x, f, p, interleaved, 1.3) for x in (q, k)])
    for a, b in zip(got, want, strict=True):
        assert (a.cpu() - b).abs().max() < 1e-5 * (1 + b.abs().max())


@pytest.mark.parametrize("interleaved", [False, True])
def test_packed_equals_separate_forward_and_backward(interleaved, device):
    """And the gradients of gradients."""
    f, packed = phases(16, device), data(H=8, D=64, device=device)[0].requires_grad_()
    plain = packed.detach().clone().requires_grad_()
    options = {"offset": 3, "interleaved": interleaved, "scale": 0.7}
    got = rope_packed(packed, 4, 2, f, **options)
    q, k, v = plain.split((4, 2, 2), dim=2)
    want = (*rope(q, k, f, **options), v)
    assert equal(got, want)
    weights = [torch.randn_like(y) for y in want]
    for x, ys in ((packed, got), (plain, want)):
        loss = sum((y * y * w).sum() for y, w in zip(ys, weights, strict=True))
        torch.autograd.grad(loss, x, create_graph=True)[0].square().sum().backward()
    assert torch.allclose(packed.grad, plain.grad, atol=1e-5)


@pytest.mark.process
def test_the_compiled_packed_gradient_moves_six_units_of_memory():
    """Inductor's code for a projection and its rotation: the gradient is one call of the op and one matrix product.

    A unit is the size of q. Three gradients are read and three are written: no copy, no concatenation, no -phase.
    """
    f, x, w = phases(), torch.randn(2, 33, 16), torch.randn(16, 12 * 64, requires_grad=True)
    torch._dynamo.reset()
    layer = torch.compile(lambda x, w: rope_packed((x @ w).unflatten(-1, (12, 64)), 4, 4, f), fullgraph=True)
    gradients = [torch.randn(2, 4, 33, 64).transpose(1, 2) for _ in range(3)]
    _, (forward, backward) = run_and_get_code(lambda: torch.autograd.backward(layer(x, w), gradients))
    for code, op in ((forward, "rotate"), (backward, "rotate_into_packed")):
        calls = r"(?:= |^ +)((?:torch\.ops|extern_kernels|aten|cpp_fused|triton_)[\w.]*)\("
        called = re.findall(calls, code, flags=re.M)
        assert sorted(called) == ["extern_kernels.mm", f"torch.ops.ropewalk.{op}.default"], called


def test_views_of_any_strides():
    x = torch.randn(2, 4, 9, 2 * 64)
    for view in (x[..., :64].transpose(1, 2), x[..., ::2].transpose(1, 2), x[..., :64].transpose(1, 2).flip(1)):
        got, _ = rope(view, view[:, :, :1], phases())
        assert close(got, exact(view, frequencies(32), torch.arange(9), False))
    q = x[..., :64].transpose(1, 2).requires_grad_()
    sum(y.sum() for y in rope(q, q[:, :, :1], phases())).backward()  # gradients of stride zero
    heads = torch.tensor([2.0, 1, 1, 1])[:, None]
    assert close(q.grad, exact(torch.ones_like(q) * heads, -frequencies(32), torch.arange(9), False))


def test_positions_and_phases_of_any_strides(device):
    q, k = data(T=9, device=device)
    f, p = phases(32, device), torch.arange(18, device=device)
    for strided in (p[::2], p[::2].expand(2, -1), p.int()[1::2], p[:1].expand(9), p.view(9, 2).T):
        assert strided.stride(-1) != 1
        assert equal(rope(q, k, f, strided), rope(q, k, f, strided.contiguous()))
    for strided in (f.repeat_interleave(2)[::2], f[:1].expand(32)):
        assert equal(rope(q, k, strided), rope(q, k, strided.contiguous()))


def test_heads_that_are_two_to_the_31_elements_apart(tmp_path):
    """With offsets of 32 bits, head 2 would be read at -2^31, where the file holds zeros. Untouched pages are free."""
    half = 2**31  # elements of two bytes before and after the start of q
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2 * half + 16, dtype=torch.float16)
    q = file.as_strided((1, 1, 3, 16), (1, 1, half // 2, 1), half)
    q.copy_(torch.randn(q.shape))
    got, _ = rope(q, q[:, :, :1], phases(8), torch.tensor([7]))
    assert close(got, exact(q, frequencies(8), torch.tensor([7]), False), torch.float16)


# ---- angles ----


@pytest.mark.parametrize("position", [0, 1, 255, 2**13, 2**17, 10**6, 2**20, 2**30, -1, -(2**20), -(2**30)])
def test_angles_against_200_bits(position, device, either_kernel):
    """x = (1, 0) in every pair becomes (cos, sin), with no larger an error at one million than at zero: a float32 table
    errs by 3e-2 there."""
    q = torch.zeros(1, 1, 1, 64, device=device)
    q[..., :32] = 1
    y = rope(q, q, phases(32, device), torch.tensor([position], device=device))[0].flatten().cpu()
    with mpmath.workprec(200):
        angles = [mpmath.mpf(position) * mpmath.mpf(float(x)) for x in frequencies(32)]
        want = torch.tensor([*(float(mpmath.cos(a)) for a in angles), *(float(mpmath.sin(a)) for a in angles)])
    assert (y - want).abs().max() < 1e-6


def test_every_quarter_turn_and_its_borders(either_kernel):
    """The polynomials and quadrants at exact eighths of a turn and one unit to each side of them."""
    eighths = [i * 2**61 for i in range(-4, 4)]
    turns = torch.tensor([e + d for e in eighths for d in (-(2**32), 0, 2**32) if -(2**63) <= e + d < 2**63])
    q = torch.zeros(1, 2, 1, 2 * len(turns))
    q[..., : len(turns)] = 1
    y = rope(q, q, turns)[0][0, 1, 0]
    angle = turns.double() * (2 * torch.pi / 2.0**64)
    assert (y - torch.cat((angle.cos(), angle.sin()))).abs().max() < 3e-7


# ---- positions ----


def test_equal_positions_give_equal_bits_in_every_form(device):
    f, (q, k) = phases(32, device), data(T=9, device=device)
    want = rope(q, k, f, offset=40)
    p = torch.arange(9, device=device) + 40
    for positions, offset in ((p, 0), (p.int(), 0), (p.expand(2, -1), 0), (p - 100, 100), (p.repeat(2, 1).int(), 0)):
        assert equal(want, rope(q, k, f, positions, offset=offset))
    rows = torch.stack((p, p.flip(0)))  # other positions in each row of the batch
    got = rope(q, k, f, rows)[0]
    assert torch.equal(got[0], want[0][0]) and torch.equal(got[1], rope(q, k, f, p.flip(0))[0][1])


# ---- a functional op that composes ----


def test_opcheck():
    q, k = (x.requires_grad_() for x in data(B=1, T=5, H=2, G=1))
    for positions in (None, torch.arange(5)):
        torch_ops.opcheck(rope_triton._rotate, (q, k, phases(), positions, 2, False, 1.0, False))
    v = k.detach().clone().requires_grad_()
    torch_ops.opcheck(rope_triton._rotate_into_packed, (q, k, v, phases(), None, 0, True, 1.0, False))


# inductor starts a C++ compiler
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_graph_breaks_and_with_dynamic_shapes(backend, device):
    f, w = phases(32, device), torch.randn(16, 512, device=device)

    def layer(x, w):
        q, k, v = rope_packed((x @ w).unflatten(-1, (8, 64)), 4, 2, f, offset=3)
        q, k = rope(q, k, f, interleaved=True)
        return q.sum(dim=2) + k.sum(dim=2) * v.sum(dim=2)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for T in (5, 9):
        leaves = torch.randn(2, T, 16, device=device).expand(2, -1, -1, -1).clone().requires_grad_()
        results = [function(x, w) for function, x in zip((layer, compiled), leaves, strict=True)]
        (gradients,) = torch.autograd.grad([y.square().sum() for y in results], leaves)
        for a, b in (results, gradients):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * a.abs().max().item())


# ---- sizes, compiles and rounding ----


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    packed = torch.randn(1, 2**17 + 64, 132, 128, device="cuda", dtype=torch.bfloat16)
    q, *_ = rope_packed(packed, 128, 2, phases(64, "cuda"))
    want = exact(packed[:, -2:, :128], frequencies(64), torch.arange(2**17 + 62, 2**17 + 64), False)
    assert (q[:, -2:].double().cpu() - want).abs().max() < 0.05


@pytest.mark.gpu
def test_one_compile_for_forward_and_backward_over_all_shapes():
    kernel, f = rope_triton._rope_kernel, phases(64, "cuda")
    kernel.device_caches.clear()
    for B, T, H, offset in ((1, 1, 16, 0), (2, 17, 16, 5), (3, 2048, 16, 10**6), (1, 4096, 4, 16)):
        q, k = (x.requires_grad_() for x in data(B=B, T=T, H=H, G=H, D=128, dtype=torch.bfloat16, device="cuda"))
        sum(y.square().sum() for y in rope(q, k, f, offset=offset)).backward()
    assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == 1


@pytest.mark.parametrize("offset", [0, 10**6])
def test_bfloat16_is_correctly_rounded(offset, device, monkeypatch):
    """On a CPU by plain torch, which has the kernel's arithmetic: the interpreter truncates."""
    monkeypatch.setattr(choice, "kernel", "auto")
    q, k = data(B=1, T=512, H=4, G=2, D=128, dtype=torch.bfloat16, device=device)
    want = exact(q, frequencies(64), torch.arange(512) + offset, False).bfloat16()
    assert (rope(q, k, phases(64, device), offset=offset)[0].cpu() != want).float().mean() < 5e-4


# ---- bad input ----


def test_bad_input_is_one_line():
    (q, k), f = data(), phases()
    for args, message in [
        ((q[0], k, f), r"q is torch\.float32 \[17, 4, 64\] on cpu: must be .* \[B, T, heads, D\] on cpu$"),
        ((q, k[:, :5], f), r"k is torch.float32 \[2, 5, 2, 64\] .* as q is \[2, 17, 4, 64\] on cpu$"),
        ((q, k, f.float()), "phase is torch.float32 .*: must be torch.int64"),
        ((q, k, torch.cat((f, f))), r"phase is .* \[64\] .*: must be .* \[1 .. D / 2 = 32\]"),
        ((q, k, f, torch.arange(16)), r"positions is .* \[16\] .*: must be .* \[T\] or \[B, T\] as q is \[2, 17,"),
    ]:
        with pytest.raises(ValueError, match=message):
            rope(*args)
    with pytest.raises(ValueError, match=r"qkv has shape .*: must be \[B, T, n_q \+ 2 n_k = 8, D\]"):
        rope_packed(q, 4, 2, f)


def test_empty_inputs_give_empty_outputs():
    for B, T in ((0, 5), (2, 0)):
        q, k = torch.empty(B, T, 4, 64), torch.empty(B, T, 2, 64)
        assert [y.shape for y in rope(q, k, phases())] == [(B, T, 4, 64), (B, T, 2, 64)]


# ---- choice of the kernel ----


def test_choosing_a_kernel(monkeypatch):
    monkeypatch.setattr(choice, "INTERPRETED", False)
    with pytest.raises(ValueError, match="kernel=triton: device=cpu is not a CUDA device: use kernel=auto"):
        kernels.choose("triton", torch.device("cpu"))
    for name in ("torch", "auto"):
        kernels.choose(name, torch.device("cpu"))
        assert choice.kernel == name and not kernels.uses_triton(torch.device("cpu"))
    monkeypatch.setattr(choice, "TRITON_INSTALLED", False)
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match="kernel=triton: triton is not installed: use kernel=auto"):
            kernels.choose("triton", torch.device(device))
        assert not kernels.uses_triton(torch.device(device))


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
    assert len(encodings._constants) <= 64


class RotateOverridden(Rope):
    """Rotates only the keys of the first head."""

    def rotate(self, q, k, prepared):
        rotated_q, rotated_k = super().rotate(q, k, prepared)
        return rotated_q, torch.cat((rotated_k[:, :, :1], k[:, :, 1:]), dim=2)


class AdjustOverridden(Rope):
    """Rotates the queries by other angles than the keys."""

    def adjust(self, tables, positions):
        tables.q = cos_sin(self.phase(self.inv_freq, positions.device), positions, start=2**61)
        return tables


class PhaseOverridden(Rope):
    """Rotates in the other direction, more slowly with every pair."""

    def phase(self, inv_freq, device):
        return -super().phase(inv_freq, device) // torch.arange(1, len(inv_freq) + 1, device=device)


SUBCLASSES = [RotateOverridden, AdjustOverridden, PhaseOverridden]
ROPES = ["rope", "rope_interleaved", "rope_partial", "rope_proportional", "rope_resonance", *SUBCLASSES]


@pytest.mark.parametrize("pos", ROPES)
def test_the_gpt_is_the_same_model_by_either_implementation(pos, monkeypatch):
    """Losses, gradients, and scaling, in float32: they differ in its rounding only. The kernel bypasses no subclass."""
    model, x = model_of("rope" if pos in SUBCLASSES else pos).float(), random_tokens()
    plain, f = model(x).detach(), model.pos.inv_freq
    if pos in SUBCLASSES:
        model.pos = pos(model.pos.shape, 10000.0, interleaved=False)
        assert (model(x) - plain).abs().max() > 0.1
    results = []
    for name in ("torch", "triton"):
        monkeypatch.setattr(choice, "kernel", name)
        prepared = model.pos.prepare(torch.arange(3), ContextChange())
        by_kernel = name == "triton" and pos not in (RotateOverridden, AdjustOverridden)
        assert isinstance(prepared, KernelInputs if by_kernel else Tables)
        loss = model.losses(x[:, :-1], x[:, 1:])
        gradients = torch.autograd.grad(loss.mean(), list(model.parameters()))
        with torch.no_grad():
            changes = ContextChange(inv_freq=f / 3, attention_factor=1.2), ContextChange(position_map=Clipped(4))
            results.append([loss.detach(), *(model(x, change=change) for change in changes), *gradients])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 2e-4 * (1 + a.abs().max())
