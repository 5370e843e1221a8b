"""The rows of the study, results/PLAN.jsonl: what they are, how they are read, and differences of them.

A row is one run, one method and one length: a Row of measure/curves.py with the columns that tell what the run is in
the study. All rows of a file are of the same texts.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, ensure
from conf.registry import ROOT
from engine.files import write_atomically
from measure.curves import Row
from measure.gain import better_controls
from measure.groups import FEWEST
from measure.intervals import Estimate, estimate

BAR = "bar"  # as the label of a method: the better of the two controls
RESULTS = ROOT / "results"


@dataclass(frozen=True)
class StudyRow(Row):
    """`run` is the name of the job: rope-s0."""

    part: str = ""  # of the plan
    base: float | None = None  # of a rotary encoding
    in_window: float | None = None  # held-out bits per byte within the trained context
    steps: int = 0
    tokens_per_second: float | None = None  # of the training
    train_seconds: float = 0.0  # on `threads` threads; `seconds` are those of the evaluation
    threads: int = 0
    commit: str = ""
    command: str = ""  # that trained the run
    # Group of targets by antecedent -> the sum of their nats, and their number, in each document, from L on
    groups: dict[str, list[list[float]]] = field(default_factory=dict)
    answers: dict[str, list[float]] = field(default_factory=dict)  # of tasks: as Curve.answers

    @functools.cached_property
    def name(self) -> str:
        """The run without its seed. rope_interleaved is rope: the same functions, with permuted dimensions."""
        name = self.run.removesuffix(f"-s{self.seed}")
        return "rope" if name == "rope_interleaved" else name

    @property
    def training(self) -> int:
        """Tells the trainings of one name apart: the seed, and another number for rope_interleaved."""
        return self.seed + 1000 * self.run.startswith("rope_interleaved")

    @property
    def lineage(self) -> str:
        """The run without seed whose weights this one began with, or its own. Seeds of one lineage are paired."""
        parent = next((x for x in self.command.split() if x.startswith("init=")), "")
        return parent.removeprefix("init=").removesuffix(f"-s{self.seed}") or self.name


Seeds = dict[int, StudyRow]  # training -> its row, of one condition


@dataclass(frozen=True)
class Rows:
    """The rows of one file. Their losses are aligned (measure/curves.py): they can be compared between lengths."""

    rows: Sequence[StudyRow]

    @functools.cached_property
    def by_condition(self) -> dict[tuple[str, str, int], Seeds]:
        found: dict[tuple[str, str, int], Seeds] = defaultdict(dict)
        for row in self.rows:
            found[row.name, row.label, row.n][row.training] = row
        return found

    @property
    def trained_ctx(self) -> int:
        """L, the context of the pre-training, tokens."""
        return min(row.train_ctx for row in self.rows)

    def find(self, run: str, label: str, n: int) -> Seeds:
        """The rows of one condition; empty if there are none. run: without its seed. label: of the method, or BAR."""
        if label != BAR:
            return self.by_condition.get((run, label, n), {})
        if not (windows := [*self.find(run, "window", n).values()]):
            return {}
        trained = windows[0].longest_trained_ctx
        nones = {row.run: {trained: row} for row in self.find(run, "none", trained).values()}
        return {row.training: row for row in better_controls(windows, nones)}

    def losses(self, run: str, label: str, n: int) -> np.ndarray:
        """The mean loss over all windows with each seed, nats per token [seeds]."""
        return np.array([row.loss for row in self.find(run, label, n).values()])

    def gain(self, run: str, label: str, n: int) -> np.ndarray:
        """How much lower the loss is than the better control's, nats per token [seeds, documents]."""
        return difference(self.find(run, BAR, n), self.find(run, label, n))

    def runs(self, part: str) -> list[str]:
        """The names of the part's runs, without seeds."""
        return sorted({row.name for row in self.rows if row.part == part})


def contrast(plus: Sequence[Seeds], minus: Sequence[Seeds] = (), others: Sequence[Seeds] = ()) -> np.ndarray:
    """The sum of the losses `plus` less that of the losses `minus`, nats per token [seeds, documents].

    On the seeds that all of them have, and on the windows that they and `others` have; no seeds if there are none.
    """
    terms = (*plus, *minus)
    if len({row.texts for seeds in (*terms, *others) for row in seeds.values()}) > 1:
        raise UserError("rows on different texts, such as other documents, cannot be compared")
    windows = sorted(set.intersection(*({*x.scored_windows} for seeds in (*terms, *others) for x in seeds.values())))
    shared = sorted(set.intersection(*({*seeds} for seeds in terms))) if windows else ()
    losses = [[[of[s].document_losses(windows) for of in part] for part in (plus, minus)] for s in shared]
    return np.array([np.sum(added, axis=0) - np.sum(subtracted, axis=0) for added, subtracted in losses])


def difference(a: Seeds, b: Seeds) -> np.ndarray:
    """Loss a - loss b, nats per token [seeds, documents], on the seeds and windows that both have."""
    return contrast([a], [b]) if a and b else np.array([])


def compare(a: Seeds, b: Seeds, since: Sequence[Seeds] = ()) -> Estimate | None:
    """The mean of loss a - loss b, nats per token. None if there are no rows, or too few seeds for an interval.

    Conditions of one lineage are paired by seed: they have the weights, or those they started from, in common. Others
    are independent trainings, also where their seeds agree: with fewer than FEWEST of each, their difference may be
    chance. since: the rows of a and b at a shorter length; then the rises of the losses since there are compared.
    """
    if not a or not b or not all(since):
        return None
    first, second = ([a], since[:1]), ([b], since[1:])  # a rise is the loss less that of `since`
    if len({row.lineage for seeds in (a, b) for row in seeds.values()}) == 1:
        values = contrast([a, *since[1:]], [b, *since[:1]])
        return estimate(values) if len(values) else None
    groups = [contrast(*group, others=(a, b, *since)) for group in (first, second)]
    return estimate(*groups) if min(map(len, groups)) >= FEWEST else None


# ---- reading ----


def read_rows(path: Path) -> Rows:
    """The rows in a file of a study. UserError if it is missing or damaged."""
    try:
        rows = [StudyRow(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        raise UserError(f"{path}: not found: first python -m studies.matrix --plan {path.stem}") from None
    except (OSError, ValueError, TypeError):
        rows = []
    ensure(rows, f"{path}: not rows that studies.matrix wrote")
    return Rows(rows)


# ---- reports ----


def line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def header(cells: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table: the names of the columns, and the rule below them."""
    return [line(cells), "|---" * len(cells) + "|"]


def fill(report: str, /, **values: Any) -> str:
    """The text of results/REPORT: its template in studies/reports with these values. A list: lines, none: no rows."""
    texts = {key: "\n".join(x or ["No rows yet."]) if isinstance(x, list) else x for key, x in values.items()}
    return (Path(__file__).with_name("reports") / report).read_text(encoding="utf-8").format(**texts)


def publish(report: str, text: str) -> None:
    """Write results/REPORT, and print it."""
    write_atomically(RESULTS / report, lambda f: f.write(text.encode()))
    print(text)
