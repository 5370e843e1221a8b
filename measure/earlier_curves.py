"""Curves in files of earlier versions: they do not stand in the way, and those of format 2 can be compared."""

from typing import Any


def upgrade(values: dict[str, Any]) -> None:
    """Give a row's JSON object the keys of this version, in place. KeyError if it is something else.

    The task's label was called `protocol`, and texts and targets were identified together.
    """
    if "protocol" in values:
        values["task"] = values.pop("protocol")
        values.pop("score", None)
        values.setdefault("extended_ctx", values["train_ctx"])
    values["texts"] = values["targets"]
