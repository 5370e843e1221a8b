"""Write a trained run as a Hugging Face checkpoint: config.json, model.safetensors, tokenizer.json and a model card.

A setting that transformers cannot express, in particular an encoding or a scaling, is an error that names it; nothing
is approximated.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import tiktoken
import torch
from safetensors.torch import save_file
from torch import Tensor

from conf.errors import UserError, file_errors
from conf.layer_schedule import describe_layers
from conf.registry import describe
from conf.schema import TrainConfig
from data.checkpoint_tokenizer import byte_letters
from data.corpus import Corpus
from data.tokenizer import END
from engine.run import Run
from hf.families import ACTIVATIONS, FAMILIES, MLP_BIAS
from hf.layer_types import WITH_LAYERS, layer_keys, layers_of
from hf.weight_names import from_ours
from model.gpt import describe_encoding

# model_type -> class name prefix
CLASSES = {"llama": "Llama", "arcee": "Arcee", "qwen3": "Qwen3", "smollm3": "SmolLM3", "olmo2": "Olmo2",
           "olmo3": "Olmo3", "gemma3_text": "Gemma3", "cohere2": "Cohere2"}  # fmt: skip


def write_checkpoint(run: Run, out: Path) -> str:
    """Write run to the new folder out, completely or not at all; returns its model_type.

    UserError if the run has a setting that transformers cannot express, if out exists or if it cannot be written.
    """
    if out.exists():
        raise UserError(f"out={out}: is there already: choose another or remove it")
    assert isinstance(run.corpus, Corpus)  # our own runs have one
    cfg, encoding = run.cfg, run.corpus.encoding
    model_type = architecture(cfg)
    layers = layer_keys(cfg, model_type, layers_of(cfg, run.trained_scaling(cfg.ctx), run.context.train_ctx))
    end, V = encoding.eot_token, encoding.n_vocab
    end_text, own = encoding.decode([end]), isinstance(encoding, tiktoken.Encoding)
    tokenizer = tokenizer_json(encoding) if own else json.loads(encoding.content)  # of the checkpoint it started from
    state = real_tokens_only(run.model.state_dict(), V)
    files: dict[str, dict | str] = {
        "README.md": model_card(run, out, model_type),
        "config.json": config(cfg, model_type, V, end, state["blocks.0.mlp.down.weight"].shape[1], layers),
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end_text,
                                  "eos_token": end_text, "clean_up_tokenization_spaces": False,
                                  "model_max_length": cfg.ctx},
    }  # fmt: skip
    state, family = in_hf_form(cfg, state, model_type == "cohere2"), FAMILIES[model_type]
    if family.unfold is not None:
        family.unfold(cfg.model, state)
    tensors = from_ours(family.table, cfg.model, state)
    # Written to a temporary folder and renamed, so that a full disk leaves nothing that looks complete
    temporary = None
    try:
        with file_errors(f"out={out}: cannot be written"):
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
            for name, content in files.items():
                text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
                (temporary / name).write_text(text)
            # A copy of each: safetensors refuses tensors that share memory, as the parts of a fused one do
            copies = {name: x.float().contiguous().clone() for name, x in tensors.items()}
            save_file(copies, temporary / "model.safetensors", metadata={"format": "pt"})
            temporary.chmod(0o755)
            temporary.rename(out)
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    return model_type


# ---- config.json ----


def architecture(cfg: TrainConfig) -> str:
    """The model_type of transformers that computes the same function as this model. UserError if there is none."""
    m = cfg.model
    gated = m.mlp in ACTIVATIONS[True].values()
    # Not qwen2 for biases of q, k and v: transformers gives it its own tokenizer, which has other token ids
    serial = "qwen3" if m.qk_norm else "llama" if gated else "arcee"
    types = {"serial": serial, "serial_post": "olmo2", "serial_both": "gemma3_text", "parallel_shared": "cohere2"}
    model_type = types.get(m.residual, "")
    cohere, post_norms = model_type == "cohere2", model_type in ("olmo2", "gemma3_text")
    # setting -> whether model_type does not have its value
    cannot = {
        "norm": (m.norm == "layer") != cohere,
        "norm_bias": m.norm_bias and cohere,
        "residual": not model_type or (not gated and m.residual != "serial") or (not m.qk_norm and post_norms),
        "head_bias": m.head_bias,
        "mlp_bias": m.mlp_bias and model_type not in MLP_BIAS,
        "head_dim": m.head_width * m.n_heads != m.width and cohere,
        "width": m.width % m.n_heads > 0,
        "qk_norm": m.qk_norm and (cohere or not gated),
        "qk_norm_all_heads": m.qk_norm_all_heads != (model_type == "olmo2"),
    }
    for setting in (s for s, bad in cannot.items() if bad):
        raise UserError(
            f"model.{setting}={getattr(m, setting)}: cannot be exported with the other settings of this model; "
            "model=nano, tiny, gpt2, llama, qwen3, olmo3, gemma3 and cohere2 can"
        )
    if cohere and not cfg.layers:
        raise UserError("layers=uniform: cannot be exported as cohere2: layers=swan can, for example")
    if cfg.layers and model_type not in WITH_LAYERS:
        reason = f"cannot be exported with model.mlp={m.mlp}; model=llama, qwen3, olmo3, gemma3 and cohere2 can"
        raise UserError(f"layers={describe_layers(cfg)}: {reason}")
    return WITH_LAYERS[model_type] if cfg.layers else model_type


def config(cfg: TrainConfig, model_type: str, vocab_size: int, end: int, hidden: int, layers: dict) -> dict:
    """config.json. end: the id of the token between documents; hidden: the MLP's width; layers: `layer_keys`."""
    m, gemma, cohere = cfg.model, model_type == "gemma3_text", model_type == "cohere2"
    activations = ACTIVATIONS[m.mlp in ACTIVATIONS[True].values()]
    return {
        "architectures": [f"{CLASSES[model_type]}ForCausalLM"],
        "model_type": model_type,
        "hidden_activation" if gemma else "hidden_act": next(x for x, mlp in activations.items() if mlp == m.mlp),
        "hidden_size": m.width,
        "intermediate_size": hidden,
        "num_hidden_layers": m.n_layers,
        "num_attention_heads": m.n_heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_width,
        **({"query_pre_attn_scalar": m.head_width} if gemma else {}),
        "max_position_embeddings": cfg.ctx,
        **({"layer_norm_eps": m.norm_eps, "logit_scale": 1.0} if cohere else {"rms_norm_eps": m.norm_eps}),
        **layers,
        "tie_word_embeddings": m.tied_head,
        "attention_bias": m.qkv_bias or m.out_bias,
        **({"mlp_bias": m.mlp_bias} if model_type in MLP_BIAS else {}),
        "vocab_size": vocab_size,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,  # the default of some families is above our vocab_size
        "dtype": "float32",
    }


# ---- README.md ----


def model_card(run: Run, out: Path, model_type: str) -> str:
    """README.md in the Hub's format: YAML between two lines of dashes, then Markdown."""
    cfg, m = run.cfg, run.cfg.model
    L, trained = run.context.train_ctx, run.context.longest_trained_ctx
    scaling = describe("scaling", cfg.scaling)
    context = f"{trained} tokens" if trained == L else f"{L} tokens, then extended to {trained} with scaling={scaling}"
    validation = ", ".join(f"{name} {value:.4f}" for name, value in run.validation.items())
    train_ctx = f" train_ctx={L}" if cfg.scaling["kind"] == "pi" else ""  # config.json cannot contain it
    rows = {
        "architecture": f"{model_type}: {m.n_layers} layers, width {m.width}, {m.n_heads} heads, "
        f"{m.kv_heads} key-value heads of width {m.head_width}, mlp={m.mlp}, {run.model.n_parameters():,} parameters",
        "positions": f"{describe_encoding(cfg)}, scaling={scaling}",
        "training context": context,
        "training text": f"data={describe('data', cfg.data)}",
        "training": f"{run.step} steps of {cfg.batch_tokens} tokens, seed {cfg.seed}, learning rate {cfg.optim.lr}",
        "on held-out text in the trained window": validation or "not measured",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- ropewalk
- {cfg.pos["kind"]}
- {scaling.split()[0]}
---

# {out.name}

A small language model that ropewalk trained to measure how positional encodings extrapolate to longer contexts.
It is the run `{run.name}`, written by `python export.py run={run.name} out={out}`.

| setting | value |
|---|---|
{table}

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{out}")
tokenizer = AutoTokenizer.from_pretrained("{out}")
```

In ropewalk, this measures its loss against context length on held-out text:

```sh
python eval.py run=hf:{out} ctx={4 * trained}{train_ctx}
```

## Limits

It was trained on one small corpus at the context above: it is an object of study, not an assistant, and what it
writes is not reliable. Beyond the trained context its loss is expected to grow.
"""


# ---- weights ----


def real_tokens_only(state: dict[str, Tensor], n_vocab: int) -> dict[str, Tensor]:
    """Our state dict without the rows that pad the vocabulary to a multiple of 64 (data/corpus.py).

    No text contains these tokens, but generate() could draw one, and the tokenizer has no text for it.
    """
    return {name: x[:n_vocab] if name.startswith(("tokens.", "head.")) else x for name, x in state.items()}


def in_hf_form(cfg: TrainConfig, state: Mapping[str, Tensor], interleaved: bool) -> dict[str, Tensor]:
    """Our state dict with QK-norm weights, and with the dimensions of each q and k head in Hugging Face's order.

    interleaved: the family rotates pairs (2i, 2i + 1), as Cohere 2, not (i, i + D/2). In layers that rotate the other
    pairs the dimensions are permuted, which does not change a score, because it is a sum over them. QK-norm without
    weights becomes QK-norm with weights of 1. In Hugging Face q, k, v and the output projection have biases together:
    missing ones become zeros.
    """
    m, D, layers = cfg.model, cfg.model.head_width, range(cfg.model.n_layers)
    widths = [heads * D if m.qk_norm_all_heads else D for heads in (m.n_heads, m.kv_heads)]
    ones = {f"blocks.{i}.attention.qk_norms.{j}.weight": torch.ones(w) for i in layers for j, w in enumerate(widths)}
    state = {**(ones if m.qk_norm else {}), **state}
    if m.qkv_bias != m.out_bias:
        missing = "out" if m.qkv_bias else "qkv"
        for name in (f"blocks.{i}.attention.{missing}" for i in layers):
            state[f"{name}.bias"] = torch.zeros(len(state[f"{name}.weight"]))
    # To interleave: 0, D/2, 1, D/2 + 1, ...; its inverse: 0, 2, 4, ..., 1, 3, 5, ...
    order = torch.arange(D).view((2, -1) if interleaved else (-1, 2)).T.flatten()
    kinds = [cfg.layers[letter]["pos"] or cfg.pos for letter in cfg.layers["pattern"]] if cfg.layers else [cfg.pos]
    others = [i for i in layers if kinds[i % len(kinds)].get("interleaved", interleaved) != interleaved]
    for name in [name for i in others for name in state if name.startswith(f"blocks.{i}.attention.q")]:
        heads = state[name].unflatten(0, (-1, D))  # [H + 2 G, D, C], of a bias [H + 2 G, D], of norms [1, H or G, D]
        if ".qkv." in name:
            qk, v = heads.split((m.n_heads + m.kv_heads, m.kv_heads))
            state[name] = torch.cat((qk[:, order], v)).flatten(0, 1)
        else:
            state[name] = heads[:, order].flatten(0, 1)
    return state


# ---- tokenizer.json ----


def tokenizer_json(encoding: tiktoken.Encoding) -> dict:
    """The content of tokenizer.json for our byte-pair vocabulary: the same text has the same token ids.

    tiktoken repeatedly joins the two neighbours whose concatenation has the lowest rank. The tokenizers package has a
    list of merges instead. So every way to split a token into two tokens becomes a merge, in the order of the tokens'
    ranks.
    """
    ranks, letters = encoding._mergeable_ranks, byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = [
        [spell(token[:i]), spell(token[i:])]
        for token, _ in sorted(ranks.items(), key=lambda item: item[1])
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    special = {"content": END, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    words = {"type": "Split", "pattern": {"Regex": encoding._pat_str}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": encoding.eot_token, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
            "vocab": {spell(token): rank for token, rank in ranks.items()}, "merges": merges,
        },
    }  # fmt: skip
