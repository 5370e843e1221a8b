"""Layer schedules: against formulas written out here, and against models of transformers that have such layers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conf.errors import UserError
from conf.layer_schedule import describe_layers, repeat_pattern
from conf.registry import yaml_values
from conf.run_name import default_name
from model import gpt
from model.decode import Decoder, same_change
from model.layers import LayerSchedule
from model.scaling import NO_CHANGE, ContextChange, NotApplicable, TrainedContext, resolve
from tests.helpers import (
    choices,
    command,
    import_or_skip,
    model_of,
    one_line_error,
    random_tokens,
    run_eval,
    run_train,
    train_settings,
)

L = 32  # of model_of
SCHEDULES = [name for name in choices("layers") if name != "uniform"]
ROPE, SMALL_BASE, LARGE_BASE, NONE, TEMPERED = "rope", 10_000.0, 1_000_000.0, None, "tempered"
# What each layer of four does: (base, window). Written here by hand, from the papers and from transformers
FOUR_LAYERS: dict[str, list[tuple[float | str | None, int | None]]] = {
    "gemma3": [(10_000.0, 8)] * 3 + [(1_000_000.0, None)],
    "olmo3": [(10_000.0, 16)] * 3 + [(10_000.0, None)],
    "swan": [(None, None)] + [(10_000.0, 16)] * 3,
    "irope": [(10_000.0, 32)] * 3 + [(TEMPERED, None)],
    "smollm3": [(10_000.0, None)] * 3 + [(None, None)],
    "sssl": [(10_000.0, 16)] * 3 + [(10_000.0, None)],
    "window_only": [(10_000.0, 16)] * 4,
}


def model_with(layers: str, *overrides: str) -> gpt.GPT:
    """A float64 model of four layers."""
    return model_of("rope", "model.n_layers=4", f"layers={layers}", *overrides)


def context_of(layers: str, *overrides: str) -> tuple[gpt.GPT, TrainedContext]:
    cfg = train_settings("pos=rope", "model.n_layers=4", "model.n_heads=4", "model.width=64", f"ctx={L}",
                         "batch_tokens=32", f"layers={layers}", *overrides)  # fmt: skip
    model = model_with(layers, *overrides)
    return model, gpt.trained_context(cfg, model.pos)


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
    m = torch.arange(T, dtype=torch.float64)
    llama4 = 1 + 0.1 * torch.log(1 + torch.floor((m + 1) / L))
    return [
        {"inv_freq": frequencies(base) if isinstance(base, float) else None, "window": window,
         "factor": llama4 if base == TEMPERED else torch.ones(T)}
        for base, window in FOUR_LAYERS[name]
    ]  # fmt: skip


def test_every_schedule_is_written_out_here():
    assert set(FOUR_LAYERS) <= set(SCHEDULES)


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


def test_sinks_are_always_seen():
    model, tokens = model_with("olmo3", "layers.L.sinks=2"), random_tokens(1, 60)
    layers = [{"inv_freq": frequencies(10_000.0), "window": w, "sinks": 2} for w in (16, 16, 16, None)]
    with torch.no_grad():
        assert (model(tokens)[0] - reference(model, tokens, layers)).abs().max() < 1e-5


def test_a_schedule_of_one_kind_without_a_window_is_the_uniform_model_to_the_bit():
    overrides = ("layers=window_only", "layers.L.window=null", "model.n_layers=4")
    one_kind, uniform = model_of("rope", *overrides), model_of("rope", "model.n_layers=4")
    assert isinstance(one_kind.pos, LayerSchedule) and not isinstance(uniform.pos, LayerSchedule)
    uniform.load_state_dict(one_kind.state_dict())
    x = random_tokens(2, 40)
    assert torch.equal(one_kind(x), uniform(x))


def test_angles_are_computed_once_for_each_kind_of_layer(monkeypatch):
    model, calls = model_with("gemma3"), []
    for encoding in model.pos.encodings:
        monkeypatch.setattr(encoding, "prepare", lambda *a, f=encoding.prepare: calls.append(f) or f(*a))
    with torch.no_grad():
        model(random_tokens())
    assert len(calls) == 2
    assert torch.equal(model.pos.of_layer(0).inv_freq, frequencies(10_000.0))
    assert torch.equal(model.pos.of_layer(3).inv_freq, frequencies(1_000_000.0))


@pytest.mark.parametrize("pos", ["t5_bias", "alibi", "learned", "sinusoidal"])
def test_schedules_of_other_encodings(pos):
    """A bias is added in the window layers as well; embeddings are those of pos=. Causality, and the parameters."""
    more = ["pos.max_positions=64"] if pos == "learned" else []
    model = model_of(pos, "layers=olmo3", "model.n_layers=4", *more)
    tokens = random_tokens(1, 60)
    other = tokens.clone()
    other[:, 40] = (other[:, 40] + 1) % 50
    with torch.no_grad():
        changed = (model(tokens) - model(other)).abs().amax((0, 2)) > 1e-12
    assert not changed[:40].any() and changed[40:].all()
    plain = model_of(pos, "model.n_layers=4", *more)
    assert model.n_parameters() == plain.n_parameters()  # the kinds share the parameters of the encoding


# ---- transformers ----


@pytest.mark.parametrize("n_layers", [4, 6, 7, 12, 26])
def test_the_layers_of_each_kind_are_those_of_transformers(n_layers):
    """A model with fewer layers than the pattern is the exception: it keeps a global layer."""
    t = import_or_skip("transformers")

    def ours(name: str, letter: str) -> list[bool]:
        cfg = train_settings(f"layers={name}", f"model.n_layers={n_layers}")
        return [x == letter for x in cfg.layers["pattern"]]

    sliding = "sliding_attention"
    if n_layers >= 6:
        theirs = t.Gemma3TextConfig(num_hidden_layers=n_layers).layer_types
        assert ours("gemma3", "L") == [x == sliding for x in theirs]
    olmo3, cohere2 = t.Olmo3Config(num_hidden_layers=n_layers), t.Cohere2Config(num_hidden_layers=n_layers)
    assert (
        ours("olmo3", "L") == [x == sliding for x in olmo3.layer_types] == [x == sliding for x in cohere2.layer_types]
    )
    assert ours("smollm3", "R") == [bool(x) for x in t.SmolLM3Config(num_hidden_layers=n_layers).no_rope_layers]
    llama4 = t.Llama4TextConfig(num_hidden_layers=n_layers)
    assert ours("irope", "L") == [bool(x) for x in llama4.no_rope_layers]
    assert ours("irope", "L") == [x == "chunked_attention" for x in llama4.layer_types]


def test_patterns_of_short_models_keep_all_kinds():
    assert [repeat_pattern("LLLLLG", n) for n in (2, 4, 6, 7)] == ["LG", "LLLG", "LLLLLG", "LLLLLGL"]
    assert [repeat_pattern("GLLL", n) for n in (2, 3, 5)] == ["GL", "GLL", "GLLLG"]
    assert train_settings("layers=sssl", "model.n_layers=6").layers["pattern"] == "SSSLSL"  # the last is long
    # nanochat: pattern[i % 4], and then the last one full
    pattern = train_settings("layers=sssl", "model.n_layers=10").layers["pattern"]
    assert pattern == "".join("SSSL"[i % 4] for i in range(9)) + "L"


@pytest.mark.parametrize("name", ["smollm3", "swan", "olmo3", "window_only", "sssl"])
def test_logits_equal_smollm3s_of_transformers(name):
    """SmolLM3 has layers without RoPE and layers with a window in any combination, in an otherwise plain Llama."""
    t = import_or_skip("transformers")
    from hf.families import FAMILIES
    from hf.weight_names import from_ours

    cfg = train_settings("model=llama", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2", "model.width=32",
                         "model.mlp_width=48", "pos.base=100", "ctx=32", "batch_tokens=32",
                         f"layers={name}")  # fmt: skip
    model = gpt.build(cfg, 96).double().eval()
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.3)
    kinds = FOUR_LAYERS[name]
    config = t.SmolLM3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=cfg.model.norm_eps, pad_token_id=0,
        rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, tie_word_embeddings=cfg.model.tied_head,
        no_rope_layers=[int(base is not None) for base, _ in kinds], use_sliding_window=True, sliding_window=16,
        layer_types=["sliding_attention" if window else "full_attention" for _, window in kinds],
    )  # fmt: skip
    theirs = t.SmolLM3ForCausalLM(config).double().eval()
    weights = {key: x for key, x in model.state_dict().items() if not key.startswith("pos.")}
    missing, unexpected = theirs.load_state_dict(from_ours(FAMILIES["llama"].table, cfg.model, weights), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = torch.randint(96, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = theirs(tokens).logits
        assert (model(tokens) - want).abs().max() < 1e-4 < 1 < want.abs().max()  # their angles are float32


@pytest.mark.parametrize("name, kind", [("gemma3", "Gemma3"), ("olmo3", "Olmo3")])
def test_angles_equal_transformers_of_each_kind_of_layer(name, kind):
    """Two bases, and YaRN on the global layers only: each against the rotary module of that model."""
    t = import_or_skip("transformers")
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "attention_factor": None,
            "original_max_position_embeddings": L}  # fmt: skip
    bases = {"gemma3": (10_000.0, 1_000_000.0), "olmo3": (10_000.0, 10_000.0)}[name]
    config = getattr(t, {"Gemma3": "Gemma3TextConfig", "Olmo3": "Olmo3Config"}[kind])(
        hidden_size=64, num_attention_heads=4, head_dim=16, num_hidden_layers=6, max_position_embeddings=4 * L,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": bases[0]},
                         "full_attention": {**yarn, "rope_theta": bases[1]}},
    )  # fmt: skip
    module = __import__(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}", fromlist=["x"])
    theirs = getattr(module, f"{kind}RotaryEmbedding")(config)
    model, trained = context_of(name)
    change = resolve({**yaml_values("scaling", "yarn"), "beta_fast": 4.0}, trained, 4 * L, 4 * L)
    positions = torch.arange(4 * L)
    layers = model.pos.prepare_layers(4, positions, change)
    for i, layer_type in ((0, "sliding_attention"), (3, "full_attention")):
        _, tables, _ = layers[i]
        want = theirs(torch.zeros(1, 1), positions[None], layer_type)
        for ours, table in zip(tables.q, want, strict=True):
            assert (ours - table[0, :, :8]).abs().max() < 1e-5
    assert change.kinds[0].inv_freq is None and change.factor == 4 and change.attention_factor > 1.1


def test_the_temperature_is_llama_4s():
    """Its formula, as in Llama4TextAttention: log1p(floor((m + 1) / floor_scale)) * attn_scale + 1."""
    model, _ = context_of("irope")
    positions = torch.arange(5 * L)
    _, factor, _ = model.pos.prepare_layers(4, positions, NO_CHANGE)[3]
    want = torch.log1p(torch.floor((positions.float() + 1.0) / L)) * 0.1 + 1.0
    assert torch.equal(factor.flatten(), want) and want[L - 2] == 1 < want[L - 1]


def llama4_of(model: gpt.GPT, chunk: int) -> Any:
    """transformers' Llama 4 with the weights of a model=llama of ours, without experts and without its QK-norm."""
    t = import_or_skip("transformers")
    from hf.weight_names import LLAMA, from_ours

    config = t.Llama4TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size_mlp=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rms_norm_eps=1e-5, use_qk_norm=False,
        rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, moe_layers=[], attention_chunk_size=chunk,
        attn_temperature_tuning=True, floor_scale=32, attn_scale=0.1,
    )  # fmt: skip
    theirs = t.Llama4ForCausalLM(config).double().eval()
    names = {name: entry for name, entry in LLAMA.layer.items() if not name.startswith("mlp")}
    names |= {"mlp.up": ("feed_forward.gate_proj", "feed_forward.up_proj"), "mlp.down": "feed_forward.down_proj"}
    settings = train_settings("model=llama").model
    settings.n_heads, settings.n_kv_heads, settings.width = 4, 2, 32
    theirs.load_state_dict(from_ours(LLAMA._replace(layer=names), settings, model.state_dict()))
    return theirs


def test_irope_has_the_rotation_the_temperature_and_the_layers_of_llama_4():
    """Up to the size of a chunk the logits are Llama 4's, and at any length where neither chunks nor windows are cut.

    Past a chunk Llama 4's queries begin again with one key, and ours keep as many keys as a chunk has.
    """
    common = ("model=llama", "model.n_layers=4", "model.n_heads=4", "model.n_kv_heads=2", "model.width=32",
              "model.mlp_width=48", "pos=rope_interleaved", "pos.base=100", f"ctx={L}", "batch_tokens=32",
              "layers=irope")  # fmt: skip
    tokens = torch.randint(96, (2, 3 * L), generator=torch.Generator().manual_seed(0))
    for window, chunk, n, equal in (("1.0", L, L, True), ("null", 4096, 3 * L, True), ("1.0", L, 3 * L, False)):
        model = gpt.build(train_settings(*common, f"layers.L.window={window}"), 96).double().eval()
        for p in model.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.3)
        theirs = llama4_of(model, chunk)
        with torch.inference_mode():
            want, got = theirs(tokens[:, :n]).logits, model(tokens[:, :n])
            assert ((got - want).abs().max() < 1e-4) == equal and want.abs().max() > 1
    # The tables of angles, of which only the L layers have some
    angles = theirs.model.rotary_emb(torch.zeros(1, 1), torch.arange(3 * L)[None])[0]
    layers = model.pos.prepare_layers(4, torch.arange(3 * L), NO_CHANGE)
    assert [bool(x) for x in theirs.config.no_rope_layers] == [hasattr(prepared, "q") for _, prepared, _ in layers]
    for ours, table in zip(layers[0][1].q, (angles.real, angles.imag), strict=True):
        assert (ours - table).abs().max() < 1e-5
    # The keys that a query of an L layer sees: of its chunk, which the window contains; the same at the end of a chunk
    i, j = torch.arange(3 * L)[:, None], torch.arange(3 * L)
    from transformers.masking_utils import create_chunked_causal_mask

    theirs.config._attn_implementation = "eager"
    embeddings = torch.zeros(1, 3 * L, 32)
    mask = create_chunked_causal_mask(theirs.config, embeddings, None, past_key_values=None, position_ids=j[None])
    chunked, windowed = mask[0, 0] == 0, (j <= i) & (i - j < layers[0][2].window)
    assert (windowed | ~chunked).all() and not torch.equal(chunked, windowed)
    assert torch.equal(chunked[L - 1 :: L], windowed[L - 1 :: L]) and torch.equal(chunked[:L], windowed[:L])


# ---- scaling, of each kind of layer ----


def scaled_reference(name: str, T: int, **of_kinds: dict[str, Any]) -> list[dict[str, Any]]:
    """The layers of `reference`, with changes of the window layers (L) and the others (G)."""
    return [x | of_kinds.get("L" if x["window"] else "G", {}) for x in expected_layers(name, T)]


def ntk(base: float, factor: float) -> Tensor:
    return frequencies(base * factor ** (16 / 14))


def log_n(T: int) -> Tensor:
    return ((torch.arange(T, dtype=torch.float64) + 1).log() / math.log(L)).clamp(min=1)


CASES = [
    # Of the kinds that are scaled: the global ones
    ("gemma3", ["ntk"], {"G": {"inv_freq": ntk(1_000_000.0, 3)}}),
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
]  # fmt: skip


@pytest.mark.parametrize("name, methods, kinds", CASES)
def test_scaling_applies_to_the_kinds_that_the_schedule_says(name, methods, kinds):
    model, trained = context_of(name)
    first, *plus = (yaml_values("scaling", m) if isinstance(m, str) else m for m in methods)
    change, tokens = resolve(first, trained, 96, 96, plus), random_tokens(1, 96)
    with torch.no_grad():
        want = reference(model, tokens, scaled_reference(name, 96, **kinds))
        got = model(tokens, change=change)[0]
        assert (got - want).abs().max() < 1e-5
        assert (reference(model, tokens, expected_layers(name, 96)) - want).abs().max() > 1e-4
        # The last tokens alone, for which tokens that cannot reach them are left out
        assert (model.last_logits(tokens, 3, change)[0] - want[-3:]).abs().max() < 1e-5
        inside = resolve(first, trained, L, L, plus)  # nothing changes inside the trained context
        if first.get("size") is None:
            assert torch.equal(model(tokens[:, :L], change=inside), model(tokens[:, :L]))
            same = resolve(yaml_values("scaling", "none"), trained, L, L)
            assert inside.effect(L, trained) == same.effect(L, trained) != change.effect(96, trained)


def test_a_window_that_sees_no_more_than_the_control_stays():
    """The control with sinks sees 28 + 4 tokens: a layer's own 30 are fewer, 32 are not."""
    for window, seen in ((30, [30, 30, 30, 28]), (32, [28, 28, 28, 28])):
        model, trained = context_of("olmo3", f"layers.L.window={window}")
        change = resolve(yaml_values("scaling", "window_sink"), trained, 96, 96)
        of_layers = model.pos.prepare_layers(4, torch.arange(96), change)
        assert [(c.window, c.sinks) for *_, c in of_layers] == [(w, 0 if w == 30 else 4) for w in seen]
        assert (change.window, change.sinks) == (max(seen), 4)  # no layer sees more
    # All layers have their own window already: the control changes nothing, and is not measured again
    trained = context_of("window_only")[1]
    first, second = (resolve(yaml_values("scaling", m), trained, 96, 96) for m in ("window", "none"))
    assert first.effect(96, trained) == second.effect(96, trained)


def test_tokens_that_cannot_reach_the_scored_ones_through_the_windows_are_left_out(monkeypatch):
    model, trained = context_of("window_only", "layers.L.window=4")
    tokens, seen = random_tokens(1, 60), []
    monkeypatch.setattr(model.pos, "embed", lambda x, p, f=model.pos.embed: seen.append(x.shape[1]) or f(x, p))
    with torch.no_grad():
        got = model.last_logits(tokens, 3, resolve(yaml_values("scaling", "none"), trained, 60, 60))
        assert (got - model(tokens)[:, -3:]).abs().max() < 1e-9
    assert seen == [3 + 4 * 3, 60]


def test_maps_that_count_from_the_first_token_leave_no_token_out():
    """Also where every kind of layer has a window: cut text would have other chunks."""
    model, trained = context_of("window_only", "layers.L.scaled=true")
    tokens, change = random_tokens(1, 500), resolve(yaml_values("scaling", "dual_chunk"), trained, 500, 500)
    got = model.last_logits(tokens, 3, change)
    assert (got - model(tokens, change=change)[:, -3:]).abs().max() < 1e-5


def test_which_methods_do_not_apply():
    def error(layers: str, method: str) -> str:
        with pytest.raises(NotApplicable) as e:
            resolve(yaml_values("scaling", method), context_of(layers)[1], 96, 96)
        return str(e.value)

    assert error("swan", "ntk").endswith("it needs rotary frequencies, and pos=none (layers G of swan) has none")
    assert "no layer of rope+window_only is scaled" in error("window_only", "logn")
    assert resolve(yaml_values("scaling", "window"), context_of("window_only")[1], 96, 96).window == 16


def test_a_trained_scaling_stays_under_a_control_and_is_replaced_by_another_method():
    cfg = train_settings("layers=olmo3", "model.n_layers=4", "ctx=64", "scaling=yarn", "scaling.factor=2.0")
    context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
    trained, own = gpt.trained_scaling(cfg, context), context.inv_freq
    from model.scaling import override

    windowed = override(trained, resolve(yaml_values("scaling", "window"), context, 256, 256))
    assert torch.equal(windowed.kinds[1].inv_freq, trained.kinds[1].inv_freq) and windowed.kinds[1].window == 64
    assert windowed.kinds[0] == NO_CHANGE and windowed.factor == 2 and windowed.attention_factor > 1
    pi = override(trained, resolve(yaml_values("scaling", "pi"), context, 256, 256))
    assert torch.equal(pi.kinds[1].inv_freq, own / 4) and pi.kinds[0] == NO_CHANGE
    assert pi.kinds[1].attention_factor == pi.attention_factor == 1 and pi.factor == 4


# ---- decoding ----


@pytest.mark.parametrize("name", FOUR_LAYERS)
@pytest.mark.parametrize("method", ["none", "window", "dynamic_ntk", "logn", "window_sink"])
def test_cached_decoding_equals_a_full_forward(name, method):
    model, trained = context_of(name)
    knobs, tokens = yaml_values("scaling", method), random_tokens(1, 80)
    try:
        decoder = Decoder(model, change_at := lambda n: resolve(knobs, trained, n, 80))
        for n in (5, 6, 20, 31, 33, 40, 41, 79, 80):
            got = decoder.logits(tokens[:, :n])
            with torch.inference_mode():
                assert (got - model(tokens[:, :n], change=change_at(n))[:, -1]).abs().max() < 1e-5
    except NotApplicable:
        assert (name, method) in {("swan", "dynamic_ntk"), *((("window_only", m)) for m in ("dynamic_ntk", "logn"))}


def test_a_change_of_one_kind_of_layer_makes_a_cache_stale():
    def of_kinds(scale: float) -> ContextChange:
        return ContextChange(kinds=(NO_CHANGE, ContextChange(inv_freq=frequencies(scale))))

    assert same_change(of_kinds(500.0), of_kinds(500.0))
    assert not same_change(of_kinds(500.0), of_kinds(501.0)) and not same_change(of_kinds(500.0), NO_CHANGE)


# ---- settings ----


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["layers.pattern=LX"], r"layers\.pattern=LX: must be made of the letters L, G, each of which has settings"),
        (["layers.last=Q"], r"layers\.last=Q: must be null or one of L, G"),
        (["model.n_layers=1"], r"layers\.pattern=LLLG: with model\.n_layers=1 no layer is L"),
        (["layers.L.window=0"], r"layers\.L\.window=0: must be null, a number of tokens, or a fraction"),
        (["layers.L.window=1.5"], r"layers\.L\.window=1\.5: must be null, a number of tokens, or a fraction"),
        (["layers.L.window=wide"], r"layers\.L\.window=wide: must be of type float \| null"),
        (["layers.G.sinks=2"], r"layers\.G\.sinks=2: must be 0 without a window"),
        (["layers.L.scaled=3"], r"layers\.L\.scaled=3: must be of type bool"),
        (["layers.L.pos=ropes"], r"layers\.L\.pos=ropes: must be null or one of alibi, "),
        (["+layers.L.windows=3"], r"layers\.L\.windows=3: must be left out: a kind of layer has pos, base, window"),
        (["pos=alibi", "layers.G.base=500"], r"layers\.G\.base=500: must be null: pos=alibi has no base"),
        (["layers.L=3"], r"layers\.L=3: must be settings: pos, base"),
        (["layers.L.base=0.5"], r"layers\.L\.base=0\.5: must be at least 1"),
        (["layers.pattern=1"], r"layers\.pattern=1: must be made of the letters L, G"),
        (["layers.pattern=[L,G]"], r"layers\.pattern=\['L', 'G'\]: must be made of the letters L, G"),
    ],
)
def test_wrong_settings_are_named(overrides, message):
    with pytest.raises(UserError, match=message):
        train_settings("layers=olmo3", *overrides)


def test_encodings_that_do_not_fit_together_are_named():
    for overrides, message in [
        (["layers.L.pos=learned"], r"layers\.L\.pos=learned: must be an encoding that acts in the layers"),
        (["layers.L.pos=alibi", "layers.G.pos=none"], r"pos=rope: no layer of layers=olmo3 uses it"),
        (["attention=linear"], r"attention=linear: needs layers=uniform, not layers=olmo3"),
    ]:
        with pytest.raises(UserError, match=message):
            gpt.build_encoding(train_settings("layers=olmo3", *overrides))


@pytest.mark.parametrize(
    "wrong", [{"pattern": "LLL"}, {"pattern": 3}, {"L": 3}, {"L": {}}, {"X": {}}, {"pattern": "LLXX"}]
)
def test_a_damaged_schedule_of_a_run_is_named(wrong):
    cfg = train_settings("layers=olmo3")
    cfg.layers |= wrong
    with pytest.raises(UserError, match=r"layers=.*: must be as train\.py saves it"):
        gpt.build_encoding(cfg)


def test_windows_are_fractions_of_ctx_or_tokens_and_the_description_names_changes():
    cfg = train_settings("layers=olmo3", "ctx=128", "layers.G.window=3")
    assert (cfg.layers["L"]["window"], cfg.layers["G"]["window"]) == (64, 3)
    assert gpt.describe_encoding(cfg) == "pos=rope, layers=olmo3 (LLLG) G.window=3"
    assert gpt.describe_encoding(train_settings()) == "pos=rope" and train_settings().layers == {}
    for name in SCHEDULES:
        assert describe_layers(train_settings(f"layers={name}")).startswith(f"{name} (")
    cfg = train_settings("layers=swan", "exp=smoke")
    assert cfg.name == default_name(cfg) == "rope-smoke-swan"


# ---- commands ----


def test_a_run_with_a_schedule_is_trained_evaluated_and_resumed(here, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_train("layers=swan", "steps=2", "name=x")
    assert "pos=rope, layers=swan (GL)" in capsys.readouterr().out
    run_train("layers=swan", "steps=2", "name=x")
    assert "already trained" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"layers\.L\.window=16 \(the run has 32\)"):
        run_train("layers=swan", "layers.L.window=0.25", "steps=2", "name=x")
    run_eval("run=x", "ctx=128", "scaling=logn", "documents=3")
    assert "pos=rope, layers=swan (GL), trained at ctx 64" in capsys.readouterr().out
    from engine.run import Run
    from hf.write import write_checkpoint

    run = Run.open("x", runs="runs", cache=".cache")
    with pytest.raises(UserError, match=r"layers=swan \(GL\): cannot be exported with model\.mlp=gelu; "):
        write_checkpoint(run, Path("out"))


@pytest.mark.process
def test_a_setting_of_a_schedule_is_checked_before_torch_is_imported(tmp_path):
    error = one_line_error(command("train.py", "layers=gemma", cwd=tmp_path))
    assert "did you mean gemma3" in error
    error = one_line_error(command("train.py", "layers=gemma3", "layers.L.windo=3", cwd=tmp_path))
    assert "layers.L.windo" in error


def test_changes_without_kinds_apply_to_all_layers():
    """Such as those of a caller who does not know of schedules."""
    model, tokens = model_with("swan"), random_tokens(1, 60)
    layers = scaled_reference("swan", 60, G={"window": 5}, L={"window": 5})
    with torch.no_grad():
        assert (model(tokens, change=ContextChange(window=5))[0] - reference(model, tokens, layers)).abs().max() < 1e-5
