"""Measuring curves: a run, a task and held-out documents; the loss of any method at each length.

A finished curve is a file, named by everything that shapes it. So what has been evaluated is read instead of computed,
and an interrupted evaluation keeps its finished curves.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.errors import check
from conf.eval_schema import EvalConfig
from conf.registry import describe, yaml_values
from data.held_out import long_documents
from engine import device as devices
from engine import distributed
from engine.progress import progress_bar
from engine.run import Run
from engine.signals import StopSignal
from measure.curves import FORMAT, Curve, Row, read_curve, write_jsonl
from measure.statistics import bootstrap
from measure.tasks import Losses, Task
from model.scaling import ContextChange

TOKENS_PER_PASS = 8192


@dataclass(frozen=True)
class Method:
    """A scaling method as evaluated: its label, and the knobs of it and of the methods added to it."""

    label: str
    scalings: list[dict]


NONE = Method("none", [yaml_values("scaling", "none")])
WINDOW = Method("window", [yaml_values("scaling", "window")])  # the control


def requested_method(cfg: EvalConfig) -> Method:
    """The method of scaling= and plus=: `yarn beta_fast=4.0 + logn`."""
    return Method(" + ".join([describe("scaling", cfg.scaling), *cfg.plus]), cfg.scalings)


def evaluated_lengths(ctx: int | list[int], shortest: int, marks: Sequence[int]) -> list[int]:
    """shortest, 2 shortest, 4 shortest, ... below ctx, with ctx and the marks; a list is taken as it is."""
    if isinstance(ctx, list):
        return sorted(set(ctx))
    doubling = {shortest * 2**k for k in range(ctx.bit_length()) if shortest * 2**k < ctx}
    return sorted(doubling | {ctx} | {m for m in marks if shortest <= m < ctx})


class Evaluation:
    """A run evaluated with one task on fixed documents."""

    def __init__(self, run: Run, task: Task, cfg: EvalConfig, device: torch.device):
        self.run, self.task, self.device, self.dtype = run, task, device, cfg.dtype
        self.ctx = cfg.longest_ctx
        L = run.context.train_ctx
        self.lengths = evaluated_lengths(cfg.ctx, task.shortest, (L // 2, L, run.context.longest_trained_ctx))
        check(self.lengths[0] >= task.minimum, "ctx", cfg.ctx, f"at least {task.minimum} with task={task.label}")
        # names of the documents; their tokens [documents, ctx + 1]
        self.documents, self.text = long_documents(run.corpus, self.ctx, cfg.documents, start=task.from_start)
        # Identifies the scored tokens: curves with the same key are comparable, across runs as well
        scored = task.targets(self.text, self.ctx).numpy()
        self.target_bytes = int(run.corpus.token_bytes[scored].sum())
        self.targets = hashlib.sha256(f"{task.label} {self.documents}".encode() + scored.tobytes()).hexdigest()[:12]
        self.dtype_name = "bfloat16" if devices.uses_bfloat16(device, cfg.dtype) else "float32"
        self.repeated_length = min(L, self.ctx)  # of the repeated passage in copy_gain, both copies, tokens
        self.stop, self.bar = StopSignal(), progress_bar(0, hidden=True)

    # ---- what identifies a curve ----

    def curve_file(self, method: Method) -> Path:
        identity = [FORMAT, self.run.digest, self.targets, self.lengths, self.dtype_name, method.scalings]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return self.run.folder / "eval" / f"{method.label.replace(' ', '-')}-ctx{self.ctx}-{key}.jsonl"

    # ---- while it runs ----

    @contextmanager
    def running(self, curves: int, by_position: int) -> Generator[None]:
        """Shows progress and stops cleanly. curves, by_position: how many of each will be computed."""
        documents = len(self.text)
        tokens = curves * sum(self.task.cost(self.text, n) for n in self.lengths)
        tokens += documents * (by_position * self.ctx + self.repeated_length)
        self.bar = progress_bar(tokens, hidden=not (curves or by_position))
        with StopSignal() as self.stop, distributed.ranks().exit_if_a_rank_dies(self.stop), torch.inference_mode():
            yield
        self.bar.close()

    # ---- losses ----

    def losses_at(self, change: ContextChange) -> Losses:
        """The model's losses under a change, in float64 on the CPU; counts tokens, and exits where a signal asks to."""

        def losses(tokens: Tensor, targets: Tensor) -> Tensor:
            with devices.autocast(self.device, self.dtype):
                nats = self.run.model.losses(tokens.to(self.device), targets.to(self.device), change=change)
            # Other ranks process about as many tokens as this one
            self.bar.update(min(tokens.numel() * distributed.world(), self.bar.total - self.bar.n))  # ty: ignore[unsupported-operator]
            if self.stop:
                self.bar.close()
                print(f"stopped; the curves that were finished are in {self.run.folder / 'eval'}")
                sys.exit(self.stop.exit_code)
            return nats.double().cpu()

        return losses

    def score(self, task: Task, n: int, change: ContextChange) -> Tensor:
        """Nats of every token that the task scores at length n, float64 [documents, scored], in passes."""
        passes = self.text.split(max(1, TOKENS_PER_PASS // n))
        # Ranks take turns by passes of the same size, so every number equals that of one process
        local = passes[distributed.rank() :: distributed.world()]
        scored = [task.score(self.losses_at(change), part, n) for part in local]
        return torch.cat(distributed.ranks().interleave(scored))

    def curve(self, method: Method, fresh: bool = False) -> Curve:
        """The curve of a method: read if it was evaluated before (and not fresh), else computed and written."""
        file = self.curve_file(method)
        if file.exists() and not fresh:
            return read_curve(file)
        rows = [self.row(method, n) for n in self.lengths]
        distributed.ranks().on_rank0(lambda: write_jsonl(file, rows))
        return Curve(rows, time.time())

    def row(self, method: Method, n: int) -> Row:
        began = time.monotonic()
        self.bar.set_postfix_str(f"{method.label}, n={n}", refresh=False)
        run, context = self.run, self.run.context
        change = run.change(method.scalings, n, self.ctx)
        per_document = self.score(self.task, n, change).sum(dim=1).numpy()  # nats [documents]
        scored = self.task.targets(self.text, n).numpy()
        n_tokens, n_bytes = scored.size, int(run.corpus.token_bytes[scored].sum())
        loss = per_document.sum() / n_tokens
        low, high = bootstrap(per_document, n_tokens)
        return Row(
            run=run.name, pos=run.context.pos, train_ctx=context.train_ctx, extended_ctx=context.longest_trained_ctx,
            step=run.step, seed=run.cfg.seed, label=method.label, scaling=method.scalings, n=n, factor=change.factor,
            window=change.window, attention_factor=change.attention_factor, loss=float(loss), low=low, high=high,
            ppl=math.exp(min(loss, 700)), bits_per_byte=float(loss * n_tokens / math.log(2) / n_bytes), tokens=n_tokens,
            bytes=n_bytes, documents=len(self.documents), ctx=self.ctx, task=self.task.label, targets=self.targets,
            weights=run.digest[:12], dtype=self.dtype_name, device=self.device.type,
            seconds=round(time.monotonic() - began, 2), nll=per_document.round(4).tolist(),
        )  # fmt: skip

    # ---- headroom ----

    def copy_gain(self) -> Tensor | None:
        """How many nats each token of a repeated passage saves, [documents, tokens]; None where L is too short."""
        n = self.repeated_length
        return self.score(Repetition(), n, self.run.trained_scaling(n)) if n >= 4 else None


class Repetition(Task):
    """A passage of n / 2 tokens, twice: nats of each token less those of its copy, [B, n / 2 - 1]."""

    label = "repetition"

    def score(self, losses: Losses, text: Tensor, n: int) -> Tensor:
        half = n // 2
        twice = text[:, -half:].repeat(1, 2)  # [B, n]
        nats = losses(twice[:, :-1], twice[:, 1:])  # [B, n - 1]
        return nats[:, : half - 1] - nats[:, half:]
