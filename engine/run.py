"""A trained run as one object: settings, weights, corpus and trained context; and the runs in a folder.

`Run.open` opens a folder runs/NAME that train.py wrote. Models from elsewhere become a Run in hf/open.py.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from conf.errors import UserError, check, ensure
from conf.registry import yaml_name
from conf.schema import TrainConfig, TrainedRunConfig, from_dict
from data import corpus as corpora
from data.corpus import HeldOut
from engine import checkpoint, distributed
from engine.finetune import Parent, describe_extension
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
    seconds: float = 0.0  # of the training
    notes: tuple[str, ...] = ()  # what a reader of its curves should know, a line each
    scaling_follows_length: bool = False  # a Hugging Face model computes its trained scaling anew at each length

    @classmethod
    def open(cls, wanted: TrainedRunConfig, device: torch.device | str = "cpu", ctx: int = 1) -> "Run":
        """Open the run that is named, or for None the newest that can be evaluated at ctx tokens with these scalings.

        ctx: 0 is the default of a run. UserError if there is no such run, or if its corpus has changed since it was
        trained.
        """
        name, reason = (wanted.run, "as named") if wanted.run is not None else newest_run(wanted, ctx)
        folder, state = Path(wanted.runs, name), load_state("run", name, wanted.runs)
        cfg: TrainConfig = state["cfg"]
        check_fits(cfg, gpt.build_encoding(cfg), ctx, wanted.scalings)
        with distributed.rank0_first():
            corpus = corpora.prepare(cfg.data, wanted.cache, state["tokenizer"])
        if corpus.key != state["corpus"]:
            raise UserError(f"{folder}: its corpus has changed since the training, so nothing is held out: train again")
        with checkpoint.reading(folder / "ckpt.pt"):
            model = gpt.from_weights(cfg, corpus.vocab_size, state["model"]).eval()
        digest = checkpoint.digest(state["model"])
        model.to(device)
        context = gpt.trained_context(cfg, model.pos)
        done = state["step"], digest, state["validation"], state["seconds"]
        return cls(name, reason, folder, cfg, model, corpus, context, *done)

    def change(self, scalings: Sequence[dict], n: int, ctx: int) -> ContextChange:
        """The change by the requested scalings at length n, combined with the one that the run was trained with.

        A requested method that changes frequencies replaces the trained one (model/scaling, `override`). ctx: the
        longest length of the evaluation, tokens, to which scaling.factor=fixed refers.
        """
        requested = resolve(scalings[0], self.context, n, ctx, scalings[1:])
        # Our runs keep the scaling of their training context at every length; Hugging Face models may compute it from n
        trained = gpt.trained_scaling(self.cfg, self.context, n if self.scaling_follows_length else None)
        return override(trained, requested)

    def describe(self) -> str:
        """Two or more lines about this run, for the start of a command."""
        progress = f", step {self.step} of {self.cfg.steps}" if self.step else ""
        lines = f"run: {self.name} ({self.reason})\n"
        lines += f"  {gpt.describe_encoding(self.cfg)}, trained at ctx {self.cfg.ctx}{progress}"
        if self.cfg.init:
            lines += f"\n  {describe_extension(self.cfg, self.context)}"
        return "\n  note: ".join([lines, *self.notes])


def default_ctx(cfg: TrainConfig, encoding: Encoding) -> int:
    """The longest length at which a run with these settings is evaluated where ctx= is not given, tokens."""
    longest = max(8192, 2 * cfg.ctx) if cfg.ctx >= 256 else 16 * cfg.ctx
    return min(longest, encoding.max_positions or longest)


def check_fits(cfg: TrainConfig, encoding: Encoding, ctx: int, scalings: Sequence[dict]) -> None:
    """NotApplicable if a run with these settings cannot be evaluated at ctx (0: its default) with these scalings."""
    ctx = ctx or default_ctx(cfg, encoding)
    if encoding.max_positions is not None and ctx > encoding.max_positions:
        limit = f"pos={yaml_name('pos', cfg.pos)} has {encoding.max_positions} positions"
        raise NotApplicable(f"{limit} and cannot be evaluated at ctx={ctx} (train with pos.max_positions={ctx})")
    resolve(scalings[0], gpt.trained_context(cfg, encoding), ctx, ctx, scalings[1:])


# ---- the runs in a folder ----


def find_runs(runs: str) -> dict[str, TrainConfig]:
    """Name -> settings of every run in the folder `runs` that has a checkpoint, newest first.

    Only config.json is read, not the weights. A folder in which it cannot be read is left out, with a line on stderr.
    """
    newest_first = sorted(Path(runs).glob("*/ckpt.pt"), key=lambda p: p.stat().st_mtime, reverse=True)
    found = {}
    for folder in (path.parent for path in newest_first):
        try:
            found[folder.name] = from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except checkpoint.ERRORS as e:
            print(f"{folder}/config.json: {str(e).splitlines()[0]}; {folder.name} is left out", file=sys.stderr)
    return found


def newest_run(wanted: TrainedRunConfig, ctx: int) -> tuple[str, str]:
    """(name of the run, the reason for the choice, which is printed). See Run.open for the arguments.

    Runs that do not fit are skipped and listed in the reason. UserError if no run fits.
    """
    skipped, runs, exp = [], wanted.runs, wanted.exp
    fit = [(name, cfg) for name, cfg in find_runs(runs).items() if exp in (None, cfg.exp)]
    for name, cfg in sorted(fit, key=lambda item: item[1].exp == "smoke"):  # which learn nothing: the last choice
        try:
            check_fits(cfg, gpt.build_encoding(cfg), ctx, wanted.scalings)
            return name, "the newest that fits" + (f"; skipped {'; '.join(skipped)}" if skipped else "")
        except NotApplicable as e:
            skipped.append(f"{name}: {e}")
    ensure(not skipped, f"no run in {runs}/ fits: {'; '.join(skipped)}")
    which, setting = (f" with exp={exp}", f" exp={exp}") if exp else ("", "")
    raise UserError(f"no trained run{which} in {runs}/: first: python train.py pos=rope{setting}")


def load_state(setting: str, name: str, runs: str) -> dict[str, Any]:
    """The checkpoint of runs/NAME. UserError if `setting` names no trained run."""
    if name not in (path.parent.name for path in Path(runs).glob("*/ckpt.pt")):
        there = f"there are {', '.join(names)}" if (names := find_runs(runs)) else "first: python train.py pos=rope"
        raise UserError(f"{setting}={name}: no trained run of that name in {runs}/: {there}")
    return checkpoint.load(Path(runs, name))


def parent_run(cfg: TrainConfig) -> Parent:
    """The run that init= names, to start a training from. UserError if there is none, or if cfg has its name."""
    assert cfg.init is not None
    check(cfg.init != cfg.name, "name", cfg.name, "another name than that of init=")
    state = load_state("init", cfg.init, cfg.runs)
    old: TrainConfig = state["cfg"]
    pretrained = old.pretrained or {"ctx": old.ctx, "tokens": state["step"] * old.batch_tokens}
    longest = {"longest": max(old.ctx, old.pretrained.get("longest", 0))} if old.pretrained else {}
    pretrained = {**pretrained, **longest, "run": cfg.init, "weights": checkpoint.digest(state["model"])}
    return Parent(old, state["model"], state["tokenizer"], state["corpus"], pretrained)
