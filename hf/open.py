"""Open what run= and init= name: one of our runs, or a foreign model: hf:FOLDER, gguf:FILE or pretrained:NAME.

A setting in config.json that our GPT does not have is an error that names it. The tests compare the logits of every
family and rope type with those of transformers.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conf.errors import check, ensure
from conf.registry import describe, yaml_values
from conf.schema import EvalConfig, TrainConfig
from data.corpus import Document, HeldOut, held_out_texts
from data.tokenizer import CheckpointTokenizer, token_bytes
from engine import checkpoint
from engine.device import store_in_bfloat16, uses_bfloat16
from engine.finetune import Parent
from engine.run import Run, check_fits, default_ctx
from hf.checkpoint import Checkpoint, open_folder
from hf.families import Family, read_settings
from hf.gguf_file import open_gguf, open_pretrained
from hf.weights import to_ours
from model import gpt

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HEADS = ("lm_head.weight", "embed_out.weight")  # a file may have either in place of the other
# Constants of old checkpoints
BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.(attention|attn)\.(bias|masked_bias)$")
# lm-eval adds it to every input of Gemma, because "Gemma underperforms without it"
LEFT_OUT = "its tokenizer puts {} at the beginning of a text; none is added here, which may raise its losses"


OPENERS = {"hf": open_folder, "gguf": open_gguf, "pretrained": lambda path: open_pretrained(str(path))}


def open_checkpoint(name: str, setting: str = "run", ignore_keys: Iterable[str] = ()) -> Checkpoint:
    """The checkpoint that hf:FOLDER, gguf:FILE or pretrained:NAME names. UserError if there is none.

    ignore_keys: keys of its config that are passed over, if they are unknown.
    """
    kind, _, rest = name.partition(":")
    check(kind in OPENERS, setting, name, "the name of a run, hf:FOLDER, gguf:FILE or pretrained:NAME")
    source = OPENERS[kind](Path(rest).expanduser())
    source.config.ignore |= set(ignore_keys)
    return source


def read_checkpoint(
    source: Checkpoint, ctx: int, train_ctx: int | None = None, keep_bfloat16: bool = False
) -> tuple[TrainConfig, dict[str, Tensor], int]:
    """(settings, our state dict, vocabulary size) of a checkpoint, to be evaluated at up to ctx tokens.

    train_ctx: the context of the pre-training, tokens, where its config does not contain it. keep_bfloat16: matrices
    that are stored in bfloat16 stay so; everything else becomes float32. UserError for anything that is missing,
    damaged or not supported.
    """
    cfg, vocab_size, family = read_settings(source.config, ctx, train_ctx)
    cfg.name = source.name
    return cfg, read_weights(source, cfg, family, keep_bfloat16), vocab_size


def read_weights(source: Checkpoint, cfg: TrainConfig, family: Family, keep_bfloat16: bool) -> dict[str, Tensor]:
    """Our state dict. UserError for a tensor that is missing, misshapen or has no place in our GPT.

    The family's fold may also untie the head: cfg.model.tied_head.
    """
    path, m, values, tensors = source.path, cfg.model, source.config.settings, source.open_tensors()
    table = family.table
    # A model of billions of layers is not built first
    ensure(m.n_layers <= len(tensors), f"{path}: has {len(tensors)} tensors for {m.n_layers} layers")
    with torch.device("meta"):  # for the names and shapes of its parameters only
        model = gpt.GPT(m, gpt.build_encoding(cfg), values["vocab_size"])
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    # A fold computes with the weights, which would round them
    keep = keep_bfloat16 and family.fold is None
    prefix = table.layers.partition(".")[0] + "."  # files of the model without its head lack it

    def take(name: str, shape: tuple[int, ...]) -> Tensor:
        """Remove a tensor from `tensors` and load it. What is left there at the end has no place."""
        names = (source.rename(name), name.removeprefix(prefix), *(HEADS if name in HEADS else ()))
        present = [n for n in names if n in tensors]
        ensure(present, f"{path}: its weights have no {name}")
        name, x = present[0], tensors.pop(present[0])()
        ensure(tuple(x.shape) == shape, f"{path}: {name} has shape {list(x.shape)}, config.json asks for {list(shape)}")
        ensure(x.dtype in FLOATS, f"{path}: {name} is {x.dtype}: quantised weights are not supported")
        ensure(x.isfinite().all(), f"{path}: {name} has values that are not finite (NaN or Inf)")
        return x if keep and x.dtype == torch.bfloat16 and x.dim() == 2 else x.float()

    ours = to_ours(table, m, shapes, take)
    for name in [n for n in HEADS if n in tensors and m.tied_head]:  # a redundant copy of the embeddings
        equal = torch.equal(tensors.pop(name)().float(), ours["head.weight"].float())
        ensure(equal, f"{path}: {name} differs from the embeddings that config.json ties it to")
    if family.fold is not None:
        family.fold(values, m, ours, take)
    unplaced = [name for name in tensors if not BUFFERS.search(name)]
    ensure(not unplaced, f"{path}: {', '.join(unplaced[:1])} has no place in this model ({len(unplaced)} such tensors)")
    return ours


def read_corpus(source: Checkpoint, data: dict, vocab_size: int) -> HeldOut:
    """The documents that data (a yaml of conf/data) holds out, in tokens of the checkpoint's tokenizer.

    No beginning-of-text token is added: documents are scored from their middle, where there is none, and one before
    every window would be an attention sink that no other model here has.
    """
    tokenizer, documents = CheckpointTokenizer(source.tokenizer().to_str(), vocab_size), []
    sizes = token_bytes(tokenizer)
    for name, text in held_out_texts(data):
        ids = np.array(tokenizer.encode_ordinary(text), dtype=np.int64)
        tokenizer.check(name, text, ids.tolist(), sizes)
        documents.append(Document(name, ids))
    key = hashlib.sha256(tokenizer.content.encode()).hexdigest()[:16]
    return HeldOut(key, vocab_size, documents, sizes, tokenizer)


def open_run(cfg: EvalConfig, device: torch.device) -> Run:
    """The run that cfg.run names, ours or a foreign model, or for None the newest run that fits these settings.

    The model is on `device` and in evaluation mode, and has bfloat16 weights if it computes in bfloat16. If cfg.ctx is
    None, it is set to the default of the run. UserError if there is no such run, or if its encoding or the requested
    scaling cannot be used at the longest length.
    """
    if ":" in (cfg.run or ""):
        cfg.ctx = cfg.ctx or 8192
        run = open_foreign(cfg, device)
    else:
        run = Run.open(cfg, device, cfg.longest_ctx)
        cfg.ctx = cfg.ctx or default_ctx(run.cfg, run.model.pos)
    if uses_bfloat16(device, cfg.dtype):
        store_in_bfloat16(run.model)
    return run


def open_foreign(cfg: EvalConfig, device: torch.device) -> Run:
    """The model that cfg.run names as a Run, to be evaluated at up to cfg.longest_ctx tokens with its scalings.

    The scored text is the held-out documents of cfg.data (sympy if it is empty), in tokens of the model's tokenizer.
    UserError for anything that is missing, damaged or not supported, or if the memory is too small; NotApplicable for a
    scaling that does not apply to the model.
    """
    source, ctx = open_checkpoint(cfg.run or "", ignore_keys=cfg.ignore_keys), cfg.longest_ctx
    in_bfloat16 = uses_bfloat16(device, cfg.dtype)
    settings, weights, vocab_size = read_checkpoint(source, ctx, cfg.train_ctx, keep_bfloat16=in_bfloat16)
    model = gpt.from_weights(settings, vocab_size, weights).to(device).eval()
    context = gpt.trained_context(settings, model.pos)
    gpt.trained_scaling(settings, context, ctx)  # UserError for parameters that do not fit, before any text is read
    check_fits(settings, model.pos, ctx, cfg.scalings)
    corpus = read_corpus(source, cfg.data or yaml_values("data", "sympy"), vocab_size)
    added = " ".join(source.tokenizer().encode("").tokens)  # what its post_processor puts around a text
    scaling = describe("scaling", {k: v for k, v in settings.scaling.items() if not isinstance(v, list)})
    return Run(
        name=source.name,
        reason=f"{source.path}, whose config says scaling={scaling}",
        folder=Path(cfg.runs) / source.name,
        cfg=settings,
        model=model,
        corpus=corpus,
        context=context,
        step=0,
        digest=digest_of(settings, weights),
        scaling_follows_length=True,
        notes=(*source.notes, *([LEFT_OUT.format(added)] if added else [])),
    )


def digest_of(settings: TrainConfig, weights: dict[str, Tensor]) -> str:
    """The sha256 of a model's weights and settings: a changed config.json or train_ctx= gives other curves, too."""
    values = {**asdict(settings), "name": None, "weights": checkpoint.digest(weights)}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def foreign_parent(cfg: TrainConfig) -> Parent:
    """The checkpoint that init= names, to start a training from.

    The corpus is the one that the command line chooses, in tokens of the checkpoint. UserError as in `open_checkpoint`,
    and for a checkpoint that does not say at which context it was trained, or that was trained with a scaling.
    """
    assert cfg.init is not None
    source = open_checkpoint(cfg.init, "init", cfg.ignore_keys)
    theirs, weights, vocab_size = read_checkpoint(source, cfg.ctx)
    scaling = theirs.scaling["kind"]
    check(scaling == "none", f"init={cfg.init}: the scaling of its config", scaling, "none to be continued")
    theirs.data = {**cfg.data, "tokenizer": "checkpoint", "vocab_size": vocab_size}
    pretrained = {"ctx": theirs.ctx, "tokens": source.tokens, "run": cfg.init, "weights": checkpoint.digest(weights)}
    fixed = ("model", "attention", "data.tokenizer", "data.vocab_size")
    return Parent(theirs, weights, source.tokenizer().to_str(), None, pretrained, fixed)
