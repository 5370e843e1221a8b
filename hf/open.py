"""Open the model that eval.py's run= names as a Run: hf:FOLDER, gguf:FILE or pretrained:NAME."""

from collections.abc import Sequence
from pathlib import Path

import torch

from conf.errors import UserError
from conf.eval_schema import EvalConfig
from conf.registry import yaml_values
from engine.device import uses_bfloat16
from engine.run import Run, check_fits
from hf.checkpoint import Checkpoint, open_folder
from hf.read import read_checkpoint, read_corpus
from model import gpt

# lm-eval adds it to every input of Gemma, because "Gemma underperforms without it"
LEFT_OUT = "its tokenizer puts {} at the beginning of a text; none is added here, which may raise its losses"


def open_checkpoint(name: str, setting: str = "run") -> Checkpoint:
    """The checkpoint that hf:FOLDER, gguf:FILE or pretrained:NAME names. UserError if there is none."""
    kind, _, rest = name.partition(":")
    if kind == "hf":
        return open_folder(Path(rest).expanduser())
    if kind == "gguf":
        from hf.gguf_file import open_gguf

        return open_gguf(Path(rest).expanduser())
    if kind == "pretrained":
        from hf.pretrained import open_pretrained

        return open_pretrained(rest)
    raise UserError(f"{setting}={name}: must be the name of a run, hf:FOLDER, gguf:FILE or pretrained:NAME")


def open_foreign(cfg: EvalConfig, *, ctx: int, scalings: Sequence[dict], runs: str, device: torch.device) -> Run:
    """The model that cfg.run names as a Run, to be evaluated at up to ctx tokens with these scalings.

    The scored text is the held-out documents of cfg.data (sympy if it is empty), in tokens of the model's tokenizer.
    runs: the folder under which the curves are written. UserError for anything that is missing, damaged or not
    supported, or if the memory is too small; NotApplicable for a scaling that does not apply to the model.
    """
    assert cfg.run is not None
    source = open_checkpoint(cfg.run)
    in_bfloat16 = uses_bfloat16(device, cfg.dtype)
    settings, weights, vocab_size = read_checkpoint(source, ctx, cfg.train_ctx, keep_bfloat16=in_bfloat16)
    model = gpt.from_weights(settings, vocab_size, weights).to(device).eval()
    context = gpt.trained_context(settings, model.pos)
    gpt.trained_scaling(settings, context, ctx)  # UserError for parameters that do not fit, before any text is read
    check_fits(settings, model.pos, ctx, scalings)
    corpus = read_corpus(source, cfg.data or yaml_values("data", "sympy"), vocab_size)
    added = " ".join(source.tokenizer().encode("").tokens)  # what its post_processor puts around a text
    knobs = {k: v for k, v in settings.scaling.items() if k != "kind" and v is not None and not isinstance(v, list)}
    scaling = " ".join([settings.scaling["kind"], *(f"{k}={v}" for k, v in knobs.items())])
    return Run(
        name=source.name,
        reason=f"{source.path}, whose config says scaling={scaling}",
        folder=Path(runs) / source.name,
        cfg=settings,
        model=model,
        corpus=corpus,
        context=context,
        step=0,
        digest=source.digest(settings.pretrained),
        scaling_follows_length=True,
        notes=(*source.notes, *([LEFT_OUT.format(added)] if added else [])),
    )
