"""GGUF files of random models of transformers, as llama.cpp's convert_hf_to_gguf.py writes them."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.tokenizer import byte_letters
from tests.hf_models import CASES, biases, transformers

gguf = pytest.importorskip("gguf", reason="pip install gguf")

L = 64
SHAPE = {**CASES["qwen2"][1], "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": L}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """(tokens, merges): all bytes, and merges of two and three letters."""
    pairs = "r+e t+u tu+r Ġ+a Ġ+Ġ i+m im+e e+f Ċ+Ġ r+n 1+2 ĠĠ+Ġ d+ef"  # Ġ, Ċ: the letters of space and newline
    merges = [pair.replace("+", " ") for pair in pairs.split()]
    return ["<|endoftext|>", "<|user|>", *byte_letters(), *(pair.replace("+", "") for pair in pairs.split())], merges


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """(tokens, scores, types): <unk>, <s>, </s>, all bytes, and pieces whose scores fall with their number."""
    tokens, types = ["<unk>", "<s>", "</s>"], [2, 3, 3]
    tokens += [f"<0x{b:02X}>" for b in range(256)]
    types += [6] * 256
    words = "▁ a e i o u d f r t n c x b ▁a ▁b re ▁re tu tur ▁retur ▁return ef def ▁def im ▁▁ ▁▁▁ ti me time ▁t"
    words = words.split()
    tokens += words
    types += [1] * len(words)
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    return tokens, scores, types


def random_model(arch: str, vocab_size: int = 271, tied: bool = False, **settings: Any) -> torch.nn.Module:
    about = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "rope_theta": 5000.0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{CLASSES[arch]}Config")(**{**SHAPE, **about, **settings})
    return biases(transformers.AutoModelForCausalLM.from_config(config))


def write_gguf(
    path: Path,
    arch: str = "llama",
    quantisation: str = "F32",
    tokenizer: str | None = "gpt2",
    extra: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    tied: bool = False,
    model: torch.nn.Module | None = None,
    divisors: np.ndarray | None = None,
    space_prefix: bool = True,
) -> None:
    """A random model of transformers as a GGUF file, as llama.cpp's convert_hf_to_gguf.py writes it."""
    tokens, merges = byte_level_vocabulary()
    scores, types = None, [3, 3] + [1] * (len(tokens) - 2)
    if tokenizer == "llama":
        tokens, scores, types = sentencepiece_vocabulary()
    model = model or random_model(arch, len(tokens), tied)
    config = model.config
    w = gguf.GGUFWriter(path, arch)
    sizes = {"block_count": 2, "context_length": L, "embedding_length": 64, "feed_forward_length": 96}
    sizes |= {"head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": config.rms_norm_eps}
    sizes |= {"rope_freq_base": config.rope_parameters["rope_theta"]}
    if arch == "qwen3":  # transformers does not read it, and takes its default of 128
        sizes |= {"key_length": 128, "value_length": 128}
    for key, value in sizes.items():
        getattr(w, f"add_{key}")(value)
    for key, value in (extra or {}).items():
        w.add_float32(key, value) if isinstance(value, float) else w.add_string(key, value)
    if tokenizer:
        w.add_tokenizer_model(tokenizer)
        w.add_token_list(tokens)
        w.add_token_types(types)
        if scores:
            w.add_token_scores(scores)
            w.add_add_space_prefix(space_prefix)
        else:
            w.add_tokenizer_pre("gpt-2")
            w.add_token_merges(merges)
        w.add_bos_token_id(1)
        w.add_eos_token_id(0 if tokenizer == "gpt2" else 2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, x in model.state_dict().items():
        x = x.clone()
        if tied and name == "lm_head.weight":
            continue
        if arch == "llama" and re.search(r"(q|k)_proj\.weight$", name):
            heads = 4 if "q_proj" in name else 2
            x = x.view(heads, 2, -1, x.shape[1]).transpose(1, 2).reshape(x.shape)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if new in drop:
            continue
        data = x.numpy()
        if x.dim() == 2 and kind.name != "F32":
            w.add_tensor(new, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            w.add_tensor(new, data)
    if divisors is not None:
        w.add_tensor("rope_freqs.weight", divisors)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
