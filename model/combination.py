"""Several scaling methods together: scaling=ntk plus=logn."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from model.scaling import ContextChange, NotApplicable


def combine(changes: Sequence[ContextChange]) -> ContextChange:
    """All these changes, as the literature joins NTK or ReRoPE with log-n.

    NotApplicable if two of them change the same field.
    """
    return functools.reduce(_both, changes)


def _both(a: ContextChange, b: ContextChange) -> ContextChange:
    if both := (a.overrides().keys() & b.overrides().keys()) - {"factor"}:
        fields = ", ".join(sorted(both))
        raise NotApplicable(f"plus: two methods change the same thing ({fields}), so they do not compose")
    return replace(a, **b.overrides())
