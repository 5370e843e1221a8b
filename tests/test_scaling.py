"""Scaling methods: frequencies against transformers, and the properties that define each method.

tests/goldens.json holds what transformers computed, so that the comparison runs without it too; remake it with
`python -m tests.test_scaling`.
"""

import importlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from model.pos import Shape
from model.pos.rope import Rope
from model.scaling import UNSCALED, Trained, Unfit, resolve
from tests.conftest import choices, eval_settings
from tests.test_pos import model_of, tokens

GOLDENS = Path(__file__).with_name("goldens.json")
ALL = choices("scaling")
KNOBS = {name: eval_settings(f"scaling={name}").scaling for name in ALL}
ANY_ENCODING = ("none", "window", "window_sink", "logn")
ROTARY = [name for name in ALL if name not in ANY_ENCODING]
FREQUENCIES = [name for name in ROTARY if not name.startswith("rerope")]


def knobs_of(name: str, pairs: int) -> dict:
    """Those of its yaml; longrope has no usual divisors, so it is given some."""
    divisors = [1.0 + i / 4 for i in range(pairs)]
    return {**KNOBS[name], **({"long": divisors} if KNOBS[name]["kind"] == "longrope" else {})}


def rope(L: int = 256, D: int = 64, base: float = 10000.0) -> Trained:
    return Trained("rope", L, base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D))


def cases() -> list[dict]:
    """What is compared: Hugging Face's type and parameters, and the length n."""
    shapes = [(256, 64, 1e4), (128, 32, 1e4), (4096, 128, 1e4), (8192, 128, 5e5)]
    found = []
    for L, D, base in shapes:
        shape = {"L": L, "D": D, "base": base}
        found += [{**shape, "type": "linear", "factor": f, "n": L} for f in (1.0, 2.0, 4.5, 32.0)]
        for f in (1.0, 2.0, 4.0):
            found += [{**shape, "type": "dynamic", "factor": f, "n": n} for n in (L // 2, L, L + 1, 4 * L)]
        found += [{**shape, "type": "llama3", "factor": f, "n": L, "low_freq_factor": low, "high_freq_factor": high}
                  for f in (1.0, 8.0) for low, high in ((1.0, 4.0), (2.0, 3.0))]  # fmt: skip
        long, short = ([1 + i / by for i in range(D // 2)] for by in (4, 40))
        found += [{**shape, "type": "longrope", "factor": f, "n": n, "long_factor": long, "short_factor": short}
                  for f in (1.0, 8.0) for n in (L, L + 1)]  # fmt: skip
        found += [{**shape, "type": "proportional", "n": L, "partial_rotary_factor": f} for f in (0.25, 0.75, 1.0)]
        for f, truncate, (fast, slow) in itertools.product(
            (1.0, 2.0, 8.0, 32.0), (True, False), ((32.0, 1.0), (4.0, 1.0))
        ):
            knobs = {"truncate": truncate, "beta_fast": fast, "beta_slow": slow}
            found.append({**shape, "type": "yarn", "factor": f, "n": L, **knobs})
        found.append({**shape, "type": "yarn", "factor": 4.0, "n": L, "attention_factor": 1.25})
    return found


def by_transformers(case: dict) -> tuple[list[float], float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {k: v for k, v in case.items() if k not in ("L", "D", "base", "type", "n")}
    parameters |= {"rope_type": case["type"], "rope_theta": case["base"], "original_max_position_embeddings": case["L"]}
    shape = {"hidden_size": 2 * case["D"], "num_attention_heads": 2, "head_dim": case["D"]}
    config = LlamaConfig(**shape, max_position_embeddings=case["L"], rope_parameters=parameters)
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[case["type"]](config, "cpu", seq_len=case["n"])
    return inv_freq.tolist(), attention_factor


def check(case: dict, inv_freq: list[float], attention_factor: float) -> None:
    want = torch.tensor(inv_freq, dtype=torch.float64)
    if case["type"] == "proportional":  # an encoding here: its still pairs have frequency zero there
        shape = Shape(width=case["D"], n_heads=1, head_dim=case["D"], train_ctx=case["L"])
        rope_p = Rope(shape, case["base"], False, rotary_fraction=case["partial_rotary_factor"], proportional=True)
        turning = len(rope_p.inv_freq)
        assert len(want) == turning + rope_p.still and not want[turning:].any(), case
        assert ((rope_p.inv_freq - want[:turning]) / want[:turning]).abs().max() < 1e-5, case
        return
    ours = {"linear": ["pi"], "yarn": ["yarn"], "llama3": ["llama3"], "longrope": ["longrope"],
            "dynamic": ["dynamic_hf"] + ["dynamic_ntk"] * (case["factor"] == 1)}[case["type"]]  # fmt: skip
    theirs = {**case, "long": case.get("long_factor"), "short": case.get("short_factor"), "hf_factor": case["factor"]}
    for name in ours:
        knobs = {**KNOBS[name], **{k: v for k, v in theirs.items() if k in KNOBS[name]}}
        got = resolve(knobs, rope(case["L"], case["D"], case["base"]), case["n"], case["n"])
        assert ((got.inv_freq - want) / want).abs().max() < 1e-5, case  # theirs is float32
        assert got.attention_factor == pytest.approx(attention_factor, rel=1e-6), case


def test_frequencies_equal_the_frozen_ones_of_transformers():
    frozen = json.loads(GOLDENS.read_text())
    assert [row["case"] for row in frozen] == cases()
    for row in frozen:
        check(row["case"], row["inv_freq"], row["attention_factor"])


def test_frequencies_equal_those_of_the_installed_transformers():
    pytest.importorskip("transformers")
    for case in cases():
        check(case, *by_transformers(case))


@pytest.mark.parametrize("name", ALL)
def test_factor_one_changes_no_bit(name):
    trained = rope()
    for n in (64, 255, 256):
        scaled = resolve(knobs_of(name, 32), trained, n, n)
        assert scaled.factor == 1 and scaled.attention_factor == 1
        assert scaled.inv_freq is None or torch.equal(scaled.inv_freq, trained.inv_freq)
    model, x = model_of("rope"), tokens()  # trained at 32
    scaled = resolve(knobs_of(name, 8), Trained("rope", 32, model.pos.inv_freq), 24, 24)
    assert torch.equal(model(x, scaled=scaled), model(x))


@pytest.mark.parametrize("name", [n for n in ALL if n != "none"])
def test_every_method_changes_something_past_the_trained_context(name):
    scaled = resolve(knobs_of(name, 32), rope(), 1024, 1024)
    assert scaled != UNSCALED
    if name in FREQUENCIES:
        assert scaled.factor == (7 if name == "dynamic_hf" else 4)
        assert not torch.equal(scaled.inv_freq, rope().inv_freq)
    model, x = model_of("rope"), tokens()
    scaled = resolve(knobs_of(name, 8), Trained("rope", 8, model.pos.inv_freq), 24, 24)
    assert (model(x, scaled=scaled) - model(x)).abs().max() > 1e-3


def test_pi_at_m_is_no_scaling_at_m_over_s():
    model, x = model_of("rope"), tokens()
    scaled = resolve({"kind": "pi", "factor": 4}, Trained("rope", 32, model.pos.inv_freq), 24, 24)
    assert (model(x, torch.arange(24) * 4, scaled) - model(x)).abs().max() < 1e-5
    assert (model(x, torch.arange(24), scaled) - model(x)).abs().max() > 0.1


@pytest.mark.parametrize("D", [4, 32, 64, 128])
def test_ntk_keeps_the_fastest_pair_and_interpolates_the_slowest(D):
    trained = rope(D=D)
    got = resolve({"kind": "ntk", "factor": 8.0}, trained, 256, 256).inv_freq
    assert got[0] == trained.inv_freq[0]
    assert got[-1].item() == pytest.approx(trained.inv_freq[-1].item() / 8, rel=1e-12)
    raised = 10000.0 * 8 ** (D / (D - 2))  # the same, said by the base
    assert torch.allclose(got, raised ** (-torch.arange(0, D, 2, dtype=torch.float64) / D), rtol=1e-12)


def test_dynamic_ntk_is_ntk_with_the_factor_of_the_length():
    for n in (100, 256, 300, 4096):
        dynamic, ntk = (resolve(KNOBS[k], rope(), n, 4096) for k in ("dynamic_ntk", "ntk"))
        assert torch.equal(dynamic.inv_freq, ntk.inv_freq) and dynamic.factor == max(1, n / 256)


def test_yarn_keeps_fast_pairs_interpolates_slow_ones_and_scales_scores_by_the_square():
    trained = rope(L=4096, D=128)
    scaled = resolve({"kind": "yarn", "factor": 8.0}, trained, 4096, 4096)
    turns = 4096 * trained.inv_freq / (2 * math.pi)
    ratio = scaled.inv_freq / trained.inv_freq
    assert torch.equal(ratio[turns > 32], torch.ones_like(ratio[turns > 32]))
    assert torch.allclose(ratio[turns < 0.9], torch.tensor(1 / 8, dtype=torch.float64))
    assert bool((ratio.diff() <= 0).all())
    model = model_of("rope")
    q, p = torch.randn(1, 5, 1, 16).double(), torch.arange(5)
    small = resolve({"kind": "yarn", "factor": 8.0}, Trained("rope", 32, model.pos.inv_freq), 32, 32)
    plain = resolve(
        {"kind": "yarn", "factor": 8.0, "attention_factor": 1.0}, Trained("rope", 32, model.pos.inv_freq), 32, 32
    )
    scores = [torch.einsum("bqhd,bkhd->qk", *model.pos.rotate(q, q, model.pos.prepare(p, s))) for s in (small, plain)]
    assert torch.allclose(scores[0], scores[1] * (0.1 * math.log(8) + 1) ** 2, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_order_of_lengths_cannot_matter(name):
    model, x = model_of("rope"), tokens(1, 24)
    trained = Trained("rope", 8, model.pos.inv_freq)

    def logits(n):
        return model(x[:, :n], scaled=resolve(knobs_of(name, 8), trained, n, 24))

    forward = [logits(n) for n in (4, 8, 12, 24)]
    backward = [logits(n) for n in (24, 12, 8, 4)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_prefix_consistency(name):
    """At a fixed factor a longer input leaves earlier logits alone, unless the method says otherwise."""
    model, x = model_of("rope"), tokens(1, 24)
    trained = Trained("rope", 8, model.pos.inv_freq)
    knobs = {**knobs_of(name, 8), **({"factor": 3.0} if "factor" in KNOBS[name] else {})}
    consistent = getattr(importlib.import_module(f"model.scaling.{knobs['kind']}"), "PREFIX_CONSISTENT", True)

    def logits(n):
        return model(x[:, :n], scaled=resolve(knobs, trained, n, 24))

    for short, long in ((16, 24), (6, 24)):
        same = torch.allclose(logits(short), logits(long)[:, :short], atol=1e-9)
        assert same or not consistent
    assert same == consistent


def test_factor_auto_fixed_and_number():
    def factor(given, n, ctx):
        return resolve({"kind": "pi", "factor": given}, rope(L=256), n, ctx).factor

    assert [factor("auto", n, 8192) for n in (64, 256, 512, 8192)] == [1, 1, 2, 32]
    assert [factor("fixed", n, 8192) for n in (64, 256, 512, 8192)] == [32] * 4
    assert [factor(6, n, 8192) for n in (64, 512)] == [6, 6]
    assert factor("fixed", 64, 128) == 1


@pytest.mark.parametrize("given", ["autos", 0.5, -1, True, None, float("nan")])
def test_bad_factors_are_refused(given):
    with pytest.raises(ValueError, match=r"scaling\.factor=.*: must be auto, fixed or a number of at least 1"):
        resolve({"kind": "pi", "factor": given}, rope(), 512, 512)


@pytest.mark.parametrize("name", ALL)
def test_what_needs_frequencies_does_not_fit_encodings_without(name):
    trained = Trained("alibi", 256, None)
    if name in ROTARY:
        with pytest.raises(Unfit, match=f"scaling={KNOBS[name]['kind']} does not fit: .*pos=alibi has none"):
            resolve(knobs_of(name, 32), trained, 512, 512)
    else:
        resolve(KNOBS[name], trained, 512, 512)


def test_bad_knobs_are_refused():
    for knobs, message in [
        ({"kind": "yarn", "factor": 2.0, "beta_fast": "fast"}, r"scaling\.beta_fast=fast: must be of type float"),
        ({"kind": "yarn", "factor": 2.0, "beta_fast": 0.5}, r"scaling\.beta_fast=0\.5: must be greater"),
        ({"kind": "yarn", "factor": 2.0, "beta": 1.0}, r"scaling\.beta=1\.0: no such setting of scaling=yarn"),
        ({"kind": "window", "size": 0}, r"scaling\.size=0: must be at least 1"),
        ({"kind": "resolve"}, r"scaling\.kind=resolve: no model/scaling/resolve\.py"),
        ({"kind": "../pos/rope"}, r"scaling\.kind="),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve(knobs, rope(), 512, 512)
    with pytest.raises(Unfit, match="rotary width"):
        resolve({"kind": "ntk", "factor": 2.0}, rope(D=2), 512, 512)


if __name__ == "__main__":
    rows = []
    for case in cases():
        inv_freq, attention_factor = by_transformers(case)
        inv_freq = [float(f"{x:.8g}") for x in inv_freq]  # float32 holds no more
        rows.append({"case": case, "inv_freq": inv_freq, "attention_factor": attention_factor})
    GOLDENS.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
