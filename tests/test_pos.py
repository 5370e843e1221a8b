"""Encodings: formulas against independent oracles, and the properties that define them."""

import math

import pytest
import torch
import torch.nn.functional as F

from conf.errors import UserError
from kernels import cos_sin, phase
from model.pos import Encoding, Shape
from model.pos.alibi import slopes
from model.pos.t5_bias import T5Bias
from model.pos.xpos import XPos
from model.scaling import NO_CHANGE
from tests.helpers import UNLIMITED, choices, encoding_of, model_of, more_positions, random_tokens

SHAPE = Shape(width=64, n_heads=4, head_dim=16, train_ctx=32)


# ---- rotation: more in tests/test_rope.py, and of a part of the head in tests/test_hf.py ----


def test_phase_of_quarter_half_and_full_rotations():
    rotations = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    cos, sin = cos_sin(phase(2 * math.pi * rotations), torch.tensor([1]))
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
    encoding = encoding_of("rope").bfloat16()
    q = torch.ones(1, 2, 1, 16, dtype=torch.bfloat16)
    rotated, _ = encoding.rotate(q, q, encoding.prepare(torch.tensor([256, 257]), NO_CHANGE))
    assert not torch.equal(rotated[:, 0], rotated[:, 1])


def test_frequencies_stay_out_of_casts_and_state_dicts():
    with torch.device("meta"):
        encoding = encoding_of("rope")
    encoding = encoding.bfloat16().half().to("cpu")
    assert encoding.inv_freq.dtype == torch.float64 and encoding.inv_freq.device.type == "cpu"
    assert encoding.state_dict() == {}


# ---- ALiBi ----


def test_alibi_slopes_are_the_published_ones():
    assert slopes(6) == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    want12 = [2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)]
    assert slopes(12) == pytest.approx(want12)


# ---- properties of whole models ----


@pytest.mark.parametrize("pos", choices("pos"))
def test_causality_by_gradient(pos):
    """The logits at place t depend on tokens 0..t, on all of them, and on none after."""
    model, x = model_of(pos, std=0.1), random_tokens(1, 12)
    embedded = []

    def keep_gradient(module, inputs, output):
        output.retain_grad()
        embedded.append(output)

    model.tokens.register_forward_hook(keep_gradient)
    model(x)[0, 7].square().sum().backward()
    depends = embedded[0].grad[0].abs().sum(-1) > 0
    assert depends.tolist() == [True] * 8 + [False] * 4


@pytest.mark.parametrize("pos", choices("pos"))
def test_positions_matter_exactly_where_they_should(pos):
    """Relative encodings do not see a shift of all positions; absolute ones do. (Negative control included.)"""
    model, x = model_of(pos, *more_positions(pos, 2000)), random_tokens()
    far = 100_000 if pos in UNLIMITED else 1000
    shifted = model(x, torch.arange(24) + far) - model(x)
    if model.pos.relative:
        assert shifted.abs().max() < 1e-5
    else:
        assert shifted.abs().max() > 0.1
    stretched = model(x, torch.arange(24) * 3) - model(x)
    hooks = ("embed", "prepare", "bias")  # what is given positions; NoPE overrides none, nor does FoX
    ignores_positions = all(getattr(type(model.pos), hook) is getattr(Encoding, hook) for hook in hooks)
    assert (stretched.abs().max() < 1e-9) == ignores_positions


@pytest.mark.parametrize("pos", UNLIMITED)
def test_positions_per_row_equal_positions_for_all(pos):
    model, x = model_of(pos), random_tokens()
    p = torch.arange(24) + 5
    assert torch.allclose(model(x, p), model(x, p.expand(2, -1)), atol=1e-12)


def test_without_positions_and_mask_attention_is_permutation_equivariant():
    """No absolute embedding is left over in NoPE, nor in ALiBi (x-transformers keeps one: its issue 70)."""
    for pos in ("none", "alibi"):
        model = model_of(pos)
        assert torch.equal(model.pos.embed(torch.ones(1, 4, 64), torch.arange(4)), torch.ones(1, 4, 64))
        assert not list(model.pos.parameters())
    x, order = random_tokens(1, 10), torch.tensor([3, 1, 4, 0, 9, 2, 6, 5, 8, 7])
    block, model = model_of("none").blocks[0], model_of("none")
    x = model.tokens(x)
    q, k, v = block.attention.qkv(x).unflatten(-1, (-1, 16)).transpose(1, 2).split(4, dim=1)
    full = F.scaled_dot_product_attention(q, k, v)
    permuted = F.scaled_dot_product_attention(q[:, :, order], k[:, :, order], v[:, :, order])
    assert torch.allclose(full[:, :, order], permuted, atol=1e-12)


@pytest.mark.parametrize("pos", [pos for pos in choices("pos") if pos not in UNLIMITED])
def test_a_table_of_positions_ends_with_an_error_never_a_clamp(pos):
    model = model_of(pos)
    model(random_tokens(1, 32))
    with pytest.raises(UserError, match=r"has 32 positions and cannot .* 33"):
        model(random_tokens(1, 33))


def test_sinusoidal_is_vaswanis_formula_and_starts_no_louder_than_the_tokens():
    encoding = encoding_of("sinusoidal")
    table = (encoding.embed(torch.zeros(1, 40, 64), torch.arange(40)) / encoding.scale)[0]
    for p in (0, 1, 17, 39):
        for i in (0, 5, 31):
            angle = p * 10000 ** (-2 * i / 64)
            assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    rms = (encoding.scale * table).square().mean().sqrt().item()
    assert rms == pytest.approx(0.02, rel=0.01)


# ---- xPos ----


@pytest.mark.parametrize("offset", [0, 1000, 60_000])
def test_xpos_is_ropes_score_times_a_decay_of_the_distance(offset):
    torch.manual_seed(0)
    xpos = XPos(SHAPE, 10000.0, False, gamma=0.4, scale_base=512.0)
    rope = encoding_of("rope")
    p = torch.tensor([0, 3, 200, 900]) + offset
    q, k = torch.zeros(2, 1, 4, 1, 16).unbind()
    for i in range(8):  # one pair at a time, whose decay is known
        q.zero_()[..., [i, i + 8]], k.zero_()[..., [i, i + 8]] = torch.randn(2, 4, 1, 2)
        got, plain = (
            torch.einsum("bqhd,bkhd->qk", *(t.double() for t in e.rotate(q, k, e.prepare(p, NO_CHANGE))))
            for e in (xpos, rope)
        )
        zeta = (2 * i / 16 + 0.4) / 1.4
        want = plain * zeta ** ((p[:, None] - p) / 512)
        assert (got - want).abs().max() < 1e-3 * want.abs().max()


# ---- T5's buckets ----


def test_t5_buckets_equal_transformers():
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    for buckets, longest in ((32, 128), (16, 64), (8, 1000), (64, 128)):
        ours = T5Bias(SHAPE, buckets, longest, 1.0).bucket(torch.arange(3000))
        theirs = attention._relative_position_bucket(-torch.arange(3000), False, buckets, longest)
        assert torch.equal(ours, theirs)
