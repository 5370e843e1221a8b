"""What is wrong with the knobs of an encoding, a scaling method, a corpus or a task. Imported when something is."""

import inspect
from typing import Any

from conf.errors import UserError
from conf.registry import has_type


def knob_error(
    group: str, knobs: dict[str, Any], accepted: list[str], required: set[str], hints: dict[str, Any]
) -> UserError:
    """The error for the first knob that is unknown, missing or of a wrong type, with its name and value."""
    for key, value in ((key, value) for key, value in knobs.items() if key != "kind"):
        if key not in accepted:
            names = ", ".join(accepted) or "none"
            return UserError(
                f"{group}.{key}={value}: no such setting of {group}={knobs.get('kind')}, which has {names}"
            )
        if not has_type(value, hints.get(key, Any)):
            expected = hints[key].__name__ if inspect.isclass(hints[key]) else str(hints[key])
            return UserError(f"{group}.{key}={value}: must be of type {expected}, and finite")
    missing = sorted(required - knobs.keys())
    return UserError(f"{group}.{missing[0]}: must be given a value")
