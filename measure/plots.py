"""What all figures share: colours and dashes, axes, labels at the ends of lines, files."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from omegaconf import OmegaConf

from engine.files import write_atomically
from measure.curves import Curve

COLORS: Any = OmegaConf.load(Path(__file__).with_name("colors.yaml"))  # the only table of colours
CONTROL_DASHES = (0, (2, 1.5))
NAMES = {"none": "no scaling", "window": "window control"}  # of labels, in figures
GREY = {"color": "#666666", "fontsize": 9}  # small text
DASHES = ["-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (5, 1, 1, 1, 1, 1))]
MARKERS = "os^DvPX*"
MOST = 8  # curves in a picture: more cannot be told apart


@functools.cache
def pyplot() -> Any:
    """matplotlib.pyplot with the style of our figures. Importing it takes half a second."""
    import matplotlib.pyplot as plt

    plt.switch_backend("agg")  # draws to files only
    plt.style.use(Path(__file__).with_name("figures.mplstyle"))
    return plt


# ---- parts of every figure ----


def color_of(kind: str, name: str) -> str:
    """The colour of one of the `methods` or `encodings`, the same in every figure.

    name: of the encoding or the label of the curve. Settings and added methods do not change it: `yarn factor=fixed`
    has the colour of yarn.
    """
    name, others = name.split()[0], COLORS["others"]
    return COLORS[kind].get(name, others[crc32(name.encode()) % len(others)])


def lengths_axis(ax: Any, ns: list[int]) -> None:
    """A logarithmic x axis with ticks at the context lengths ns (tokens), of which powers of two have labels."""
    ax.set_xscale("log", base=2)
    ax.set_xticks(ns, [str(n) if np.log2(n).is_integer() else "" for n in ns])
    ax.minorticks_off()


def mark(ax: Any, n: float, text: str, line: int = 0) -> None:
    """A vertical line with its name at the top. line: 0, 1 ... for names that would overlap on one line."""
    ax.axvline(n, color="#999999", linewidth=1)
    ax.annotate(text, (n, 1), (4, -12 * (line + 1)), ("data", "axes fraction"), "offset points", **GREY)


def end_labels(ax: Any, space: int = 28) -> None:
    """Write the name (label) of each line to the right of the axes, and join it to the line's end by a dotted leader.

    space: distance of the names from the axes in points. Names that would overlap are moved apart, as little as
    possible (isotonic regression). Call it when the limits and the size of the axes no longer change.
    """
    named = [line for line in ax.get_lines() if not line.get_label().startswith("_child")]  # matplotlib's for no label
    named.sort(key=lambda line: line.get_ydata()[-1])
    ends = [line.get_xydata()[-1] for line in named]
    ax.autoscale_view()  # which matplotlib otherwise puts off until it draws
    width, height = (pixels * 72 / ax.figure.dpi for pixels in ax.bbox.size)  # points
    shift = 12 / height * np.arange(len(ends))  # 12 points: a line of text
    y = ax.transAxes.inverted().transform(ax.transData.transform(ends))[:, 1] - shift
    for i, line in enumerate(named):
        at = max(min(y[j : k + 1].mean() for k in range(i, len(y))) for j in range(i + 1)) + shift[i]
        leader = {"arrowstyle": "-", "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 3, "color": line.get_color()}
        leader |= {"linestyle": (0, (1, 2)), "linewidth": 0.9}  # unlike any curve: it is not the curve's continuation
        look = {"va": "center", "color": line.get_color(), "fontsize": 9, "annotation_clip": False, "parse_math": False}
        ax.annotate(line.get_label(), ends[i], (1 + space / width, at), "data", "axes fraction", leader, **look)


def save(fig: Any, path: Path, *suffixes: str) -> None:
    """Write the figure in the format of the path's suffix, or once for each of the suffixes instead, and close it.

    Without a date, so equal figures give equal files.
    """
    dates = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    for suffix in suffixes or (path.suffix,):
        draw = functools.partial(fig.savefig, format=suffix[1:], metadata=dates.get(suffix))
        write_atomically(path.with_suffix(suffix), draw)
    pyplot().close(fig)


# ---- curves against context length ----

Values = Callable[[Curve], np.ndarray]  # [3, lengths]: the line of a curve, the lower and the upper end of its band


def draw_curves(
    curves: Sequence[Curve], values: Values, title: str, ylabel: str, levels: Sequence[float] = (), nats: float = 0.0
) -> Any:
    """A figure with the curves as lines with bands, and marks at the trained contexts. levels: of dotted lines.

    Of more than MOST curves it has the first ones of `by_importance`.
    nats: per token for each bit per byte, if that is the unit; then a second axis shows perplexities.
    """
    fig, ax = pyplot().subplots(figsize=(9, 5.2))
    chosen = by_importance(curves)[:MOST]
    title += f"; {MOST} of {len(curves)} curves: the best and the controls of each run" if len(curves) > MOST else ""
    curves = [curve for curve in curves if curve in chosen]
    for curve in curves:
        style, ns, (y, low, high) = curve_style(curve, curves), [row.n for row in curve.overall], values(curve)
        ax.plot(ns, y, **style)
        ax.fill_between(ns, low, high, color=style["color"], alpha=0.15, linewidth=0)
    contexts = {c.first.longest_trained_ctx: f"extended to {c.first.longest_trained_ctx}" for c in curves}
    contexts |= {c.first.train_ctx: f"trained at {c.first.train_ctx}" for c in curves}
    for i, (n, text) in enumerate(sorted(contexts.items())):
        mark(ax, n, text, i)
    for level in levels:
        ax.axhline(level, color="#999999", linewidth=1, linestyle=(0, (1, 2)))
    if nats:
        low, high = np.exp(np.minimum(np.multiply(ax.get_ylim(), nats), 700))
        round_numbers = pyplot().LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7), numticks=99).tick_values(low, high)
        ticks = [ppl for ppl in round_numbers if low <= ppl <= high]
        right = ax.secondary_yaxis("right")  # in bits per byte, too
        right.set_yticks(np.log(ticks) / nats, [f"{ppl:g}" for ppl in ticks])
        right.tick_params(labelsize=8, pad=1, direction="in", colors="#666666")
        ax.annotate("perplexity", (1, 1), (0, 5), "axes fraction", "offset points", ha="right", **GREY)
    lengths_axis(ax, sorted({row.n for c in curves for row in c.overall}))
    ax.set_title(title, parse_math=False)  # it names runs, and a $ may be in a name
    ax.set(xlabel="context length n, tokens", ylabel=ylabel)
    end_labels(ax)
    return fig


def by_importance(curves: Sequence[Curve]) -> list[Curve]:
    """The best method of each group at its longest length, then the controls of each, then the other methods."""
    groups = defaultdict(list)
    for curve in sorted(curves, key=lambda c: c.overall[-1].loss):
        groups[curve.group].append(curve)
    ranked = []
    for group in groups.values():
        best = next((c for c in group if c.label not in NAMES), None)
        ranked += enumerate(sorted(group, key=lambda c: (c is not best, c.label not in NAMES)))
    return [curve for _, curve in sorted(ranked, key=lambda x: x[0])]


def curve_style(curve: Curve, curves: Sequence[Curve]) -> dict[str, Any]:
    """The line's properties in matplotlib, of one of these curves.

    The colour is that of the encoding if there are several, otherwise that of the method. The dashes are those of the
    method, so that a curve can be seen on top of another. Runs of one encoding have different markers.
    """
    groups = list(dict.fromkeys(c.group for c in curves if c.encoding == curve.encoding))
    labels = list(dict.fromkeys(c.label for c in curves))
    several = len({c.encoding for c in curves}) > 1
    color = color_of("encodings", curve.encoding) if several else color_of("methods", curve.label)
    dashes = CONTROL_DASHES if curve.label == "window" else DASHES[labels.index(curve.label) % len(DASHES)]
    name = NAMES.get(curve.label, curve.label)
    if len({c.group for c in curves}) > 1:
        name = f"{curve.group}, {name}" if len(labels) > 1 else curve.group
    marker = MARKERS[groups.index(curve.group) % len(MARKERS)]
    return {"label": name, "color": color, "linestyle": dashes, "marker": marker}
