"""Tokens/s of training with several encodings and layer schedules, relative to rope: python -m bench.encodings pos=fox

Each argument has the settings of one training of train.py: `pos=fox`, `layers=swan`, 'pos=rope pos.base=500000'. All
models are in one process. Rounds alternate between them and pos=rope, and medians of the step times are compared. The
row is appended to results/encoding_steps.jsonl.
"""

import argparse
import shlex
import sys
from pathlib import Path

from bench.rows import append_json
from conf.compose import train_settings
from conf.errors import check, user_errors_in_one_line
from conf.leftovers import check_writable
from conf.registry import ROOT

BASELINE = "pos=rope"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("training", nargs="+", help="settings of train.py, in quotes if there are several")
    parser.add_argument("--common", default="", help="settings of all trainings, such as exp=quick")
    parser.add_argument("--compiled", action="store_true", help="compile blocks and loss, as long trainings do")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="of each training in a round")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "results/encoding_steps.jsonl", help="rows are appended to it"
    )
    args = parser.parse_args()
    for option in ("rounds", "steps"):
        check(getattr(args, option) >= 1, f"--{option}", getattr(args, option), "at least 1")
    check_writable("--out", args.out)
    common = shlex.split(args.common)
    settings = {name: train_settings(*common, *shlex.split(name)) for name in dict.fromkeys([BASELINE, *args.training])}

    import torch._dynamo

    from bench.step import interleaved, origin, our_step

    # All blocks share the code of one function, which is compiled for each kind of layer of each training
    with torch._dynamo.config.patch(recompile_limit=16 * len(settings)):
        steps = {name: our_step(cfg, args.compiled) for name, cfg in settings.items()}
        seconds = interleaved(steps, args.rounds, args.steps)
    speed = {name: cfg.batch_tokens / seconds[name] for name, cfg in settings.items()}
    relative = {name: round(value / speed[BASELINE], 3) for name, value in speed.items()}
    for name, value in speed.items():
        print(f"{name:<40}{value:>10,.0f} tokens/s{relative[name]:>8.2f}x")
    command = "python -m bench.encodings " + shlex.join(sys.argv[1:])
    row = {"command": command, **origin(settings[BASELINE]), "compiled": args.compiled,
           "tokens_per_s": {name: round(value) for name, value in speed.items()}, "relative": relative}  # fmt: skip
    append_json(args.out, row)


if __name__ == "__main__":
    user_errors_in_one_line(main)()
