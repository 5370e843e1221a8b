"""Encodings: formulas against independent oracles, and the properties that define them."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F

from kernels import cos_sin, phase, rotate
from model import attention, gpt
from model.pos.alibi import slopes
from model.scaling import Scaled
from tests.conftest import choices, train_settings

SMALL = ("model.n_layers=2", "model.n_heads=4", "model.width=64", "ctx=32", "batch_tokens=32")
NO_POSITION_LIMIT = [p for p in choices("pos") if p != "learned"]


def model_of(pos: str, *overrides: str, std: float = 0.3) -> gpt.GPT:
    """A small float64 model with large weights: at an initialisation of 0.02 positions hardly move the logits."""
    model = gpt.build(train_settings(f"pos={pos}", *SMALL, *overrides), vocab_size=50).double().eval()
    for name, p in model.named_parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=std)
        if name == "pos.scale":
            torch.nn.init.constant_(p, 0.3)
    return model


def tokens(batch: int = 2, time: int = 24) -> torch.Tensor:
    return torch.randint(50, (batch, time), generator=torch.Generator().manual_seed(1))


# ---- rotation ----


@pytest.mark.parametrize("position", [0, 1, 255, 2**13, 2**17, 10**6, 2**20, 2**30, -1, -(2**20)])
def test_angles_are_exact_at_any_position(position):
    """Against 200-bit arithmetic; a float32 table errs by 3e-2 at one million."""
    D, base = 64, 10000.0
    inv_freq = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    cos, sin = cos_sin(phase(inv_freq), torch.tensor([position]))
    with mpmath.workprec(200):
        for i in range(D // 2):
            angle = mpmath.mpf(position) * mpmath.mpf(float(inv_freq[i]))
            assert abs(cos[0, i].item() - float(mpmath.cos(angle))) < 4e-7
            assert abs(sin[0, i].item() - float(mpmath.sin(angle))) < 4e-7


def test_phase_of_half_and_whole_turns():
    turns = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    cos, sin = cos_sin(phase(2 * math.pi * turns), torch.tensor([1]))
    assert torch.allclose(cos[0], torch.tensor([1.0, 0, -1, 0, 1]), atol=1e-6)
    assert torch.allclose(sin[0], torch.tensor([0.0, 1, 0, -1, 0]), atol=1e-6)


def test_positions_and_frequencies_in_low_precision_are_refused():
    inv_freq = torch.ones(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="must be int32 or int64"):
        cos_sin(phase(inv_freq), torch.arange(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="must be float64"):
        phase(inv_freq.float())


def test_neighbouring_positions_differ_in_a_bfloat16_model():
    """Positions 256 and 257 are one number in bfloat16 (transformers#25681)."""
    encoding = gpt.build_encoding(train_settings("pos=rope", *SMALL)).bfloat16()
    q = torch.ones(1, 2, 1, 16, dtype=torch.bfloat16)
    turned, _ = encoding.rotate(q, q, encoding.prepare(torch.tensor([256, 257]), Scaled()))
    assert not torch.equal(turned[:, 0], turned[:, 1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_complex_multiplication(interleaved):
    torch.manual_seed(0)
    x, D = torch.randn(2, 9, 3, 16), 16
    inv_freq = 100.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    got = rotate(x, *cos_sin(phase(inv_freq), torch.arange(9)), interleaved).double()
    pairs = x.double().unflatten(-1, (8, 2)) if interleaved else x.double().unflatten(-1, (2, 8)).transpose(-1, -2)
    angle = torch.arange(9)[:, None, None] * inv_freq
    turned = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    want = torch.view_as_real(turned)
    want = want.flatten(-2) if interleaved else want.transpose(-1, -2).flatten(-2)
    assert (got - want).abs().max() < 2e-6
    assert torch.allclose(got.norm(dim=-1), x.double().norm(dim=-1), atol=1e-5)  # norms are kept


def test_rotation_passes_the_rest_through():
    x = torch.randn(1, 5, 2, 12)
    y = rotate(x, *cos_sin(phase(torch.ones(4, dtype=torch.float64)), torch.arange(5)))
    assert torch.equal(y[..., 8:], x[..., 8:]) and not torch.equal(y[..., :8], x[..., :8])


def test_split_and_interleaved_are_a_permutation_of_each_other():
    torch.manual_seed(0)
    q, k, D = torch.randn(1, 7, 2, 16), torch.randn(1, 7, 2, 16), 16
    P = torch.arange(D).view(D // 2, 2).T.reshape(-1)
    table = cos_sin(phase(10.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)), torch.arange(7))
    split = [rotate(x[..., P], *table) for x in (q, k)]
    inter = [rotate(x, *table, interleaved=True) for x in (q, k)]
    assert torch.equal(split[0], inter[0][..., P])  # bit for bit
    scores = [torch.einsum("bqhd,bkhd->bhqk", a.double(), b.double()) for a, b in (split, inter)]
    assert (scores[0] - scores[1]).abs().max() < 1e-12
    wrong = [rotate(x, *table) for x in (q, k)]  # the other layout without the permutation: another model
    assert (torch.einsum("bqhd,bkhd->bhqk", *(w.double() for w in wrong)) - scores[0]).abs().max() > 0.1


def test_rotation_equals_transformers():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    q, k = torch.randn(2, 50, 4, 32), torch.randn(2, 50, 4, 32)
    encoding = gpt.build_encoding(train_settings("pos=rope", *SMALL, "model.n_heads=2"))
    ours = encoding.rotate(q, k, encoding.prepare(torch.arange(50), Scaled()))
    freqs = torch.outer(torch.arange(50.0), encoding.inv_freq.float())
    emb = torch.cat((freqs, freqs), dim=-1)[None]
    theirs = llama.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), emb.cos(), emb.sin())
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b.transpose(1, 2)).abs().max() < 2e-5  # theirs: float32 angles


def test_frequencies_stay_out_of_casts_and_state_dicts():
    with torch.device("meta"):
        encoding = gpt.build_encoding(train_settings("pos=rope", *SMALL))
    encoding = encoding.bfloat16().half().to("cpu")
    assert encoding.inv_freq.dtype == torch.float64 and encoding.inv_freq.device.type == "cpu"
    assert encoding.state_dict() == {}


# ---- ALiBi ----


def test_alibi_slopes_are_the_published_ones():
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(4) == [0.25, 0.0625, 0.015625, 0.00390625]
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    want12 = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]
    assert slopes(12) == pytest.approx(want12)


def test_alibi_equals_the_key_only_form():
    """fairseq adds slope * j, which differs from -slope * (i - j) by a constant of each row: the softmax is one."""
    encoding = gpt.build_encoding(train_settings("pos=alibi", *SMALL))
    T = 20
    p = torch.arange(T)
    scores = torch.randn(4, T, T, dtype=torch.float64).masked_fill(
        torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf
    )
    slope = torch.tensor(slopes(4), dtype=torch.float64)[:, None, None]
    ours, theirs = (scores + encoding.bias(p, p).double()).softmax(-1), (scores + slope * p).softmax(-1)
    assert (ours - theirs).abs().max() < 1e-14


# ---- properties of whole models ----


@pytest.mark.parametrize("pos", choices("pos"))
def test_causality_by_gradient(pos):
    """The logits at place t depend on tokens 0..t, on all of them, and on none after."""
    model, x = model_of(pos, std=0.1), tokens(1, 12)
    embedded = []
    model.tokens.register_forward_hook(lambda m, i, out: embedded.append(out.requires_grad_().retain_grad() or out))
    model(x)[0, 7].square().sum().backward()
    reach = embedded[0].grad[0].abs().sum(-1) > 0
    assert reach.tolist() == [True] * 8 + [False] * 4


@pytest.mark.parametrize("pos", choices("pos"))
def test_positions_matter_exactly_where_they_should(pos):
    """Relative encodings do not see a shift of all positions; absolute ones do. (Negative control included.)"""
    limit = ["pos.max_positions=2000"] if pos == "learned" else []
    model, x = model_of(pos, *limit), tokens()
    shifted = model(x, torch.arange(24) + 1000) - model(x)
    if model.pos.relative:
        assert shifted.abs().max() < 1e-5
    else:
        assert shifted.abs().max() > 0.1
    spread = model(x, torch.arange(24) * 3) - model(x)
    assert (spread.abs().max() < 1e-9) == (pos == "none")


@pytest.mark.parametrize("pos", ["rope", "alibi", "xpos", "t5_bias"])
def test_relative_far_out(pos):
    model, x = model_of(pos), tokens()
    assert (model(x, torch.arange(24) + 100_000) - model(x)).abs().max() < 1e-5


@pytest.mark.parametrize("pos", NO_POSITION_LIMIT)
def test_positions_per_row_equal_positions_for_all(pos):
    model, x = model_of(pos), tokens()
    p = torch.arange(24) + 5
    assert torch.allclose(model(x, p), model(x, p.expand(2, -1)), atol=1e-12)


def test_without_positions_and_mask_attention_is_permutation_equivariant():
    """No absolute embedding is left over in NoPE, nor in ALiBi (x-transformers keeps one: its issue 70)."""
    for pos in ("none", "alibi"):
        model = model_of(pos)
        assert torch.equal(model.pos.embed(torch.ones(1, 4, 64), torch.arange(4)), torch.ones(1, 4, 64))
        assert not list(model.pos.parameters())
    x, order = tokens(1, 10), torch.tensor([3, 1, 4, 0, 9, 2, 6, 5, 8, 7])
    block, model = model_of("none").blocks[0], model_of("none")
    x = model.tokens(x)
    q, k, v = block.attention.qkv(x).unflatten(-1, (-1, 16)).transpose(1, 2).split(4, dim=1)
    full = F.scaled_dot_product_attention(q, k, v)
    permuted = F.scaled_dot_product_attention(q[:, :, order], k[:, :, order], v[:, :, order])
    assert torch.allclose(full[:, :, order], permuted, atol=1e-12)


def test_learned_positions_end_with_an_error_never_a_clamp():
    model = model_of("learned")
    model(tokens(1, 32))
    with pytest.raises(ValueError, match="has 32 positions and cannot read 33"):
        model(tokens(1, 33))


def test_sinusoidal_is_vaswanis_formula_and_starts_no_louder_than_the_tokens():
    encoding = gpt.build_encoding(train_settings("pos=sinusoidal", *SMALL))
    table = (encoding.embed(torch.zeros(1, 40, 64), torch.arange(40)) / encoding.scale)[0]
    for p in (0, 1, 17, 39):
        for i in (0, 5, 31):
            angle = p * 10000 ** (-2 * i / 64)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    rms = (encoding.scale * table).square().mean().sqrt().item()
    assert rms == pytest.approx(0.02, rel=0.01)


# ---- the attention that they run in ----


@pytest.mark.parametrize("pos", choices("pos"))
@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_blocked_and_written_out_attention_equal_the_plain_formula(pos, window, n_kv_heads, monkeypatch):
    """Both paths, against softmax(q k / sqrt(D) + bias) with a dense mask written here."""
    model = model_of(pos, f"model.n_kv_heads={n_kv_heads}")
    x, scaled = tokens(), Scaled(window=window)
    written_out = model(x, scaled=scaled)
    with torch.no_grad():
        whole = model(x, scaled=scaled)
        monkeypatch.setattr(attention, "QUERY_BLOCK", 7)
        blocked = model(x, scaled=scaled)

    def plain(q, k, v, pos, positions, scaled, far):
        T, window = q.shape[2], scaled.window
        distance = torch.arange(T)[:, None] - torch.arange(T)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        bias = pos.bias(positions, positions)
        scores = scores if bias is None else scores + bias
        return scores.masked_fill((distance < 0) | (distance >= (window or T)), -math.inf).softmax(-1) @ v

    monkeypatch.setattr(attention, "attend", plain)
    want = model(x, scaled=scaled)
    for got in (written_out, whole, blocked):
        assert (got - want).abs().max() < 1e-9


@pytest.mark.parametrize("pos", NO_POSITION_LIMIT)
def test_window_control_is_full_attention_inside_the_window(pos):
    model, x = model_of(pos), tokens(1, 24)
    with torch.no_grad():
        full = model(x)
        assert torch.equal(model(x, scaled=Scaled(window=24)), full)
        assert (model(x, scaled=Scaled(window=23)) - full).abs().max() > 1e-6


def test_losses_score_the_last_tokens_and_blocks_change_nothing(monkeypatch):
    model, x = model_of("rope"), tokens(2, 17)
    logits = model(x[:, :-1])
    want = F.cross_entropy(logits[:, -5:].flatten(0, 1), x[:, -5:].flatten(), reduction="none").view(2, 5)
    assert (model.losses(x[:, :-1], x[:, -5:]) - want).abs().max() < 1e-6
    whole = model.losses(x[:, :-1], x[:, 1:]).mean()
    whole.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(gpt, "LOSS_BLOCK", 3 * 50)  # three rows of logits at a time
    blocked = model.losses(x[:, :-1], x[:, 1:]).mean()
    blocked.backward()
    assert (whole - blocked).abs() < 1e-6
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad - grad).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [("gelu", True), ("swiglu", True), ("gelu", False)])
def test_model_options(shape):
    mlp, tied = shape
    model = gpt.build(train_settings("pos=rope", *SMALL, f"model.mlp={mlp}", f"model.tied_head={tied}"), 64)
    assert (model.head.weight is model.tokens.weight) == tied
    plain = gpt.build(train_settings("pos=rope", *SMALL), 64).n_parameters() + (0 if tied else 64 * 64)
    assert abs(model.n_parameters() / plain - 1) < 0.15  # a gated MLP costs about the same


def test_sizes_are_as_documented():
    sizes = {"nano": (3e6, 4.2e6), "tiny": (10e6, 30e6)}
    for name, (low, high) in sizes.items():
        model = gpt.build(train_settings(f"model={name}"), 2048)
        assert low <= model.n_parameters() <= high
    with torch.device("meta"):
        model = gpt.build(train_settings("model=gpt2", "pos=learned", "ctx=1024", "batch_tokens=8192"), 50304)
    assert model.n_parameters() == pytest.approx(124e6, rel=0.01)


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim=15"):
        gpt.build_encoding(train_settings("pos=rope", *SMALL, "model.width=60"))
    with pytest.raises(ValueError, match=r"model\.width=63"):
        gpt.build_encoding(train_settings("pos=sinusoidal", *SMALL, "model.width=63", "model.n_heads=7"))
