"""The names of each family's weights in a Hugging Face checkpoint, and the way between them and ours.

One table serves both directions: `to_ours` concatenates the checkpoint's tensors, `from_ours` splits ours.

Letters: C width, H query heads, G key-value heads, D head width, i layer.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
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
PHI3 = LLAMA._replace(layer={**LLAMA.layer, "attention.qkv": "self_attn.qkv_proj", "mlp.up": "mlp.gate_up_proj"})
OLMO2 = LLAMA._replace(
    layer={**LLAMA.layer, "norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"}
)
GEMMA3 = LLAMA._replace(
    layer={
        **LLAMA.layer,
        "post_norm1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "post_norm2": "post_feedforward_layernorm",
    }
)
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
GPT2 = Table(
    {"tokens": "transformer.wte", "pos.table": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
    "transformer.h",
    {
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attention.qkv": Transposed("attn.c_attn"),
        "attention.out": Transposed("attn.c_proj"),
        "mlp.up": Transposed("mlp.c_fc"),
        "mlp.down": Transposed("mlp.c_proj"),
    },
)
BLOOM = Table(
    {"tokens": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
    "transformer.h",
    {**NEOX.layer, "attention.qkv": ByHead("self_attention.query_key_value"), "attention.out": "self_attention.dense"},
)
MPT = Table(
    {"tokens": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
    "transformer.blocks",
    {
        "norm1": "norm_1",
        "norm2": "norm_2",
        "attention.qkv": "attn.Wqkv",
        "attention.out": "attn.out_proj",
        "mlp.up": "ffn.up_proj",
        "mlp.down": "ffn.down_proj",
    },
)
HEADS = ("lm_head.weight", "embed_out.weight")  # a file may have either in place of the other


# ---- between their names and ours ----

Take = Callable[[str, tuple[int, ...]], Tensor]  # (name, shape) -> the checkpoint's tensor, after a check of its shape


def place(table: Table, m: ModelConfig, name: str, rows: int) -> tuple[dict[str, int], type]:
    """The tensors of a checkpoint that make up our parameter: ({tensor name: number of rows}, the type of the entry).

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
    return parts, type(entry)


def to_ours(table: Table, m: ModelConfig, shapes: Mapping[str, torch.Size], take: Take) -> dict[str, Tensor]:
    """Our state dict from a checkpoint's tensors. shapes: name -> shape of all our parameters."""
    ours = {}
    for name, (rows, *columns) in shapes.items():
        if name == "head.weight" and m.tied_head:
            continue
        parts, layout = place(table, m, name, rows)
        if layout is Transposed and columns:
            (part,) = parts
            ours[name] = take(part, (*columns, rows)).T.contiguous()
            continue
        x = torch.cat([take(part, (size, *columns)) for part, size in parts.items()])  # [rows, C] or [rows]
        if layout is ByHead:
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
        parts, layout = place(table, m, name, len(x))
        if layout is Transposed and x.dim() == 2:
            tensors[next(iter(parts))] = x.T
            continue
        if layout is ByHead:
            x = x.view(3, m.n_heads, m.head_width, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        tensors |= zip(parts, x.split(list(parts.values())), strict=True)
    return tensors
