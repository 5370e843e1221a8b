"""Figures that show several runs: each run has a colour, and each method its dashes."""

from collections.abc import Sequence
from typing import Any

from measure.curves import Curve
from measure.plots import CONTROL_DASHES, OKABE_ITO

DASHES = ["-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (5, 1, 1, 1, 1, 1))]


def style(curve: Curve, curves: Sequence[Curve], runs: list[str], labels: list[str]) -> tuple[str, Any, str]:
    """(colour, dashes, text) of a curve. runs, labels: of all curves, labels without the window control's."""
    is_window, several_labels = curve.label == "window", len({c.label for c in curves}) > 1
    dashes = CONTROL_DASHES if is_window else DASHES[labels.index(curve.label) % len(DASHES)]
    text = "window control" if is_window else curve.label
    text = f"{curve.run}, {text}" if several_labels else curve.run
    return OKABE_ITO[runs.index(curve.run) % len(OKABE_ITO)], dashes, text
