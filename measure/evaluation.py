"""Measuring curves: a run, a task and its texts; the loss of any method at each length.

A curve's file has a hash of weights, method, task and precision in its name, and each row names its texts and targets.
So lengths that exist are read instead of computed, and an interrupted evaluation keeps its finished lengths.
"""

import functools
import hashlib
import json
import math
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from conf.errors import UserError, check
from conf.registry import describe, yaml_values
from conf.schema import CommonConfig, EvalConfig
from engine import device as devices, distributed
from engine.progress import StopSignal, flops_per_token, progress_bar
from engine.run import Run
from measure.curves import FORMAT, Curve, Row, add_rows, read_curve
from measure.intervals import mean_interval
from measure.tasks import Piece, build
from model.scaling import ContextChange

Measured = list[tuple[Piece, np.ndarray]]  # with the losses of its scored targets


@dataclass(frozen=True)
class Method:
    """A scaling method to evaluate: its label in tables and files, its knobs, and those of the methods added to it."""

    label: str
    scalings: list[dict]


NONE = Method("none", [yaml_values("scaling", "none")])  # what the run was trained with stays
WINDOW = Method("window", [yaml_values("scaling", "window")])  # the control


def requested_method(cfg: CommonConfig) -> Method:
    """The method that scaling= and plus= select, with a label such as `yarn beta_fast=4.0 + logn`."""
    return Method(" + ".join([describe("scaling", cfg.scaling), *cfg.plus]), cfg.scalings)


def doubled_lengths(ctx: int, shortest: int, marks: Sequence[int]) -> list[int]:
    """The context lengths to evaluate up to ctx, sorted, in tokens.

    shortest, 2 shortest, 4 shortest, ... below ctx, ctx itself, and the marks (L and related lengths) below ctx.
    """
    doubling = {shortest * 2**k for k in range(ctx.bit_length()) if shortest * 2**k < ctx}
    return sorted(doubling | {ctx} | {m for m in marks if shortest <= m < ctx})


def losses_and_hits(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target, nats, and 1 where it has the largest logit, else 0: float32 [B, S, 2].

    logits: [B, S, V]. targets: int64 [B, S].
    """
    nats = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return torch.stack((nats, (logits.argmax(-1) == targets).float()), dim=-1)


class Evaluation:
    """One run, one task and fixed texts: the curves of any scaling method on the same targets.

    UserError if ctx is shorter than the task allows, or if no held-out document is long enough.
    """

    def __init__(self, run: Run, cfg: EvalConfig, device: torch.device):
        self.run, self.device, self.dtype = run, device, cfg.dtype
        self.ctx: int = cfg.longest_ctx
        self.task = task = build(cfg.task, run.corpus, self.ctx, cfg.documents)
        L, longest = run.context.train_ctx, run.context.longest_trained_ctx
        given = cfg.ctx if isinstance(cfg.ctx, list) else None
        lengths = given or doubled_lengths(self.ctx, task.shortest, (L // 2, L, longest))
        check(min(lengths) >= task.minimum, "ctx", cfg.ctx, f"at least {task.minimum} with task={task.label}")
        truncation = {longest} if self.ctx > longest >= task.minimum else set()  # the length of this control
        self.lengths = sorted(truncation.union(lengths))
        identity = hashlib.sha256(task.identity().encode())
        self.texts = task.texts()
        self.target_keys = {n: self._key(identity.copy(), n) for n in self.lengths}
        # Of every row, and of the config of a wandb run
        self.facts: dict[str, Any] = {"task": task.label, "texts": self.texts, "documents": len(task.names)}
        self.facts |= {"ctx": self.ctx, "weights": run.digest[:12], "step": run.step}
        self.dtype_name = "bfloat16" if devices.uses_bfloat16(device, cfg.dtype) else "float32"
        self.stop, self.bar = StopSignal(), progress_bar(0, "", hidden=True)
        # The same on all ranks, which split the windows alike
        self.pass_tokens = min(distributed.interleave([devices.tokens_per_pass(device, run.model)]))

    # ---- what identifies the targets and a curve ----

    def _key(self, identity: Any, n: int) -> str:
        """Identifies the tokens scored at length n: rows with the same key are comparable, across runs as well.

        identity: the hash of the task and its texts, to which the tokens are added.
        """
        for piece in self.task.pieces(n):
            identity.update(piece.scored_targets().tobytes())
            # The inputs of a task with an answer do not follow from the names of documents
            identity.update(piece.tokens.numpy().tobytes() if self.task.accuracy else b"")
        return identity.hexdigest()[:12]

    def curve_file(self, method: Method) -> Path:
        """The file of a method's curves, which need not exist: runs/NAME/eval/LABEL-HASH.jsonl.

        It has the rows of all evaluated lengths and targets; in a row, `n` and `targets` say which.
        """
        fixed = self.ctx if method.scalings[0].get("factor") == "fixed" else None  # the factor then depends on ctx
        identity = [FORMAT, self.run.digest, self.task.label, self.dtype_name, method.scalings, fixed]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return self.run.folder / "eval" / f"{method.label.replace(' ', '-')[:120]}-{key}.jsonl"

    def measured_rows(self, method: Method) -> dict[int, list[Row]]:
        """n -> the rows of a method that are in its file already, for the lengths and targets of this evaluation."""
        file = self.curve_file(method)
        rows = read_curve(file).rows if file.exists() else []
        found = {n: [x for x in rows if (x.n, x.targets) == (n, key)] for n, key in self.target_keys.items()}
        return {n: of_length for n, of_length in found.items() if of_length}

    def missing_lengths(self, method: Method, fresh: bool = False) -> list[int]:
        """The lengths that have to be measured for a method's curve. fresh: all of them, in any case."""
        measured = {} if fresh else self.measured_rows(method)
        return [n for n in self.lengths if n not in measured]

    # ---- while it runs ----

    @contextmanager
    def running(self, work: Iterable[tuple[Method, int]]) -> Generator[None]:
        """Context manager around all measurements: a progress bar, and a clean stop at SIGINT and SIGTERM.

        work: the methods and lengths that will be measured.
        """
        changes = [(n, self.change(m, n)) for m, n in work if m == NONE or not self.changes_nothing(m, n)]
        flops = sum(self.flops(p.tokens, p.targets, change) for n, change in changes for p in self.task.pieces(n))
        self.bar = progress_bar(flops, "{elapsed}, {remaining} left", hidden=not flops)
        with closing(self.bar), StopSignal() as self.stop, torch.inference_mode():
            yield

    def flops(self, tokens: Tensor, targets: Tensor, change: ContextChange) -> float:
        """Those of one pass over tokens [B, n]: a measure of its time, which the number of tokens is not."""
        m = self.run.cfg.model
        n = change.reach(tokens.shape[1], targets.shape[1], m.n_layers)
        # A third of those of training; the mask is causal, so a token attends to half of the context
        return len(tokens) * n * flops_per_token(12 * m.n_layers * m.width**2, m, min(n, change.window or n) // 2) / 3

    # ---- losses ----

    def losses(self, tokens: Tensor, targets: Tensor, change: ContextChange) -> Tensor:
        """Nats of each target under `change`, float64 [B, S] on the CPU; with accuracy [B, S, 2]: and 1 where right.

        Each call also updates the progress bar, and exits the process if a signal has arrived.
        """
        tokens, targets = tokens.to(self.device), targets.to(self.device)
        with devices.autocast(self.device, self.dtype):
            if self.task.accuracy:
                result = losses_and_hits(self.run.model.last_logits(tokens, targets.shape[1], change), targets)
            else:
                result = self.run.model.losses(tokens, targets, change=change)
        # The bar counts the work of all ranks; the others do about as much as this one
        done = self.flops(tokens, targets, change) * distributed.world()
        self.bar.update(min(done, self.bar.total - self.bar.n))  # ty: ignore[unsupported-operator]
        if self.stop:
            if distributed.rank() == 0:
                self.bar.write(f"stopped; the lengths that were finished are in {self.run.folder / 'eval'}")
            sys.exit(self.stop.exit_code)
        return result.double().cpu()

    def measure(self, piece: Piece, change: ContextChange) -> np.ndarray:
        """The losses of a piece's scored targets, float64 [B, scored] or with accuracy [B, scored, 2].

        Computed in passes of several windows; ranks share the passes and all get the complete result.
        """
        size = max(1, self.pass_tokens // piece.tokens.shape[1])
        passes = list(zip(piece.tokens.split(size), piece.targets.split(size), strict=True))
        # The size of a pass does not depend on the number of ranks, so every number equals that of one process
        local = [self.losses(*part, change) for part in passes[distributed.rank() :: distributed.world()]]
        result = torch.cat(distributed.interleave(local))
        return (result if piece.scored is None else result[:, piece.scored]).numpy()

    def curve(self, method: Method, fresh: bool = False) -> Curve:
        """The curve of a method at all lengths: read from its file, or measured and added to it, length by length.

        fresh: measure all lengths in any case. NONE must come first, as measure_length uses its rows. All ranks return
        the same curve, and rank 0 writes the files.
        """
        rows, missing = self.measured_rows(method), self.missing_lengths(method, fresh)
        distributed.assert_same(f"{self.run.folder}/eval", tuple(missing))
        for n in missing:
            rows[n], losses = self.measure_length(method, n)
            distributed.on_rank0(functools.partial(add_rows, self.curve_file(method), rows[n], losses))
        return Curve([row for n in self.lengths for row in rows[n]])

    def measure_length(self, method: Method, n: int) -> tuple[list[Row], np.ndarray | None]:
        """(the row of a method at length n, and one for each distance of the task; the losses of all targets)

        If the method changes nothing at this length, the rows without scaling are used, and the losses are None.
        """
        began, change = time.monotonic(), self.change(method, n)
        self.bar.set_postfix_str(f"{method.label}, n={n}", refresh=False)
        if method != NONE and self.changes_nothing(method, n):
            rows = self.measured_rows(NONE).get(n, [])
            if not distributed.any_rank(not rows):  # all ranks measure, or none does
                own = {"label": method.label, "scaling": method.scalings, "factor": change.factor, "seconds": 0.0}
                return [replace(row, window=change.window, **own) for row in rows], None
        measured = [(piece, self.measure(piece, change)) for piece in self.task.pieces(n)]
        if not all(np.isfinite(x).all() for _, x in measured):
            raise UserError(f"{method.label} at n={n}: the loss is not finite (NaN or Inf), so it is not written")
        seconds = round(time.monotonic() - began, 2)
        distances = (None, *sorted({p.distance for p, _ in measured if p.distance is not None}))
        parts = {d: [(p, x) for p, x in measured if d is None or p.distance == d] for d in distances}
        rows = [replace(self.row(method, n, change, parts[d], d), seconds=seconds) for d in distances]
        return rows, np.concatenate([losses for _, losses in measured], axis=1).astype(np.float32)

    def change(self, method: Method, n: int) -> ContextChange:
        return self.run.change(method.scalings, n, self.ctx)

    def changes_nothing(self, method: Method, n: int) -> bool:
        """Whether the model computes the same as without scaling at length n, as most methods do up to L."""
        return len({self.change(m, n).effect(n, self.run.context) for m in (method, NONE)}) == 1

    def row(self, method: Method, n: int, change: ContextChange, measured: Measured, distance: int | None) -> Row:
        """The row of one method at length n, from the pieces (of one distance, or all of them) and their losses."""
        run, context, task = self.run, self.run.context, self.task
        losses = np.concatenate([losses for _, losses in measured], axis=1)
        nats = losses[..., 0] if task.accuracy else losses  # [B, scored]
        hits = losses[..., 1].mean(axis=1).round(4).tolist() if task.accuracy else []
        n_bytes = sum(int(run.corpus.token_bytes[piece.scored_targets()].sum()) for piece, _ in measured)
        nll = nats.sum(axis=1).round(4).tolist()
        loss, low, high = mean_interval(nats.reshape(1, len(task.names), -1).mean(axis=2))
        bits_per_byte = float(loss * nats.size / math.log(2) / n_bytes)

        row: dict[str, Any] = self.facts | {"run": run.name, "seed": run.cfg.seed, "targets": self.target_keys[n]}
        row |= {key: getattr(context, key) for key in ("pos", "train_ctx", "longest_trained_ctx")}
        row |= {key: getattr(change, key) for key in ("factor", "window", "attention_factor")}
        row |= {"label": method.label, "scaling": method.scalings, "n": n, "distance": distance, "seconds": 0.0}
        row |= {"loss": float(loss), "low": low, "high": high, "ppl": math.exp(min(loss, 700))}
        row |= {"bits_per_byte": bits_per_byte, "nll": nll, "hits": hits}
        row |= {"tokens": nats.size, "bytes": n_bytes, "scored_windows": task.windows(n)}
        return Row(**row, dtype=self.dtype_name, device=self.device.type)
