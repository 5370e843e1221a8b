"""Curves in files of earlier versions, of which those of format 2 can be compared, and files that are no curves."""

from pathlib import Path
from typing import Any

from conf.errors import UserError
from conf.failures import reason


def upgrade(values: dict[str, Any]) -> None:
    """Give a row's JSON object the keys of this version, in place. KeyError if it is something else.

    The task's label was called `protocol`, and texts and targets were identified together.
    """
    if "protocol" in values:
        values["task"] = values.pop("protocol")
        values.pop("score", None)
        values.setdefault("extended_ctx", values["train_ctx"])
    values["texts"] = values["targets"]


def not_a_curve(path: Path, e: Exception, good: int) -> UserError:
    """The error for a file of curves that cannot be read. good: the number of rows before the one that failed."""
    if isinstance(e, OSError):
        return UserError(f"{path}: cannot be read ({reason(e)})")
    return UserError(f"{path}: not a curve that eval.py wrote (line {good + 1}): move it away and evaluate again")
