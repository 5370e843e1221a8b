"""The rows of the matrix, results/matrix.jsonl: functions that read them, and computations that several studies share.

A row is one run, one method and one length n. Its keys are those of `gather` and `shifted` in studies/jobs.py, which
writes the file. Claims, tables and figures only read it.

A row scores several windows of each document: `windows` has their numbers, and `nll` the sum of nats of each window,
the windows of a document together. At long n fewer windows have enough text before them, so two rows are compared on
the windows that both have. The old rows, results/matrix-last64.jsonl, have no `windows`: they score one, the last 64
tokens of each document. Old and new rows have different targets and are never compared with each other.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from conf.leftovers import check_writable
from conf.registry import ROOT
from engine.checkpoint import write_atomically

Rows = list[dict[str, Any]]
Losses = dict[int, dict[int, np.ndarray]]  # seed -> window -> nats per token of each document [documents]

BAR = "bar"  # as the label of a method: the better of the two controls


# ---- reading ----


def read_rows(path: Path) -> Rows:
    """The rows in a file that studies.matrix wrote. UserError if it is missing or damaged."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except FileNotFoundError:
        plan = " --plan layers" if path.name.startswith("layers") else ""
        raise UserError(f"{path}: not found: first python -m studies.matrix{plan}") from None
    except (OSError, ValueError):
        rows = []
    if not rows or not all(isinstance(row, dict) and {"name", "n", "loss"} <= row.keys() for row in rows):
        raise UserError(f"{path}: not rows that studies.matrix wrote")
    if len({row["texts"] for row in rows if "texts" in row}) > 1:
        raise UserError(f"{path}: its rows are on different texts, such as other documents, and cannot be compared")
    return rows


def run_of(row: dict[str, Any]) -> str:
    """The name of the row's run without its seed: `rope` for rope-s0, rope-s1 and rope-s2."""
    return row["name"].rpartition("-s")[0]


def seeds_of(rows: Rows, part: str) -> Rows:
    """The rows of all parts whose seed occurs in this part: its runs are then compared with rope at the same seeds."""
    seeds = {row["seed"] for row in rows if row["part"] == part}
    return [row for row in rows if row["seed"] in seeds]


# ---- losses ----


def trained_ctx(rows: Rows, run: str) -> int:
    """The longest context that this run was trained on, tokens; 0 if there are no rows of it."""
    return max((row.get("extended_ctx", row["train_ctx"]) for row in rows if run_of(row) == run), default=0)


def losses(rows: Rows, run: str, label: str, n: int) -> Losses:
    """The losses of one condition at length n; empty if there are no rows. label: of the method, or BAR."""
    if label == BAR:
        return bar(rows, run, n)[0]
    matching = [row for row in rows if (row["n"], row["label"]) == (n, label) and run_of(row) == run]
    return {row["seed"]: by_window(row) for row in matching}


def by_window(row: dict[str, Any]) -> dict[int, np.ndarray]:
    """window -> nats per token of each document [documents]. Every window has the same number of scored tokens."""
    nats = np.array(row["nll"]) * len(row["nll"]) / row["tokens"]
    windows = row.get("windows", [0])
    return dict(zip(windows, nats.reshape(-1, len(windows)).T, strict=True))


def minus(a: Losses, b: Losses) -> Losses:
    """a - b, for the seeds and windows that both have. Seeds without a common window are left out."""
    pairs = {seed: (a[seed], b[seed]) for seed in sorted(a.keys() & b.keys()) if a[seed].keys() & b[seed].keys()}
    return {seed: {w: x[w] - y[w] for w in sorted(x.keys() & y.keys())} for seed, (x, y) in pairs.items()}


def per_document(values: Losses) -> np.ndarray:
    """The means over the windows of each document, [seeds, documents]. At least one seed."""
    return np.stack([np.mean(list(windows.values()), axis=0) for windows in values.values()])


def mean_losses(rows: Rows, run: str, label: str, n: int) -> dict[int, float]:
    """seed -> the mean loss over all windows, nats per token.

    Where a row has fewer windows than no scaling at the trained context L: the loss of no scaling at L on all windows,
    plus the difference between the two on the windows that both have (`align` of measure/curves.py), so that lengths
    can be compared.
    """
    L = trained_ctx(rows, run)
    at_L, means = losses(rows, run, "none", L), {}
    for seed, windows in losses(rows, run, label, n).items():
        means[seed] = float(np.mean(list(windows.values())))
        if windows.keys() < at_L.get(seed, {}).keys():
            common = np.mean([at_L[seed][window] for window in windows])
            means[seed] += float(np.mean(list(at_L[seed].values())) - common)
    return means


def bar(rows: Rows, run: str, n: int) -> tuple[Losses, str]:
    """(losses of the better of the two controls at n > L, its name); ({}, "") if there are no rows.

    Both give the run's model as many tokens as it was trained on, L: "window" limits the attention of each query to the
    last L tokens, "truncation" the text, which is no scaling at n = L. The better one has the lower mean loss over all
    seeds, on the windows that both have. A method uses context past L only if its loss is below this bar.
    """
    window = losses(rows, run, "window", n)
    truncation = losses(rows, run, "none", trained_ctx(rows, run))
    difference = minus(window, truncation)
    if not difference:
        return (window, "window") if window else (truncation, "truncation" if truncation else "")
    return (window, "window") if per_document(difference).mean() <= 0 else (truncation, "truncation")


# ---- commands ----


def read_both(path: str, old_path: str) -> tuple[Rows, Rows]:
    """(new rows, old rows) of two files. One of them may be missing, then its rows are empty."""
    if not Path(old_path).exists():
        return read_rows(Path(path)), []
    return read_rows(Path(path)) if Path(path).exists() else [], read_rows(Path(old_path))


def report_command(report: Callable[[Rows, Rows], str], description: str, file_name: str) -> None:
    """The command line of a study that turns new and old rows into one text.

    Writes it to results/FILE_NAME and prints it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="the rows that studies.matrix wrote")
    parser.add_argument(
        "--old-rows",
        default=str(ROOT / "results/matrix-last64.jsonl"),
        help="rows of the last 64 tokens of each document, used where --rows has none",
    )
    parser.add_argument("--out", default=str(ROOT / "results" / file_name), help="the file to write")
    args = parser.parse_args()
    check_writable("--out", Path(args.out))
    text = report(*read_both(args.rows, args.old_rows))
    write_atomically(Path(args.out), lambda f: f.write(text.encode()))
    print(text)
