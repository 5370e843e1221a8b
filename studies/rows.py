"""The rows of the study, results/matrix.jsonl and layers.jsonl: what they are, how they are read, differences of them.

A row is one run, one method and one length: a Row of measure/curves.py with the columns that tell what the run is in
the study. It scores several windows of each document, at long n fewer of them, so two rows are compared on the windows
that both have. The rows of the earlier targets, results/matrix-last64.jsonl, score one: the last 64 tokens of each
document. They are never compared with the others.
"""

import argparse
import functools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.registry import ROOT
from engine.files import write_atomically
from measure.curves import Row
from measure.gain import better_controls

BAR = "bar"  # as the label of a method: the better of the two controls
MATRIX = (ROOT / "results/matrix.jsonl", ROOT / "results/matrix-last64.jsonl")
OLD = "old targets"  # the mark of what is measured on the rows of the last 64 tokens


@dataclass(frozen=True)
class StudyRow(Row):
    """`run` is the name of the job: rope-s0."""

    part: str = ""  # of the plan, or the corpus of studies/real.py
    base: float | None = None  # of a rotary encoding
    method: str = ""  # of a fine-tuning; none: fine-tuned without scaling
    finetune_steps: int = 0
    percent: float = 0.0  # of the pre-training's steps
    in_window: float | None = None  # held-out bits per byte within the trained context
    steps: int = 0
    tokens_per_second: float | None = None  # of the training
    threads: int = 0
    commit: str = ""
    command: str = ""  # that trained the run

    @functools.cached_property
    def name(self) -> str:
        """The run without its seed: `rope` for rope-s0, rope-s1 and rope-s2."""
        return self.run.removesuffix(f"-s{self.seed}")


Seeds = dict[int, StudyRow]  # seed -> its row, of one condition


@dataclass(frozen=True)
class Rows:
    """The rows of one file. Their losses are aligned (measure/curves.py): they can be compared between lengths."""

    rows: Sequence[StudyRow]
    mark: str = ""  # OLD for those of the earlier targets

    @functools.cached_property
    def by_condition(self) -> dict[tuple[str, str, int], Seeds]:
        found: dict[tuple[str, str, int], Seeds] = defaultdict(dict)
        for row in self.rows:
            found[row.name, row.label, row.n][row.seed] = row
        return found

    @functools.cached_property
    def nones(self) -> dict[str, dict[int, StudyRow]]:
        """run -> n -> its row without scaling."""
        found: dict[str, dict[int, StudyRow]] = defaultdict(dict)
        for row in self.rows:
            if row.label == "none":
                found[row.run][row.n] = row
        return found

    @property
    def trained_ctx(self) -> int:
        """L, the context of the pre-training, tokens."""
        return min(row.train_ctx for row in self.rows)

    def find(self, run: str, label: str, n: int) -> Seeds:
        """The rows of one condition; empty if there are none. run: without its seed. label: of the method, or BAR."""
        if label != BAR:
            return self.by_condition.get((run, label, n), {})
        windows = [*self.find(run, "window", n).values()]
        return {row.seed: row for row in better_controls(windows, self.nones)} if windows else {}

    def losses(self, run: str, label: str, n: int) -> np.ndarray:
        """The mean loss over all windows with each seed, nats per token [seeds]."""
        return np.array([row.loss for row in self.find(run, label, n).values()])

    def gain(self, run: str, label: str, n: int) -> np.ndarray:
        """How much lower the loss is than the better control's, nats per token [seeds, documents]."""
        return difference(self.find(run, BAR, n), self.find(run, label, n))

    def has(self, part: str, label: str | None = None) -> bool:
        return any(row.part == part and label in (None, row.label) for row in self.rows)

    def runs(self, part: str, label: str | None = None) -> list[str]:
        """The names of the part's runs, without seeds; label: only runs that were evaluated with this method."""
        return sorted({row.name for row in self.rows if row.part == part and label in (None, row.label)})

    def lengths(self, part: str) -> list[int]:
        """The lengths at which the part's runs were evaluated without scaling."""
        return sorted({row.n for row in self.rows if row.part == part and row.label == "none"})

    def bases(self) -> dict[float, str]:
        """RoPE's base in pre-training -> the run, in the order of the bases. `rope` has the default base."""
        found = {float(row.base): row.name for row in self.rows if row.part == "base" and row.base}
        return dict(sorted((found | {10000.0: "rope"}).items())) if found else {}

    def with_seeds_of(self, part: str) -> "Rows":
        """The rows of all parts with the seeds of this part: its runs are compared with rope at the same seeds."""
        seeds = {row.seed for row in self.rows if row.part == part}
        return Rows([row for row in self.rows if row.seed in seeds], self.mark)


def contrast(plus: Sequence[Seeds], minus: Sequence[Seeds], absolute: bool = False) -> np.ndarray:
    """The sum of the losses `plus` less that of the losses `minus`, nats per token [seeds, documents].

    On the seeds and windows that all of them have; no seeds if there are none. absolute: the mean of the absolute
    values over the windows of a document.
    """
    values = []
    for seed in sorted(set.intersection(*({*seeds} for seeds in (*plus, *minus)))):
        first, second = ([seeds[seed] for seeds in terms] for terms in (plus, minus))
        windows = set.intersection(*({*row.scored_windows} for row in (*first, *second)))
        if windows:
            groups = [[w] for w in windows] if absolute else [sorted(windows)]
            a, b = (sum(np.stack([row.document_losses(g) for g in groups]) for row in rows) for rows in (first, second))
            values.append(np.mean(np.abs(a - b) if absolute else a - b, axis=0))
    return np.array(values)


def difference(a: Seeds, b: Seeds) -> np.ndarray:
    """Loss a - loss b, nats per token [seeds, documents], on the seeds and windows that both have."""
    return contrast([a], [b])


# ---- reading ----


def read_rows(path: Path) -> Rows:
    """The rows in a file that studies.matrix wrote. UserError if it is missing or damaged."""
    try:
        rows = [study_row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        plan = " --plan layers" if path.name.startswith("layers") else ""
        raise UserError(f"{path}: not found: first python -m studies.matrix{plan}") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        rows = []
    if not rows:
        raise UserError(f"{path}: not rows that studies.matrix wrote")
    if len({row.texts for row in rows} - {""}) > 1:
        raise UserError(f"{path}: its rows are on different texts, such as other documents, and cannot be compared")
    return Rows(rows, OLD if path.name == MATRIX[1].name else "")


def study_row(row: dict[str, Any]) -> StudyRow:
    """A row of a file. The published ones have other names for some columns, and lack those that no report uses."""
    names = {"name": "run", "windows": "scored_windows", "extended_ctx": "longest_trained_ctx"}
    row = {names.get(key, key): value for key, value in row.items()}
    known = {field.name for field in fields(StudyRow)}
    unknown: dict[str, Any] = dict.fromkeys(known - {"run", "seed", "label", "n", "train_ctx", "loss", "tokens", "nll"})
    unknown |= {"texts": "", "hits": [], "scored_windows": [0], "longest_trained_ctx": row["train_ctx"]}
    unknown |= {"part": "", "documents": len(row["nll"]) // len(row.get("scored_windows", [0]))}
    return StudyRow(**unknown | {key: value for key, value in row.items() if key in known})


def read_sources(paths: Sequence[Path]) -> list[Rows]:
    """The rows of the files that are there. A report takes each of its numbers from the first source that has it."""
    return [read_rows(path) for path in paths if path.exists()] or [read_rows(paths[0])]


def source(sources: Sequence[Rows], part: str, label: str | None = None) -> Rows:
    """The first source that has this part of the plan, with this method; the last one if none has."""
    return next((rows for rows in sources if rows.has(part, label)), sources[-1])


# ---- reports ----


def line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def header(cells: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table: the names of the columns, and the rule below them."""
    return [line(cells), "|---" * len(cells) + "|"]


def fill(report: str, /, **values: Any) -> str:
    """The text of results/REPORT: its template in studies/reports with these values. A list: lines."""
    texts = {key: "\n".join(value) if isinstance(value, list) else value for key, value in values.items()}
    return (Path(__file__).with_name("reports") / report).read_text(encoding="utf-8").format(**texts)


def report_command(report: Callable[[Sequence[Rows]], str], out: str, paths: Sequence[Path] = MATRIX) -> None:
    """The command line of a study that turns rows into one text: writes it to results/OUT and prints it."""
    parser = argparse.ArgumentParser(description=f"Write results/{out} from the rows of studies.matrix")
    help_text = "files of rows; each number is of the first that has it"
    parser.add_argument("--rows", nargs="+", type=Path, default=paths, help=help_text)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / out, help="the file to write")
    args = parser.parse_args()
    text = report(read_sources(args.rows))
    write_atomically(args.out, lambda f: f.write(text.encode()))
    print(text)
