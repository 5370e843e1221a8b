"""Measuring curves: a run, a task and held-out documents; the loss of any method at each length.

A finished curve is a file whose name contains a hash of everything that determines its numbers. So curves that exist
are read instead of computed, and an interrupted evaluation keeps its finished curves.
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
from engine import device as devices, distributed
from engine.progress import progress_bar
from engine.run import Run
from engine.signals import StopSignal
from measure.curves import FORMAT, Curve, Row, read_curve, write_jsonl
from measure.statistics import bootstrap
from measure.tasks import Losses, Task
from model.scaling import ContextChange

TOKENS_PER_PASS = 8192  # tokens in one forward pass: several documents at short lengths, one at long ones


@dataclass(frozen=True)
class Method:
    """A scaling method to evaluate: its label in tables and files, its knobs, and those of the methods added to it."""

    label: str
    scalings: list[dict]


NONE = Method("none", [yaml_values("scaling", "none")])
WINDOW = Method("window", [yaml_values("scaling", "window")])  # the control


def requested_method(cfg: EvalConfig) -> Method:
    """The method that scaling= and plus= select, with a label such as `yarn beta_fast=4.0 + logn`."""
    return Method(" + ".join([describe("scaling", cfg.scaling), *cfg.plus]), cfg.scalings)


def evaluated_lengths(ctx: int | list[int], shortest: int, marks: Sequence[int]) -> list[int]:
    """The context lengths to evaluate, sorted, in tokens.

    A list ctx is used as it is. For a number: shortest, 2 shortest, 4 shortest, ... below ctx, ctx itself, and those of
    the marks (L and related lengths) that are below ctx.
    """
    if isinstance(ctx, list):
        return sorted(set(ctx))
    doubling = {shortest * 2**k for k in range(ctx.bit_length()) if shortest * 2**k < ctx}
    return sorted(doubling | {ctx} | {m for m in marks if shortest <= m < ctx})


class Evaluation:
    """One run, one task and a fixed set of held-out documents: the curves of any scaling method on the same targets.

    UserError if ctx is shorter than the task allows, or if no held-out document is long enough.
    """

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
        """The file of a method's curve, which need not exist: runs/NAME/eval/LABEL-ctxN-HASH.jsonl."""
        identity = [FORMAT, self.run.digest, self.targets, self.lengths, self.dtype_name, method.scalings]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return self.run.folder / "eval" / f"{method.label.replace(' ', '-')}-ctx{self.ctx}-{key}.jsonl"

    # ---- while it runs ----

    @contextmanager
    def running(self, curves: int, by_position: int) -> Generator[None]:
        """Context manager around all measurements: a progress bar, and a clean stop at SIGINT and SIGTERM.

        curves, by_position: the number of curves and of losses by position that will be computed, for the bar's total.
        """
        documents = len(self.text)
        tokens = curves * sum(self.task.cost(self.text, n) for n in self.lengths)
        tokens += documents * (by_position * self.ctx + self.repeated_length)
        self.bar = progress_bar(tokens, hidden=not (curves or by_position))
        with StopSignal() as self.stop, distributed.ranks().exit_if_a_rank_dies(self.stop), torch.inference_mode():
            yield
        self.bar.close()

    # ---- losses ----

    def losses_at(self, change: ContextChange) -> Losses:
        """A function that computes the model's losses under `change`, float64 on the CPU (see measure.tasks.Losses).

        Each call also updates the progress bar, and exits the process if a signal has arrived.
        """

        def losses(tokens: Tensor, targets: Tensor) -> Tensor:
            with devices.autocast(self.device, self.dtype):
                nats = self.run.model.losses(tokens.to(self.device), targets.to(self.device), change=change)
            # The bar counts the tokens of all ranks; the others process about as many as this one
            self.bar.update(min(tokens.numel() * distributed.world(), self.bar.total - self.bar.n))  # ty: ignore[unsupported-operator]
            if self.stop:
                self.bar.close()
                print(f"stopped; the curves that were finished are in {self.run.folder / 'eval'}")
                sys.exit(self.stop.exit_code)
            return nats.double().cpu()

        return losses

    def score(self, task: Task, n: int, change: ContextChange) -> Tensor:
        """Nats of every token that the task scores at length n, float64 [documents, scored tokens].

        Computed in passes of TOKENS_PER_PASS tokens; ranks share the passes and all get the complete result.
        """
        passes = self.text.split(max(1, TOKENS_PER_PASS // n))
        # The size of a pass does not depend on the number of ranks, so every number equals that of one process
        local = passes[distributed.rank() :: distributed.world()]
        scored = [task.score(self.losses_at(change), part, n) for part in local]
        return torch.cat(distributed.ranks().interleave(scored))

    def curve(self, method: Method, fresh: bool = False) -> Curve:
        """The curve of a method at all lengths: read from its file, or computed and written if there is none.

        fresh: compute it in any case. All ranks return the same curve, and rank 0 writes the file.
        """
        file = self.curve_file(method)
        if file.exists() and not fresh:
            return read_curve(file)
        rows = [self.row(method, n) for n in self.lengths]
        distributed.ranks().on_rank0(lambda: write_jsonl(file, rows))
        return Curve(rows, time.time())

    def row(self, method: Method, n: int) -> Row:
        """Measure one method at length n. The mean loss is per token, over all scored tokens of all documents."""
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
        """The loss of each token of a passage minus the loss of its repetition, nats [documents, L / 2 - 1].

        Both copies together have min(L, ctx) tokens, so the repetition is within the trained context. None below 4.
        """
        n = self.repeated_length
        return self.score(Repetition(), n, self.run.trained_scaling(n)) if n >= 4 else None


class Repetition(Task):
    """A passage of n / 2 tokens, twice in a row. score: nats of each token minus those of its copy, [B, n / 2 - 1]."""

    label = "repetition"

    def score(self, losses: Losses, text: Tensor, n: int) -> Tensor:
        half = n // 2
        twice = text[:, -half:].repeat(1, 2)  # [B, n]
        nats = losses(twice[:, :-1], twice[:, 1:])  # [B, n - 1]
        return nats[:, : half - 1] - nats[:, half:]
