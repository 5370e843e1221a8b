"""The numbers that torchrun sets in the environment. Imported under torchrun, and where something has failed."""

import os

from conf.errors import UserError


def check_numbers() -> None:
    """UserError for a WORLD_SIZE, RANK or LOCAL_RANK that torchrun cannot have set."""
    if "WORLD_SIZE" in os.environ:
        world = _number("WORLD_SIZE", 1, None)
        _number("RANK", 0, world)
        _number("LOCAL_RANK", 0, world)


def _number(name: str, low: int, end: int | None) -> int:
    """The value of a variable, which must be in low .. end - 1; low if it is not set."""
    text = os.environ.get(name, str(low))
    if not text.isdecimal() or int(text) < low or (end is not None and int(text) >= end):
        right = f"a whole number of at least {low}" + (f" and less than WORLD_SIZE={end}" if end else "")
        raise UserError(f"{name}={text} in the environment: must be {right}, as torchrun sets it")
    return int(text)
