"""What all pictures share: colours that the colour-blind tell apart, labels at the ends of lines, whole files."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter

from model.checkpoint import write_atomically

OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B"]
CONTROL = "#333333"


def lengths_axis(ax: Any, ns: list[int]) -> None:
    """Context lengths by doublings, without minor ticks, and no box around the picture."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ns)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.minorticks_off()
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def mark(ax: Any, n: float, text: str) -> None:
    """A vertical line with its name at the top."""
    ax.axvline(n, color="#999999", linewidth=1)
    ax.annotate(text, (n, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points",
                color="#666666", fontsize=9)  # fmt: skip


def end_labels(
    ax: Any, ends: list[tuple[float, str, str]], space: int = 28, styles: dict[str, Any] | None = None
) -> None:
    """(y, text, colour) of each line at its right end, moved apart where they would overlap.

    styles: text -> style of its line; a piece of it is drawn before the text, for lines of one colour.
    """
    to_axes = ax.transScale + ax.transLimits
    gap, low = 0.042, -np.inf
    for y, text, color in sorted(ends):
        at = to_axes.transform((1, y))[1]
        low = max(at, low + gap)
        if styles:
            ax.plot([1.015, 1.06], [low, low], color=color, linestyle=styles[text], linewidth=1.6,
                    transform=ax.transAxes, clip_on=False)  # fmt: skip
        start = 1.06 if styles else 1
        ax.annotate(text, (start, low), xycoords="axes fraction", xytext=(space, 0), textcoords="offset points",
                    color=color, fontsize=9, va="center", annotation_clip=False)  # fmt: skip


def save(fig: Any, path: Path) -> None:
    """By the format that the path's suffix names."""
    kind = path.suffix[1:]
    about = {"svg": {"Date": None}}.get(kind)  # the same rows give the same file
    write_atomically(path, lambda f: fig.savefig(f, format=kind, bbox_inches="tight", metadata=about))
    plt.close(fig)
