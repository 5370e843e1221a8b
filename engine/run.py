"""A trained run as one object: settings, weights, corpus and trained context.

`Run.open` opens a folder runs/NAME that train.py wrote. Models from elsewhere become a Run in hf/open.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from conf.errors import UserError
from conf.registry import yaml_name
from conf.schema import TrainConfig
from data import corpus as corpora
from data.corpus import HeldOut
from engine import checkpoint, distributed
from model import gpt
from model.pos import Encoding
from model.scaling import ContextChange, NotApplicable, TrainedContext, override, resolve


@dataclass(frozen=True)
class Run:
    """A trained run, opened for evaluation or generation: settings, weights, corpus and trained context."""

    name: str
    reason: str  # why this run was opened, for the first line of output
    folder: Path  # runs/NAME: evaluations are written below it
    cfg: TrainConfig
    model: gpt.GPT  # on its device, in evaluation mode
    corpus: HeldOut  # of our own runs: a Corpus, with the tokenizer
    context: TrainedContext
    step: int  # optimiser steps done; 0 for a Hugging Face model
    digest: str  # of the weights
    validation: dict[str, float] = field(default_factory=dict)  # loss, ppl and bits_per_byte in the trained window
    notes: tuple[str, ...] = ()  # what a reader of its curves should know, a line each
    scaling_follows_length: bool = False  # a Hugging Face model computes its trained scaling anew at each length

    @classmethod
    def open(
        cls, name: str | None, *, runs: str, cache: str, device: torch.device | str = "cpu",
        ctx: int = 1, scalings: Sequence[dict] = (), exp: str | None = None,
    ) -> "Run":  # fmt: skip
        """Open the run runs/NAME, or for None the newest run that can be evaluated at ctx tokens with these scalings.

        scalings: the knobs of a scaling method and of those added to it. exp: with name None, only runs that were
        trained with that experiment. cache: the folder of prepared corpora. UserError if there is no such run, or if
        its corpus has changed since it was trained.
        """
        reason = "as named"
        if name is None:
            from engine.newest_run import newest_run

            name, reason = newest_run(runs, ctx, scalings, exp)
        elif name not in (path.parent.name for path in Path(runs).glob("*/ckpt.pt")):
            from engine.newest_run import known_runs

            raise UserError(f"run={name}: no trained run of that name in {runs}/: {known_runs(runs)}")
        folder = Path(runs) / name
        state = checkpoint.load(folder)
        cfg: TrainConfig = state["cfg"]
        check_fits(cfg, gpt.build_encoding(cfg), ctx, scalings)
        with distributed.ranks().rank0_first():
            corpus = corpora.prepare(cfg.data, cache, state.get("tokenizer"))
        if corpus.key != state["corpus"]:
            raise UserError(f"{folder}: its corpus has changed since the training, so nothing is held out: train again")
        with checkpoint.reading(folder / "ckpt.pt"):
            model = gpt.from_weights(cfg, corpus.vocab_size, state["model"]).eval()
        model.to(device)
        context, digest = gpt.trained_context(cfg, model.pos), checkpoint.digest(folder)
        return cls(name, reason, folder, cfg, model, corpus, context, state["step"], digest, state["validation"])

    def trained_scaling(self, n: int) -> ContextChange:
        """The change by the scaling that the run was trained with, when it processes n tokens.

        Our runs keep the scaling of their training context at every length; Hugging Face models may compute it from n.
        """
        return gpt.trained_scaling(self.cfg, self.context, n if self.scaling_follows_length else None)

    def change(self, scalings: Sequence[dict], n: int, ctx: int) -> ContextChange:
        """The change by the requested scalings at length n, combined with the one that the run was trained with.

        A requested method that changes frequencies replaces the trained one (model/scaling, `override`). ctx: the
        longest length of the evaluation, tokens, to which scaling.factor=fixed refers.
        """
        requested = resolve(scalings[0], self.context, n, ctx, scalings[1:])
        return override(self.trained_scaling(n), requested)

    def describe(self) -> str:
        """One or two lines about this run, for the start of a command."""
        unfinished = "" if self.step == self.cfg.steps else f" of {self.cfg.steps}, unfinished"
        progress = f", step {self.step}{unfinished}" if self.step else ""
        lines = f"run: {self.name} ({self.reason}): {gpt.describe_encoding(self.cfg)}, "
        lines += f"trained at ctx {self.cfg.ctx}{progress}"
        if self.cfg.init:
            from engine.finetune import describe_extension

            lines += f"\n  {describe_extension(self.cfg, self.context)}"
        return "\n  note: ".join([lines, *self.notes])


def check_fits(cfg: TrainConfig, encoding: Encoding, ctx: int, scalings: Sequence[dict]) -> None:
    """NotApplicable if a run with these settings cannot be evaluated at ctx with these scalings."""
    if encoding.max_positions is not None and ctx > encoding.max_positions:
        limit = f"pos={yaml_name('pos', cfg.pos)} has {encoding.max_positions} positions"
        raise NotApplicable(f"{limit} and cannot be evaluated at ctx={ctx} (train with pos.max_positions={ctx})")
    if scalings:
        resolve(scalings[0], gpt.trained_context(cfg, encoding), ctx, ctx, scalings[1:])
