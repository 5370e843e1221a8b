"""Read a local Hugging Face checkpoint into our GPT: config.json, *.safetensors and tokenizer.json, never a pickle.

Layouts, names and defaults as transformers 5 has them. Whatever a config asks for and we do not have is refused by its
name; the tests hold every family and rope type to transformers' logits.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from tokenizers import Tokenizer
from torch import Tensor

from conf.registry import usual
from conf.schema import EvalConfig, ModelConfig, TrainConfig
from data import tokens
from data.tokens import Document
from model import gpt
from model.hf_families import FAMILIES, Config

PREFIX = "hf:"  # of run=hf:PATH
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attention|attn)\.(bias|masked_bias)$")  # constants of old checkpoints


@dataclass(frozen=True)
class Corpus:
    """The text to score, as eval.py needs it: a corpus's held-out documents in the checkpoint's own tokens."""

    key: str
    vocab_size: int
    held_out: list[Document]
    token_bytes: np.ndarray  # int64 [V]


def tensors(folder: Path) -> dict[str, Any]:
    """Name -> the open safetensors file that holds it. ValueError if a file is missing or not whole."""
    index = folder / "model.safetensors.index.json"
    try:
        files = {folder / f for f in json.loads(index.read_text())["weight_map"].values()} if index.exists() else None
    except (OSError, ValueError, KeyError, AttributeError):
        raise ValueError(f"{index}: not an index of safetensors files") from None
    files = sorted(files or folder.glob("*.safetensors"))
    if not files:
        pickled = next(iter([*folder.glob("*.bin"), *folder.glob("*.pt")]), None)
        but = f" ({pickled.name} is a pickle, which is never loaded: convert it)" if pickled else ""
        raise ValueError(f"run=hf:{folder}: no *.safetensors there{but}")
    found = {}
    for file in files:
        try:
            opened = safetensors.safe_open(file, framework="pt")
            found |= dict.fromkeys(opened.keys(), opened)
        except (OSError, safetensors.SafetensorError) as e:
            raise ValueError(f"{file}: not a whole safetensors file ({str(e).splitlines()[0][:80]})") from None
    return found


def weights(folder: Path, m: ModelConfig, vocab_size: int, mapping: Callable) -> dict[str, Tensor]:
    """Our state dict, float32. ValueError for a tensor that is missing, misshapen or has no place in our GPT."""
    left = tensors(folder)

    def take(name: str | tuple[str, ...], *shape: int) -> Tensor:
        names = [name] if isinstance(name, str) else name
        found = next((n for n in names if n in left), None)
        if found is None:
            raise ValueError(f"{folder}: its safetensors have no {names[0]}")
        x = left.pop(found).get_tensor(found)
        if tuple(x.shape) != shape:
            raise ValueError(f"{folder}: {found} has shape {list(x.shape)}, and config.json asks for {list(shape)}")
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise ValueError(f"{folder}: {found} is {x.dtype}: quantised weights are not supported")
        return x.float()

    ours = mapping(m, vocab_size, take)
    for name in [n for n in left if n in ("lm_head.weight", "embed_out.weight") and m.tied_head]:
        if not torch.equal(left.pop(name).get_tensor(name).float(), ours["head.weight"]):
            raise ValueError(f"{folder}: {name} differs from the embeddings that config.json ties it to")
    if unplaced := [n for n in left if not BUFFERS.search(n)]:
        raise ValueError(f"{folder}: {unplaced[0]} has no place in this model ({len(unplaced)} such tensors)")
    return ours


def read(folder: Path, ctx: int, train_ctx: int | None = None) -> tuple[TrainConfig, dict[str, Tensor], int]:
    """(settings, weights, vocabulary) of the checkpoint in folder, to be read at up to ctx tokens."""
    if not folder.is_dir():
        raise ValueError(f"run=hf:{folder}: no such folder; it must be a local Hugging Face checkpoint")
    c = Config(folder)
    kind = c.get("model_type")
    if kind not in FAMILIES:
        raise c.refuse("model_type", kind, f"not supported; there are {', '.join(sorted(FAMILIES))}")
    settings, mapping = FAMILIES[kind]
    m, pos, (scaling, L, longest) = settings(c, ctx, train_ctx)
    vocab_size = c.count("vocab_size")
    c.finish()
    cfg = TrainConfig(model=m, pos=pos, scaling=scaling, ctx=longest, steps=0, dtype="float32", name=run_name(folder))
    if longest > L:  # extended, as a run of ours that was fine-tuned with init=
        cfg.init, cfg.pretrained = "hf", {"ctx": L, "run": "config.json"}
    gpt.build_encoding(cfg)
    return cfg, weights(folder, m, vocab_size, mapping), vocab_size


def run_name(folder: Path) -> str:
    return "hf-" + re.sub(r"[^A-Za-z0-9._-]+", "_", folder.resolve().name)


def is_checkpoint(run: str | None) -> bool:
    return run is not None and run.startswith(PREFIX)


def load(cfg: EvalConfig, ctx: int) -> tuple[str, dict[str, Any], Corpus]:
    """For run=hf:PATH: (a line about it, its state as model/checkpoint.py has it, the text in its own tokens)."""
    folder = Path(str(cfg.run).removeprefix(PREFIX)).expanduser()
    train, ours, vocab_size = read(folder, ctx, cfg.train_ctx)
    scaling = {k: v for k, v in train.scaling.items() if v is not None and not isinstance(v, list)}
    shown = " ".join(f"{k}={v}" if k != "kind" else str(v) for k, v in scaling.items())
    about = f"{folder}, whose config.json says scaling={shown}"
    corpus = corpus_of(folder, cfg.data or usual("data", "sympy"), vocab_size)
    digest = hashlib.sha256(str(train.pretrained).encode())  # train_ctx= shapes the curves, too
    for file in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with file.open("rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    state = {"cfg": train, "model": ours, "step": 0, "corpus": corpus.key, "digest": digest.hexdigest()}
    return about, state, corpus


def corpus_of(folder: Path, data: dict, vocab_size: int) -> Corpus:
    """The documents that data (a yaml of conf/data) holds out, by the checkpoint's tokenizer.

    Without a beginning-of-text token: documents are read from their middle, where there is none, and one before every
    window would be a sink that no other model here has.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path}: not found: its own tokenizer is needed for the text to score")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the tokenizers package raises Exception itself
        raise ValueError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    sizes = token_bytes(tokenizer, vocab_size)
    documents = []
    for name, text in tokens.held_out(data):
        ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if len(ids) and ids.max() >= vocab_size:
            raise ValueError(f"{path}: has token {ids.max()}, and the model's vocabulary has {vocab_size}")
        n = len(text.encode())
        if abs(int(sizes[ids].sum()) - n) > 1 + n // 1000:  # a space put before the text, characters normalised
            raise ValueError(f"{path}: its tokens of {name} do not add up to the {n} bytes of the text")
        documents.append(Document(name, ids))
    key = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return Corpus(key, vocab_size, documents, sizes)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """How many bytes of text each token stands for, int64 [V].

    Byte-level vocabularies have one character for each byte; SentencePiece's have ▁ for a space and <0x41> for a byte.
    """
    by_byte = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    added = tokenizer.get_added_tokens_decoder()
    sizes = np.zeros(vocab_size, dtype=np.int64)
    for token, i in tokenizer.get_vocab().items():
        if i < vocab_size:
            plain = token.replace("▁", " ").encode()
            sizes[i] = len(token) if by_byte else 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", token) else len(plain)
    for i, token in added.items():
        if i < vocab_size:
            sizes[i] = len(token.content.encode())
    return sizes
