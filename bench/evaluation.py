"""The speed of eval.py in two checkouts, interleaved: python -m bench.evaluation BEFORE run=rope ctx=8192

BEFORE is another checkout of this repository. Both evaluate the same command with fresh=true, in alternating child
processes. Printed are the medians of tokens/s: tokens of context given at all lengths and methods, divided by the
seconds of measurement in the rows, without start and figures. Written to results/evaluation.jsonl.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.rows import append_json
from conf.errors import UserError, user_errors_in_one_line
from conf.registry import ROOT
from engine.code_version import commit


def measure(checkout: Path, arguments: list[str], runs: Path) -> dict[str, float]:
    """Evaluate with the code of a checkout; returns tokens/s over all lengths, and at the longest."""
    for folder in runs.glob("*/eval"):
        shutil.rmtree(folder)
    argv = [sys.executable, str(checkout / "eval.py"), *arguments, f"runs={runs}", "fresh=true"]
    env = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": str(checkout)}
    child = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    _, errors = child.communicate()
    if child.returncode:
        raise UserError(f"`{' '.join(argv)}`: {errors.strip().splitlines()[-1] if errors.strip() else 'failed'}")
    files = runs.glob("*/eval/*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    rows = [row for row in rows if row.get("distance") is None]
    longest = max(row["n"] for row in rows)

    def speed(some: list[dict]) -> float:
        tokens = sum(row["documents"] * len(row.get("windows", [0])) * row["n"] for row in some)
        return tokens / sum(row["seconds"] for row in some)

    return {"tokens_per_s": speed(rows), "longest": speed([row for row in rows if row["n"] == longest])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path, help="another checkout of this repository")
    parser.add_argument("arguments", nargs="+", help="of eval.py")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder with the run, which is copied")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results/evaluation.jsonl", help="rows are appended to it")
    args = parser.parse_args()
    name = next((a.removeprefix("run=") for a in args.arguments if a.startswith("run=")), "")
    results: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    with tempfile.TemporaryDirectory() as temporary:
        if name and ":" not in name:
            shutil.copytree(args.runs / name, Path(temporary, name), ignore=shutil.ignore_patterns("eval"))
        for _ in range(args.rounds):
            for label, checkout in (("before", args.before.resolve()), ("after", ROOT)):
                results[label].append(measure(checkout, args.arguments, Path(temporary)))
                print(label, {k: round(v) for k, v in results[label][-1].items()}, flush=True)
    row: dict = {"command": f"eval.py {' '.join(args.arguments)}", "rounds": args.rounds}
    for key in ("tokens_per_s", "longest"):
        before, after = (median(r[key] for r in results[label]) for label in results)
        row |= {f"{key}_before": round(before), f"{key}_after": round(after), f"{key}_ratio": round(after / before, 2)}
    commits = {label: commit(path) for label, path in (("before", args.before), ("after", ROOT))}
    append_json(args.out, {**row, **commits})
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    user_errors_in_one_line(main)()
