"""Which trained runs there are below runs/."""

import contextlib
import json
from pathlib import Path

from conf.schema import TrainConfig, from_dict


def find_runs(runs: str) -> list[tuple[str, TrainConfig]]:
    """(name, settings) of every run in the folder `runs` that has a checkpoint, newest first.

    Only config.json is read, not the weights. Folders that are not runs are ignored.
    """
    newest_first = sorted(Path(runs).glob("*/ckpt.pt"), key=lambda p: p.stat().st_mtime, reverse=True)
    found = []
    for path in newest_first:
        with contextlib.suppress(OSError, ValueError):  # a folder that is not a run of ours
            found.append((path.parent.name, from_dict(json.loads((path.parent / "config.json").read_text()))))
    return found


def known_runs(runs: str) -> str:
    """For messages: the names of the trained runs, or the command that trains the first."""
    names = [name for name, _ in find_runs(runs)]
    return f"there are {', '.join(names)}" if names else "first: python train.py pos=rope"
