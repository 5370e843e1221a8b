"""init=hf:FOLDER, gguf:FILE or pretrained:NAME: start a training from a foreign checkpoint."""

from typing import Any

from conf.errors import UserError
from conf.schema import TrainConfig
from engine.finetune import choose_encoding, refuse_overrides
from hf.open import open_checkpoint
from hf.pretrained import TOKENS
from hf.read import read_checkpoint
from hf.rope_types import UnknownContext


def inherit(cfg: TrainConfig) -> dict[str, Any]:
    """Copy the checkpoint's model and pos settings and its tokenizer into cfg, and record the checkpoint in it.

    The command line may choose another encoding (engine/finetune.py, `choose_encoding`).

    The corpus is the one that the command line chooses, in tokens of the checkpoint. Returns the weights and the
    tokenizer, under the keys of a checkpoint of ours. UserError as in hf.open, and for settings that the checkpoint
    fixes.
    """
    assert cfg.init is not None
    refuse_overrides(cfg, "model", "attention", r"data\.tokenizer", r"data\.vocab_size")
    source = open_checkpoint(cfg.init, "init")
    try:  # copies: weights, gradients and AdamW's two averages
        theirs, weights, vocab_size = read_checkpoint(source, cfg.ctx, copies=4)
    except UnknownContext:
        reason = f"{source.path} does not say at which context it was pre-trained, so it cannot be fine-tuned"
        raise UserError(f"init={cfg.init}: {reason}") from None
    if theirs.scaling["kind"] != "none":
        raise UserError(f"init={cfg.init}: its config has scaling={theirs.scaling['kind']}, which cannot be continued")
    cfg.model, cfg.attention = theirs.model, "softmax"
    cfg.data = {**cfg.data, "tokenizer": "checkpoint", "vocab_size": vocab_size}
    digest = source.digest({})
    cfg.pretrained = {"ctx": theirs.ctx, "tokens": TOKENS.get(source.name, 0), "run": cfg.init, "weights": digest}
    choose_encoding(cfg, theirs)
    return {"model": weights, "corpus": None, "tokenizer": source.tokenizer().to_str()}
