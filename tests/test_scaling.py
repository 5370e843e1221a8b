"""Scaling methods: frequencies against transformers, the properties that define each method, and every encoding."""

import dataclasses
import importlib
import itertools
import math
import re

import pytest
import torch

from conf.errors import UserError
from conf.registry import yaml_values
from model import gpt
from model.pos import Shape
from model.pos.rope import Rope
from model.scaling import NO_CHANGE, ContextChange, NotApplicable, TrainedContext, combine, override, resolve
from tests.helpers import SMALL, choices, model_of, random_tokens, rope_context as rope, scaling_knobs, train_settings

ALL = choices("scaling")
KNOBS = {name: yaml_values("scaling", name) for name in ALL}


def cases() -> list[dict]:
    """What is compared: Hugging Face's type and parameters, and the length n."""
    shapes = [(256, 64, 1e4), (128, 32, 1e4), (4096, 128, 1e4), (8192, 128, 5e5)]
    found = []
    for L, D, base in shapes:
        shape = {"L": L, "D": D, "base": base}
        found += [{**shape, "type": "linear", "factor": f, "n": L} for f in (1.0, 2.0, 4.5, 32.0)]
        for f in (1.0, 2.0, 4.0):
            found += [{**shape, "type": "dynamic", "factor": f, "n": n} for n in (L // 2, L, L + 1, 4 * L)]
        found += [
            {**shape, "type": "llama3", "factor": f, "n": L, "low_freq_factor": low, "high_freq_factor": high}
            for f in (1.0, 8.0)
            for low, high in ((1.0, 4.0), (2.0, 3.0))
        ]
        long, short = ([1 + i / by for i in range(D // 2)] for by in (4, 40))
        found += [
            {**shape, "type": "longrope", "factor": f, "n": n, "long_factor": long, "short_factor": short}
            for f in (1.0, 8.0)
            for n in (L, L + 1)
        ]
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
        rotating = len(rope_p.inv_freq)
        assert len(want) == rotating + rope_p.still and not want[rotating:].any(), case
        assert ((rope_p.inv_freq - want[:rotating]) / want[:rotating]).abs().max() < 1e-5, case
        return
    ours = {
        "linear": ["pi"],
        "yarn": ["yarn"],
        "llama3": ["llama3"],
        "longrope": ["longrope"],
        "dynamic": ["dynamic_hf"] + ["dynamic_ntk"] * (case["factor"] == 1),
    }[case["type"]]
    theirs = {**case, "long": case.get("long_factor"), "short": case.get("short_factor"), "hf_factor": case["factor"]}
    for name in ours:
        knobs = {**KNOBS[name], **{k: v for k, v in theirs.items() if k in KNOBS[name]}}
        got = resolve(knobs, rope(case["L"], case["D"], case["base"]), case["n"], case["n"])
        assert ((got.inv_freq - want) / want).abs().max() < 1e-5, case  # theirs is float32
        assert got.attention_factor == pytest.approx(attention_factor, rel=1e-6), case


def test_frequencies_equal_those_of_transformers():
    pytest.importorskip("transformers")
    for case in cases():
        check(case, *by_transformers(case))


@pytest.mark.parametrize("name", ALL)
def test_factor_one_changes_no_bit(name):
    trained, off = rope(), {"always": False} if "always" in KNOBS[name] else {}
    for n in (64, 255, 256):
        change = resolve({**scaling_knobs(name, 32), **off}, trained, n, n)
        assert change.factor == 1 and change.attention_factor == 1
        assert change.inv_freq is None or torch.equal(change.inv_freq, trained.inv_freq)
    model, x = model_of("rope"), random_tokens()  # trained at 32
    change = resolve({**scaling_knobs(name, 8), **off}, TrainedContext("rope", 32, model.pos.inv_freq), 24, 24)
    assert torch.equal(model(x, change=change), model(x))


@pytest.mark.parametrize("name", [n for n in ALL if n != "none"])
def test_every_method_changes_something_past_the_trained_context(name):
    change = resolve(scaling_knobs(name, 32), rope(), 1024, 1024)
    assert change.overrides()
    if change.inv_freq is not None:
        assert not torch.equal(change.inv_freq, rope().inv_freq)
    if "factor" in KNOBS[name]:
        assert change.factor == 4
    model, x = model_of("rope"), random_tokens()
    change = resolve(scaling_knobs(name, 8), TrainedContext("rope", 8, model.pos.inv_freq), 24, 24)
    assert (model(x, change=change) - model(x)).abs().max() > 1e-3


def test_pi_at_m_is_no_scaling_at_m_over_s():
    model, x = model_of("rope"), random_tokens()
    change = resolve({"kind": "pi", "factor": 4}, TrainedContext("rope", 32, model.pos.inv_freq), 24, 24)
    assert (model(x, torch.arange(24) * 4, change) - model(x)).abs().max() < 1e-5
    assert (model(x, torch.arange(24), change) - model(x)).abs().max() > 0.1


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


@pytest.mark.parametrize("name", ALL)
def test_order_of_lengths_cannot_matter(name):
    model, x = model_of("rope"), random_tokens(1, 24)
    trained = TrainedContext("rope", 8, model.pos.inv_freq)

    def logits(n):
        return model(x[:, :n], change=resolve(scaling_knobs(name, 8), trained, n, 24))

    forward = [logits(n) for n in (4, 8, 12, 24)]
    backward = [logits(n) for n in (24, 12, 8, 4)][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_prefix_consistency(name):
    """At a fixed factor a longer input leaves earlier logits alone, unless the method says otherwise."""
    model, x = model_of("rope"), random_tokens(1, 24)
    trained = TrainedContext("rope", 8, model.pos.inv_freq)
    knobs = {**scaling_knobs(name, 8), **({"factor": 3.0} if "factor" in KNOBS[name] else {})}
    consistent = getattr(importlib.import_module(f"model.scaling.{knobs['kind']}"), "PREFIX_CONSISTENT", True)

    def logits(n):
        return model(x[:, :n], change=resolve(knobs, trained, n, 24))

    for short, long in ((16, 24), (8, 24)):
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


def uses_frequencies(change: ContextChange) -> bool:
    return change.inv_freq is not None or change.position_map is not None


@pytest.mark.parametrize("name", ALL)
def test_what_needs_frequencies_is_not_applicable_to_encodings_without(name):
    """Or it changes something else there, as window_sink does: it clips distances only of encodings that rotate."""
    knobs, without = scaling_knobs(name, 32), TrainedContext("alibi", 256, None)
    with_frequencies = resolve(knobs, rope(), 512, 512)
    try:
        change = resolve(knobs, without, 512, 512)
    except NotApplicable as e:
        assert uses_frequencies(with_frequencies)
        assert re.search(f"scaling={name} is not applicable: .*pos=alibi has none", str(e))
    else:
        assert not uses_frequencies(change)
        assert bool(change.overrides()) == bool(with_frequencies.overrides())


def test_bad_knobs_are_refused():
    with pytest.raises(ValueError, match=r"scaling\.kind="):
        resolve({"kind": "../pos/rope"}, rope(), 512, 512)
    with pytest.raises(NotApplicable, match="rotary width"):
        resolve({"kind": "ntk", "factor": 2.0}, rope(D=2), 512, 512)


# ---- formulas of single methods ----


def test_ntk_mixed_slows_the_last_pair_by_the_factor_and_lies_between_pi_and_none():
    trained = rope()
    ratio = resolve({"kind": "ntk_mixed", "factor": 8.0}, trained, 256, 256).inv_freq / trained.inv_freq
    a = math.log(8) / 32**0.75  # Su's own form, kexue.fm/archives/9706
    want = torch.exp(-a * torch.arange(1, 33, dtype=torch.float64) ** 0.75)
    assert torch.allclose(ratio, want, rtol=1e-12) and ratio[-1].item() == pytest.approx(1 / 8)


def test_by_parts_at_its_limits():
    trained = rope(4096, 128)

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
    trained = rope()
    factors = [resolve({"kind": "dynamic_hf", "hf_factor": f}, trained, 1024, 1024).factor for f in (1.0, 2.0, 4.0)]
    assert factors == [4, 7, 13]


# ---- composing ----


def test_methods_compose_where_they_change_different_things():
    trained = TrainedContext("rope", 8, model_of("rope").pos.inv_freq)
    both = resolve(KNOBS["ntk"], trained, 24, 24, [KNOBS["logn"]])
    assert torch.equal(both.inv_freq, resolve(KNOBS["ntk"], trained, 24, 24).inv_freq)
    assert both.logn == 8 and both.factor == 3
    with pytest.raises(NotApplicable, match="two methods change the same thing"):
        resolve(KNOBS["ntk"], trained, 24, 24, [KNOBS["pi"]])
    assert combine([ContextChange(window=3), ContextChange(logn=4)]) == ContextChange(window=3, logn=4)


def test_a_method_replaces_the_frequencies_a_run_was_tuned_with_and_nothing_else():
    f, g = torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    tuned = ContextChange(inv_freq=f, factor=4.0, attention_factor=1.1, logn=64)
    other = override(tuned, ContextChange(inv_freq=g, factor=8.0))
    assert other.inv_freq is g and other.factor == 8 and other.attention_factor == 1 and other.logn == 64
    window = override(tuned, ContextChange(window=5))
    assert window.inv_freq is f and window.attention_factor == 1.1 and window.window == 5 and window.factor == 4
    assert override(window, ContextChange(window=9, logn=3)).window == 5  # it was trained with no more
    same = override(tuned, NO_CHANGE)
    assert all(getattr(same, f.name) is getattr(tuned, f.name) for f in dataclasses.fields(tuned))


# ---- with every encoding ----


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("pos", choices("pos"))
def test_every_encoding_with_every_scaling(pos, attention):
    """Each is applicable, trains a step at L and evaluates 3 L with finite losses, or says in words why not."""
    cfg = train_settings(f"pos={pos}", *SMALL, "model.n_layers=1", f"attention={attention}")
    try:
        model = gpt.build(cfg, 50)
    except UserError as e:
        assert attention == "linear" and f"attention=linear: has no scores that pos={pos} could change" in str(e)
        return
    trained = gpt.trained_context(cfg, model.pos)
    pairs = 0 if trained.frequencies is None else len(trained.frequencies)
    x, long = random_tokens(2, 33), random_tokens(2, 97)
    for name in ALL:
        try:
            at_L, at_3L = (resolve(scaling_knobs(name, pairs), trained, n, 96) for n in (32, 96))
        except NotApplicable:
            elsewhere = resolve(scaling_knobs(name, 32), rope(L=32), 96, 96)  # softmax attention and frequencies
            changes_scores = any((elsewhere.logn, elsewhere.position_map, elsewhere.always_visible))
            lacks_frequencies = uses_frequencies(elsewhere) and trained.frequencies is None
            assert lacks_frequencies or (changes_scores and attention == "linear"), name
            continue
        model.zero_grad()
        loss = model.losses(x[:, :-1], x[:, 1:], change=at_L).mean()
        loss.backward()
        assert torch.isfinite(loss) and all(torch.isfinite(p.grad).all() for p in model.parameters()), name
        if model.pos.max_positions is None:
            with torch.no_grad():
                assert torch.isfinite(model.losses(long[:, :-1], long[:, -5:], change=at_3L)).all(), name
