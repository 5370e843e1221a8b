"""Model families of Hugging Face: the settings in config.json.

A family is a function, config.json -> our settings, and a table of weight names (hf/weight_names.py), which several
families share. What our GPT has no setting for, but can be multiplied into the weights, is done when they are read
(`Family.fold`), so that it costs no code in the model. Names and defaults are those of transformers 5.

Letters: C width, H query heads, G key-value heads, D head width, i layer.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from conf.schema import ModelConfig
from hf.config import HARMLESS, OFF, Config
from hf.folds import (
    fold_bloom,
    fold_cohere2,
    fold_gemma3,
    fold_gpt2,
    fold_granite,
    logits_scaling,
    score_width,
    unfold_gemma3,
)
from hf.layer_types import (
    FULL,
    SLIDING,
    read_rope_of_types,
    read_rotated,
    read_windows,
    sliding_window,
    windows_of_family,
    with_layers,
)
from hf.rope_types import PositionSettings, read_rope, rope_object, rotary_part, without_rotation
from hf.weight_names import ARCEE, BLOOM, GEMMA3, GPT2, GPTJ, LLAMA, MPT, NEOX, OLMO2, PHI3, Table, Take

# hidden_act -> model.mlp, without and with a gate. Of several names for one function, the first is written.
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
ACTIVATIONS = {
    False: {"relu2": "relu2", "gelu": "gelu_exact"} | dict.fromkeys(TANH_GELU, "gelu"),
    True: {"silu": "swiglu"} | dict.fromkeys(TANH_GELU, "geglu"),
}

# ---- settings from config.json ----

Settings = tuple[ModelConfig, PositionSettings]


def activation(c: Config, key: str, gated: bool, default: str) -> str:
    """Our model.mlp for the activation in config.json[key]. gated: whether the family has a gate in its MLP."""
    name = c.get(key, default=default)
    known = ACTIVATIONS[gated]
    if not isinstance(name, str) or name not in known:
        raise c.refuse(key, name, f"not supported: must be {', '.join(known)}")
    return known[name]


def refuse_window(c: Config, key: str, window: int | None, ctx: int) -> None:
    """UserError if the model attends to fewer than ctx tokens, or has fewer positions."""
    if window is not None and window < ctx:
        raise c.refuse(key, window, f"not supported past itself, and ctx={ctx}: try ctx={window}")


# Where transformers' defaults, which apply to an absent key, are not those of Llama
NORM_EPS = {"arcee": 1e-5, "olmo2": 1e-5, "olmo3": 1e-5, "phi3": 1e-5}
KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4, "stablelm": 32}
# Settings of the code that trained these models, and of sums in another order. transformers reads none of MPT's,
# learned_pos_emb beside ALiBi neither.
BLOOM_HARMLESS = """attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion offset_alibi skip_bias_add
    skip_bias_add_qkv slow_but_exact"""
MPT_HARMLESS = """learned_pos_emb init_device init_config embedding_fraction verbose norm_type emb_pdrop
    tokenizer_name"""
ATTENTION_BIAS = ("llama", "arcee", "qwen3", "olmo2", "olmo3", "granite", "smollm3")  # families that read this key
MLP_BIAS = ("llama", "arcee", "granite", "smollm3")
# Of Cohere 2's older files: they describe the architecture, and transformers does not read them
COHERE2_NOTES = {"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"} | (
    dict.fromkeys(
        ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"), True
    )
)


def kv_heads(c: Config, H: int) -> int:
    """The number of key-value heads: null is as many as query heads, an absent key the family's default."""
    default = H if "num_key_value_heads" in c.values else KV_HEADS.get(c.get("model_type"), H)
    return c.count("num_key_value_heads", default=default)


def llama_model(c: Config) -> ModelConfig:
    """The model of Llama and its relatives; Arcee is one without the gate."""
    kind, H, width = c.get("model_type"), c.count("num_attention_heads"), c.count("hidden_size")
    attention_bias, olmo = kind in ATTENTION_BIAS and c.flag("attention_bias"), kind in ("olmo2", "olmo3")
    return ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=H, n_kv_heads=kv_heads(c, H),
        head_dim=c.count("head_dim", default=128 if kind == "qwen3" else max(1, width // H)), width=width,
        mlp=activation(c, "hidden_act", kind != "arcee", "silu" if kind != "arcee" else "relu2"),
        mlp_width=c.count("intermediate_size"), tied_head=c.flag("tie_word_embeddings", default=kind == "smollm3"),
        norm_eps=c.number("rms_norm_eps", default=NORM_EPS.get(kind, 1e-6), least=1e-20),
        qk_norm=kind == "qwen3" or olmo, qk_norm_weight=kind == "qwen3" or olmo,
        qk_norm_all_heads=olmo, residual="serial_post" if olmo else "serial",
        qkv_bias=kind == "qwen2" or attention_bias, out_bias=attention_bias,
        mlp_bias=kind in MLP_BIAS and c.flag("mlp_bias"),
    )  # fmt: skip


def llama(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """Llama 2 and 3, SmolLM2 and 3, Mistral, Qwen2 and 3, OLMo 2, and Arcee.

    For this and the other families: ctx is the longest length to evaluate, tokens. train_ctx: the context of the
    pre-training from the command line, or None. UserError for a setting that our GPT does not have.
    """
    m, kind = llama_model(c), c.get("model_type")
    rotated = read_rotated(c, m.n_layers) if kind == "smollm3" else [True] * m.n_layers
    windows, longest = windows_of_family(c, kind, rotated), c.count("max_position_embeddings")
    base = c.number("rope_theta", default=2_000_000.0 if kind == "smollm3" else 10_000.0, least=1)
    rope = read_rope(c, *rope_object(c), base, longest, train_ctx)
    return m, with_layers(c, windows, rotated, rope, rope)


def granite(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """Granite: Llama with multipliers (`fold_granite`)."""
    for multiplier in ("embedding_multiplier", "residual_multiplier", "attention_multiplier"):
        c.number(multiplier, default=1.0)
    logits_scaling(c)
    return llama(c, ctx, train_ctx)


def olmo3(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """OLMo 3: OLMo 2, with windows in three of four layers, which may have a rotation of their own."""
    m, default = llama_model(c), 500_000.0
    base, rotated = c.number("rope_theta", default=default, least=1), [True] * m.n_layers
    if not c.object("rope_parameters") and base != default:
        reason = "transformers gives it to the full layers only: rope_parameters must have it for each type"
        raise c.refuse("rope_theta", base, reason)
    windows = windows_of_family(c, "olmo3", rotated)
    types = read_rope_of_types(c, {FULL: base, SLIDING: default}, c.count("max_position_embeddings"), train_ctx)
    return m, with_layers(c, windows, rotated, types[FULL], types[SLIDING])


def phi3(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """Phi-3: Llama with partial rotary and LongRoPE."""
    m, longest = llama_model(c), c.count("max_position_embeddings")
    base, rotated = c.number("rope_theta", default=10_000.0, least=1), [True] * m.n_layers
    key, parameters = rope_object(c)
    fraction = rotary_part(c, m.head_width, "partial_rotary_factor", parameters, 1.0)
    rope_type = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    if rope_type not in ("default", "longrope", "su", "yarn"):
        raise c.refuse(f"{key}.rope_type", rope_type, "not supported: of phi3 it must be default or longrope")
    parameters["rope_type"] = "default" if rope_type == "default" else "longrope"  # su, yarn: its earlier names
    rope = read_rope(c, key, parameters, base, longest, train_ctx, rotary_fraction=fraction, longrope_ctx=4096)
    return m, with_layers(c, windows_of_family(c, "phi3", rotated), rotated, rope, rope)


def gemma3(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """Gemma 3's text model: norms before and after attention and MLP, a gated GELU, QK-norm.

    Five of six layers have a window and a base of their own.
    """
    bias, tied = c.flag("attention_bias"), c.flag("tie_word_embeddings", default=True)
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=c.count("num_attention_heads", default=8),
        n_kv_heads=c.count("num_key_value_heads", default=4), head_dim=c.count("head_dim", default=256),
        width=c.count("hidden_size"), mlp=activation(c, "hidden_activation", True, "gelu_pytorch_tanh"),
        mlp_width=c.count("intermediate_size"), tied_head=tied, qkv_bias=bias, out_bias=bias,
        norm_eps=c.number("rms_norm_eps", default=1e-6, least=1e-20),
        qk_norm=True, qk_norm_weight=True, residual="serial_both",
    )  # fmt: skip
    score_width(c)
    every = c.count("sliding_window_pattern", default=6)
    c.ignore("hidden_act cache_implementation _sliding_window_pattern")  # transformers does not read them
    windows = read_windows(c, m.n_layers, sliding_window(c, 4096), lambda i: (i + 1) % every > 0)
    bases = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
    bases = {layer_type: c.number(key, default=base, least=1) for layer_type, (key, base) in bases.items()}
    types = read_rope_of_types(c, bases, c.count("max_position_embeddings", default=131_072), train_ctx)
    return m, with_layers(c, windows, [True] * m.n_layers, types[FULL], types[SLIDING])


def cohere2(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """Cohere 2: attention and MLP in parallel after one LayerNorm without biases, interleaved pairs.

    Three of four layers have a window and rotate, the others see all tokens and have no positions.
    """
    H, width, bias = c.count("num_attention_heads"), c.count("hidden_size"), c.flag("attention_bias")
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=H, n_kv_heads=kv_heads(c, H), width=width,
        mlp=activation(c, "hidden_act", True, "silu"), mlp_width=c.count("intermediate_size"),
        tied_head=c.flag("tie_word_embeddings", default=True), qkv_bias=bias, out_bias=bias,
        norm="layer", norm_bias=False, norm_eps=c.number("layer_norm_eps", default=1e-5, least=1e-20),
        residual="parallel_shared",
    )  # fmt: skip
    c.number("logit_scale", default=0.0625)  # `fold_cohere2`
    if (head := c.count("head_dim", default=m.head_width)) != m.head_width:
        raise c.refuse("head_dim", head, f"must be {m.head_width}: transformers divides the width by the heads")
    for key, right in COHERE2_NOTES.items():
        c.require(key, right)
    c.ignore("cache_implementation layer_switch rotary_pct")
    every = c.count("sliding_window_pattern", default=4)
    windows = read_windows(c, m.n_layers, sliding_window(c, 4096), lambda i: (i + 1) % every > 0)
    key, parameters = rope_object(c)
    base, longest = c.number("rope_theta", default=10000.0, least=1), c.count("max_position_embeddings", default=8192)
    rope = read_rope(c, key, parameters, base, longest, train_ctx, interleaved=True)
    return m, with_layers(c, windows, [window is not None for window in windows], rope, rope)


def stablelm(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """StableLM: Llama with LayerNorm, partial rotary, and optionally biases of q, k and v or a parallel residual."""
    H = c.count("num_attention_heads")
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=H, n_kv_heads=kv_heads(c, H), width=c.count("hidden_size"),
        mlp=activation(c, "hidden_act", True, "silu"), mlp_width=c.count("intermediate_size"),
        tied_head=c.flag("tie_word_embeddings"), qkv_bias=c.flag("use_qkv_bias"),
        norm="layer", norm_eps=c.number("layer_norm_eps", default=1e-5, least=1e-20),
        residual="parallel_shared" if c.flag("use_parallel_residual") else "serial",
    )  # fmt: skip
    key, parameters = rope_object(c)
    fraction = rotary_part(c, m.head_width, "partial_rotary_factor", parameters, 0.25)
    base, longest = c.number("rope_theta", default=10000.0, least=1), c.count("max_position_embeddings")
    return m, read_rope(c, key, parameters, base, longest, train_ctx, rotary_fraction=fraction)


def neox(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """GPT-NeoX and Pythia: LayerNorm, biases, partial rotary, parallel residual."""
    bias = c.flag("attention_bias", default=True)
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=c.count("num_attention_heads"), width=c.count("hidden_size"),
        mlp=activation(c, "hidden_act", False, "gelu"), mlp_width=c.count("intermediate_size"),
        tied_head=c.flag("tie_word_embeddings"), qkv_bias=bias, out_bias=bias, mlp_bias=True,
        norm="layer", norm_eps=c.number("layer_norm_eps", default=1e-5, least=1e-20),
        residual="parallel" if c.flag("use_parallel_residual", default=True) else "serial",
    )  # fmt: skip
    key, parameters = rope_object(c)
    fraction = rotary_part(c, m.head_width, "rotary_pct", parameters, 0.25)
    # transformers 4.45 and later write the same two values under these names, too; transformers reads the old ones
    c.ignore("rope_theta partial_rotary_factor")
    base, longest = c.number("rotary_emb_base", default=10000.0, least=1), c.count("max_position_embeddings")
    return m, read_rope(c, key, parameters, base, longest, train_ctx, rotary_fraction=fraction)


def gptj(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """GPT-J: interleaved pairs, one norm for attention and MLP, a bias on the head, no rope types, a fixed base."""
    width = c.count("n_embd")
    m = ModelConfig(
        n_layers=c.count("n_layer"), n_heads=c.count("n_head"), width=width,
        mlp=activation(c, "activation_function", False, "gelu_new"), mlp_width=c.count("n_inner", default=4 * width),
        tied_head=c.flag("tie_word_embeddings"), mlp_bias=True, head_bias=True,
        norm="layer", norm_eps=c.number("layer_norm_epsilon", default=1e-5, least=1e-20), residual="parallel_shared",
    )  # fmt: skip
    rotary_dim = c.count("rotary_dim", default=None if "rotary_dim" in c.values else 64)
    if rotary_dim % 2 or rotary_dim > m.head_width:
        raise c.refuse("rotary_dim", rotary_dim, f"must be even and at most {m.head_width}")
    c.ignore("rope_theta scale_attn_weights")  # as transformers
    longest = c.count("n_positions", "max_position_embeddings", default=2048)
    fraction = rotary_dim / m.head_width
    key, parameters = rope_object(c)
    parameters.pop("rope_theta", None)
    rope = read_rope(
        c, key, parameters, 10000.0, longest, train_ctx, rotary_fraction=fraction, interleaved=True, can_scale=False
    )
    return m, rope


def gpt2(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """GPT-2: learned positions, LayerNorm, biases, a tied head."""
    width, longest = c.count("n_embd"), c.count("n_positions", "max_position_embeddings", default=1024)
    m = ModelConfig(
        n_layers=c.count("n_layer"), n_heads=c.count("n_head"), width=width,
        mlp=activation(c, "activation_function", False, "gelu_new"), mlp_width=c.count("n_inner", default=4 * width),
        tied_head=c.flag("tie_word_embeddings", default=True), qkv_bias=True, out_bias=True, mlp_bias=True,
        norm="layer", norm_eps=c.number("layer_norm_epsilon", default=1e-5, least=1e-20),
    )  # fmt: skip
    refuse_window(c, "n_positions", longest, ctx)
    c.flag("scale_attn_weights", default=True)  # both: `fold_gpt2`
    c.flag("scale_attn_by_inverse_layer_idx")
    c.ignore("reorder_and_upcast_attn")  # the same scores in another order
    return m, without_rotation(c, {"kind": "learned", "max_positions": longest}, longest, train_ctx)


def bloom(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """BLOOM: ALiBi, LayerNorm (also of the embeddings: `fold_bloom`), biases, a tied head."""
    width = c.count("n_embed", "hidden_size")
    m = ModelConfig(
        n_layers=c.count("n_layer", "num_hidden_layers"), n_heads=c.count("n_head", "num_attention_heads"),
        width=width, mlp="gelu", mlp_width=4 * width, tied_head=c.flag("tie_word_embeddings", default=True),
        qkv_bias=True, out_bias=True, mlp_bias=True,
        norm="layer", norm_eps=c.number("layer_norm_epsilon", default=1e-5, least=1e-20),
    )  # fmt: skip
    c.ignore(BLOOM_HARMLESS)
    c.require("n_inner", 4 * width)
    return m, without_rotation(c, {"kind": "alibi"}, c.optional_count("seq_length"), train_ctx)


def mpt(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """MPT: ALiBi, LayerNorm without biases, no other biases, a tied head."""
    width, H = c.count("d_model"), c.count("n_heads")
    m = ModelConfig(
        n_layers=c.count("n_layers"), n_heads=H, width=width,
        mlp="gelu_exact", mlp_width=c.count("expansion_ratio", default=4) * width,
        tied_head=c.flag("tie_word_embeddings", default=True),
        norm="layer", norm_bias=False, norm_eps=c.number("layer_norm_epsilon", default=1e-5, least=1e-20),
    )  # fmt: skip
    c.ignore(MPT_HARMLESS)
    c.require("no_bias", True)
    attention = c.object("attn_config")
    for key, right in {"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"}.items():
        if (value := attention.pop(key, right)) != right:
            raise c.refuse(f"attn_config.{key}", value, f"not supported: must be {right}")
    harmless = ("attn_impl", "attn_uses_sequence_id", *HARMLESS)  # transformers 5 writes those of every config here
    for key in (k for k, v in attention.items() if k not in harmless and v not in OFF):
        raise c.refuse(f"attn_config.{key}", attention[key], "not supported, and not ignored either")
    return m, without_rotation(c, {"kind": "alibi"}, c.count("max_seq_len", default=2048), train_ctx)


class Family(NamedTuple):
    settings: Callable[[Config, int, int | None], Settings]  # (config.json, ctx to be read at, train_ctx) -> settings
    table: Table
    # Changes our state dict, and model.tied_head, by what the settings cannot express
    fold: Callable[[Config, ModelConfig, dict[str, Tensor], Take], None] | None = None
    unfold: Callable[[ModelConfig, dict[str, Tensor]], None] | None = None  # the inverse, where we write the family


FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), Family(llama, LLAMA)) | {
    "arcee": Family(llama, ARCEE),
    "phi3": Family(phi3, PHI3),
    "olmo2": Family(llama, OLMO2),
    "olmo3": Family(olmo3, OLMO2),
    "gemma3_text": Family(gemma3, GEMMA3, fold_gemma3, unfold_gemma3),
    "cohere2": Family(cohere2, LLAMA, fold_cohere2),
    "granite": Family(granite, LLAMA, fold_granite),
    "stablelm": Family(stablelm, LLAMA),
    "gpt_neox": Family(neox, NEOX),
    "gptj": Family(gptj, GPTJ),
    "gpt2": Family(gpt2, GPT2, fold_gpt2),
    "bloom": Family(bloom, BLOOM, fold_bloom),
    "mpt": Family(mpt, MPT),
}  # by model_type
