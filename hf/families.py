"""Model families of Hugging Face: the settings in config.json, and the names of each family's weights.

A family is a function, config.json -> our settings, and one table of weight names for both directions: `to_ours`
concatenates the checkpoint's tensors, `from_ours` splits ours. Llama, Mistral, Qwen2 and Qwen3 share a table. Names and
defaults are those of transformers 5.

Letters: C width, H query heads, G key-value heads, D head width, i layer.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from conf.schema import ModelConfig
from hf.config import Config
from hf.rope_types import RopeSettings, read_rope, rope_object

# hidden_act -> model.mlp. Of several names for one function, the first is written.
ACTIVATIONS = {"silu": "swiglu", "gelu": "gelu_exact"} | dict.fromkeys(
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu"
)

# ---- weight names ----


class ByHead(str):
    """The name of a fused qkv module whose rows are q, k and v of the first head, then of the second head, and so on.

    In our qkv the rows are q of all heads, then k of all heads, then v of all heads.
    """


class Table(NamedTuple):
    """Our modules -> the checkpoint's modules with the same weight (and bias), outside the layers and in each layer.

    A tuple: the rows of our weight are those of several modules, one after another. A model need not have every entry.
    """

    outside: dict[str, str]
    layers: str  # the checkpoint's name of what is `blocks` in our GPT
    layer: dict[str, str | tuple[str, ...]]


LLAMA = Table(
    {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers",
    {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.qk_norms.0": "self_attn.q_norm",
        "attention.qk_norms.1": "self_attn.k_norm",
        "attention.out": "self_attn.o_proj",
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": "mlp.down_proj",
    },
)
ARCEE = LLAMA._replace(layer={**LLAMA.layer, "mlp.up": "mlp.up_proj"})  # no gate
NEOX = Table(
    {"tokens": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    "gpt_neox.layers",
    {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.qkv": ByHead("attention.query_key_value"),
        "attention.out": "attention.dense",
        "mlp.up": "mlp.dense_h_to_4h",
        "mlp.down": "mlp.dense_4h_to_h",
    },
)
GPTJ = Table(
    {"tokens": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
    "transformer.h",
    {
        "norm1": "ln_1",
        "attention.qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        "attention.out": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
    },
)
HEADS = ("lm_head.weight", "embed_out.weight")  # a file may have either in place of the other


def place(table: Table, m: ModelConfig, name: str, rows: int) -> tuple[dict[str, int], bool]:
    """The tensors of a checkpoint that make up our parameter: ({tensor name: number of rows}, whether it is ByHead).

    name, rows: of our parameter. Several tensors are concatenated along their rows, in this order. KeyError if the
    table has no entry for the parameter.
    """
    module, _, kind = name.rpartition(".")  # kind: weight or bias
    if module.startswith("blocks."):
        _, i, module = module.split(".", 2)
        entry, prefix = table.layer[module], f"{table.layers}.{i}."
    else:
        entry, prefix = table.outside[module], ""
    modules = (entry,) if isinstance(entry, str) else entry
    sizes = [rows // len(modules)] * len(modules)  # one module, or gate and up, which are equal
    if module == "attention.qkv" and len(modules) == 3:
        sizes = [m.n_heads * m.head_width, m.kv_heads * m.head_width, m.kv_heads * m.head_width]
    parts = {f"{prefix}{part}.{kind}": size for part, size in zip(modules, sizes, strict=True)}
    return parts, isinstance(entry, ByHead)


def to_ours(
    table: Table, m: ModelConfig, shapes: Mapping[str, torch.Size], take: Callable[[str, tuple[int, ...]], Tensor]
) -> dict[str, Tensor]:
    """Our state dict from a checkpoint's tensors.

    shapes: name -> shape of all our parameters. take(name, shape): returns the checkpoint's tensor of that name, after
    a check of its shape.
    """
    ours = {}
    for name, (rows, *columns) in shapes.items():
        if name == "head.weight" and m.tied_head:
            continue
        parts, by_head = place(table, m, name, rows)
        x = torch.cat([take(part, (size, *columns)) for part, size in parts.items()])  # [rows, C] or [rows]
        if by_head:
            x = x.view(m.n_heads, 3, m.head_width, *columns).transpose(0, 1).reshape(rows, *columns)
        ours[name] = x
    if m.tied_head:
        ours["head.weight"] = ours["tokens.weight"]
    return ours


def from_ours(table: Table, m: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors, by their names there: the inverse of `to_ours`."""
    tensors = {}
    for name, x in ours.items():
        if name == "head.weight" and m.tied_head:
            continue
        parts, by_head = place(table, m, name, len(x))
        if by_head:
            x = x.view(3, m.n_heads, m.head_width, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        tensors |= zip(parts, x.split(list(parts.values())), strict=True)
    return tensors


# ---- settings from config.json ----

Settings = tuple[ModelConfig, dict, RopeSettings]  # model, the knobs of pos, and the rotation with its context


def rope_pos(base: float, D: int, rotary_dim: int, interleaved: bool = False) -> dict:
    """The knobs of pos=rope for heads of width D of which the first rotary_dim dimensions are rotated."""
    return {"kind": "rope", "base": base, "interleaved": interleaved, "rotary_fraction": rotary_dim / D}


def activation(c: Config, key: str, gated: bool) -> str:
    """Our model.mlp for the activation in config.json[key]. gated: whether the family has a gate in its MLP."""
    name = c.get(key)
    mlp = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if mlp is None or (mlp == "swiglu") != gated:
        accepted = [known for known, ours in ACTIVATIONS.items() if (ours == "swiglu") == gated]
        raise c.refuse(key, name, f"not supported: must be {', '.join(accepted)}")
    return mlp


def llama(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """Llama 2/3, SmolLM2, Mistral, Qwen2, Qwen3, and Arcee, which is Llama without the gate.

    For this and the other families: ctx is the longest length to evaluate, tokens. train_ctx: the context of the
    pre-training from the command line, or None. UserError for a setting that our GPT does not have.
    """
    kind, H, width = c.get("model_type"), c.count("num_attention_heads"), c.count("hidden_size")
    out_bias = kind in ("llama", "arcee", "qwen3") and bool(c.get("attention_bias"))
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=H, n_kv_heads=c.count("num_key_value_heads", default=H),
        head_dim=c.count("head_dim", default=128 if kind == "qwen3" else width // H), width=width,
        mlp=activation(c, "hidden_act", gated=kind != "arcee"), mlp_width=c.count("intermediate_size"),
        tied_head=bool(c.get("tie_word_embeddings")), norm_eps=float(c.get("rms_norm_eps", default=1e-6)),
        qk_norm=kind == "qwen3", qk_norm_weight=kind == "qwen3", qkv_bias=kind == "qwen2" or out_bias,
        out_bias=out_bias, mlp_bias=kind in ("llama", "arcee") and bool(c.get("mlp_bias")),
    )  # fmt: skip
    window = c.get("sliding_window") if kind != "mistral" or "sliding_window" in c.values else 4096
    if kind in ("qwen2", "qwen3") and not c.get("use_sliding_window"):
        window = None
    if window is not None and window < ctx:
        raise c.refuse("sliding_window", window, f"not supported past itself, and ctx={ctx}: try ctx={window}")
    layers = {"full_attention"} | ({"sliding_attention"} if window else set())
    if different := [t for t in c.get("layer_types", default=[]) if t not in layers]:
        raise c.refuse("layer_types", different[0], "not supported: must be full_attention")
    longest = c.count("max_position_embeddings")
    rope = read_rope(c, *rope_object(c), c.get("rope_theta", default=10000.0), longest, train_ctx)
    return m, rope_pos(rope.base, m.head_width, m.head_width), rope


def neox(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """GPT-NeoX and Pythia: LayerNorm, biases, partial rotary, parallel residual."""
    bias = bool(c.get("attention_bias", default=True))
    m = ModelConfig(
        n_layers=c.count("num_hidden_layers"), n_heads=c.count("num_attention_heads"), width=c.count("hidden_size"),
        mlp=activation(c, "hidden_act", gated=False), mlp_width=c.count("intermediate_size"),
        tied_head=bool(c.get("tie_word_embeddings")), qkv_bias=bias, out_bias=bias, mlp_bias=True,
        norm="layer", norm_eps=float(c.get("layer_norm_eps", default=1e-5)),
        residual="parallel" if c.get("use_parallel_residual", default=True) else "serial",
    )  # fmt: skip
    key, parameters = rope_object(c)
    fraction = c.get("rotary_pct", default=0.25)
    if (partial := parameters.pop("partial_rotary_factor", None)) is not None:  # transformers 5 has it here
        fraction = partial
    rotary_dim = int(m.head_width * fraction)
    if rotary_dim < 2 or rotary_dim % 2 or fraction > 1:
        raise c.refuse("rotary_pct", fraction, f"rotates {rotary_dim} of {m.head_width} dimensions: must be even")
    base, longest = c.get("rope_theta", "rotary_emb_base", default=10000.0), c.count("max_position_embeddings")
    rope = read_rope(c, key, parameters, base, longest, train_ctx)
    return m, rope_pos(rope.base, m.head_width, rotary_dim), rope


def gptj(c: Config, ctx: int, train_ctx: int | None) -> Settings:
    """GPT-J: interleaved pairs, one norm for attention and MLP, a bias on the head, no rope types, a fixed base."""
    width = c.count("n_embd")
    m = ModelConfig(
        n_layers=c.count("n_layer"), n_heads=c.count("n_head"), width=width,
        mlp=activation(c, "activation_function", gated=False), mlp_width=c.count("n_inner", default=4 * width),
        tied_head=bool(c.get("tie_word_embeddings")), mlp_bias=True, head_bias=True,
        norm="layer", norm_eps=float(c.get("layer_norm_epsilon", default=1e-5)), residual="parallel_shared",
    )  # fmt: skip
    rotary_dim = c.count("rotary_dim", default=m.head_width)
    if rotary_dim % 2 or rotary_dim > m.head_width:
        raise c.refuse("rotary_dim", rotary_dim, f"must be even and at most {m.head_width}")
    c.get("rope_theta")  # transformers ignores it, too
    longest = c.count("n_positions", "max_position_embeddings")
    rope = read_rope(c, *rope_object(c), 10000.0, longest, train_ctx, can_scale=False)
    return m, rope_pos(10000.0, m.head_width, rotary_dim, interleaved=True), rope


class Family(NamedTuple):
    settings: Callable[[Config, int, int | None], Settings]  # (config.json, ctx to be read at, train_ctx) -> settings
    table: Table


FAMILIES = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), Family(llama, LLAMA)) | {
    "arcee": Family(llama, ARCEE),
    "gpt_neox": Family(neox, NEOX),
    "gptj": Family(gptj, GPTJ),
}  # by model_type
