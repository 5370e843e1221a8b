"""Rows and curves: the loss of one run with one method at each length. Only this module writes and reads their files.

A curve is a file runs/NAME/eval/*.jsonl. It has one row for each length and targets, and of a task with an answer also
one for each distance.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from conf.errors import UserError
from engine.files import locked, write_atomically

FORMAT = 4  # raise it when the meaning of a row changes: curves are then evaluated again


@dataclass(frozen=True)
class Row:
    """One run, one method, one length. Losses are sums or means over the scored tokens of all documents."""

    run: str
    pos: str
    train_ctx: int  # L
    longest_trained_ctx: int  # of pre-training and fine-tuning
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
    documents: int  # or examples of a task
    ctx: int  # the longest length of the evaluation
    task: str  # label of the task
    texts: str  # identifies the task and its texts: rows of different n are comparable only where it is equal
    targets: str  # identifies the scored tokens at this length: rows of one n are comparable only where it is equal
    weights: str  # identifies the run's weights
    dtype: str
    device: str
    seconds: float
    nll: list[float]  # sum of nats of each window, the windows of a document together
    scored_windows: list[int] = field(default_factory=lambda: [0])  # the numbers of a document's windows that count
    hits: list[float] = field(default_factory=list)  # of tasks with an answer: share of right tokens of each example
    distance: int | None = None  # the row of one distance of the answer, tokens; None: of all

    @property
    def targets_per_window(self) -> float:
        return self.tokens / len(self.nll)

    @property
    def accuracy(self) -> float | None:
        return float(np.mean(self.hits)) if self.hits else None

    def document_losses(self, windows: Iterable[int]) -> np.ndarray:
        """The mean nats per token of each document over these windows, [documents]."""
        nats = np.array(self.nll).reshape(self.documents, -1)[:, [self.scored_windows.index(w) for w in windows]]
        return nats.mean(axis=1) / self.targets_per_window


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass(frozen=True)
class Curve:
    """The rows of one run and one method, in the order of their lengths."""

    rows: list[Row]
    written: float = 0.0  # modification time of the file, seconds: of two curves the newer one is used
    named: str = ""  # its group, if that is not its run
    file: Path | None = None  # that it was read from

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def run(self) -> str:
        return self.first.run

    @property
    def group(self) -> str:
        """The name of the runs that differ from its run only in the seed: they are shown as one curve."""
        return self.named or self.run

    @property
    def label(self) -> str:
        return self.first.label

    @property
    def encoding(self) -> str:
        """The name of its positional encoding, without settings."""
        return self.first.pos.split()[0]

    @property
    def overall(self) -> list[Row]:
        """The rows of all distances together, one for each length: all rows, but for tasks with an answer."""
        return [row for row in self.rows if row.distance is None]

    def answers(self, n: int) -> dict[str, list[float]]:
        """Of tasks with an answer: its distance, tokens -> the share of right tokens of each example."""
        return {str(row.distance): row.hits for row in self.rows if row.n == n and row.distance is not None}

    def by_length(self) -> dict[int, Row]:
        return {row.n: row for row in self.overall}


def write_jsonl(path: Path, rows: Iterable[Row | dict]) -> None:
    """One JSON object a line, written to a temporary name and renamed."""
    text = "".join(json.dumps(row if isinstance(row, dict) else asdict(row)) + "\n" for row in rows)
    write_atomically(path, lambda f: f.write(text.encode()))


def losses_file(file: Path, row: Row) -> Path:
    """The .npy with the loss of each target of a row in a file of curves, float32 [B, scored] (accuracy: [.., 2])."""
    return file.parent / "losses" / f"{file.stem}-n{row.n}-{row.targets}.npy"


def add_rows(file: Path, rows: list[Row], losses: np.ndarray | None) -> None:
    """Add the rows of one length to a file of curves, in place of earlier ones on the same targets.

    losses: of each target, which are written to a file of their own, if there are any.
    """
    first = rows[0]
    with locked(file.parent, wait=True):  # another process may add rows to the same file
        if losses is not None:
            write_atomically(losses_file(file, first), lambda f: np.save(f, losses))
        before = read_curve(file).rows if file.exists() else []
        others = [row for row in before if (row.n, row.targets) != (first.n, first.targets)]
        write_jsonl(file, sorted([*others, *rows], key=lambda row: row.n))


def read_curve(path: Path) -> Curve:
    """The curve in a file that eval.py wrote. UserError, with the line, if it is something else.

    Its run is the folder's name: rows that were measured before and after the folder was renamed are of one run.
    """
    rows: list[Row] = []
    try:
        rows.extend(Row(**json.loads(line)) for line in path.read_bytes().splitlines() or [b""])
    except (OSError, ValueError, TypeError, RecursionError):
        what = f"not a curve that this version of eval.py wrote (line {len(rows) + 1})"
        raise UserError(f"{path}: {what}: move it away and evaluate again") from None
    rows = [replace(row, run=path.parents[1].name) for row in rows]
    return Curve(rows, path.stat().st_mtime, file=path)


def read_run(folder: Path, digest: str | None) -> list[Curve]:
    """The curves of a run that were measured with these weights.

    A line on stderr names a file that cannot be read, and says if all curves are of other weights. digest: of the
    weights in its ckpt.pt, whose beginning the rows have. None, for a model from elsewhere: all curves.
    """
    curves = []
    for file in sorted(folder.glob("eval/*.jsonl")):
        try:
            curves.append(read_curve(file))
        except UserError as e:
            print(f"left out: {e}", file=sys.stderr)
    current = [c for c in curves if digest is None or c.first.weights == digest[:12]]
    if curves and not current:
        print(f"left out: {folder}: no curve of its present weights: python eval.py run={folder.name}", file=sys.stderr)
    return current


def select(curves: Sequence[Curve], texts: str, targets: dict[int, str]) -> list[Curve]:
    """The rows on these texts as curves, one for each run and label, sorted by run, the controls first.

    targets: n -> the key of the targets at this length. Of several curves of a run and label, the one with the longest
    n is taken, and of these the newest. A model from elsewhere may have curves of several weights: those of the newest
    file are used.
    """
    on = [replace(c, rows=[x for x in c.rows if x.texts == texts and targets.get(x.n) == x.targets]) for c in curves]
    matching = [c for c in on if c.rows]
    weights = {c.run: c.first.weights for c in sorted(matching, key=lambda c: c.written)}
    # Sorted so that a longer one, or of the same length a newer one, replaces the earlier one
    newest = [c for c in matching if c.first.weights == weights[c.run]]
    chosen = {(c.run, c.label): c for c in sorted(newest, key=lambda c: (c.rows[-1].n, c.written))}
    order = {"none": 0, "window": 1}
    return align(sorted(chosen.values(), key=lambda c: (c.run, order.get(c.label, 2), c.label)))


def select_shared(curves: Sequence[Curve], texts: str) -> list[Curve]:
    """The curves on these texts as `select` returns them, at each length on the targets that most rows have."""
    count = Counter((row.n, row.targets) for c in curves for row in c.rows if row.texts == texts)
    return select(curves, texts, {n: key for (n, key), _ in reversed(count.most_common())})


def align(curves: Collection[Curve]) -> list[Curve]:
    """The curves with losses that can be compared between lengths, although long ones score fewer windows.

    aligned(n) = loss_L(all windows) + mean over common windows of (loss_n - loss_L)

    loss_L is the loss without scaling at the longest length up to the trained context where most windows are scored.
    Example: at L the two windows of a document have the losses 2.0 and 4.0, mean 3.0. At n = 4096 only the second is
    scored, with 3.5. That is a fall by 0.5, not a rise from 3.0: aligned(4096) = 3.0 + (3.5 - 4.0) = 2.5.

    A row with all windows is unchanged, and so are those of a run without such a reference.
    """
    references = {}
    for c in curves:
        if c.label == "none" and (inside := [row for row in c.rows if row.n <= c.first.longest_trained_ctx]):
            references[c.run] = max(inside, key=lambda row: (len(row.scored_windows), row.n))
    return [replace(c, rows=[_aligned(row, references.get(c.run, row)) for row in c.rows]) for c in curves]


def _aligned(row: Row, reference: Row) -> Row:
    if not {*row.scored_windows} < {*reference.scored_windows} or row.hits:
        return row
    loss = reference.loss + float(per_document_difference(row, reference).mean())
    low, high = (x + loss - row.loss for x in (row.low, row.high))
    bits_per_byte = loss * reference.tokens / math.log(2) / reference.bytes
    return replace(row, loss=loss, low=low, high=high, ppl=math.exp(min(loss, 700)), bits_per_byte=bits_per_byte)


def per_document_difference(a: Row, b: Row) -> np.ndarray:
    """Loss a - loss b of each document, nats per token [documents], on the windows that both rows have."""
    common = sorted({*a.scored_windows} & {*b.scored_windows})
    return a.document_losses(common) - b.document_losses(common)
