"""Write a trained run as a Hugging Face checkpoint: config.json, model.safetensors, tokenizer.json and a model card.

A setting that transformers cannot express, in particular an encoding or a scaling, is an error that names it; nothing
is approximated.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tiktoken
import torch
from safetensors.torch import save
from torch import Tensor

from conf.errors import UserError, check, file_errors
from conf.registry import describe
from conf.schema import ModelConfig, TrainConfig
from data.corpus import new_folder
from engine.run import Run
from hf.checkpoint import Config
from hf.families import FAMILIES, model_keys, read_model, read_settings
from hf.positions import Layer, layer_keys, layers_of
from hf.tokenizer import of_run
from hf.weights import from_ours
from model.gpt import describe_encoding

# The families that are written, the simplest first: model_type -> the beginning of its class in transformers. Not qwen2
# for biases of q, k and v: transformers gives it its own tokenizer, which has other token ids.
WRITTEN = {"starcoder2": "Starcoder2", "arcee": "Arcee", "llama": "Llama", "smollm3": "SmolLM3", "qwen3": "Qwen3"}
WRITTEN |= {"olmo2": "Olmo2", "olmo3": "Olmo3", "gemma3_text": "Gemma3", "cohere2": "Cohere2"}


def write_checkpoint(run: Run, out: Path) -> str:
    """Write run to the new folder out, completely or not at all; returns its model_type.

    UserError if the run has a setting that transformers cannot express, or if out cannot be written.
    """
    cfg, encoding = run.cfg, run.corpus.encoding
    end, longest = encoding.eot_token, run.context.longest_trained_ctx
    # Without the rows that pad the vocabulary to a multiple of 64: generate() could draw one of these tokens
    state = {
        name: x[: encoding.n_vocab] if name.startswith(("tokens.", "head.")) else x
        for name, x in run.model.state_dict().items()
    }
    m = in_their_terms(cfg.model, state["blocks.0.mlp.down.weight"].shape[1])
    config = choose_family(run, m, encoding.n_vocab)
    model_type = config["model_type"]
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), end)
    config |= {**ends, "pad_token_id": None}  # its default is above our vocab_size in some families
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    about |= {"model_max_length": longest, **dict.fromkeys(("bos_token", "eos_token"), encoding.decode([end]))}
    json_files = {"config": config, "generation_config": ends, "tokenizer_config": about}
    files = {f"{name}.json": json.dumps(x, indent=1, ensure_ascii=False) for name, x in json_files.items()}
    files["README.md"] = model_card(run, out, model_type)
    # That of the checkpoint it started from is copied
    ours = isinstance(encoding, tiktoken.Encoding)
    files["tokenizer.json"] = of_run(encoding).to_str(pretty=True) if ours else encoding.content
    state, family = in_hf_form(cfg, state, model_type == "cohere2"), FAMILIES[model_type]
    if family.unfold is not None:
        family.unfold(cfg.model, state)
    # A copy of each: safetensors refuses tensors that share memory, as the parts of a fused one do
    tensors = {k: x.float().contiguous().clone() for k, x in from_ours(family.table, cfg.model, state).items()}
    with file_errors(f"out={out}: cannot be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(out) as temporary:
            for name, text in files.items():
                (temporary / name).write_text(text, encoding="utf-8")
            # Not by save_file, whose error on a full disk is no OSError
            (temporary / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    return model_type


# ---- config.json ----


def in_their_terms(m: ModelConfig, mlp_width: int) -> ModelConfig:
    """m without settings that have no effect or that a family says in another way. Its biases: see `in_hf_form`."""
    bias, norm_bias = m.qkv_bias or m.out_bias, m.norm_bias and m.norm == "layer"
    said = {"n_kv_heads": m.kv_heads, "head_dim": m.head_width, "qk_norm_weight": m.qk_norm, "zero_init": False}
    return replace(m, mlp_ratio=1, mlp_width=mlp_width, norm_bias=norm_bias, qkv_bias=bias, out_bias=bias, **said)


def choose_family(run: Run, m: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """config.json in the first family in which it is read as the settings of this run. m: `in_their_terms`.

    UserError if there is none, which names a setting that the most similar family does not have.
    """
    cfg, layers, lacking, longest = run.cfg, layers_of(run.cfg), {}, run.context.longest_trained_ctx
    check(m.width % m.n_heads == 0, "model.width", m.width, f"a multiple of model.n_heads={m.n_heads} to be exported")
    for model_type, name in WRITTEN.items():
        family = FAMILIES[model_type]
        by_type = family.positions.sliding_base is not None
        of_layers = layer_keys(layers, longest, by_type)
        if not cfg.layers and layers[0].rope and not by_type:
            of_layers = {"rope_parameters": of_layers["rope_parameters"]}
        keys = model_keys(m, family) | of_layers | {"vocab_size": vocab_size, "max_position_embeddings": longest}
        config: dict[str, Any] = {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, "dtype": "float32"}
        config |= {family.names.get(key, key): value for key, value in keys.items() if key in family.keys}
        lacking[model_type] = differences(run, m, layers, config)
        if not lacking[model_type]:
            return config
    model_type = min(reversed(lacking), key=lambda x: len(lacking[x]))
    raise UserError(f"{lacking[model_type][0]}: cannot be exported; the most similar family is {model_type}")


def differences(run: Run, m: ModelConfig, layers: list[Layer], config: dict[str, Any]) -> list[str]:
    """The settings of a run that config.json cannot say: those that are others when it is read."""
    cfg, family, c = run.cfg, FAMILIES[config["model_type"]], Config(Path("config.json"), config)
    c.settings = c.read(family.keys, family.names)
    theirs = read_model(c, family)
    theirs = vars(in_their_terms(theirs, theirs.mlp_width or 0))
    lacking = [f"model.{setting}={value}" for setting, value in vars(m).items() if theirs[setting] != value]
    try:
        back = read_settings(c, cfg.ctx, train_ctx_of(run))[0]
        reason = "" if layers_of(back) == layers else "it has other layers"
    except UserError as e:
        reason = str(e)
    if reason:
        lacking.append(f"layers={cfg.layers.name if cfg.layers else 'uniform'} ({reason})")
    return lacking


def train_ctx_of(run: Run) -> int | None:
    """What train_ctx= must be to read the exported run: with pi config.json cannot contain it."""
    return run.context.train_ctx if run.cfg.scaling["kind"] == "pi" else None


# ---- README.md ----


def model_card(run: Run, out: Path, model_type: str) -> str:
    """README.md in the Hub's format: YAML between two lines of dashes, then Markdown."""
    cfg, L, trained, train_ctx = run.cfg, run.context.train_ctx, run.context.longest_trained_ctx, train_ctx_of(run)
    scaling = describe("scaling", cfg.scaling)
    validation = ", ".join(f"{name} {value:.4f}" for name, value in run.validation.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [ropewalk, {cfg.pos["kind"]}, {scaling.split()[0]}]
---
# {out.name}

The run `{run.name}` of ropewalk, written by export.py as {model_type}: an object of study, not an assistant.

* {cfg.model.n_layers} layers, width {cfg.model.width}, {describe_encoding(cfg)}, scaling={scaling}
* training: {trained} tokens (first {L}), data={describe("data", cfg.data)}, {run.step} x {cfg.batch_tokens} tokens
* on held-out text in the trained window: {validation or "not measured"}
* its loss by context: `python eval.py run=hf:{out} ctx={4 * trained}{f" train_ctx={train_ctx}" if train_ctx else ""}`
"""


# ---- weights ----


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
    kinds = [cfg.layers.types[letter].pos or cfg.pos for letter in cfg.layers.pattern] if cfg.layers else [cfg.pos]
    others = [i for i in layers if kinds[i % len(kinds)].get("interleaved", interleaved) != interleaved]
    for name in [name for i in others for name in state if name.startswith(f"blocks.{i}.attention.q")]:
        heads = state[name].unflatten(0, (-1, D))  # [H + 2 G, D, C], of a bias [H + 2 G, D], of norms [1, H or G, D]
        if ".qkv." in name:
            qk, v = heads.split((m.n_heads + m.kv_heads, m.kv_heads))
            state[name] = torch.cat((qk[:, order], v)).flatten(0, 1)
        else:
            state[name] = heads[:, order].flatten(0, 1)
    return state
