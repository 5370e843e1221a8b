"""The lines of figures with several runs, or with more curves than one evaluation has."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from measure.curves import Curve
from measure.plots import CONTROL_DASHES, NAMES, color_of

DASHES = ["-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (5, 1, 1, 1, 1, 1))]
OVER_ANOTHER = (0, (4, 4))  # both curves are visible where one lies on the other
MARKERS = "os^DvPX*"


def style_among(curve: Curve, curves: Sequence[Curve]) -> tuple[dict[str, Any], str]:
    """(the line's properties in matplotlib, its name) of one of these curves.

    With several encodings, the colour is that of the encoding and the dashes are those of the method. Otherwise the
    colour is that of the method, and the dashes tell apart its variants (`yarn`, `yarn factor=fixed`). Runs of one
    encoding have different markers.
    """
    runs = list(dict.fromkeys(c.run for c in curves if encoding(c) == encoding(curve)))
    labels = list(dict.fromkeys(c.label for c in curves if c.label != "window"))
    if len({encoding(c) for c in curves}) > 1:
        color = color_of("encodings", encoding(curve))
    else:
        color = color_of("methods", curve.label)
        labels = sorted(label for label in labels if label.split()[0] == curve.label.split()[0])
    if curve.label == "window":
        dashes: Any = CONTROL_DASHES
    elif any(covers(curve, earlier, curves) for earlier in curves[: curves.index(curve)]):
        dashes = OVER_ANOTHER
    else:
        dashes = DASHES[labels.index(curve.label) % len(DASHES)]
    name = NAMES.get(curve.label, curve.label)
    if len({c.run for c in curves}) > 1:
        name = f"{curve.run}, {name}" if len({c.label for c in curves}) > 1 else curve.run
    return {"color": color, "linestyle": dashes, "marker": MARKERS[runs.index(curve.run) % len(MARKERS)]}, name


def encoding(curve: Curve) -> str:
    """The name of its positional encoding, without settings."""
    return curve.first.pos.split()[0]


def covers(curve: Curve, earlier: Curve, curves: Sequence[Curve]) -> bool:
    """Whether a curve hides one of its run that was drawn before it: equal at every length to a 200th of the figure."""
    rows, others = curve.by_length(), earlier.by_length()
    if earlier.run != curve.run or not rows.keys() <= others.keys():
        return False
    height = np.ptp([row.bits_per_byte for c in curves for row in c.rows])
    differences = [abs(row.bits_per_byte - others[n].bits_per_byte) for n, row in rows.items()]
    return bool(max(differences) <= height / 200)
