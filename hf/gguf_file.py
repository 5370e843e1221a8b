"""A GGUF file (the format of llama.cpp) in the form of a Hugging Face checkpoint.

Its metadata become the keys of config.json and its tensors get Hugging Face's names, so that the families of
hf/families.py read it. The `gguf` package parses the file and dequantises the tensors. Key and tensor names:
github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from conf.errors import UserError, file_errors
from hf.checkpoint import Checkpoint, LazyTensor, run_name
from hf.config import Config

MAGIC = b"GGUF"

# key of config.json -> key of the metadata without the architecture's name
CONFIG = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
# Metadata that do not change the logits, or whose values follow from others. Any other key of the architecture is an
# error that names it.
HARMLESS = ("attention.value_length",)
SCALING = "rope.scaling."
ROPE_TYPES = {"none": "default", "linear": "linear", "yarn": "yarn"}
# module of a layer in the file -> in the checkpoint
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FREQS = "rope_freqs.weight"  # of Llama 3: the divisor of each frequency
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# architecture -> whether q and k are permuted: llama.cpp rotates pairs (2i, 2i + 1) of this architecture
PERMUTED = {"llama": True, "qwen2": False, "qwen3": False}

# tokenizer.ggml.pre -> the patterns that split the text before byte-pair merges, as in llama.cpp (src/llama-vocab.cpp)
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = {
    "gpt-2": [GPT2_WORDS],
    "smollm": [r"\p{N}", GPT2_WORDS],
    "llama-bpe": [LLAMA3_WORDS],
    "qwen2": [LLAMA3_WORDS.replace("{1,3}", "")],
}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type


def open_gguf(path: Path) -> Checkpoint:
    """UserError if the file is damaged, or has an architecture, a quantisation or a tokenizer that we do not read."""
    try:
        import gguf
    except ImportError:
        raise UserError(f"gguf:{path}: needs the gguf package: pip install gguf==0.19.0") from None
    with file_errors(path), path.open("rb") as f:
        if f.read(4) != MAGIC:
            raise UserError(f"{path}: not a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as e:
        reason = str(e).splitlines()[0][:80]
        raise UserError(f"{path}: a GGUF file that is incomplete, damaged or of another version ({reason})") from None
    arch = values.get("general.architecture")
    if arch not in PERMUTED:
        raise UserError(f"{path}: general.architecture={arch}: must be {', '.join(PERMUTED)}")
    infos = {t.name: t for t in reader.tensors}
    for t in infos.values():
        if t.tensor_type.name not in ("F32", "F16") and t.tensor_type not in gguf.quants._type_traits:
            raise UserError(f"{path}: {t.name} has type {t.tensor_type.name}, which the gguf package cannot dequantise")
    config = read_config(path, arch, values, infos)

    def tensor(name: str) -> Callable[[], Tensor]:
        def load() -> Tensor:
            x = torch.from_numpy(np.array(gguf.dequantize(infos[name].data, infos[name].tensor_type)))
            heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
            return unpermute(x, config[heads]) if PERMUTED[arch] and heads else x

        return load

    content = tokenizer_json(path, values)
    types = [t.tensor_type.name for t in infos.values() if len(t.shape) == 2]
    return Checkpoint(
        name=run_name("gguf", path),
        path=path,
        config=Config(path, config),
        open_tensors=lambda: {
            checkpoint_name(path, name): LazyTensor(tensor(name), int(info.n_elements))
            for name, info in infos.items()
            if name != ROPE_FREQS
        },
        tokenizer=functools.partial(build_tokenizer, path, content),
        files=lambda: [path],
        notes=(f"{values.get('general.name', path.stem)}, weights stored as {max(types, key=types.count)}",),
    )


# ---- settings and weights ----


def read_config(path: Path, arch: str, values: dict[str, Any], infos: dict[str, Any]) -> dict[str, Any]:
    """The keys of config.json. UserError for metadata that are missing, or that we do not know."""
    of_arch = {k.removeprefix(f"{arch}."): v for k, v in values.items() if k.startswith(f"{arch}.")}
    config: dict[str, Any] = {
        "model_type": arch,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in infos,
    }
    config["vocab_size"] = len(values.get("tokenizer.ggml.tokens", [])) or None
    config |= {key: of_arch.pop(name) for key, name in CONFIG.items() if name in of_arch}
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if (rotated := of_arch.pop("rope.dimension_count", head_dim)) != head_dim:
        raise UserError(f"{path}: {arch}.rope.dimension_count={rotated}: not supported: must be head_dim={head_dim}")
    scaling = {key: of_arch.pop(f"{SCALING}{key}", None) for key in ("type", "factor", "original_context_length")}
    of_arch.pop(f"{SCALING}finetuned", None)
    if unknown := [k for k in of_arch if k not in HARMLESS]:
        raise UserError(f"{path}: {arch}.{unknown[0]}={of_arch[unknown[0]]}: not supported, and not ignored either")
    if arch != "qwen2" and "blk.0.attn_q.bias" in infos:
        config["attention_bias"] = True
    kind = scaling["type"] or ("linear" if scaling["factor"] not in (None, 0, 1) else "none")  # as llama.cpp
    if kind not in ROPE_TYPES:
        raise UserError(f"{path}: {arch}.{SCALING}type={kind}: must be {', '.join(ROPE_TYPES)}")
    if kind != "none":
        original = scaling["original_context_length"]
        config["rope_scaling"] = {"rope_type": ROPE_TYPES[kind], "factor": scaling["factor"],
                                  "original_max_position_embeddings": original}  # fmt: skip
    if ROPE_FREQS in infos:
        if kind != "none":
            raise UserError(f"{path}: {ROPE_FREQS} and {arch}.{SCALING}type={kind}: not supported together")
        divisors = [float(x) for x in infos[ROPE_FREQS].data]
        config["rope_scaling"] = {"rope_type": "longrope", "attention_factor": 1.0, "short_factor": divisors,
                                  "long_factor": divisors}  # fmt: skip
    return config


def checkpoint_name(path: Path, name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight. UserError for an unknown tensor."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in OUTSIDE:
        return f"{OUTSIDE[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER:
        return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
    raise UserError(f"{path}: tensor {name} has no place in this model")


def unpermute(x: Tensor, heads: int) -> Tensor:
    """Rows of q or k [heads x D, C] (or a bias [heads x D]) from pairs (2i, 2i + 1) to pairs (i, i + D / 2)."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(x.shape)


# ---- tokenizer.json ----


def tokenizer_json(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The content of tokenizer.json. UserError if there is no tokenizer, or one of a kind that we do not read."""
    kind, tokens = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.tokens")
    if not tokens or kind is None:
        raise UserError(f"{path}: has no tokenizer (tokenizer.ggml.tokens), and the text to score needs it")
    types = values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": t, **flags} for i, t in enumerate(tokens) if types[i] in (CONTROL, USER_DEFINED)]
    vocab = {token: i for i, token in enumerate(tokens)}
    shared = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": None}
    if kind == "gpt2":
        merges = [merge.split(" ", 1) for merge in values.get("tokenizer.ggml.merges", [])]
        pre = values.get("tokenizer.ggml.pre")
        return {**shared, **byte_level(path, pre), "model": bpe(vocab, merges, ignore_merges=pre == "llama-bpe")}
    if kind == "llama":
        scores = values.get("tokenizer.ggml.scores")
        if not scores:
            raise UserError(f"{path}: tokenizer.ggml.scores: missing, and tokenizer.ggml.model=llama needs them")
        prefix = bool(values.get("tokenizer.ggml.add_space_prefix", True))
        model = bpe(vocab, sentencepiece_merges(tokens, scores)) | {"byte_fallback": True, "fuse_unk": True}
        model["unk_token"] = tokens[values.get("tokenizer.ggml.unknown_token_id", 0)]
        return {**shared, **sentencepiece(prefix), "model": model}
    raise UserError(f"{path}: tokenizer.ggml.model={kind}: must be gpt2 or llama")


def build_tokenizer(path: Path, content: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(content))
    except Exception as e:  # the tokenizers package raises Exception itself
        raise UserError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None


def bpe(vocab: dict[str, int], merges: list[list[str]], ignore_merges: bool = False) -> dict[str, Any]:
    """ignore_merges: a word that is a token becomes this token, even if no merges lead to it."""
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges,
        "vocab": vocab, "merges": merges,
    }  # fmt: skip


def byte_level(path: Path, pre: str | None) -> dict[str, Any]:
    """Normaliser, pre-tokeniser and decoder of a byte-level vocabulary. pre: the name of its word patterns."""
    if pre not in WORDS:
        raise UserError(f"{path}: tokenizer.ggml.pre={pre}: must be {', '.join(WORDS)}")
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False} for regex in WORDS[pre]
    ]
    normalizer = {"type": "NFC"} if pre == "qwen2" else None
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [*splits, bytes_]}
    return {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": bytes_}


def sentencepiece(prefix: bool) -> dict[str, Any]:
    """Normaliser and decoder of a SentencePiece vocabulary, where ▁ stands for a space; prefix: one before the text."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizers = [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), spaces]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def sentencepiece_merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Every way to split a token into two, the tokens with the highest scores first: SentencePiece has no list."""
    ids = {token: i for i, token in enumerate(tokens)}
    merges = []
    for i in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[i]
        splits = [(token[:k], token[k:]) for k in range(1, len(token)) if token[:k] in ids and token[k:] in ids]
        merges += [list(pair) for pair in sorted(splits, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    return merges
