"""Model families of Hugging Face: a table of what each has in config.json.

An entry says which keys a family has, with the values that transformers 5 takes for absent ones, the settings of our
model that all its checkpoints have, which layers have windows and how they rotate (hf/positions.py), and the names of
its weights (hf/weights.py). Keys have the names that most families have for them, and `names` those of this family.

Letters: H query heads, D head width, i layer.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from conf.errors import check
from conf.schema import ModelConfig, TrainConfig
from hf import weights
from hf.checkpoint import Config, Keys
from hf.positions import ROPE_TYPES, PositionRule, read_positions
from hf.weights import Table, Take

# hidden_act -> model.mlp, without and with a gate. Of several names for one function, the first is written.
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
ACTIVATIONS = {
    False: {"relu2": "relu2", "gelu": "gelu_exact"} | dict.fromkeys(TANH_GELU, "gelu"),
    True: {"silu": "swiglu"} | dict.fromkeys(TANH_GELU, "geglu"),
}
# Which layers have the window where config.json does not say it: all, all after the first ones, all but every n-th
ALL = PositionRule(slides=lambda s, i: s["sliding_window"] is not None, fixed=True)
LAST = PositionRule(slides=lambda s, i: s["sliding_window"] is not None and i >= s["max_window_layers"])
SOME = PositionRule(slides=lambda s, i: (i + 1) % s.get("sliding_window_pattern", 4) > 0)
WITHOUT_POSITIONS = PositionRule(slides=lambda s, i: s["sliding_window"] is not None and not s["no_rope_layers"][i])

# Key -> setting of ModelConfig
SETTINGS = (
    {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
    | {"head_dim": "head_dim", "hidden_size": "width", "intermediate_size": "mlp_width", "rms_norm_eps": "norm_eps"}
    | {"attn_logit_softcapping": "attention_softcap", "final_logit_softcapping": "logit_softcap"}
    | {"tie_word_embeddings": "tied_head", "qkv_bias": "qkv_bias", "attention_bias": "out_bias", "mlp_bias": "mlp_bias"}
)


class Family(NamedTuple):
    table: Table
    keys: Keys  # of config.json that it reads
    names: Mapping[str, str] = {}  # key -> its names in this family: Config.read
    model: Mapping[str, Any] = {}  # settings of ModelConfig beside those that the keys give
    gated: bool = True  # whether the MLP has a gate
    positions: PositionRule = PositionRule()
    # Keys that must have the value of all its checkpoints, or none
    requires: Mapping[str, Any] = {}
    ignored: str = ""  # keys that change no logit of this family
    # Changes our state dict, and model.tied_head, by what the settings cannot express
    fold: Callable[[dict[str, Any], ModelConfig, dict[str, Tensor], Take], None] | None = None
    unfold: Callable[[ModelConfig, dict[str, Tensor]], None] | None = None  # the inverse, where we write the family


# ---- the table ----

SIZES = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), int)
BASIC = SIZES | {"max_position_embeddings": int | None, "tie_word_embeddings": False, "rms_norm_eps": 1e-5}
ROPE = {"rope_parameters": {}, "rope_scaling": {}, "original_max_position_embeddings": int | None}
ROTATING = BASIC | ROPE | {"intermediate_size": int, "hidden_act": "silu", "rope_theta": 10_000.0}
GQA = {"num_key_value_heads": int | None}
LAYERS = {"layer_types": list | None}
LLAMA = ROTATING | GQA | LAYERS | {"head_dim": int | None, "rms_norm_eps": 1e-6}
PHI3_TYPES = {"default": "default"} | dict.fromkeys(("longrope", "su", "yarn"), "longrope")  # two are earlier names
BIASES = {"attention_bias": False, "mlp_bias": False}
WINDOW = {"sliding_window": 4096}
QWEN = LLAMA | WINDOW | {"use_sliding_window": False, "max_window_layers": 28.0, "num_key_value_heads": 32}
OLMO2 = LLAMA | {"rms_norm_eps": 1e-5, "attention_bias": False}
GEMMA = LLAMA | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256.0}
GEMMA |= WINDOW | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "attention_bias": False}
GRANITE = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0)
GPT2 = BASIC | {"intermediate_size": int | None, "hidden_act": "gelu_new"}

LAYER_NORM = {"rms_norm_eps": "layer_norm_eps"}
GPT2_NAMES = (
    {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    | {"intermediate_size": "n_inner", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
    | {"max_position_embeddings": "n_positions max_position_embeddings"}
)
BLOOM_NAMES = (
    {"hidden_size": "n_embed hidden_size", "num_hidden_layers": "n_layer num_hidden_layers"}
    | {"num_attention_heads": "n_head num_attention_heads", "max_position_embeddings": "seq_length"}
    | {"rms_norm_eps": "layer_norm_epsilon", "intermediate_size": "n_inner"}
)
QK_NORM = {"qk_norm": True, "qk_norm_weight": True}
POST_NORM = {**QK_NORM, "qk_norm_all_heads": True, "residual": "serial_post"}
LAYER = {"norm": "layer"}
ALL_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


FAMILIES = {
    "llama": Family(weights.LLAMA, LLAMA | BIASES, requires={"activation": "swiglu"}),  # of Falcon 3
    "mistral": Family(weights.LLAMA, LLAMA | WINDOW | {"num_key_value_heads": 8}, positions=ALL),
    "ministral3": Family(
        weights.LLAMA,
        LLAMA | {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": int | None},
        positions=ALL._replace(types={"yarn": "yarn"}, tempered=True),
    ),
    "qwen2": Family(weights.LLAMA, QWEN, model={"qkv_bias": True}, positions=LAST),
    "qwen3": Family(weights.LLAMA, QWEN | {"head_dim": 128, "attention_bias": False}, model=QK_NORM, positions=LAST),
    "smollm3": Family(
        weights.LLAMA,
        {**LLAMA, **BIASES, "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
        | {"no_rope_layers": list | None, "no_rope_layer_interval": 4}
        | {"use_sliding_window": False, "sliding_window": int | None},
        positions=WITHOUT_POSITIONS,
    ),
    "arcee": Family(weights.ARCEE, LLAMA | BIASES | {"hidden_act": "relu2", "rms_norm_eps": 1e-5}, gated=False),
    "phi3": Family(
        weights.PHI3,
        LLAMA | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": int | None},
        positions=ALL._replace(types=PHI3_TYPES, longrope_ctx=4096),
    ),
    "olmo2": Family(weights.OLMO2, OLMO2, model=POST_NORM),
    "olmo3": Family(
        weights.OLMO2,
        OLMO2 | WINDOW | {"rope_theta": 500_000.0},
        model=POST_NORM,
        positions=SOME._replace(sliding_base=500_000.0),
    ),
    "gemma2": Family(
        weights.GEMMA3,
        {**GEMMA, "vocab_size": 256_000, "max_position_embeddings": 8192}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names={"hidden_act": "hidden_activation"},
        model={"residual": "serial_both"},
        positions=PositionRule(slides=lambda s, i: s["sliding_window"] is not None and i % 2 == 0),
        ignored="hidden_act",  # as transformers
        fold=weights.fold_gemma,
    ),
    "gemma3_text": Family(
        weights.GEMMA3,
        {**GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window_pattern": 6}
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        names={"hidden_act": "hidden_activation"},
        model={**QK_NORM, "residual": "serial_both"},
        positions=SOME._replace(sliding_base="rope_local_base_freq"),
        ignored="hidden_act _sliding_window_pattern",  # transformers does not read them
        fold=weights.fold_gemma,
        unfold=weights.unfold_gemma,
    ),
    "cohere2": Family(
        weights.LLAMA,
        {**ROTATING, **WINDOW, **GQA, **LAYERS, "max_position_embeddings": 8192, "attention_bias": False}
        | {"tie_word_embeddings": True, "sliding_window_pattern": 4, "logit_scale": 0.0625},
        names=LAYER_NORM,
        model={**LAYER, "norm_bias": False, "residual": "parallel_shared"},
        positions=SOME._replace(rotates=lambda s, slides: slides, interleaved=True),
        # transformers does not read them; most, of older files, describe the architecture
        ignored="""layer_switch rotary_pct _sliding_window_pattern use_embedding_sharing use_gated_activation
            use_parallel_block use_parallel_embedding order_of_interleaved_layers position_embedding_type""",
        fold=weights.fold_cohere2,
    ),
    "exaone4": Family(
        weights.OLMO2,
        LLAMA | WINDOW | {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "layer_types": list},
        model={**QK_NORM, "residual": "serial_post"},
        positions=PositionRule(rotates=lambda s, slides: slides or s["sliding_window"] is None),
        ignored="sliding_window_pattern",  # layer_types says it
    ),
    "glm": Family(
        weights.GLM,
        {**LLAMA, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}
        | {"rms_norm_eps": 1.5625e-7, "qkv_bias": True},
        names={"qkv_bias": "attention_bias"},
        positions=PositionRule(interleaved=True),
    ),
    "starcoder2": Family(
        weights.STARCODER2,
        {**LLAMA, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "sliding_window": int | None},
        names={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
        model=LAYER,
        gated=False,
        positions=ALL,
        requires={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
        ignored="layer_norm_epsilon scale_attention_softmax_in_fp32",  # as transformers
    ),
    "granite": Family(weights.LLAMA, LLAMA | BIASES | GRANITE, fold=weights.fold_granite),
    "stablelm": Family(
        weights.LLAMA,
        {**ROTATING, "num_key_value_heads": 32, "partial_rotary_factor": 0.25}
        | {"qkv_bias": False, "use_parallel_residual": False},
        names={**LAYER_NORM, "qkv_bias": "use_qkv_bias"},
        model={**LAYER, "residual": "parallel_shared"},
        # In transformers it fails with the type proportional
        positions=PositionRule(types={name: name for name in ROPE_TYPES if name != "proportional"}),
    ),
    "gpt_neox": Family(
        weights.NEOX,
        {**ROTATING, "hidden_act": "gelu", "attention_bias": True}
        | {"partial_rotary_factor": 0.25, "use_parallel_residual": True},
        names={**LAYER_NORM, "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        model={**LAYER, "mlp_bias": True, "residual": "parallel"},
        gated=False,
        # transformers 4.45 and later write the same two values under these names, too; transformers reads the old ones
        ignored="rope_theta partial_rotary_factor",
    ),
    "gpt2": Family(
        weights.GPT2,
        {**GPT2, "max_position_embeddings": 1024, "tie_word_embeddings": True}
        | {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        names=GPT2_NAMES,
        model={**LAYER, **ALL_BIASES},
        gated=False,
        positions=PositionRule({"kind": "learned"}),
        fold=weights.fold_gpt2,
    ),
    "bloom": Family(
        weights.BLOOM,
        BASIC | {"intermediate_size": int | None, "tie_word_embeddings": True},
        names=BLOOM_NAMES,
        model={**LAYER, **ALL_BIASES, "mlp": "gelu"},
        positions=PositionRule({"kind": "alibi"}),
        fold=weights.fold_bloom,
    ),
}  # by model_type
# Models that also read images: model_type -> (those of their text part, their keys that change no logit of a text)
TEXT_PARTS = {
    "gemma3": ("gemma3_text", "vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index"),
    "mistral3": (
        "ministral3 mistral",
        """vision_config image_token_index multimodal_projector_bias projector_hidden_act spatial_merge_size
            vision_feature_layer""",
    ),
}


# ---- settings ----


def read_settings(c: Config, ctx: int, train_ctx: int | None) -> tuple[TrainConfig, int, Family]:
    """(settings, vocabulary size, family) of a config.json.

    ctx: the longest length to evaluate; train_ctx: that of the pre-training, or None. UserError for a setting that our
    GPT does not have, and if the file says another context than train_ctx. c.settings then has the values of the
    family's keys.
    """
    model_type = str(c.values.get("model_type"))
    known = sorted((*FAMILIES, *TEXT_PARTS))
    c.check(model_type in known, "model_type", model_type, f"not supported; there are {', '.join(known)}")
    if model_type in TEXT_PARTS:
        model_type = enter_text_part(c)
    family = FAMILIES[model_type]
    c.settings = c.read(family.keys, family.names)
    m = read_model(c, family)
    c.keys_read |= set(family.ignored.split())
    # Families without the key head_dim divide the width by the heads, whatever it is in the file
    c.require({"head_dim": m.head_width, **family.requires})
    pos, scaling, L, longest, layers = read_positions(c, family.positions, m.head_width, ctx, train_ctx)
    c.finish()
    check(not c.ignore, "ignore_keys", ", ".join(sorted(c.ignore)), f"keys that {c.path} has and that are refused")
    check(train_ctx in (None, L), "train_ctx", train_ctx, f"left out: {c.path} says {L}")
    cfg = TrainConfig(model=m, pos=pos, scaling=scaling, layers=layers, ctx=longest, steps=0, dtype="float32")
    if longest > L:  # extended, as a run of ours that was fine-tuned with init=
        cfg.init, cfg.pretrained = "hf", {"ctx": L, "run": "config.json"}
    return cfg, c.settings["vocab_size"], family


def enter_text_part(c: Config) -> str:
    """Of a model that also reads images, check the keys beside text_config, and go on with that: its model_type."""
    types, image_keys = TEXT_PARTS[c.values["model_type"]]
    beside = c.read({"tie_word_embeddings": True})  # that of text_config is not read by transformers
    text = c.object("text_config", c.values.get("text_config"))
    model_type = str(text.values.get("model_type"))
    text.check(model_type in types.split(), "model_type", model_type, f"not supported: must be one of {types}")
    c.keys_read |= {"text_config", *image_keys.split()}
    c.finish()
    c.values, c.prefix, c.keys_read = {**text.values, **beside, "model_type": model_type}, text.prefix, text.keys_read
    return model_type


def read_model(c: Config, family: Family) -> ModelConfig:
    s, keys = c.settings, family.keys
    m = ModelConfig(**{setting: s[key] for key, setting in SETTINGS.items() if key in keys})
    m.mlp_width = m.mlp_width or 4 * m.width
    m.qkv_bias |= m.out_bias
    if "hidden_act" in keys:
        known = ACTIVATIONS[family.gated]
        c.check(s["hidden_act"] in known, "hidden_act", s["hidden_act"], f"not supported: must be {', '.join(known)}")
        m.mlp = known[s["hidden_act"]]
    for name, value in family.model.items():
        setattr(m, name, value)
    if not s.get("use_parallel_residual", True):
        m.residual = "serial"
    c.check(m.head_dim or m.width % m.n_heads == 0, "hidden_size", m.width, f"must be a multiple of {m.n_heads} heads")
    c.check(m.n_heads % m.kv_heads == 0, "num_key_value_heads", m.kv_heads, f"must be a divisor of {m.n_heads} heads")
    return m


def model_keys(m: ModelConfig, family: Family) -> dict[str, Any]:
    """The keys of config.json that say these settings, as far as the family has them: the inverse of `read_model`."""
    activation = next((name for name, mlp in ACTIVATIONS[family.gated].items() if mlp == m.mlp), None)
    keys = {key: getattr(m, setting) for key, setting in SETTINGS.items()}
    return keys | {"hidden_act": activation, "query_pre_attn_scalar": m.head_width, "logit_scale": 1.0}
