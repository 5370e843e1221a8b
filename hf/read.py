"""Open a local Hugging Face checkpoint as a Run: config.json, *.safetensors and tokenizer.json, never a pickle.

The weights are model.safetensors or else the files of model.safetensors.index.json; no other file is read. A setting
in config.json that our GPT does not have is an error that names it. The tests compare the logits of every family and
rope type with those of transformers.
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

# Constants of old checkpoints
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attention|attn)\.(bias|masked_bias)$")


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
    context = gpt.trained_context(cfg, model.pos)
    gpt.trained_scaling(cfg, context, ctx)  # UserError for parameters that do not fit, before any text is read
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
        context=context,
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
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise c.refuse("model_type", model_type, f"not supported; there are {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[model_type]
    m, positions = family.settings(c, ctx, train_ctx)
    vocab_size = c.count("vocab_size")
    c.finish()
    if m.head_dim is None and m.width % m.n_heads:
        raise UserError(f"{c.path}: hidden size {m.width}: must be a multiple of the {m.n_heads} attention heads")
    if m.n_heads % m.kv_heads:
        raise c.refuse("num_key_value_heads", m.kv_heads, f"must be a divisor of the {m.n_heads} attention heads")
    name = "hf-" + re.sub(r"[^A-Za-z0-9._-]+", "_", folder.resolve().name)
    cfg = TrainConfig(model=m, pos=positions.pos, scaling=positions.scaling, ctx=positions.longest_ctx, name=name)
    cfg.steps, cfg.dtype = 0, "float32"
    if positions.longest_ctx > positions.train_ctx:  # extended, as a run of ours that was fine-tuned with init=
        cfg.init, cfg.pretrained = "hf", {"ctx": positions.train_ctx, "run": "config.json"}
    return cfg, read_weights(folder, c, cfg, vocab_size, family), vocab_size


# ---- weights ----


def read_weights(folder: Path, c: Config, cfg: TrainConfig, vocab_size: int, family: Family) -> dict[str, Tensor]:
    """Our state dict, float32. UserError for a tensor that is missing, misshapen or has no place in our GPT.

    c: config.json, for the family's fold, which may also untie the head: cfg.model.tied_head.
    """
    files = open_tensors(weight_files(folder))
    if cfg.model.n_layers > len(files):  # a model of billions of layers is not built first
        raise UserError(f"{folder}: its safetensors have {len(files)} tensors for {cfg.model.n_layers} layers")
    try:
        with torch.device("meta"):  # for the names and shapes of its parameters only
            model = gpt.GPT(cfg.model, gpt.build_encoding(cfg), vocab_size)
    except RuntimeError as e:  # more bytes than fit into 64 bits
        raise UserError(f"{c.path}: no model has these sizes ({str(e).splitlines()[0][:80]})") from None
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    prefix = family.table.layers.partition(".")[0] + "."  # files of the model without its head lack it

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        """Remove a tensor from `files` and load it, in float32. What is left in `files` at the end has no place."""
        names = (name, name.removeprefix(prefix), *(HEADS if name in HEADS else ()))
        present = [n for n in names if n in files]
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
    if family.fold is not None:
        family.fold(c, cfg.model, ours, take)
    if unplaced := [name for name in files if not BUFFERS.search(name)]:
        raise UserError(f"{folder}: {unplaced[0]} has no place in this model ({len(unplaced)} such tensors)")
    return ours


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the model: model.safetensors, or else the files that the index names, as transformers.

    Never any other: a folder may also contain an adapter, or the same weights in another format. UserError if there is
    neither, or if the index names a file outside the folder.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not names or any(Path(name).name != name for name in names):
                raise ValueError("not names of files in the folder")
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise UserError(f"{index}: not an index of safetensors files") from None
        return [folder / name for name in names]
    hint = ""
    if others := sorted(folder.glob("*.safetensors")):
        hint = f" ({others[0].name} is not read: it may be an adapter or another format)"
    elif pickles := [*folder.glob("*.bin"), *folder.glob("*.pt")]:
        hint = f" ({pickles[0].name} is a pickle, which is never loaded: convert it)"
    raise UserError(f"run=hf:{folder}: no model.safetensors there, and no {index.name}{hint}")


def open_tensors(paths: list[Path]) -> dict[str, Any]:
    """Tensor name -> the open safetensors file that holds it. UserError if a file is missing or incomplete."""
    tensors = {}
    for path in paths:
        try:
            file = safetensors.safe_open(path, framework="pt")
            tensors |= dict.fromkeys(file.keys(), file)
        except (OSError, safetensors.SafetensorError) as e:
            raise UserError(f"{path}: not a complete safetensors file ({str(e).splitlines()[0][:80]})") from None
    return tensors


def digest(folder: Path, cfg: TrainConfig) -> str:
    """The sha256 of config.json and the weights, and of the trained context, since train_ctx= can set it."""
    result = hashlib.sha256(str(cfg.pretrained).encode())
    for path in [folder / "config.json", *weight_files(folder)]:
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
