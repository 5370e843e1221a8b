"""The weights of each family in a Hugging Face checkpoint, and the way between them and ours.

One table serves both directions: `to_ours` concatenates the checkpoint's tensors, `from_ours` splits ours (of the
families that hf/write.py writes). What our GPT has no setting for is multiplied into the weights when they are read, by
the family's fold, so that it costs no code in the model.

Letters: C width, H query heads, G key-value heads, D head width, i layer.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import ModelConfig

# ---- the tables ----


class ByHead(str):
    """The name of a fused qkv module whose rows are q, k and v of the first head, then of the second head, and so on.

    In our qkv the rows are q of all heads, then k of all heads, then v of all heads.
    """


class Transposed(str):
    """The name of a module whose weight is [columns, rows]: GPT-2's Conv1D."""


class Table(NamedTuple):
    """Our modules -> the checkpoint's modules with the same weight (and bias), outside the layers and in each layer.

    A tuple: the rows of our weight are those of several modules, one after another. A model need not have every entry.
    """

    outside: dict[str, str]
    layers: str  # the checkpoint's name of what is `blocks` in our GPT
    layer: dict[str, str | tuple[str, ...]]


NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
LLAMA = Table(
    {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers",
    NORMS
    | {"attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
    | {"attention.qk_norms.0": "self_attn.q_norm", "attention.qk_norms.1": "self_attn.k_norm"}
    | {"attention.out": "self_attn.o_proj"}
    | {"mlp.up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": "mlp.down_proj"},
)
ARCEE = LLAMA._replace(layer=LLAMA.layer | {"mlp.up": "mlp.up_proj"})  # no gate
PHI3 = LLAMA._replace(layer=LLAMA.layer | {"attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"})
GLM = LLAMA._replace(layer=LLAMA.layer | {"mlp.up": "mlp.gate_up_proj"})
STARCODER2 = LLAMA._replace(layer=LLAMA.layer | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"})
POST_NORMS = {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
OLMO2 = LLAMA._replace(layer=LLAMA.layer | POST_NORMS)
GEMMA3_NORMS = {f"post_{name}": entry for name, entry in POST_NORMS.items()} | {"norm2": "pre_feedforward_layernorm"}
GEMMA3 = LLAMA._replace(layer=LLAMA.layer | GEMMA3_NORMS)
NEOX = Table(
    {"tokens": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    "gpt_neox.layers",
    NORMS
    | {"attention.qkv": ByHead("attention.query_key_value"), "attention.out": "attention.dense"}
    | {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"},
)
GPT2 = Table(
    {"tokens": "transformer.wte", "pos.table": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
    "transformer.h",
    {"norm1": "ln_1", "norm2": "ln_2"}
    | {"attention.qkv": Transposed("attn.c_attn"), "attention.out": Transposed("attn.c_proj")}
    | {"mlp.up": Transposed("mlp.c_fc"), "mlp.down": Transposed("mlp.c_proj")},
)
BLOOM = Table(
    {"tokens": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
    "transformer.h",
    NEOX.layer | {"attention.qkv": ByHead("self_attention.query_key_value"), "attention.out": "self_attention.dense"},
)


# ---- between their names and ours ----

Take = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the checkpoint's tensor, after a check of its shape


def place(table: Table, m: ModelConfig, name: str, shape: Sequence[int]) -> tuple[dict[str, tuple[int, ...]], type]:
    """The tensors of a checkpoint that make up our parameter: ({tensor name: its shape}, the type of the entry).

    name, shape: of our parameter. Several tensors are concatenated along their rows, in this order. KeyError if the
    table has no entry for the parameter.
    """
    module, _, kind = name.rpartition(".")  # kind: weight or bias
    if module.startswith("blocks."):
        _, i, module = module.split(".", 2)
        entry, prefix = table.layer[module], f"{table.layers}.{i}."
    else:
        entry, prefix = table.outside[module], ""
    modules = (entry,) if isinstance(entry, str) else entry
    sizes = [shape[0] // len(modules)] * len(modules)  # one module, or gate and up, which are equal
    if module == "attention.qkv" and len(modules) == 3:
        sizes = [m.n_heads * m.head_width, m.kv_heads * m.head_width, m.kv_heads * m.head_width]
    shapes = [(size, *shape[1:]) for size in sizes]
    if isinstance(entry, Transposed):
        shapes = [tuple(reversed(x)) for x in shapes]
    return {f"{prefix}{part}.{kind}": x for part, x in zip(modules, shapes, strict=True)}, type(entry)


def to_ours(table: Table, m: ModelConfig, shapes: Mapping[str, torch.Size], take: Take) -> dict[str, Tensor]:
    """Our state dict from a checkpoint's tensors. shapes: name -> shape of all our parameters."""
    ours = {}
    for name, shape in shapes.items():
        if name == "head.weight" and m.tied_head:
            continue
        parts, layout = place(table, m, name, shape)
        x = torch.cat([take(part, its_shape) for part, its_shape in parts.items()])  # [rows, C] or [rows]
        if layout is Transposed:
            x = x.t().contiguous()
        if layout is ByHead:
            x = x.view(m.n_heads, 3, m.head_width, *shape[1:]).transpose(0, 1).reshape(shape)
        ours[name] = x
    if m.tied_head:
        ours["head.weight"] = ours["tokens.weight"]
    return ours


def from_ours(table: Table, m: ModelConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors, by their names there: the inverse of `to_ours` for tables of rows in our order."""
    tensors = {}
    for name, x in ours.items():
        if name == "head.weight" and m.tied_head:
            continue
        parts, _ = place(table, m, name, x.shape)
        tensors |= zip(parts, x.split([rows for rows, *_ in parts.values()]), strict=True)
    return tensors


# ---- folds: (the values of config.json, our model, our state dict, Take) ----


def multiply(ours: dict[str, Tensor], factors: Mapping[str, float]) -> None:
    """Multiply the weights whose names contain a key. Not in place: a tied head is the tensor of the embeddings."""
    for part, factor in factors.items():
        ours |= {name: x * factor for name, x in ours.items() if part in name}


def scale_scores(m: ModelConfig, ours: dict[str, Tensor], factors: Iterable[float]) -> None:
    """Multiply the attention scores of each layer by its factor, by way of the weights that make the queries."""
    for i, factor in enumerate(factors):
        for name in (f"blocks.{i}.attention.qkv.{kind}" for kind in ("weight", "bias")):
            if name in ours and factor != 1:
                ours[name][: m.n_heads * m.head_width] *= factor


def fold_granite(s: dict[str, Any], m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """Granite's multipliers: of the embeddings, of what each block adds, of the scores, and a divisor of the logits."""
    added = dict.fromkeys((".attention.out.", ".mlp.down."), s["residual_multiplier"])
    multiply(ours, added | {"tokens.weight": s["embedding_multiplier"]})
    ours["head.weight"] = ours["head.weight"] / s["logits_scaling"]
    scale_scores(m, ours, [s["attention_multiplier"] * m.head_width**0.5] * m.n_layers)
    m.tied_head = False


def fold_gpt2(s: dict[str, Any], m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """GPT-2's other scales of the scores: not divided by sqrt(D), or divided by the number of the layer."""
    factor, by_layer = 1.0 if s["scale_attn_weights"] else m.head_width**0.5, s["scale_attn_by_inverse_layer_idx"]
    scale_scores(m, ours, [factor / (i + 1) if by_layer else factor for i in range(m.n_layers)])


def fold_bloom(s: dict[str, Any], m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """BLOOM's LayerNorm of the embeddings: a function of the token alone, so its output is the embedding.

    The tied head has the embeddings before the norm, so it is no longer tied.
    """
    norm = {kind: take(f"transformer.word_embeddings_layernorm.{kind}", (m.width,)) for kind in ("weight", "bias")}
    ours["tokens.weight"] = F.layer_norm(ours["tokens.weight"], (m.width,), **norm, eps=m.norm_eps)
    m.tied_head = False


def fold_cohere2(s: dict[str, Any], m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """Cohere 2's factor of the logits, by way of the final norm, which has no bias."""
    ours["norm.weight"] = ours["norm.weight"] * s["logit_scale"]


def fold_gemma(s: dict[str, Any], m: ModelConfig, ours: dict[str, Tensor], take: Take) -> None:
    """Gemma's norms multiply by 1 + weight, its embeddings by sqrt(C), and its scores have another divisor."""
    shift_norms(ours, 1)
    factor = (m.head_width / s["query_pre_attn_scalar"]) ** 0.5
    if m.qk_norm:
        multiply(ours, {"qk_norms.0.weight": factor})
    else:
        scale_scores(m, ours, [factor] * m.n_layers)
    scale_embeddings(m, ours, m.width**0.5)


def unfold_gemma(m: ModelConfig, ours: dict[str, Tensor]) -> None:
    """The inverse of `fold_gemma`, where the scores are divided by the root of the width of a head."""
    scale_embeddings(m, ours, m.width**-0.5)
    shift_norms(ours, -1)


def shift_norms(ours: dict[str, Tensor], by: float) -> None:
    ours |= {name: x + by for name, x in ours.items() if x.dim() == 1 and name.endswith("weight")}


def scale_embeddings(m: ModelConfig, ours: dict[str, Tensor], factor: float) -> None:
    """Multiply the embeddings. A head that is tied to them stays so: the final norm is divided by the factor."""
    ours["tokens.weight"] = ours["tokens.weight"] * factor
    if m.tied_head:
        ours["head.weight"], ours["norm.weight"] = ours["tokens.weight"], ours["norm.weight"] / factor
