"""What must be right before Hydra starts: imported where an argument or an environment variable needs a look."""

import os
import sys

from conf.registry import ROOT


def check_start(arguments: list[str]) -> None:
    """Exit with one line for a list in place of the name of a yaml, and for numbers that torchrun cannot have set.

    Hydra would merge the files of exp=[a,b] silently. arguments: of the command line.
    """
    for argument in arguments:
        group, _, value = argument.lstrip("+").partition("=")
        if value.startswith("[") and group and (ROOT / "conf" / group).is_dir():
            sys.exit(f"error: {argument}: must be one name, not a list")
    if "WORLD_SIZE" in os.environ:
        world = _number("WORLD_SIZE", 1, None)
        _number("RANK", 0, world)
        _number("LOCAL_RANK", 0, world)


def _number(name: str, low: int, end: int | None) -> int:
    """The value of a variable, which must be in low .. end - 1; low if it is not set."""
    text = os.environ.get(name, str(low))
    if not text.isdecimal() or int(text) < low or (end is not None and int(text) >= end):
        right = f"a whole number of at least {low}" + (f" and less than WORLD_SIZE={end}" if end else "")
        sys.exit(f"error: {name}={text} in the environment: must be {right}, as torchrun sets it")
    return int(text)
