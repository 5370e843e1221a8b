"""Figures: what all of them share (axes, labels at the ends of lines, files), and loss against context length."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib.pyplot as plt
import numpy as np
from omegaconf import OmegaConf

from engine.checkpoint import write_atomically
from measure.curves import Curve, Row, controls
from measure.statistics import gain

plt.switch_backend("agg")  # draws to files only
plt.style.use(Path(__file__).with_name("figures.mplstyle"))
COLORS: Any = OmegaConf.load(Path(__file__).with_name("colors.yaml"))  # the only table of colours
CONTROL_DASHES = (0, (2, 1.5))
NAMES = {"none": "no scaling", "window": "window control"}  # of labels, in figures
GREY = {"color": "#666666", "fontsize": 9}  # small text


# ---- parts of every figure ----


def color_of(kind: str, name: str) -> str:
    """The colour of one of the `methods` or `encodings`, the same in every figure.

    name: of the encoding or the label of the curve. Settings and added methods do not change it: `yarn factor=fixed`
    has the colour of yarn.
    """
    name, others = name.split()[0], COLORS["others"]
    return COLORS[kind].get(name, others[crc32(name.encode()) % len(others)])


def lengths_axis(ax: Any, ns: list[int]) -> None:
    """A logarithmic x axis with ticks at the context lengths ns (tokens).

    Where labels would overlap, powers of two have one and the lengths between them have none.
    """
    ax.set_xscale("log", base=2)
    ticks: list[int] = []
    for n in sorted(ns, key=lambda n: (not np.log2(n).is_integer(), n)):
        if all(max(n, tick) > 1.35 * min(n, tick) for tick in ticks):
            ticks.append(n)
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.minorticks_off()


def mark(ax: Any, n: float, text: str, line: int = 0) -> None:
    """A vertical line with its name at the top. line: 0, 1 ... for names that would overlap on one line."""
    ax.axvline(n, color="#999999", linewidth=1)
    ax.annotate(text, (n, 1), (4, -12 * (line + 1)), ("data", "axes fraction"), "offset points", **GREY)


def end_labels(ax: Any, ends: Sequence[tuple[float, float, str, dict[str, Any]]], space: int = 28) -> None:
    """Write the name of each line to the right of the axes, and join it to the line's end by a dotted leader.

    ends: (x and y of the line's end in data coordinates, name, style of the line). space: distance of the names from
    the axes in points. Names that would overlap are moved apart, as little as possible (isotonic regression). Call it
    when the limits and the size of the axes no longer change.
    """
    ends = sorted(ends, key=lambda end: end[1])
    ax.autoscale_view()  # which matplotlib otherwise puts off until it draws
    width, height = (pixels * 72 / ax.figure.dpi for pixels in ax.bbox.size)  # points
    shift = 12 / height * np.arange(len(ends))  # 12 points: a line of text
    y = ax.transAxes.inverted().transform(ax.transData.transform([end[:2] for end in ends]))[:, 1] - shift
    for i, (x, last, text, style) in enumerate(ends):
        at = max(min(y[j : k + 1].mean() for k in range(i, len(y))) for j in range(i + 1)) + shift[i]
        leader = {"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3, "color": style["color"]}
        leader |= {"linestyle": (0, (1, 2)), "linewidth": 0.9}  # unlike any curve: it is not the curve's continuation
        ax.annotate(text, (x, last), (1 + space / width, at), "data", "axes fraction", leader, annotation_clip=False,
                    va="center", color=style["color"], fontsize=9)  # fmt: skip


def save(fig: Any, path: Path, *suffixes: str) -> None:
    """Write the figure in the format of the path's suffix, or once for each of the suffixes instead, and close it.

    Without a date, so equal figures give equal files.
    """
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    for suffix in suffixes or (path.suffix,):
        write_atomically(path.with_suffix(suffix), lambda f, suffix=suffix: fig.savefig(
            f, format=suffix[1:], metadata=dates.get(suffix)))  # fmt: skip
    plt.close(fig)


# ---- loss against context length ----


def draw_curves(curves: Sequence[Curve], path: Path, title: str, only: Sequence[str] | None = None) -> None:
    """Bits per byte and perplexity against context length, each line labelled at its end.

    Bands are 95 % intervals of each curve's difference from its run's better control. curves: on the same targets, with
    the controls. only: the labels to draw; None: all.
    """
    bars = controls(curves)
    curves = [c for c in curves if only is None or c.label in only]
    fig, ax = plt.subplots(figsize=(9, 5.2))
    ends = []
    for curve in curves:
        style, text = curve_style(curve, curves)
        ns, bits = [row.n for row in curve.rows], np.array([row.bits_per_byte for row in curve.rows])
        ax.plot(ns, bits, **style)
        ax.fill_between(ns, *_band(curve, bars.get(curve.run, {})), color=style["color"], alpha=0.15, linewidth=0)
        ends.append((ns[-1], bits[-1], text, style))
    for i, (n, text) in enumerate(sorted(context_marks(curves).items())):
        mark(ax, n, text, i)
    lengths_axis(ax, sorted({row.n for c in curves for row in c.rows}))
    ax.set(xlabel="context length n, tokens", ylabel="bits per byte (same targets at every n)")
    _perplexity_axis(ax, curves[0].first)
    end_labels(ax, ends)
    ax.set_title(f"{title}\nbands: 95 % of the difference from the better control")
    save(fig, path)


def curve_style(curve: Curve, curves: Sequence[Curve]) -> tuple[dict[str, Any], str]:
    """(the line's properties in matplotlib, its name) of a curve. curves: all of the figure."""
    if len(curves) > 3 or len({c.run for c in curves}) > 1:
        from measure.plots_of_runs import style_among

        return style_among(curve, curves)
    dashes = CONTROL_DASHES if curve.label == "window" else "-"
    style = {"color": color_of("methods", curve.label), "linestyle": dashes, "marker": "o"}
    return style, NAMES.get(curve.label, curve.label)


def _band(curve: Curve, bar: dict[int, Row]) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) in bits per byte, each [lengths]: the curve, plus and minus the interval of its difference from the
    run's better control (n -> row).

    The interval of the curve itself would be much wider: documents differ more than methods do, and these differences
    are common to all curves.
    """
    bits, losses = np.array([(row.bits_per_byte, row.loss) for row in curve.rows]).T
    gains = np.array([gain(row, bar.get(row.n, row)) for row in curve.rows]) * (bits / losses)[:, None]
    return bits + gains[:, 0] - gains[:, 2], bits + gains[:, 0] - gains[:, 1]


def context_marks(curves: Sequence[Curve]) -> dict[int, str]:
    """n -> the text of a vertical line at this length: the contexts of pre-training and of fine-tuning."""
    extended = {c.first.extended_ctx: f"extended to {c.first.extended_ctx}" for c in curves}
    return extended | {c.first.train_ctx: f"trained at {c.first.train_ctx}" for c in curves}


def _perplexity_axis(ax: Any, row: Row) -> None:
    """A second axis: ln(perplexity) is bits/byte times a constant of the target set, so it is exact."""
    nats = np.log(2) * row.bytes / row.tokens
    right = ax.secondary_yaxis("right", functions=(lambda b: b * nats, lambda p: p / nats))
    shown = np.exp(np.linspace(*ax.get_ylim(), 7) * nats)
    # Round numbers that are shown, with as few digits as give three of them, so that no range is without ticks
    rounded = ([p for x in shown if shown[0] <= (p := float(f"{x:.{d}g}")) <= shown[-1]] for d in range(1, 9))
    ticks = next((ticks for ticks in map(sorted, map(set, rounded)) if len(ticks) > 2), [])
    right.set_yticks(np.log(ticks), [f"{p:g}" for p in ticks])
    right.tick_params(labelsize=8, pad=1, direction="in", colors="#666666")
    ax.annotate("perplexity", (1, 1), (0, 5), "axes fraction", "offset points", ha="right", **GREY)
