"""Open a local Hugging Face checkpoint as a Run: config.json, *.safetensors and tokenizer.json, never a pickle.

A setting in config.json that our GPT does not have is an error that names it. The tests compare the logits of every
family and rope type with those of transformers.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from tokenizers import Tokenizer
from torch import Tensor

from conf.errors import UserError, file_errors
from conf.registry import yaml_values
from conf.schema import TrainConfig
from data.corpus import Document, HeldOut, held_out_texts
from engine.run import Run, check_fits
from hf.config import Config
from hf.families import FAMILIES, HEADS, Family, to_ours
from model import gpt

BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attention|attn)\.(bias|masked_bias)$")  # constants of old checkpoints


def open_hf(
    path: str | Path,
    *,
    ctx: int,
    train_ctx: int | None = None,
    data: dict | None = None,
    runs: str = "runs",
    device: torch.device | str = "cpu",
    scalings: Sequence[dict] = (),
) -> Run:
    """The checkpoint in folder path as a Run, to be evaluated at up to ctx tokens with these scalings.

    train_ctx: the context of the pre-training, tokens, where config.json does not contain it. data: the settings of a
    corpus (a yaml of conf/data), whose held-out documents are scored, in tokens of the checkpoint's tokenizer; None or
    empty: sympy. runs: the folder under which the curves are written. UserError for anything in the folder that is
    missing, damaged or not supported, NotApplicable for a scaling that does not apply to the model.
    """
    folder = Path(path).expanduser()
    cfg, weights, vocab_size = read(folder, ctx, train_ctx)
    assert cfg.name is not None
    corpus = read_corpus(folder, data or yaml_values("data", "sympy"), vocab_size)
    model = gpt.from_weights(cfg, vocab_size, weights).to(device).eval()
    check_fits(cfg, model.pos, ctx, scalings)
    knobs = {k: v for k, v in cfg.scaling.items() if k != "kind" and v is not None and not isinstance(v, list)}
    scaling = " ".join([cfg.scaling["kind"], *(f"{k}={v}" for k, v in knobs.items())])
    return Run(
        name=cfg.name,
        reason=f"{folder}, whose config.json says scaling={scaling}",
        folder=Path(runs) / cfg.name,
        cfg=cfg,
        model=model,
        corpus=corpus,
        context=gpt.trained_context(cfg, model.pos),
        step=0,
        digest=digest(folder, cfg),
        scaling_follows_length=True,
    )


def read(folder: Path, ctx: int, train_ctx: int | None = None) -> tuple[TrainConfig, dict[str, Tensor], int]:
    """(settings, our state dict, vocabulary size) of the checkpoint in folder, to be evaluated at up to ctx tokens.

    The name of the run is hf-FOLDER. UserError as in `open_hf`.
    """
    if not folder.is_dir():
        raise UserError(f"run=hf:{folder}: no such folder; it must be a local Hugging Face checkpoint")
    c = Config(folder)
    model_type = c.get("model_type")
    if model_type not in FAMILIES:
        raise c.refuse("model_type", model_type, f"not supported; there are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    m, pos, rope = family.settings(c, ctx, train_ctx)
    vocab_size = c.count("vocab_size")
    c.finish()
    name = "hf-" + re.sub(r"[^A-Za-z0-9._-]+", "_", folder.resolve().name)
    cfg = TrainConfig(model=m, pos=pos, scaling=rope.scaling, ctx=rope.longest_ctx, steps=0, dtype="float32", name=name)
    if rope.longest_ctx > rope.train_ctx:  # extended, as a run of ours that was fine-tuned with init=
        cfg.init, cfg.pretrained = "hf", {"ctx": rope.train_ctx, "run": "config.json"}
    return cfg, read_weights(folder, cfg, vocab_size, family), vocab_size


# ---- weights ----


def read_weights(folder: Path, cfg: TrainConfig, vocab_size: int, family: Family) -> dict[str, Tensor]:
    """Our state dict, float32. UserError for a tensor that is missing, misshapen or has no place in our GPT."""
    with torch.device("meta"):  # for the names and shapes of its parameters only
        model = gpt.GPT(cfg.model, gpt.build_encoding(cfg), vocab_size)
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    files = open_tensors(folder)

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        """Remove a tensor from `files` and load it, in float32. What is left in `files` at the end has no place."""
        present = [n for n in (name, *(HEADS if name in HEADS else ())) if n in files]
        if not present:
            raise UserError(f"{folder}: its safetensors have no {name}")
        name = present[0]
        x = files.pop(name).get_tensor(name)
        if tuple(x.shape) != shape:
            raise UserError(f"{folder}: {name} has shape {list(x.shape)}, and config.json asks for {list(shape)}")
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UserError(f"{folder}: {name} is {x.dtype}: quantised weights are not supported")
        return x.float()

    ours = to_ours(family.table, cfg.model, shapes, take)
    for name in [n for n in HEADS if n in files and cfg.model.tied_head]:  # a redundant copy of the embeddings
        if not torch.equal(files.pop(name).get_tensor(name).float(), ours["head.weight"]):
            raise UserError(f"{folder}: {name} differs from the embeddings that config.json ties it to")
    if unplaced := [name for name in files if not BUFFERS.search(name)]:
        raise UserError(f"{folder}: {unplaced[0]} has no place in this model ({len(unplaced)} such tensors)")
    return ours


def open_tensors(folder: Path) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it. UserError if a file is missing or incomplete."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        try:
            files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError):
            raise UserError(f"{index}: not an index of safetensors files") from None
    if not files:
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pt")]
        hint = f" ({pickles[0].name} is a pickle, which is never loaded: convert it)" if pickles else ""
        raise UserError(f"run=hf:{folder}: no *.safetensors there{hint}")
    tensors = {}
    for path in files:
        try:
            file = safetensors.safe_open(path, framework="pt")
            tensors |= dict.fromkeys(file.keys(), file)
        except (OSError, safetensors.SafetensorError) as e:
            raise UserError(f"{path}: not a complete safetensors file ({str(e).splitlines()[0][:80]})") from None
    return tensors


def digest(folder: Path, cfg: TrainConfig) -> str:
    """The sha256 of config.json and the weights, and of the trained context, since train_ctx= can set it."""
    result = hashlib.sha256(str(cfg.pretrained).encode())
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        with file_errors(path), path.open("rb") as f:
            result.update(hashlib.file_digest(f, "sha256").digest())
    return result.hexdigest()


# ---- text ----


def read_corpus(folder: Path, data: dict, vocab_size: int) -> HeldOut:
    """The documents that data (a yaml of conf/data) holds out, in tokens of the checkpoint's tokenizer.

    No beginning-of-text token is added: documents are scored from their middle, where there is none, and one before
    every window would be an attention sink that no other model here has.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path}: not found: the text to score needs the checkpoint's tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the tokenizers package raises Exception itself
        raise UserError(f"{path}: not a tokenizer ({str(e).splitlines()[0][:80]})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    sizes = token_bytes(tokenizer, vocab_size)
    documents = []

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    for name, text in held_out_texts(data):
        ids = np.array(encode(text), dtype=np.int64)
        if len(ids) and ids.max() >= vocab_size:
            raise UserError(f"{path}: has token {ids.max()}, and the model's vocabulary has {vocab_size}")
        n = len(text.encode())
        # Tokenizers that put a space before the text are some bytes off; ones that normalise characters are refused
        if abs(int(sizes[ids].sum()) - n) > 1 + n // 1000:
            raise UserError(f"{path}: its tokens of {name} do not add up to the {n} bytes of the text")
        documents.append(Document(name, ids))
    key = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return HeldOut(key, vocab_size, documents, sizes, encode, decode)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> np.ndarray:
    """The length in bytes of each token's text, int64 [V], for bits per byte.

    In byte-level vocabularies each character of a token stands for one byte. In SentencePiece's, ▁ stands for a space,
    and <0x41> for a single byte.
    """
    byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    sizes = np.zeros(vocab_size, dtype=np.int64)
    for token, i in tokenizer.get_vocab().items():
        if i >= vocab_size:
            continue
        if byte_level:
            sizes[i] = len(token)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
            sizes[i] = 1
        else:
            sizes[i] = len(token.replace("▁", " ").encode())
    for i, token in tokenizer.get_added_tokens_decoder().items():
        if i < vocab_size:
            sizes[i] = len(token.content.encode())
    return sizes
