"""The rows of the matrix, results/matrix.jsonl: functions that read them, and computations that several studies share.

A row is one run, one method and one length n. Its keys are those of `gather` and `shifted` in studies/matrix.py, which
writes the file. Claims, tables and figures only read it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.registry import ROOT
from engine.checkpoint import write_atomically

Rows = list[dict[str, Any]]
Interval = tuple[float, float, float]  # mean, and the low and high end of its 95 % interval


# ---- reading ----


def read_rows(path: Path) -> Rows:
    """The rows in a file that studies.matrix wrote. UserError if it is missing or damaged."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        raise UserError(f"{path}: not found: first python -m studies.matrix") from None
    except (OSError, ValueError):
        rows = []
    if not rows:
        raise UserError(f"{path}: not rows that studies.matrix wrote")
    return rows


def run_of(row: dict[str, Any]) -> str:
    """The name of the row's run without its seed: `rope` for rope-s0, rope-s1 and rope-s2."""
    return row["name"].rpartition("-s")[0]


def seeds_of(rows: Rows, part: str) -> Rows:
    """The rows of all parts whose seed occurs in this part: its runs are then compared with rope at the same seeds."""
    seeds = {row["seed"] for row in rows if row["part"] == part}
    return [row for row in rows if row["seed"] in seeds]


def document_losses(rows: Rows, run: str, label: str, n: int) -> dict[int, np.ndarray]:
    """seed -> the loss of each document at length n, nats per token [documents]."""
    matching = [row for row in rows if (run_of(row), row["label"], row["n"]) == (run, label, n)]
    # Every document has the same number of scored tokens: tokens / documents
    return {row["seed"]: np.array(row["nll"]) * len(row["nll"]) / row["tokens"] for row in matching}


# ---- intervals ----


def interval(delta: np.ndarray, draws: int = 4000) -> Interval:
    """(mean, low, high): 95 % bootstrap interval of the mean of differences [seeds, documents].

    The documents are the same for all seeds, so seeds and documents are resampled independently (a crossed design).
    With three seeds the interval is too narrow.
    """
    rng = np.random.default_rng(0)
    seeds, documents = delta.shape
    # How often each draw takes each seed [draws, seeds] and each document [draws, documents]
    times_seed, times_document = (rng.multinomial(k, np.full(k, 1 / k), size=draws) for k in (seeds, documents))
    means = ((times_seed @ delta) * times_document).sum(axis=1) / delta.size
    low, high = np.percentile(means, [2.5, 97.5])
    return float(delta.mean()), float(low), float(high)


# ---- commands ----


def report_command(report: Callable[[Rows], str], description: str, file_name: str) -> None:
    """The command line of a study that turns the rows into one text: write it to results/FILE_NAME and print it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="the rows that studies.matrix wrote")
    parser.add_argument("--out", default=str(ROOT / "results" / file_name), help="the file to write")
    args = parser.parse_args()
    text = report(read_rows(Path(args.rows)))
    write_atomically(Path(args.out), lambda f: f.write(text.encode()))
    print(text)
