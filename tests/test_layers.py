"""Layer schedules: against formulas written out here, and against models of transformers that have such layers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.layer_schedule import repeat_pattern
from conf.registry import yaml_values
from hf.weights import LLAMA as LLAMA_WEIGHTS, from_ours
from model import gpt
from model.decode import Decoder, computed
from model.scaling import NO_CHANGE, ContextChange, NotApplicable, TrainedContext, override, resolve
from tests.helpers import SMALL, import_or_skip, model_of, random_tokens, train_settings

L = 32  # of model_of
QUARTER = "quarter"  # base 1,000,000, but only the fastest quarter of the pairs rotates
TEMPERED = "tempered"  # no rotation, but Llama 4's temperature
# What each layer of four does: (base, window). Written here by hand, from the papers and from transformers
FOUR_LAYERS: dict[str, list[tuple[float | str | None, int | None]]] = {
    "gemma3": [(10_000.0, 8)] * 3 + [(1_000_000.0, None)],
    "gemma4": [(10_000.0, 8)] * 3 + [(QUARTER, None)],
    "olmo3": [(10_000.0, 16)] * 3 + [(10_000.0, None)],
    "swan": [(None, None)] + [(10_000.0, 16)] * 3,
    "irope": [(10_000.0, 32)] * 3 + [(TEMPERED, None)],
    "smollm3": [(10_000.0, None)] * 3 + [(None, None)],
    "sssl": [(10_000.0, 16)] * 3 + [(10_000.0, None)],
    "window_only": [(10_000.0, 16)] * 4,
}


def model_with(layers: str, *overrides: str) -> gpt.GPT:
    """A float64 model of four layers."""
    pos = train_settings(f"layers={layers}").pos["kind"]  # gpt_oss has its own
    return model_of(pos, "model.n_layers=4", f"layers={layers}", *overrides)


def context_of(layers: str, *overrides: str) -> tuple[gpt.GPT, TrainedContext]:
    cfg = train_settings(*SMALL, "model.n_layers=4", f"layers={layers}", *overrides)
    return (model := model_with(layers, *overrides)), gpt.trained_context(cfg, model.pos)


def scaling(method: str | dict, trained: TrainedContext, n: int, *plus: str) -> ContextChange:
    """The change by a method, a yaml of conf/scaling or its knobs, at n tokens."""
    knobs = yaml_values("scaling", method) if isinstance(method, str) else method
    return resolve(knobs, trained, n, n, [yaml_values("scaling", name) for name in plus])


# ---- the formulas ----


def rotated(x: Tensor, inv_freq: Tensor) -> Tensor:
    """[T, H, D] rotated by position * inv_freq, pairs (i, i + D / 2)."""
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * inv_freq  # [T, D / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def reference(model: gpt.GPT, tokens: Tensor, layers: list[dict[str, Any]]) -> Tensor:
    """The logits of model for tokens [1, T], written out. layers: inv_freq, window, sinks and query factor of each."""
    x = model.tokens(tokens[0])  # [T, C]
    T = len(x)
    i, j = torch.arange(T)[:, None], torch.arange(T)
    norm = lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # noqa: E731
    for block, layer in zip(model.blocks, layers, strict=True):
        q, k, v = (norm(x) @ block.attention.qkv.weight.T).view(T, 3, 4, 16).unbind(1)
        if layer["inv_freq"] is not None:
            q, k = rotated(q, layer["inv_freq"]), rotated(k, layer["inv_freq"])
        q = q * layer.get("factor", torch.ones(T)).to(q)[:, None, None]
        scores = torch.einsum("ihd,jhd->hij", q, k) / 4
        hidden = j > i
        if layer["window"] is not None:
            hidden = hidden | ((i - j >= layer["window"]) & (j >= layer.get("sinks", 0)))
        attended = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)
        x = x + attended.reshape(T, 64) @ block.attention.out.weight.T
        hidden_units = torch.nn.functional.gelu(norm(x) @ block.mlp.up.weight.T, approximate="tanh")
        x = x + hidden_units @ block.mlp.down.weight.T
    return norm(x) @ model.head.weight.T


def frequencies(base: float) -> Tensor:
    return base ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)


def expected_layers(name: str, T: int) -> list[dict[str, Any]]:
    """The layers of FOUR_LAYERS for `reference`."""
    of_base = {QUARTER: frequencies(1_000_000.0) * (torch.arange(8) < 2)}
    llama4 = {"factor": 1 + 0.1 * torch.log(1 + torch.floor((torch.arange(T, dtype=torch.float64) + 1) / L))}
    return [
        {"inv_freq": frequencies(base) if isinstance(base, float) else of_base.get(base), "window": window}
        | (llama4 if base == TEMPERED else {})
        for base, window in FOUR_LAYERS[name]
    ]


def scaled_reference(name: str, T: int, **of_kinds: dict[str, Any]) -> list[dict[str, Any]]:
    """expected_layers with changes of the window layers (L) and the others (G)."""
    return [x | of_kinds.get("L" if x["window"] else "G", {}) for x in expected_layers(name, T)]


@pytest.mark.parametrize("name", FOUR_LAYERS)
def test_logits_equal_the_formulas_in_training_and_at_any_length(name):
    """By two implementations: with gradients one mask for all, without them blocks of queries or the fused kernel."""
    model, tokens = model_with(name), random_tokens(1, 100)
    with torch.no_grad():
        want = reference(model, tokens, expected_layers(name, 100))
        assert (model(tokens)[0] - want).abs().max() < 1e-5  # angles are float32
        uniform = [{"inv_freq": frequencies(10_000.0), "window": None}] * 4
        assert (reference(model, tokens, uniform) - want).abs().max() > 1e-2
        for wrong in (-1, 1):  # a window that is off by one shows
            moved = [{**x, "window": x["window"] and x["window"] + wrong} for x in expected_layers(name, 100)]
            assert (reference(model, tokens, moved) - want).abs().max() > 1e-3 or name == "smollm3"
    assert (model(tokens)[0] - want).abs().max() < 1e-5


def test_the_lowest_learning_rates_of_the_encodings_count():
    cfg = train_settings("layers=swan", "layers.G.pos=cope")
    assert gpt.build_encoding(cfg).lr_scale == gpt.build_encoding(train_settings("pos=cope")).lr_scale < 1


def test_sinks_are_always_seen_and_changes_without_kinds_apply_to_all_layers():
    """Such changes are those of a caller who does not know of schedules."""
    tokens = random_tokens(1, 60)
    five = scaled_reference("swan", 60, G={"window": 5}, L={"window": 5})
    with torch.no_grad():
        sinks = model_with("olmo3", "layers.L.sinks=2"), scaled_reference("olmo3", 60, L={"sinks": 2}), NO_CHANGE
        for model, layers, change in (sinks, (model_with("swan"), five, ContextChange(window=5))):
            assert (model(tokens, change=change)[0] - reference(model, tokens, layers)).abs().max() < 1e-5


def test_angles_are_computed_once_for_each_kind_of_layer(monkeypatch):
    model, calls = model_with("gemma3"), []
    for encoding in model.pos.encodings:
        monkeypatch.setattr(encoding, "prepare", lambda *a, f=encoding.prepare: calls.append(f) or f(*a))
    with torch.no_grad():
        model(random_tokens())
    assert len(calls) == 2


# ---- transformers ----


@pytest.mark.parametrize("n_layers", [4, 6, 7, 12, 26])
def test_the_layers_of_each_kind_are_those_of_transformers(n_layers):
    """A model with fewer layers than the pattern is the exception: it keeps a global layer."""
    t = import_or_skip("transformers")

    def theirs(family: str, attribute: str = "layer_types") -> list[bool]:
        values = getattr(getattr(t, f"{family}Config")(num_hidden_layers=n_layers), attribute)
        return [x in (1, "sliding_attention", "chunked_attention") for x in values]

    for name, letter, layers in (
        ("gemma3", "L", theirs("Gemma3Text")),
        ("gemma4", "L", theirs("Gemma4Text")),
        ("gpt_oss", "L", theirs("GptOss")),
        ("olmo3", "L", theirs("Olmo3")),
        ("olmo3", "L", theirs("Cohere2")),
        ("smollm3", "R", theirs("SmolLM3", "no_rope_layers")),
        ("irope", "L", theirs("Llama4Text")),
        ("irope", "L", theirs("Llama4Text", "no_rope_layers")),
    ):
        pattern = train_settings(f"layers={name}", f"model.n_layers={n_layers}").layers.pattern
        assert [x == letter for x in pattern] == layers or (name == "gemma3" and n_layers < 6), name


def test_patterns_of_short_models_keep_all_kinds():
    assert [repeat_pattern("LLLLLG", n) for n in (2, 4, 6, 7)] == ["LG", "LLLG", "LLLLLG", "LLLLLGL"]
    assert [repeat_pattern("GLLL", n) for n in (2, 3, 5)] == ["GL", "GLL", "GLLLG"]
    # nanochat: pattern[i % 4], and then the last one full
    pattern = train_settings("layers=sssl", "model.n_layers=10").layers.pattern
    assert pattern == "".join("SSSL"[i % 4] for i in range(9)) + "L"


# The sizes of the models of transformers below, and the same for ours
LLAMA = ["model=llama", "model.n_layers=4", "model.n_kv_heads=2", "model.width=32", "model.mlp_width=48"]
LLAMA += ["pos.base=100"]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
}


def llama4_of(model: gpt.GPT, chunk: int) -> Any:
    """transformers' Llama 4 with the weights of a model=llama of ours, without experts and without its QK-norm."""
    t = import_or_skip("transformers")

    config = t.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=48,
        head_dim=8,
        use_qk_norm=False,
        moe_layers=[],
        attention_chunk_size=chunk,
        attn_temperature_tuning=True,
        floor_scale=32,
        attn_scale=0.1,
    )
    theirs = t.Llama4ForCausalLM(config).double().eval()
    names = {name: entry for name, entry in LLAMA_WEIGHTS.layer.items() if not name.startswith("mlp")}
    names |= {"mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"), "mlp.down": "feed_forward.down_proj"}
    settings = train_settings(*LLAMA).model
    theirs.load_state_dict(from_ours(LLAMA_WEIGHTS._replace(layer=names), settings, model.state_dict()))
    return theirs


def test_irope_has_the_rotation_the_temperature_and_the_layers_of_llama_4():
    """Up to the size of a chunk the logits are Llama 4's, and at any length where neither chunks nor windows are cut.

    Past a chunk Llama 4's queries begin again with one key, and ours keep as many keys as a chunk has.
    """
    tokens = random_tokens(2, 3 * L)
    for window, chunk, n, equal in (("1.0", L, L, True), ("null", 4096, 3 * L, True), ("1.0", L, 3 * L, False)):
        model = model_of("rope_interleaved", *LLAMA, "layers=irope", f"layers.L.window={window}")
        theirs = llama4_of(model, chunk)
        with torch.inference_mode():
            want, got = theirs(tokens[:, :n]).logits, model(tokens[:, :n])
            assert ((got - want).abs().max() < 1e-4) == equal and want.abs().max() > 1


def test_gpt_oss_has_the_sinks_the_windows_and_the_yarn_of_transformers():
    """Attention alone: instead of its experts and of our MLP there are zeros."""
    t, given = import_or_skip("transformers"), [*LLAMA, "layers=gpt_oss", "model.qkv_bias=true", "model.out_bias=true"]
    settings = train_settings(*SMALL, *given)
    model = model_of(settings.pos["kind"], *given)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += torch.randn(p.shape) if p.dim() == 1 else 0  # biases and sinks
            p *= "mlp.down" not in name
    yarn = {"factor": 3.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False}
    rope = {**SIZES["rope_parameters"], **yarn, "rope_type": "yarn", "original_max_position_embeddings": L}
    sizes = {**SIZES, "head_dim": 8, "sliding_window": 16, "num_local_experts": 1, "rope_parameters": rope}
    theirs = t.GptOssForCausalLM(t.GptOssConfig(**sizes)).double().eval()
    for layer in theirs.model.layers:
        layer.mlp.forward = lambda x: (torch.zeros_like(x), None)
    sinks = {f"model.layers.{i}.self_attn.sinks": b.attention.content.logit for i, b in enumerate(model.blocks)}
    ours = {name: x for name, x in model.state_dict().items() if ".mlp." not in name and ".content." not in name}
    theirs.load_state_dict(theirs.state_dict() | from_ours(LLAMA_WEIGHTS, settings.model, ours) | sinks)
    trained, tokens = gpt.trained_context(settings, model.pos), random_tokens(2, 3 * L)
    with torch.inference_mode():
        want, got = theirs(tokens).logits, model(tokens, change=scaling({"kind": "yarn", **yarn}, trained, 3 * L))
        assert (got - want).abs().max() < 1e-4 and want.abs().max() > 1


# ---- scaling, of each kind of layer ----


def ntk(base: float, factor: float) -> Tensor:
    return frequencies(base * factor ** (16 / 14))


def log_n(T: int) -> Tensor:
    return ((torch.arange(T, dtype=torch.float64) + 1).log() / math.log(L)).clamp(min=1)


LONGROPE = {"kind": "longrope", "factor": 3.0, "long": [3.0, 3.0], "attention_factor": 1.0}
CASES = [
    # Of the kinds that are scaled: the global ones
    ("gemma3", ["ntk"], {"G": {"inv_freq": ntk(1_000_000.0, 3)}}),
    ("gemma4", ["pi"], {"G": {"inv_freq": frequencies(1_000_000.0) * (torch.arange(8) < 2) / 3}}),
    # As many divisors as these have pairs, which do not fit the others
    ("gemma4", [LONGROPE], {"G": {"inv_freq": frequencies(1_000_000.0) * (torch.arange(8) < 2) / 3}}),
    ("olmo3", ["ntk"], {"G": {"inv_freq": ntk(10_000.0, 3)}}),
    ("sssl", ["pi"], {"G": {"inv_freq": frequencies(10_000.0) / 3}}),
    ("swan", ["logn"], {"G": {"factor": log_n(96)}}),
    ("olmo3", ["ntk", "logn"], {"G": {"inv_freq": ntk(10_000.0, 3), "factor": log_n(96)}}),
    # NTK does not fit the layers without positions, log-n does
    ("irope", ["ntk"], {"L": {"inv_freq": ntk(10_000.0, 3)}}),
    # The controls: all layers see L tokens, or fewer if their own window is narrower
    ("gemma3", ["window"], {"G": {"window": 32}}),
    ("swan", ["window"], {"G": {"window": 32}}),
    ("smollm3", ["window"], {"G": {"window": 32}}),
    ("olmo3", [{"kind": "window", "size": 9}], {"G": {"window": 9}, "L": {"window": 9}}),
    ("swan", ["window_sink"], {"G": {"window": 28, "sinks": 4}}),
]


@pytest.mark.parametrize("name, methods, kinds", CASES)
def test_scaling_applies_to_the_kinds_that_the_schedule_says(name, methods, kinds):
    (model, trained), tokens, (first, *plus) = context_of(name), random_tokens(1, 96), methods
    change, inside = scaling(first, trained, 96, *plus), scaling(first, trained, L, *plus)
    with torch.no_grad():
        want = reference(model, tokens, scaled_reference(name, 96, **kinds))
        assert (model(tokens, change=change)[0] - want).abs().max() < 1e-5
        assert (reference(model, tokens, expected_layers(name, 96)) - want).abs().max() > 1e-4
        # The last tokens alone, for which tokens that cannot reach them are left out
        assert (model.last_logits(tokens, 3, change)[0] - want[-3:]).abs().max() < 1e-5
        if isinstance(first, str):  # nothing changes inside the trained context
            assert torch.equal(model(tokens[:, :L], change=inside), model(tokens[:, :L]))
            same = scaling("none", trained, L).effect(L, trained)
            assert inside.effect(L, trained) == same != change.effect(96, trained)


def test_a_window_that_sees_no_more_than_the_control_stays():
    """The control with sinks sees 28 + 4 tokens: a layer's own 30 are fewer, 32 are not."""
    for window, seen in ((30, [30, 30, 30, 28]), (32, [28, 28, 28, 28])):
        model, trained = context_of("olmo3", f"layers.L.window={window}")
        change = scaling("window_sink", trained, 96)
        of_layers = model.pos.prepare_layers(4, torch.arange(96), change)
        assert [(c.window, c.always_visible) for *_, c in of_layers] == [(w, 0 if w == 30 else 4) for w in seen]
        assert (change.window, change.always_visible) == (max(seen), 4)  # no layer sees more
    # All layers have their own window already: the control changes nothing, and is not measured again
    trained = context_of("window_only")[1]
    first, second = (scaling(method, trained, 96).effect(96, trained) for method in ("window", "none"))
    assert first == second


@pytest.mark.parametrize("method, n, processed", [("none", 60, 3 + 4 * 3), ("dual_chunk", 500, 500)])
def test_tokens_that_cannot_reach_the_scored_ones_through_the_windows_are_left_out(method, n, processed, monkeypatch):
    """But none under maps that count from the first token: cut text would have other chunks."""
    model, trained = context_of("window_only", "layers.L.window=4", "layers.L.scaled=true")
    tokens, change, seen = random_tokens(1, n), scaling(method, trained, n), []
    monkeypatch.setattr(model.pos, "embed", lambda x, p, f=model.pos.embed: seen.append(x.shape[1]) or f(x, p))
    with torch.no_grad():
        got = model.last_logits(tokens, 3, change)
        assert (got - model(tokens, change=change)[:, -3:]).abs().max() < 1e-5
    assert seen == [processed, n]


def test_which_methods_do_not_apply():
    none = r"it needs rotary frequencies, and pos=none \(layers G of swan\) has none$"
    for layers, method, message in (("swan", "ntk", none), ("window_only", "logn", "no layer of .* is scaled")):
        with pytest.raises(NotApplicable, match=message):
            scaling(method, context_of(layers)[1], 96)
    assert scaling("window", context_of("window_only")[1], 96).window == 16


def test_a_trained_scaling_stays_under_a_control_and_is_replaced_by_another_method():
    cfg = train_settings("layers=olmo3", "model.n_layers=4", "ctx=64", "scaling=yarn", "scaling.factor=2.0")
    context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
    trained = gpt.trained_scaling(cfg, context)
    windowed, pi = (override(trained, scaling(method, context, 256)) for method in ("window", "pi"))
    assert torch.equal(windowed.by_type[1].inv_freq, trained.by_type[1].inv_freq) and windowed.by_type[1].window == 64
    assert windowed.by_type[0] == NO_CHANGE and windowed.factor == 2 and windowed.attention_factor > 1
    assert torch.equal(pi.by_type[1].inv_freq, context.inv_freq / 4) and pi.by_type[0] == NO_CHANGE
    assert pi.by_type[1].attention_factor == pi.attention_factor == 1 and pi.factor == 4


# ---- decoding ----


@pytest.mark.parametrize("name", [*FOUR_LAYERS, "gpt_oss"])
@pytest.mark.parametrize("method", ["none", "window", "dynamic_ntk", "logn", "window_sink"])
def test_cached_decoding_equals_a_full_forward(name, method):
    (model, trained), tokens = context_of(name), random_tokens(1, 80)
    if (name, method) in {("swan", "dynamic_ntk"), ("window_only", "dynamic_ntk"), ("window_only", "logn")}:
        pytest.skip("the method does not apply")
    decoder = Decoder(model, lambda n: scaling(method, trained, n))
    for n in (5, 6, 20, 31, 33, 40, 41, 79, 80):
        got = decoder.logits(tokens[:, :n])
        with torch.inference_mode():
            want = model(tokens[:, :n], change=scaling(method, trained, n))[:, -1]
        assert (got - want).abs().max() < 1e-5


def test_a_change_of_one_kind_of_layer_makes_a_cache_stale():
    def of_kinds(scale: float) -> ContextChange:
        return ContextChange(by_type=(NO_CHANGE, ContextChange(inv_freq=frequencies(scale))))

    assert computed(of_kinds(500.0)) == computed(of_kinds(500.0))
    assert computed(of_kinds(501.0)) != computed(of_kinds(500.0)) != computed(NO_CHANGE)
