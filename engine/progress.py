"""The progress bar that every long command shows."""

import sys

from tqdm import tqdm

from engine import distributed


class Lines:
    """A file for tqdm where stderr is not a terminal: every state of the bar is a new line in place of the last one."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)


def progress_bar(total: float, show: str, done: int = 0, hidden: bool = False) -> tqdm:
    """A progress bar on a terminal, and a line every 15 s in a log file; on rank 0 only.

    total, done: units; what an earlier part of the run has done. show: what stands after the percentage, in the fields
    of tqdm's bar_format. hidden: print nothing.
    """
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total, initial=done, dynamic_ncols=terminal, disable=hidden or distributed.rank() > 0,
        file=None if terminal else Lines(), mininterval=0.5 if terminal else 15, maxinterval=30,
        bar_format="{percentage:3.0f}%" + ("|{bar}| " if terminal else " ") + show + "{postfix}",
    )  # fmt: skip
