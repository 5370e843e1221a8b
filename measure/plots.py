"""Figures: what all of them share (colours, axes, labels at the ends of lines), and loss against context length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter

from engine.checkpoint import write_atomically
from measure.curves import Curve, Row, controls
from measure.statistics import gain

# Colours that colour-blind readers can tell apart (Okabe and Ito, jfly.uni-koeln.de/color)
OKABE_ITO = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8C564B"]
CONTROL = "#333333"
CONTROL_DASHES = (0, (2, 1.5))
PERPLEXITY_TICKS = (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 70, 100, 200, 500, 1e3, 2e3, 5e3, 1e4)


# ---- parts of every figure ----


def lengths_axis(ax: Any, ns: list[int]) -> None:
    """A logarithmic x axis with ticks at the context lengths ns (tokens), and no box around the figure.

    Where labels would overlap, powers of two have one and the lengths between them have none.
    """
    ax.set_xscale("log", base=2)
    ticks: list[int] = []
    for n in sorted(ns, key=lambda n: (not np.log2(n).is_integer(), n)):
        if all(max(n, tick) > 1.35 * min(n, tick) for tick in ticks):
            ticks.append(n)
    ax.set_xticks(ticks)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.minorticks_off()
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def mark(ax: Any, n: float, text: str) -> None:
    """A vertical line with its name at the top."""
    ax.axvline(n, color="#999999", linewidth=1)
    ax.annotate(text, (n, 1), xycoords=("data", "axes fraction"), xytext=(4, -12), textcoords="offset points",
                color="#666666", fontsize=9)  # fmt: skip


def end_labels(ax: Any, ends: list[tuple[float, str, str]], space: int = 28) -> dict[str, float]:
    """Write the name of each line at its right end; labels that would overlap are moved apart.

    ends: (y in data coordinates, text, colour) of each line. space: distance from the axes in points. Returns the
    height of each label, as a share of the axes.
    """
    to_axes = ax.transScale + ax.transLimits
    gap, low, heights = 0.042, -np.inf, {}
    for y, text, color in sorted(ends):
        heights[text] = low = max(to_axes.transform((1, y))[1], low + gap)
        ax.annotate(text, (1, low), xycoords="axes fraction", xytext=(space, 0), textcoords="offset points",
                    color=color, fontsize=9, va="center", annotation_clip=False)  # fmt: skip
    return heights


def save(fig: Any, path: Path) -> None:
    """Write the figure in the format of the path's suffix, and close it.

    Without a date, so equal figures give equal files.
    """
    kind = path.suffix[1:]
    fixed = {"metadata": {"Date": None}} if kind == "svg" else {}
    write_atomically(path, lambda f: fig.savefig(f, format=kind, bbox_inches="tight", **fixed))
    plt.close(fig)


# ---- loss against context length ----


def draw_curves(curves: Sequence[Curve], path: Path, title: str, only: Sequence[str] | None = None) -> None:
    """Bits per byte and perplexity against context length, each line labelled at its end.

    Bands are 95 % intervals of each curve's difference from its run's better control. curves: on the same targets, with
    the controls. only: the labels to draw; None: all.
    """
    bars = controls(curves)
    curves = [c for c in curves if only is None or c.label in only]
    fig, ax = plt.subplots(figsize=(9, 5.2), dpi=150)
    ends = []
    for curve in curves:
        color, dashes, text = curve_style(curve, curves)
        ns, bits = [row.n for row in curve.rows], np.array([row.bits_per_byte for row in curve.rows])
        low, high = _band(curve, bars.get(curve.run, {}))
        ax.plot(ns, bits, color=color, linestyle=dashes, marker="o", markersize=3, linewidth=1.6)
        ax.fill_between(ns, low, high, color=color, alpha=0.15, linewidth=0)
        ends.append((bits[-1], text, color))
    for n, text in sorted(context_marks(curves).items()):
        mark(ax, n, text)
    lengths_axis(ax, sorted({row.n for c in curves for row in c.rows}))
    ax.set(xlabel="context length n, tokens", ylabel="bits per byte (same targets at every n)")
    _perplexity_axis(ax, curves[0].first)
    end_labels(ax, ends)
    ax.set_title(f"{title}\nbands: 95 % of the difference from the better control", fontsize=10, loc="left")
    save(fig, path)


def curve_style(curve: Curve, curves: Sequence[Curve]) -> tuple[str, Any, str]:
    """(colour, dashes, text) of a curve. If there are several runs, each run has a colour, otherwise each label."""
    runs = sorted({c.run for c in curves})
    labels = list(dict.fromkeys(c.label for c in curves if c.label != "window"))
    if len(runs) > 1:
        from measure.plots_of_runs import style

        return style(curve, curves, runs, labels)
    if curve.label == "window":
        return CONTROL, CONTROL_DASHES, "window control"
    text = "no scaling" if curve.label == "none" else curve.label
    return OKABE_ITO[labels.index(curve.label) % len(OKABE_ITO)], "-", text


def _band(curve: Curve, bar: dict[int, Row]) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) in bits per byte, each [lengths]: the curve, plus and minus the interval of its difference from the
    run's better control (n -> row).

    The interval of the curve itself would be much wider: documents differ more than methods do, and these differences
    are common to all curves.
    """
    bits = np.array([row.bits_per_byte for row in curve.rows])
    gains = np.array([gain(row, bar.get(row.n, row)) for row in curve.rows]) * bits[:, None]
    gains /= np.array([row.loss for row in curve.rows])[:, None]  # from nats per token to bits per byte
    return bits + gains[:, 0] - gains[:, 2], bits + gains[:, 0] - gains[:, 1]


def context_marks(curves: Sequence[Curve]) -> dict[int, str]:
    """n -> the text of a vertical line at this length: the contexts of pre-training and of fine-tuning."""
    extended = {c.first.extended_ctx: f"extended to {c.first.extended_ctx}" for c in curves}
    return extended | {c.first.train_ctx: f"trained at {c.first.train_ctx}" for c in curves}


def _perplexity_axis(ax: Any, row: Row) -> None:
    """A second axis: ln(perplexity) is bits/byte times a constant of the target set, so it is exact."""
    nats = np.log(2) * row.bytes / row.tokens
    right = ax.secondary_yaxis("right", functions=(lambda b: b * nats, lambda p: p / nats))
    low, high = (y * nats for y in ax.get_ylim())
    ticks = [p for p in PERPLEXITY_TICKS if low <= np.log(p) <= high]
    right.set_yticks(np.log(ticks), [f"{p:g}" for p in ticks])
    right.tick_params(labelsize=8, pad=1, direction="in", colors="#666666")
    ax.annotate("perplexity", (1, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
                ha="right", color="#666666", fontsize=9)  # fmt: skip
