"""The rows of the study as one HTML page, which opens without a network: python -m studies.page

The same page as `python compare.py --html` writes for your own runs, with all seeds of a run as one curve.
"""

import argparse
import dataclasses
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from conf.errors import user_errors_in_one_line
from conf.registry import ROOT, choices
from measure.comparison import select_shared
from measure.curves import Curve, Row
from studies.rows import Rows, read_rows, run_of

# What not all rows of the study have: the page does not show it, or leaves it out
DEFAULTS: dict[str, Any] = {
    **{"bytes": 0, "bits_per_byte": math.nan, "low": math.nan, "high": math.nan, "factor": 1.0, "task": "matched"},
    **{"texts": "", "targets": "", "weights": "", "dtype": "", "device": "", "scaling": [], "step": 0, "ctx": 0},
    **{"attention_factor": 1.0, "seconds": 0.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="the rows that studies.matrix wrote")
    parser.add_argument("--out", default="runs/study.html", help="the file to write")
    args = parser.parse_args()
    from measure.page import write_page

    write_page(curves_of(read_rows(Path(args.rows))), Path(args.out), f"The study, {Path(args.rows).name}")
    print(f"page: {args.out}")


def curves_of(rows: Rows) -> list[Curve]:
    """The rows as curves that can be compared: those on the texts of most rows."""
    by_run = defaultdict(list)
    for row in map(row_of, rows):
        by_run[row.run, row.label].append(row)
    texts = Counter(row.texts for found in by_run.values() for row in found).most_common(1)[0][0]
    return select_shared([Curve(sorted(found, key=lambda row: row.n)) for found in by_run.values()], texts)


def row_of(row: dict[str, Any]) -> Row:
    """A row of the study as a row of a curve. Rows of the earlier targets have one window, and no keys of texts."""
    windows = row.get("windows", [0])
    known = {field.name: row[field.name] for field in dataclasses.fields(Row) if field.name in row}
    encoding = run_of(row) if run_of(row) in choices("pos") else row.get("pos", "rope")
    derived: dict[str, Any] = {
        "pos": encoding,  # `pos` of the study is rope for rope_interleaved, too
        "run": row["name"],
        "window": row["train_ctx"] if row["label"] == "window" else None,
        "extended_ctx": row.get("extended_ctx", row["train_ctx"]),
        "ppl": math.exp(min(row["loss"], 700)),
        "documents": len(row["nll"]) // len(windows),
    }
    return Row(**{**DEFAULTS, **known, **derived})


if __name__ == "__main__":
    user_errors_in_one_line(main)()
