"""The runs in a folder, and which of them eval.py and sample.py open without run=: the newest that fits."""

import json
from collections.abc import Sequence
from pathlib import Path

from conf.errors import UserError
from conf.schema import TrainConfig, from_dict
from engine.failures import restore_settings
from engine.run import check_fits
from model import gpt
from model.scaling import NotApplicable


def find_runs(runs: str) -> dict[str, TrainConfig]:
    """Name -> settings of every run in the folder `runs` that has a checkpoint, newest first.

    Only config.json is read, not the weights; where it is lost, it is restored from ckpt.pt. Folders that are not runs
    are ignored.
    """
    newest_first = sorted(Path(runs).glob("*/ckpt.pt"), key=lambda p: p.stat().st_mtime, reverse=True)
    found = {}
    for folder in (path.parent for path in newest_first):
        try:
            found[folder.name] = from_dict(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError) as e:  # lost or damaged, or a folder that is not a run of ours
            if cfg := restore_settings(folder, e):
                found[folder.name] = cfg
    return found


def newest_run(runs: str, ctx: int, scalings: Sequence[dict], exp: str | None) -> tuple[str, str]:
    """(name of the run, the reason for the choice, which is printed). See Run.open for the arguments.

    Runs that do not fit are skipped and listed in the reason. UserError if no run fits.
    """
    skipped = []
    fit = [(name, cfg) for name, cfg in find_runs(runs).items() if exp in (None, cfg.exp)]
    for name, cfg in sorted(fit, key=lambda item: item[1].exp == "smoke"):  # which learn nothing: the last choice
        try:
            check_fits(cfg, gpt.build_encoding(cfg), ctx, scalings)
            return name, "the newest that fits" + (f"; skipped {'; '.join(skipped)}" if skipped else "")
        except NotApplicable as e:
            skipped.append(f"{name}: {e}")
    if skipped:
        raise UserError(f"no run in {runs}/ fits: {'; '.join(skipped)}")
    which, setting = (f" with exp={exp}", f" exp={exp}") if exp else ("", "")
    raise UserError(f"no trained run{which} in {runs}/: first: python train.py pos=rope{setting}")


def known_runs(runs: str) -> str:
    """For messages: the names of the trained runs, or the command that trains the first."""
    names = ", ".join(find_runs(runs))
    return f"there are {names}" if names else "first: python train.py pos=rope"
