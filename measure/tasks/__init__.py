"""Tasks define the tokens that are scored at a context length n. One file each; conf/task/NAME.yaml has `kind: FILE`.

A new task is one .py here, with a subclass of Task named `build`, and one .yaml; nothing else changes.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from conf.registry import build_from_knobs, load_kind
from data.corpus import HeldOut


@dataclass(frozen=True)
class Piece:
    """Inputs of one shape, and what is scored of them. B is documents x windows, the windows of a document together."""

    tokens: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, S]: the tokens that follow the last S of `tokens`
    scored: Tensor | None = None  # bool [S]: the targets that count; None: all
    distance: int | None = None  # of tasks with an answer that occurs before: tokens between the two

    def scored_targets(self) -> np.ndarray:
        """int64 [B, scored]"""
        return (self.targets if self.scored is None else self.targets[:, self.scored]).numpy()


def stacked(cuts: list[np.ndarray]) -> Tensor:
    """int64 [B, T], from texts of T tokens each."""
    return torch.from_numpy(np.stack(cuts).astype(np.int64))


class Task(Protocol):
    """What is scored at a length n. The yaml's knobs are the parameters of __init__ after corpus, ctx and documents."""

    label: str  # identifies what is scored, with every knob that shapes it
    names: list[str]  # of the documents or examples, the units of the intervals
    shortest: int = 64  # the shortest length that is evaluated by default
    minimum: int = 1  # the shortest length that can be evaluated
    accuracy: bool = False  # there are right answers: the share of right tokens is measured as well
    chance: float = 0.0  # accuracy of guessing
    guess: float = math.inf  # loss of guessing, nats per token
    threshold: float = 0.0  # of the effective context: the accuracy that counts as solved

    def __init__(self, corpus: HeldOut, ctx: int, documents: int):
        """ctx: the longest length, tokens. documents: how many to score at most."""

    def pieces(self, n: int) -> list[Piece]:
        """What is scored at length n; all pieces have the same B."""

    def identity(self) -> str:
        """Identifies the texts and everything that shapes what is scored of them, at all lengths."""
        return f"{self.label} {self.names}"

    def texts(self) -> str:
        """Row.texts: a hash of the identity."""
        return hashlib.sha256(self.identity().encode()).hexdigest()[:12]

    def describe(self) -> str:
        """What is scored, for a line of output."""

    def windows(self, n: int) -> list[int]:
        """The numbers of the windows of a document that are scored at length n: rows compare those that both have."""
        return [0]


def build(knobs: dict, corpus: HeldOut, ctx: int, documents: int) -> Task:
    """The task that a yaml of conf/task names, for a corpus. UserError for a wrong knob, or if no document fits."""
    kind = load_kind("measure.tasks", knobs["kind"], "build", "task")
    task = build_from_knobs(kind, knobs, "task", corpus, ctx, documents)
    task.guess = math.log(corpus.vocab_size)
    return task
