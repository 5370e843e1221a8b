"""What a Hugging Face config.json says, and where each family keeps its weights: Llama and its kin, GPT-NeoX, GPT-J.

A family is two functions: config.json -> (model settings, encoding, scaling), and tensors by their names -> our state
dict. Whatever a config asks for and we do not have is refused by its name.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.schema import ModelConfig

ACTIVATIONS = {"silu": "swiglu", "gelu": "gelu_exact"} | dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu"
)
# Keys of config.json that do not change the logits of one text; any other that we do not read must be off
HARMLESS = re.findall(
    r"\S+",
    """
    architectures model_type torch_dtype dtype transformers_version _name_or_path bos_token_id eos_token_id
    pad_token_id unk_token_id sep_token_id decoder_start_token_id use_cache initializer_range attention_dropout
    hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop pretraining_tp max_window_layers
    is_llama_config n_ctx gradient_checkpointing scale_attn_weights summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class rotary
    transformers.js_config id2label label2id output_attentions output_hidden_states return_dict use_return_dict
    problem_type chunk_size_feed_forward _attn_implementation_autoset max_length min_length
    max_sequence_length model_max_length
    """,
)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


class Config:
    """config.json, which remembers what has been read of it, so that nothing else is ignored."""

    def __init__(self, folder: Path):
        self.path = folder / "config.json"
        try:
            self.values = json.loads(self.path.read_text())
            assert isinstance(self.values, dict)
        except FileNotFoundError:
            raise ValueError(f"run=hf:{folder}: no Hugging Face checkpoint: it has no config.json") from None
        except (OSError, ValueError, AssertionError):
            raise ValueError(f"{self.path}: not a JSON object") from None
        self.read = set(HARMLESS)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.path}: {key}={value}: must be a whole number of at least 1")
        return value

    def refuse(self, key: str, value: Any, why: str) -> ValueError:
        return ValueError(f"{self.path}: {key}={str(value)[:60]}: {why}")

    def finish(self) -> None:
        """ValueError for the first key that was not read and is not off."""
        for key, value in self.values.items():
            if key not in self.read and value not in (None, False, 0, [], {}):
                raise self.refuse(key, value, "not supported, and not ignored either")


def rope_of(c: Config, train_ctx: int | None, supported: bool = True) -> tuple[float, dict, int, int]:
    """(base, the scaling as conf/scaling has it, L, the longest context that the model was trained for).

    train_ctx: L, where the config does not say. supported=False: this family has no rope types in transformers.
    """
    given = c.get("rope_parameters") or {}
    if legacy := c.get("rope_scaling"):
        if given and given != legacy:
            raise c.refuse("rope_scaling", legacy, "rope_parameters says something else")
        given = legacy
    if not isinstance(given, dict):
        raise c.refuse("rope_parameters", given, "must be an object")
    given, name = dict(given), "rope_scaling" if legacy else "rope_parameters"
    kinds = [given.pop(key, None) for key in ("rope_type", "type")]
    kind = kinds[0] or kinds[1] or "default"
    base, longest = c.get("rope_theta", 10000.0), c.count("max_position_embeddings")
    base = given.pop("rope_theta", None) or base
    original = c.get("original_max_position_embeddings")
    original = given.pop("original_max_position_embeddings", None) or original

    def number(key: str, default: float | None = None, least: float = 0.0) -> float:
        value = given.pop(key, None)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value < least:
            raise c.refuse(f"{name}.{key}", value, f"must be a number of at least {least:g}")
        return value

    if kind not in ROPE_TYPES:
        raise c.refuse(f"{name}.rope_type", kind, f"not supported: must be one of {', '.join(ROPE_TYPES)}")
    if not supported and kind != "default":
        raise c.refuse(f"{name}.rope_type", kind, f"transformers does not scale {c.get('model_type')}'s positions")
    L = longest if kind in ("default", "dynamic") else original
    if L is None and train_ctx is None:
        why = f"max_position_embeddings={longest} may be the context it was trained at or the one it was extended to"
        raise c.refuse(name, kind, f"{why}: give the former as train_ctx=")
    if None not in (L, train_ctx) and train_ctx != L:
        raise ValueError(f"train_ctx={train_ctx}: {c.path} says {L}")
    L = L or train_ctx
    if not isinstance(L, int) or L < 1 or (original or L) != L:
        raise c.refuse(f"{name}.original_max_position_embeddings", original, f"must be a whole number, here {L}")
    knobs: dict[str, Any] = {"kind": "none"}
    if kind == "linear":
        knobs = {"kind": "pi", "factor": number("factor", least=1)}
        longest = round(L * knobs["factor"])
    elif kind == "dynamic":
        knobs = {"kind": "dynamic_hf", "hf_factor": number("factor", least=1)}
    elif kind == "yarn":
        factor, truncate = number("factor", least=1), given.pop("truncate", None)
        knobs = {"kind": "yarn", "factor": factor, "beta_fast": number("beta_fast", 32.0),
                 "beta_slow": number("beta_slow", 1.0), "truncate": truncate is None or bool(truncate)}  # fmt: skip
        temperature, mscale, all_dim = (number(k, 0.0) for k in ("attention_factor", "mscale", "mscale_all_dim"))
        if not temperature and mscale and all_dim:  # only both count
            grown = 0.1 * np.log(factor)
            temperature = (grown * mscale + 1) / (grown * all_dim + 1)
        knobs |= {"attention_factor": float(temperature)} if temperature else {}
    elif kind == "llama3":
        knobs = {"kind": "llama3", "factor": number("factor", least=1), "low_freq_factor": number("low_freq_factor"),
                 "high_freq_factor": number("high_freq_factor")}  # fmt: skip
    elif kind == "longrope":
        knobs = {"kind": "longrope", "factor": max(1.0, number("factor", longest / L)),
                 "long": given.pop("long_factor", None), "short": given.pop("short_factor", None)}  # fmt: skip
        if "attention_factor" in given:
            knobs["attention_factor"] = number("attention_factor")
    if left := [k for k, v in given.items() if v is not None]:
        raise c.refuse(f"{name}.{left[0]}", given[left[0]], f"not a parameter of rope type {kind} that we have")
    return float(base), knobs, L, max(L, longest)


# ---- families: what config.json says, and where the weights are ----

Take = Callable[..., Tensor]  # take(name, *shape): the tensor of that name, float32, checked


def rope_pos(base: float, D: int, rotary_dim: int, interleaved: bool = False) -> dict:
    return {"kind": "rope", "base": base, "interleaved": interleaved, "rotary_fraction": rotary_dim / D}


def llama(c: Config, ctx: int, train_ctx: int | None) -> tuple[ModelConfig, dict, tuple]:
    """Llama 2/3, SmolLM2, Mistral, Qwen2, Qwen3, and Arcee, which is Llama without the gate."""
    kind, H = c.get("model_type"), c.count("num_attention_heads")
    width, gated = c.count("hidden_size"), kind != "arcee"
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=H, n_kv_heads=c.count("num_key_value_heads", H), width=width,
        head_dim=c.count("head_dim", 128 if kind == "qwen3" else width // H), mlp_width=c.count("intermediate_size"),
        mlp=activation(c, "hidden_act", gated), norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        tied_head=bool(c.get("tie_word_embeddings", False)), qk_norm=kind == "qwen3", qk_norm_weight=kind == "qwen3",
    )  # fmt: skip
    m.out_bias = kind in ("llama", "arcee", "qwen3") and bool(c.get("attention_bias"))
    m.qkv_bias = kind == "qwen2" or m.out_bias
    m.mlp_bias = kind in ("llama", "arcee") and bool(c.get("mlp_bias"))
    window = c.get("sliding_window") if kind != "mistral" or "sliding_window" in c.values else 4096
    if kind in ("qwen2", "qwen3") and not c.get("use_sliding_window"):
        window = None
    if window is not None and window < ctx:
        raise c.refuse("sliding_window", window, f"not supported past itself, and ctx={ctx}: try ctx={window}")
    layers = {"full_attention"} | ({"sliding_attention"} if window else set())
    if different := [t for t in c.get("layer_types", []) if t not in layers]:
        raise c.refuse("layer_types", different[0], "not supported: must be full_attention")
    rope = rope_of(c, train_ctx)
    return m, rope_pos(rope[0], m.head_width, m.head_width), rope[1:]


def llama_weights(m: ModelConfig, V: int, take: Take) -> dict[str, Tensor]:
    C, D, F = m.width, m.head_width, m.mlp_width
    w = {"tokens.weight": take("model.embed_tokens.weight", V, C), "norm.weight": take("model.norm.weight", C)}
    w["head.weight"] = w["tokens.weight"] if m.tied_head else take("lm_head.weight", V, C)
    for i in range(m.n_layers):
        ours, a, mlp = f"blocks.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        w[f"{ours}.norm1.weight"] = take(f"model.layers.{i}.input_layernorm.weight", C)
        w[f"{ours}.norm2.weight"] = take(f"model.layers.{i}.post_attention_layernorm.weight", C)
        for kind, shape in (("weight", (C,)), *([("bias", ())] * m.qkv_bias)):
            parts = (("q", m.n_heads), ("k", m.kv_heads), ("v", m.kv_heads))
            w[f"{ours}.attention.qkv.{kind}"] = torch.cat(
                [take(f"{a}.{x}_proj.{kind}", n * D, *shape) for x, n in parts]
            )
        for j, x in enumerate("qk" * m.qk_norm_weight):
            w[f"{ours}.attention.qk_norms.{j}.weight"] = take(f"{a}.{x}_norm.weight", D)
        w[f"{ours}.attention.out.weight"] = take(f"{a}.o_proj.weight", C, m.n_heads * D)
        if m.out_bias:
            w[f"{ours}.attention.out.bias"] = take(f"{a}.o_proj.bias", C)
        ups = ("gate", "up") if m.mlp == "swiglu" else ("up",)
        w[f"{ours}.mlp.up.weight"] = torch.cat([take(f"{mlp}.{x}_proj.weight", F, C) for x in ups])
        w[f"{ours}.mlp.down.weight"] = take(f"{mlp}.down_proj.weight", C, F)
        if m.mlp_bias:
            w[f"{ours}.mlp.up.bias"] = torch.cat([take(f"{mlp}.{x}_proj.bias", F) for x in ups])
            w[f"{ours}.mlp.down.bias"] = take(f"{mlp}.down_proj.bias", C)
    return w


def neox(c: Config, ctx: int, train_ctx: int | None) -> tuple[ModelConfig, dict, tuple]:
    """GPT-NeoX and Pythia: LayerNorm, biases, partial rotary, parallel residual."""
    H, width, bias = c.count("num_attention_heads"), c.count("hidden_size"), bool(c.get("attention_bias", True))
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=H, width=width, mlp_width=c.count("intermediate_size"),
        mlp=activation(c, "hidden_act", False), norm="layer", norm_eps=float(c.get("layer_norm_eps", 1e-5)),
        residual="parallel" if c.get("use_parallel_residual", True) else "serial",
        qkv_bias=bias, out_bias=bias, mlp_bias=True, tied_head=bool(c.get("tie_word_embeddings", False)),
    )  # fmt: skip
    for name in ("rope_parameters", "rope_scaling"):  # NeoX's own names for what others call otherwise
        rope = c.values.get(name)
        if isinstance(rope, dict) and "partial_rotary_factor" in rope:
            c.values = {**c.values, "rotary_pct": rope["partial_rotary_factor"],
                        name: {k: v for k, v in rope.items() if k != "partial_rotary_factor"}}  # fmt: skip
    fraction, base = c.get("rotary_pct", 0.25), c.get("rotary_emb_base", 10000.0)
    c.values = {"rope_theta": base, **c.values}
    rotary_dim = int(m.head_width * fraction)
    if rotary_dim < 2 or rotary_dim % 2 or fraction > 1:
        raise c.refuse("rotary_pct", fraction, f"turns {rotary_dim} of {m.head_width} dimensions: must be even")
    rope = rope_of(c, train_ctx)
    return m, rope_pos(rope[0], m.head_width, rotary_dim), rope[1:]


def neox_weights(m: ModelConfig, V: int, take: Take) -> dict[str, Tensor]:
    C, H, D, F = m.width, m.n_heads, m.head_width, m.mlp_width
    w = {"tokens.weight": take("gpt_neox.embed_in.weight", V, C)}
    w["head.weight"] = w["tokens.weight"] if m.tied_head else take(("embed_out.weight", "lm_head.weight"), V, C)
    for kind, shape in (("weight", (C,)), ("bias", ())):
        w[f"norm.{kind}"] = take(f"gpt_neox.final_layer_norm.{kind}", C)
        for i in range(m.n_layers):
            ours, theirs = f"blocks.{i}", f"gpt_neox.layers.{i}"
            w[f"{ours}.norm1.{kind}"] = take(f"{theirs}.input_layernorm.{kind}", C)
            w[f"{ours}.norm2.{kind}"] = take(f"{theirs}.post_attention_layernorm.{kind}", C)
            if kind == "weight" or m.qkv_bias:  # fused by head, [q | k | v] of each
                qkv = take(f"{theirs}.attention.query_key_value.{kind}", 3 * C, *shape)
                w[f"{ours}.attention.qkv.{kind}"] = qkv.view(H, 3, D, *shape).transpose(0, 1).reshape(3 * C, *shape)
                w[f"{ours}.attention.out.{kind}"] = take(f"{theirs}.attention.dense.{kind}", C, *shape)
            w[f"{ours}.mlp.up.{kind}"] = take(f"{theirs}.mlp.dense_h_to_4h.{kind}", F, *shape)
            w[f"{ours}.mlp.down.{kind}"] = take(f"{theirs}.mlp.dense_4h_to_h.{kind}", C, *([F] * len(shape)))
    return w


def gptj(c: Config, ctx: int, train_ctx: int | None) -> tuple[ModelConfig, dict, tuple]:
    """GPT-J: interleaved pairs, one norm for attention and MLP, a bias on the head."""
    H, width, tied = c.count("n_head"), c.count("n_embd"), bool(c.get("tie_word_embeddings", False))
    m = ModelConfig(
        n_layers=c.count("n_layer"), n_heads=H, width=width, mlp_width=c.count("n_inner", 4 * width),
        mlp=activation(c, "activation_function", False), norm="layer", residual="parallel_shared",
        norm_eps=float(c.get("layer_norm_epsilon", 1e-5)), mlp_bias=True, tied_head=tied, head_bias=True,
    )  # fmt: skip
    c.values = {"max_position_embeddings": c.count("n_positions"), **c.values}
    rotary_dim = c.count("rotary_dim", m.head_width)
    if rotary_dim % 2 or rotary_dim > m.head_width:
        raise c.refuse("rotary_dim", rotary_dim, f"must be even and at most {m.head_width}")
    rope = rope_of(c, train_ctx, supported=False)
    return m, rope_pos(10000.0, m.head_width, rotary_dim, interleaved=True), rope[1:]


def gptj_weights(m: ModelConfig, V: int, take: Take) -> dict[str, Tensor]:
    C, F = m.width, m.mlp_width
    w = {"tokens.weight": take("transformer.wte.weight", V, C), "head.bias": take("lm_head.bias", V)}
    w["head.weight"] = w["tokens.weight"] if m.tied_head else take("lm_head.weight", V, C)
    for i in range(m.n_layers):
        ours, h = f"blocks.{i}", f"transformer.h.{i}"
        w[f"{ours}.attention.qkv.weight"] = torch.cat([take(f"{h}.attn.{x}_proj.weight", C, C) for x in "qkv"])
        w[f"{ours}.attention.out.weight"] = take(f"{h}.attn.out_proj.weight", C, C)
        for kind, shape in (("weight", (C,)), ("bias", ())):
            w[f"{ours}.norm1.{kind}"] = take(f"{h}.ln_1.{kind}", C)
            w[f"{ours}.mlp.up.{kind}"] = take(f"{h}.mlp.fc_in.{kind}", F, *shape)
            w[f"{ours}.mlp.down.{kind}"] = take(f"{h}.mlp.fc_out.{kind}", C, *([F] * len(shape)))
    return w | {f"norm.{kind}": take(f"transformer.ln_f.{kind}", C) for kind in ("weight", "bias")}


LLAMA, NEOX, GPTJ = (llama, llama_weights), (neox, neox_weights), (gptj, gptj_weights)
FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "arcee"), LLAMA) | {"gpt_neox": NEOX, "gptj": GPTJ}


def activation(c: Config, key: str, gated: bool) -> str:
    name = c.get(key)
    mlp = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if mlp is None or (mlp == "swiglu") != gated:
        raise c.refuse(key, name, f"not supported: must be {'silu' if gated else ', '.join(list(ACTIVATIONS)[1:])}")
    return mlp
