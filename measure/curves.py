"""Rows and curves: the loss of one run with one method at each length. Only this module writes and reads their files.

A curve is a file runs/NAME/eval/*.jsonl with one row for each length.
"""

import json
import typing
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.registry import has_type
from engine.checkpoint import write_atomically

FORMAT = 2  # raise it when the meaning of a row changes: curves are then evaluated again


@dataclass(frozen=True)
class Row:
    """One run, one method, one length. Losses are sums or means over the scored tokens of all documents."""

    run: str
    pos: str
    train_ctx: int  # L
    extended_ctx: int  # the longest context that the run was trained on
    step: int
    seed: int
    label: str  # of the method: none, window, "yarn beta_fast=4.0"
    scaling: list[dict]  # its knobs, and those of the methods added to it
    n: int  # context length, tokens
    factor: float
    window: int | None
    attention_factor: float
    loss: float  # nats per token
    low: float  # 95 % interval of the loss over documents
    high: float
    ppl: float
    bits_per_byte: float
    tokens: int  # scored, of all documents
    bytes: int  # of the same tokens
    documents: int
    ctx: int  # the longest length of the evaluation
    task: str  # label of the task
    targets: str  # identifies the scored tokens: rows are comparable only where it is equal
    weights: str  # identifies the run's weights
    dtype: str
    device: str
    seconds: float
    nll: list[float]  # sum of nats of each document


@dataclass(frozen=True)
class Curve:
    """The rows of one run and one method, in the order of their lengths."""

    rows: list[Row]
    written: float = 0.0  # modification time of the file, seconds: of two curves the newer one is used

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def run(self) -> str:
        return self.first.run

    @property
    def label(self) -> str:
        return self.first.label

    def by_length(self) -> dict[int, Row]:
        return {row.n: row for row in self.rows}


def write_jsonl(path: Path, rows: Iterable[Row | dict]) -> None:
    """One JSON object a line, written to a temporary name and renamed."""
    text = "".join(json.dumps(row if isinstance(row, dict) else asdict(row)) + "\n" for row in rows)
    write_atomically(path, lambda f: f.write(text.encode()))


def read_curve(path: Path) -> Curve:
    """The curve in a file that eval.py wrote, also of earlier versions.

    UserError if it is damaged or something else.
    """
    try:
        rows = [_row(json.loads(line)) for line in path.read_text().splitlines()]
        if not rows:
            raise ValueError("empty")
        return Curve(rows, path.stat().st_mtime)
    except (OSError, ValueError, TypeError, KeyError):
        raise UserError(f"{path}: not a curve that eval.py wrote: delete it and evaluate again") from None


def _row(values: dict[str, Any]) -> Row:
    """A row from its JSON object. In files of earlier versions the task's label is called `protocol`."""
    if "protocol" in values:
        values["task"] = values.pop("protocol")
        values.pop("score", None)
        values.setdefault("extended_ctx", values["train_ctx"])
    row = Row(**values)
    if wrong := [k for k, hint in typing.get_type_hints(Row).items() if not has_type(getattr(row, k), hint)]:
        raise TypeError(f"wrong types of {wrong}")
    return row


def select(curves: Iterable[Curve], targets: str) -> list[Curve]:
    """The curves on these targets, one for each run and label, sorted by run, with the controls first.

    Of several curves of a run and label, the one with the longest ctx is taken, and of these the newest. If the run was
    trained again or further after some of its curves were evaluated, only the curves of its newest weights are used.
    """
    curves = [c for c in curves if c.first.targets == targets]
    weights = {c.run: c.first.weights for c in sorted(curves, key=lambda c: c.written)}
    chosen: dict[tuple[str, str], Curve] = {}
    for c in sorted(curves, key=lambda c: (c.first.ctx, c.written)):
        if c.first.weights == weights[c.run]:
            chosen[c.run, c.label] = c  # a longer ctx, or at the same ctx a newer curve, replaces the earlier one
    order = {"none": 0, "window": 1}
    return sorted(chosen.values(), key=lambda c: (c.run, order.get(c.label, 2), c.label))


def window_rows(curves: Iterable[Curve]) -> dict[str, dict[int, Row]]:
    """run -> n -> the row of its window control, the reference for gains."""
    return {c.run: c.by_length() for c in curves if c.label == "window"}
