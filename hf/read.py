"""Read a checkpoint: its settings as a TrainConfig, its weights as our state dict, and text in its tokens.

A setting in config.json that our GPT does not have is an error that names it. The tests compare the logits of every
family and rope type with those of transformers.
"""

import hashlib
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conf.errors import UserError
from conf.schema import TrainConfig
from data.checkpoint_tokenizer import CheckpointTokenizer
from data.corpus import Document, HeldOut
from data.preparation import held_out_texts
from hf.checkpoint import Checkpoint, LazyTensor, check_memory, open_folder
from hf.config import Config
from hf.families import FAMILIES, Family
from hf.weight_names import HEADS, to_ours
from model import gpt

# Constants of old checkpoints
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attention|attn)\.(bias|masked_bias)$")


def read(folder: Path, ctx: int, train_ctx: int | None = None) -> tuple[TrainConfig, dict[str, Tensor], int]:
    """`read_checkpoint` of a Hugging Face folder."""
    return read_checkpoint(open_folder(folder), ctx, train_ctx)


def read_checkpoint(
    source: Checkpoint, ctx: int, train_ctx: int | None = None, keep_bfloat16: bool = False, copies: int = 1
) -> tuple[TrainConfig, dict[str, Tensor], int]:
    """(settings, our state dict, vocabulary size) of a checkpoint, to be evaluated at up to ctx tokens.

    train_ctx: the context of the pre-training, tokens, where its config does not contain it. keep_bfloat16: matrices
    that are stored in bfloat16 stay so; everything else becomes float32. copies: so many float32 copies of the weights
    must fit into the memory. UserError if they do not, and for anything that is missing, damaged or not supported.
    """
    cfg, vocab_size, family = read_settings(source.config, ctx, train_ctx)
    cfg.name, tensors = source.name, source.open_tensors()
    check_memory(source.path, sum(tensor.size for tensor in tensors.values()), copies)
    return cfg, read_weights(source, tensors, cfg, vocab_size, family, keep_bfloat16), vocab_size


def read_settings(c: Config, ctx: int, train_ctx: int | None) -> tuple[TrainConfig, int, Family]:
    """(settings, vocabulary size, family) of a config.json."""
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
    cfg = TrainConfig(model=m, pos=positions.pos, scaling=positions.scaling, ctx=positions.longest_ctx)
    cfg.layers = positions.layers or {}
    cfg.steps, cfg.dtype = 0, "float32"
    if positions.longest_ctx > positions.train_ctx:  # extended, as a run of ours that was fine-tuned with init=
        cfg.init, cfg.pretrained = "hf", {"ctx": positions.train_ctx, "run": "config.json"}
    return cfg, vocab_size, family


# ---- weights ----


def read_weights(
    source: Checkpoint,
    tensors: dict[str, LazyTensor],
    cfg: TrainConfig,
    vocab_size: int,
    family: Family,
    keep_bfloat16: bool,
) -> dict[str, Tensor]:
    """Our state dict. UserError for a tensor that is missing, misshapen or has no place in our GPT.

    The family's fold may also untie the head: cfg.model.tied_head.
    """
    path, c = source.path, source.config
    if cfg.model.n_layers > len(tensors):  # a model of billions of layers is not built first
        raise UserError(f"{path}: has {len(tensors)} tensors for {cfg.model.n_layers} layers")
    try:
        with torch.device("meta"):  # for the names and shapes of its parameters only
            model = gpt.GPT(cfg.model, gpt.build_encoding(cfg), vocab_size)
    except RuntimeError as e:  # more bytes than fit into 64 bits
        raise UserError(f"{c.path}: no model has these sizes ({str(e).splitlines()[0][:80]})") from None
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    prefix = family.table.layers.partition(".")[0] + "."  # files of the model without its head lack it

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        """Remove a tensor from `tensors` and load it. What is left there at the end has no place."""
        names = (name, name.removeprefix(prefix), *(HEADS if name in HEADS else ()))
        present = [n for n in names if n in tensors]
        if not present:
            raise UserError(f"{path}: its weights have no {name}")
        name = present[0]
        x = tensors.pop(name).load()
        if tuple(x.shape) != shape:
            raise UserError(f"{path}: {name} has shape {list(x.shape)}, and config.json asks for {list(shape)}")
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise UserError(f"{path}: {name} is {x.dtype}: quantised weights are not supported")
        if not x.isfinite().all():
            raise UserError(f"{path}: {name} has values that are not finite (NaN or Inf)")
        # A fold computes with the weights, which would round them
        keep = keep_bfloat16 and x.dtype == torch.bfloat16 and x.dim() == 2 and family.fold is None
        return x if keep else x.float()

    ours = to_ours(family.table, cfg.model, shapes, take)
    for name in [n for n in HEADS if n in tensors and cfg.model.tied_head]:  # a redundant copy of the embeddings
        if not torch.equal(tensors.pop(name).load().float(), ours["head.weight"].float()):
            raise UserError(f"{path}: {name} differs from the embeddings that config.json ties it to")
    if family.fold is not None:
        family.fold(c, cfg.model, ours, take)
    if unplaced := [name for name in tensors if not BUFFERS.search(name)]:
        raise UserError(f"{path}: {unplaced[0]} has no place in this model ({len(unplaced)} such tensors)")
    return ours


# ---- text ----


def read_corpus(source: Checkpoint, data: dict, vocab_size: int) -> HeldOut:
    """The documents that data (a yaml of conf/data) holds out, in tokens of the checkpoint's tokenizer.

    No beginning-of-text token is added: documents are scored from their middle, where there is none, and one before
    every window would be an attention sink that no other model here has.
    """
    tokenizer, documents = CheckpointTokenizer(source.tokenizer().to_str(), vocab_size), []
    sizes = tokenizer.token_bytes()
    for name, text in held_out_texts(data):
        ids = np.array(tokenizer.encode_ordinary(text), dtype=np.int64)
        tokenizer.check(name, text, ids.tolist(), sizes)
        documents.append(Document(name, ids))
    key = hashlib.sha256(tokenizer.content.encode()).hexdigest()[:16]
    return HeldOut(key, vocab_size, documents, sizes, tokenizer.encode_ordinary, tokenizer.decode)
