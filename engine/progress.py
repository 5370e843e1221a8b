"""The progress bar that every long command shows."""

import sys

from tqdm import tqdm

from engine import distributed


def progress_bar(total: float, done: int = 0, hidden: bool = False, unit: str = "tok") -> tqdm:
    """A progress bar that counts tokens or another unit, on rank 0 only; in a log file it prints a line every 15 s.

    total, done: units; what an earlier part of the run has done. hidden: print nothing.
    """
    return tqdm(
        total=total, initial=done, unit=unit, unit_scale=True, dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 15, disable=hidden or distributed.rank() > 0,
    )  # fmt: skip
