"""Every encoding with every scaling, and the formulas of those beyond RoPE against independent ones."""

import importlib
import json
import math
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F

from model import attention, gpt, linear_attention, positions
from model.pos import Shape
from model.pos.t5_bias import T5Bias
from model.pos.xpos import XPos
from model.scaling import Scaled, Trained, Unfit, compose, on_top, resolve
from tests.conftest import ROOT, choices, command, train_settings
from tests.test_pos import SMALL, model_of, tokens
from tests.test_scaling import ALL, KNOBS, ROTARY, knobs_of

SHAPE = Shape(width=64, n_heads=4, head_dim=16, train_ctx=32)


def rotates(pos: str) -> bool:
    return gpt.build_encoding(train_settings(f"pos={pos}", *SMALL)).inv_freq is not None


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("pos", choices("pos"))
def test_every_encoding_with_every_scaling(pos, attention):
    """Each fits, trains a step at L and reads 3 L with finite losses, or says in words why not."""
    try:
        cfg = train_settings(f"pos={pos}", *SMALL, "model.n_layers=1", f"attention={attention}")
        model = gpt.build(cfg, 50)
    except ValueError as e:
        assert attention == "linear" and f"attention=linear: has no scores that pos={cfg_kind(pos)} could add" in str(e)
        return
    trained = gpt.trained(cfg, model.pos)
    x, long = tokens(2, 33), tokens(2, 97)
    for name in ALL:
        pairs = 0 if trained.frequencies is None else len(trained.frequencies)
        needs_scores = KNOBS[name]["kind"] in ("logn", "rerope", "window_sink")
        try:
            at_L, at_3L = (resolve(knobs_of(name, pairs), trained, n, 96) for n in (32, 96))
        except Unfit:
            assert (name in ROTARY and not rotates(pos)) or (attention == "linear" and needs_scores), name
            continue
        model.zero_grad()
        loss = model.losses(x[:, :-1], x[:, 1:], scaled=at_L).mean()
        loss.backward()
        assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in model.parameters()), name
        if model.pos.max_positions is None:
            with torch.no_grad():
                assert torch.isfinite(model.losses(long[:, :-1], long[:, -5:], scaled=at_3L)).all(), name


def cfg_kind(pos: str) -> str:
    return train_settings(f"pos={pos}", *SMALL).pos["kind"]


# ---- encodings ----


def test_partial_rotary_turns_the_first_part_with_its_own_exponent():
    encoding = gpt.build_encoding(train_settings("pos=rope_partial", *SMALL, "pos.rotary_fraction=0.5"))
    assert encoding.inv_freq.tolist() == pytest.approx([10000 ** (-2 * i / 8) for i in range(4)])  # D = 8 of 16
    q = torch.randn(1, 5, 2, 16)
    turned, _ = encoding.rotate(q, q, encoding.prepare(torch.arange(5), Scaled()))
    assert torch.equal(turned[..., 8:], q[..., 8:]) and not torch.equal(turned[:, 1:, :, :8], q[:, 1:, :, :8])


def test_proportional_rotary_turns_the_fast_pairs_at_the_whole_heads_frequencies():
    settings = ("pos=rope_proportional", *SMALL, "pos.rotary_fraction=0.5")
    encoding, whole = gpt.build_encoding(train_settings(*settings)), gpt.build_encoding(train_settings(*SMALL))
    assert torch.equal(encoding.inv_freq, whole.inv_freq[:4])
    q = torch.randn(1, 5, 2, 16)
    p = torch.arange(5)
    turned, want = (e.rotate(q, q, e.prepare(p, Scaled()))[0] for e in (encoding, whole))
    fast = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])  # pairs (i, i + 8), i < 4
    slow = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])
    assert torch.equal(turned[..., fast], want[..., fast]) and torch.equal(turned[..., slow], q[..., slow])


@pytest.mark.parametrize("settings", ["0", "1.5", "-0.1", "0.01"])
def test_rotary_fractions_that_leave_no_pair_are_refused(settings):
    with pytest.raises(ValueError, match=r"pos\.rotary_fraction=.*: must be at most 1 and leave a pair of head_dim=16"):
        gpt.build_encoding(train_settings("pos=rope_partial", *SMALL, f"pos.rotary_fraction={settings}"))


@pytest.mark.parametrize("offset", [0, 1000, 60_000])
def test_xpos_is_ropes_score_times_a_decay_of_the_distance(offset):
    torch.manual_seed(0)
    xpos = XPos(SHAPE, 10000.0, False, gamma=0.4, scale_base=512.0)
    rope = gpt.build_encoding(train_settings(*SMALL))
    p = torch.tensor([0, 3, 200, 900]) + offset
    q, k = torch.zeros(2, 1, 4, 1, 16).unbind()
    for i in range(8):  # one pair at a time, whose decay is known
        q.zero_()[..., [i, i + 8]], k.zero_()[..., [i, i + 8]] = torch.randn(2, 4, 1, 2)
        got, plain = (
            torch.einsum("bqhd,bkhd->qk", *(t.double() for t in e.rotate(q, k, e.prepare(p, Scaled()))))
            for e in (xpos, rope)
        )
        zeta = (2 * i / 16 + 0.4) / 1.4
        want = plain * zeta ** ((p[:, None] - p) / 512)
        assert (got - want).abs().max() < 1e-3 * want.abs().max()


def test_t5_buckets_equal_transformers():
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    for buckets, longest in ((32, 128), (16, 64), (8, 1000), (64, 128)):
        ours = T5Bias(SHAPE, buckets, longest).bucket(torch.arange(3000))
        theirs = attention._relative_position_bucket(-torch.arange(3000), False, buckets, longest)
        assert torch.equal(ours, theirs)


def test_t5_buckets_by_hand():
    bucket = T5Bias(SHAPE, 8, 16).bucket(torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 1000]))
    # 0..3 exact; then 4 + floor(4 ln(d / 4) / ln 4): 6 -> 5.17, 8 -> 6, 12 -> 7.17
    assert bucket.tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_alibi_without_a_mask_equals_alibi_with_one(dtype, tolerance):
    """Also at distances where a bias in plain bfloat16 would be off by whole nats: the reference is float64."""
    encoding = gpt.build_encoding(train_settings("pos=alibi", *SMALL))
    T = 3000
    q, k, v = torch.randn(3, 1, 4, T, 16, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    p = torch.arange(T) + 10**6
    with torch.no_grad():
        got = attention.attend(q, k, v, encoding, p, Scaled())
        mask = encoding.bias(p, p).double().masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=mask[None])
    assert (got.double() - want).abs().max() < tolerance


# ---- scaling methods that change attention ----


def dense(model: gpt.GPT, x: torch.Tensor, scores) -> torch.Tensor:
    """One layer's attention output with scores(q, k) [H, T, T] given in full, as an independent reference."""
    block = model.blocks[0]
    h = block.norm1(model.tokens(x))
    q, k, v = block.attention.qkv(h).unflatten(-1, (-1, 16)).split(4, dim=2)
    s = scores(q[0].transpose(0, 1), k[0].transpose(0, 1)) / 4
    T = x.shape[1]
    s = s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
    return (s.softmax(-1) @ v[0].transpose(0, 1)).transpose(0, 1).flatten(1)


def attention_output(model: gpt.GPT, x: torch.Tensor, scaled: Scaled) -> torch.Tensor:
    seen = []
    handle = model.blocks[0].attention.out.register_forward_pre_hook(lambda m, i: seen.append(i[0]))
    with torch.no_grad():
        model(x, scaled=scaled)
    handle.remove()
    return seen[0][0]


def turned_scores(inv_freq: torch.Tensor, relative: torch.Tensor):
    """q . R(relative) k for any matrix of relative positions, which may be fractions, in float64."""

    def scores(q, k):
        angle = relative[..., None] * inv_freq
        q, k = (torch.view_as_complex(t.unflatten(-1, (2, 8)).transpose(-1, -2).contiguous()) for t in (q, k))
        return torch.einsum("hqi,hki,qki->hqk", q, k.conj(), torch.polar(torch.ones_like(angle), angle)).real

    return scores


@pytest.mark.parametrize("block", [7, 512])
@pytest.mark.parametrize("leak", [None, 4.0, "auto"])
def test_rerope_clips_relative_positions(leak, block, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    model, x = model_of("rope"), tokens(1, 24)
    trained = Trained("rope", 12, model.pos.inv_freq)
    scaled = resolve({"kind": "rerope", "size": 6, "leak": leak}, trained, 24, 24)
    slope = {None: 0.0, 4.0: 1 / 4, "auto": (12 - 6) / (24 - 6)}[leak]
    r = (torch.arange(24)[:, None] - torch.arange(24)).double()
    clipped = torch.where(r < 6, r, 6 + (r - 6) * slope)
    want = dense(model, x, turned_scores(model.pos.inv_freq, clipped))
    assert (attention_output(model, x, scaled) - want).abs().max() < 1e-5
    if leak == "auto":
        assert clipped.max() < 12  # inside what was trained
    unclipped = dense(model, x, turned_scores(model.pos.inv_freq, r))
    assert (want - unclipped).abs().max() > 1e-2


@pytest.mark.parametrize("block", [7, 512])
def test_window_with_sinks_keeps_the_first_keys_at_distance_L(block, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    model, x = model_of("rope"), tokens(1, 24)
    scaled = resolve({"kind": "window_sink", "sinks": 2}, Trained("rope", 8, model.pos.inv_freq), 24, 24)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    seen = (i - j < 6) | (j < 2)
    turned = turned_scores(model.pos.inv_freq, (i - j).clamp(max=8).double())
    want = dense(model, x, lambda q, k: turned(q, k).masked_fill(~seen, -math.inf))
    assert (attention_output(model, x, scaled) - want).abs().max() < 1e-5
    assert (seen & (j <= i)).sum(dim=1).max() == 8  # as many keys as the window control


def test_logn_multiplies_queries_past_L():
    model, x = model_of("rope"), tokens(1, 24)
    scaled = resolve({"kind": "logn"}, Trained("rope", 8, model.pos.inv_freq), 24, 24)
    factor = torch.tensor([max(1, math.log(m + 1) / math.log(8)) for m in range(24)], dtype=torch.float64)
    r = (torch.arange(24)[:, None] - torch.arange(24)).double()
    turned = turned_scores(model.pos.inv_freq, r)
    want = dense(model, x, lambda q, k: turned(q, k) * factor[:, None])
    assert (attention_output(model, x, scaled) - want).abs().max() < 1e-5


def test_ntk_mixed_slows_the_last_pair_by_the_factor_and_lies_between_pi_and_none():
    trained = Trained("rope", 256, 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    ratio = resolve({"kind": "ntk_mixed", "factor": 8.0}, trained, 256, 256).inv_freq / trained.inv_freq
    a = math.log(8) / 32**0.75  # Su's own form, kexue.fm/archives/9706
    want = torch.exp(-a * torch.arange(1, 33, dtype=torch.float64) ** 0.75)
    assert torch.allclose(ratio, want, rtol=1e-12) and ratio[-1].item() == pytest.approx(1 / 8)


def test_by_parts_at_its_limits():
    trained = Trained("rope", 4096, 10000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))

    def ratio(alpha, beta, kind="ntk_by_parts"):
        got = resolve({"kind": kind, "factor": 8.0, "alpha": alpha, "beta": beta}, trained, 4096, 4096)
        return got.inv_freq / trained.inv_freq

    assert torch.allclose(ratio(1e9, 2e9), torch.tensor(1 / 8).double())  # PI
    assert torch.equal(ratio(0.0, 1e-9), torch.ones(64).double())  # none
    llama3 = resolve({"kind": "llama3", "factor": 8.0}, trained, 4096, 4096)
    assert torch.equal(llama3.inv_freq / trained.inv_freq, ratio(1.0, 4.0))
    paper = resolve({"kind": "yarn_paper", "factor": 8.0}, trained, 4096, 4096)
    assert paper.attention_factor == pytest.approx(0.1 * math.log(8) + 1)
    assert torch.equal(paper.inv_freq / trained.inv_freq, ratio(1.0, 32.0))
    code = resolve({"kind": "yarn", "factor": 8.0}, trained, 4096, 4096)
    assert 0.2 < (1 - paper.inv_freq / code.inv_freq).abs().max() < 0.6  # not the same method


def test_hf_dynamic_factor_is_not_the_extension_factor():
    trained = Trained("rope", 256, 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
    factors = [resolve({"kind": "dynamic_hf", "hf_factor": f}, trained, 1024, 1024).factor for f in (1.0, 2.0, 4.0)]
    assert factors == [4, 7, 13]


# ---- composing ----


def test_methods_compose_where_they_change_different_things():
    trained = Trained("rope", 8, model_of("rope").pos.inv_freq)
    both = resolve(KNOBS["ntk"], trained, 24, 24, [KNOBS["logn"]])
    assert torch.equal(both.inv_freq, resolve(KNOBS["ntk"], trained, 24, 24).inv_freq)
    assert both.logn == 8 and both.factor == 3
    with pytest.raises(Unfit, match="two methods change the same thing"):
        resolve(KNOBS["ntk"], trained, 24, 24, [KNOBS["pi"]])
    assert compose(Scaled(window=3), Scaled(logn=4)) == Scaled(window=3, logn=4)


def test_a_method_replaces_the_frequencies_a_run_was_tuned_with_and_nothing_else():
    f, g = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    own = Scaled(inv_freq=f, factor=4.0, attention_factor=1.1, logn=64)
    asked = on_top(own, Scaled(inv_freq=g, factor=8.0))
    assert asked.inv_freq is g and asked.factor == 8 and asked.attention_factor == 1 and asked.logn == 64
    window = on_top(own, Scaled(window=5))
    assert window.inv_freq is f and window.attention_factor == 1.1 and window.window == 5 and window.factor == 4
    assert on_top(own, Scaled()) == own


# ---- linear attention ----


@pytest.mark.parametrize("window", [None, 1, 37, 300])
@pytest.mark.parametrize("T", [1, 100, 128, 300])
def test_linear_attention_equals_its_masked_quadratic_form(T, window):
    torch.manual_seed(0)
    q = torch.randn(2, T, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, T, 2, 16, dtype=torch.float64).unbind()
    rope = gpt.build_encoding(train_settings(*SMALL))
    prepared = rope.prepare(torch.arange(T), Scaled())

    def rotate(a, b):
        return rope.rotate(a, b, prepared)

    got = linear_attention.linear_attention(q, k, v, rotate, window)
    fq, fk = F.elu(q) + 1, (F.elu(k) + 1).repeat_interleave(2, dim=2)
    rq, rk = rotate(fq, fk)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    numerator = torch.einsum("bqhd,bkhd->bhqk", rq, rk) * seen  # rotated
    denominator = (torch.einsum("bqhd,bkhd->bhqk", fq, fk) * seen).sum(-1, keepdim=True)  # not rotated
    want = torch.einsum("bhqk,bkhd->bqhd", numerator / denominator, v.repeat_interleave(2, dim=2))
    assert (got - want).abs().max() < 1e-9


def test_linear_attention_is_causal_and_sees_the_rotation():
    linear = ("attention=linear",)
    model, x = model_of("rope", *linear), tokens(1, 24)
    other = x.clone()
    other[0, 20:] = (other[0, 20:] + 1) % 50
    assert torch.equal(model(x)[:, :20], model(other)[:, :20])
    assert (model(x, torch.arange(24) + 5) - model(x)).abs().max() < 1e-5
    assert (model(x, torch.arange(24) * 2) - model(x)).abs().max() > 1e-2
    pi = resolve(KNOBS["pi"], Trained("rope", 8, model.pos.inv_freq, "linear"), 24, 24)
    assert (model(x, scaled=pi) - model(x)).abs().max() > 1e-3


# ---- training positions ----


@pytest.mark.parametrize("kind", ["random", "pose"])
def test_drawn_positions_rise_within_their_range_and_reach_far(kind):
    drawn = [positions.sample(kind, s, seed=0, rows=8, ctx=32, longest=256) for s in range(50)]
    p = torch.stack(drawn)
    assert p.shape == (50, 8, 32) and p.dtype == torch.int64 and p.min() >= 0 and p.max() < 256
    steps = p.diff(dim=-1)
    assert bool((steps >= 1).all()) and p.max() > 240
    if kind == "pose":  # one skip at most
        assert bool(((steps > 1).sum(-1) <= 1).all()) and bool((p[..., 0] == 0).float().mean() > 0.9)
    assert torch.equal(p[7], positions.sample(kind, 7, seed=0, rows=8, ctx=32, longest=256))  # pure in (seed, step)
    assert not torch.equal(p[7], positions.sample(kind, 7, seed=1, rows=8, ctx=32, longest=256))


def test_ordered_positions_are_none():
    assert positions.sample("ordered", 0, seed=0, rows=2, ctx=4, longest=None) is None


# ---- one file and one yaml ----


def test_a_toy_encoding_and_a_toy_scaling_need_one_file_and_one_yaml_each(tmp_path, cache):
    """In a copy of the repo, as processes: train with the one, read with the other."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".cache").symlink_to(cache)
    (tmp_path / "model/pos/toy.py").write_text(
        "from model.pos.rope import Rope\n\n\nclass Toy(Rope):\n"
        "    def __init__(self, shape, base: float, interleaved: bool, twist: float):\n"
        "        super().__init__(shape, base, interleaved)\n"
        "        self.inv_freq = self.inv_freq * twist\n\n\nbuild = Toy\n"
    )
    (tmp_path / "conf/pos/toy.yaml").write_text("kind: toy\nbase: 100.0\ninterleaved: true\ntwist: 0.5\n")
    (tmp_path / "model/scaling/toy_half.py").write_text(
        "from model.scaling import Scaled\n\n\ndef scale(trained, n: int, factor: float, share: float):\n"
        "    return Scaled(inv_freq=trained.inv_freq / (1 + share * (factor - 1)), factor=factor)\n"
    )
    (tmp_path / "conf/scaling/toy_half.yaml").write_text("kind: toy_half\nfactor: auto\nshare: 0.5\n")
    script = tmp_path / "train.py"
    done = command(str(script), "exp=smoke", "steps=2", "pos=toy", "name=toy", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = command(str(tmp_path / "eval.py"), "run=toy", "ctx=128", "documents=3", "scaling=toy_half", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "toy_half" in done.stdout
    rows = [json.loads(x) for x in next((tmp_path / "runs/toy/eval").glob("toy_half-*.jsonl")).read_text().splitlines()]
    assert [row["factor"] for row in rows] == [1, 2] and rows[0]["pos"] == "toy"
    assert importlib.util.find_spec("model.pos.toy") is None  # and nothing of it is left here
