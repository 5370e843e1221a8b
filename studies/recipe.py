"""What one change of the training recipe does to the held-out loss: python -m studies.recipe

Takes the finished trainings of an experiment in --runs, which differ in the change, the encoding and the seed, as
`python train.py -m exp=quick optim=muon pos=rope,none,alibi seed=0,1,2 optim.lr=8e-3` makes them; adds their rows to
--out, and prints a table of all rows there. A difference is paired by seed, with its 95 % t interval.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from conf.cli import train_settings
from conf.errors import UserError, user_errors
from conf.registry import ROOT, yaml_name
from conf.schema import RUN_CONTROL, TrainConfig, flatten
from engine import checkpoint
from engine.files import commit
from engine.run import find_runs
from measure.curves import write_jsonl
from measure.intervals import half_width, interval_text

NO_CHANGE = (*RUN_CONTROL, "seed", "exp", "val_every", "val_windows")
BASE = "-"  # the name of no change


def change_of(cfg: TrainConfig, base: TrainConfig) -> str:
    """The settings of a run that are not those of the recipe with its encoding: `optim.lr=0.008 model.mlp=relu2`."""
    ours, theirs = flatten(asdict(cfg)), flatten(asdict(base))
    different = [f"{key}={value}" for key, value in ours.items() if key not in NO_CHANGE and value != theirs.get(key)]
    return " ".join(different) or BASE


def row_of(folder: Path, base: list[str]) -> dict[str, Any] | None:
    """What a training has reached; None if it has not ended. base: the settings of the recipe."""
    state = checkpoint.load(folder)
    cfg: TrainConfig = state["cfg"]
    if state["step"] < cfg.steps:
        return None
    pos = yaml_name("pos", cfg.pos)
    row: dict[str, Any] = {
        "recipe": " ".join(base),
        "change": change_of(cfg, train_settings(*base, f"pos={pos}")),
        "pos": pos,
    }
    row |= {"seed": cfg.seed, "steps": cfg.steps, "minutes": round(state["seconds"] / 60, 2)}
    return row | {key: round(state["validation"][key], 5) for key in ("loss", "bits_per_byte")} | {"commit": commit()}


def print_table(rows: list[dict[str, Any]]) -> None:
    """As Markdown: a line for each change, and for each encoding the mean loss and its difference from no change."""
    losses: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        losses[row["change"], row["pos"]][row["seed"]] = row["loss"]
    encodings = list(dict.fromkeys(row["pos"] for row in rows))
    print(f"| change | {' | '.join(encodings)} |\n{'|---' * (1 + len(encodings))}|")
    for change in sorted(dict.fromkeys(row["change"] for row in rows), key=lambda change: change != BASE):
        cells = [describe(losses[change, pos], losses[BASE, pos]) for pos in encodings]
        print(f"| {change} | {' | '.join(cells)} |")


def describe(losses: dict[int, float], base: dict[int, float]) -> str:
    """`2.650, -0.050 [-0.091, -0.009]`; both: seed -> nats per token."""
    differences = [loss - base[seed] for seed, loss in losses.items() if seed in base]
    if not losses:
        return ""
    mean = f"{np.mean([*losses.values()]):.3f}"
    if losses == base or not differences:
        return mean
    if len(differences) == 1:
        return f"{mean}, {differences[0]:+.3f}"
    change, n = float(np.mean(differences)), len(differences)
    half = float(half_width(float(np.var(differences, ddof=1)) / n, n - 1))
    return f"{mean}, {interval_text(change, change - half, change + half)}"


@user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", nargs="*", default=["exp=quick", "optim=muon"], help="the settings that are changed")
    parser.add_argument("--runs", default="runs", help="the folder of runs")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "recipe.jsonl", help="the rows")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()] if args.out.exists() else []
    known = {(row["recipe"], row["change"], row["pos"], row["seed"]): row for row in rows}
    exp = train_settings(*args.recipe).exp
    for name, cfg in sorted(find_runs(args.runs).items()):
        if cfg.exp == exp and not cfg.init and (row := row_of(Path(args.runs, name), args.recipe)):
            known.setdefault((row["recipe"], row["change"], row["pos"], row["seed"]), row)
    if not known:
        raise UserError(f"--runs={args.runs}: no finished training of {' '.join(args.recipe)} there")
    write_jsonl(args.out, known.values())
    print_table([row for row in known.values() if row["recipe"] == " ".join(args.recipe)])


if __name__ == "__main__":
    main()
