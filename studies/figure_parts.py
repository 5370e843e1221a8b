"""What the figures of the study are made of: colours and dashes, seeds as bands or points, axes.

Rows are those of studies.matrix. A band is the range over seeds; with fewer than three seeds, the seeds are points.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from measure import plots
from measure.plots import CONTROL_DASHES, color_of
from studies.rows import Rows, mean_losses, run_of, trained_ctx

DASHED, DOTTED, MIXED = (0, (5, 1.5)), (0, (2, 1.5)), (0, (5, 1.5, 1.5, 1.5))
CONTROL = {"color": color_of("methods", "window"), "linestyle": CONTROL_DASHES}
FEWEST_FOR_A_BAND = 3  # seeds: the range of two of them says little

Line = tuple[str, str, str, dict[str, Any]]  # (run, label of the method, name in the figure, style of the line)


# ---- styles ----


def style_of(name: str) -> dict[str, Any]:
    """The colour and dashes of an encoding. Variants of RoPE are dashed, because their curves are close together."""
    dashes = {"rope_interleaved": DASHED, "rope_partial": MIXED, "rope_proportional": DOTTED}
    return {"color": color_of("encodings", name), "linestyle": dashes.get(name, "-")}


def method_style(method: str) -> dict[str, Any]:
    return {"color": color_of("methods", method), "linestyle": "-"}


# ---- values from the rows ----


def seed_losses(rows: Rows, run: str, label: str) -> dict[int, np.ndarray]:
    """n -> the losses of all seeds, nats per token [seeds]."""
    ns = sorted({row["n"] for row in rows if (run_of(row), row["label"]) == (run, label)})
    return {n: np.array(list(mean_losses(rows, run, label, n).values())) for n in ns}


def describe_seeds(rows: Rows) -> str:
    """For the title: how many seeds there are, and what bands and points show. Runs can differ in their seeds."""
    seeds = defaultdict(set)
    for row in rows:
        seeds[run_of(row)].add(row["seed"])
    counts = sorted({len(of_one_run) for of_one_run in seeds.values()})
    if counts == [1]:
        return "one seed"
    text = f"mean of {' or '.join(map(str, counts))} seeds"
    text += "; bands: their range" if counts[-1] >= FEWEST_FOR_A_BAND else ""
    return text + ("; hollow points: single seeds" if any(1 < n < FEWEST_FOR_A_BAND for n in counts) else "")


# ---- parts of the figures ----


def draw_line(ax: Any, points: dict[Any, np.ndarray], style: dict[str, Any]) -> tuple[float, float]:
    """Draw exp(mean loss over seeds) as a line and the range over seeds as a band.

    Where there are two seeds, they are points instead. points: x -> losses [seeds], nats per token. Returns x and y of
    the end of the line.
    """
    x = list(points)
    means = [float(np.exp(losses.mean())) for losses in points.values()]
    enough = [len(losses) >= FEWEST_FOR_A_BAND for losses in points.values()]
    low, high = ([np.exp(end(losses)) for losses in points.values()] for end in (np.min, np.max))
    ax.plot(x, means, marker="o", **style)
    ax.fill_between(x, low, high, where=enough, color=style["color"], alpha=0.15, linewidth=0)
    seeds = [(at, np.exp(loss)) for at, losses in points.items() if len(losses) == 2 for loss in losses]
    if seeds:
        ax.plot(*zip(*seeds, strict=True), "o", markersize=4.5, markerfacecolor="none", markeredgewidth=0.9,
                color=style["color"])  # fmt: skip
    return x[-1], means[-1]


def perplexity_axis(ax: Any) -> None:
    """A logarithmic y axis with round numbers as ticks. Call it after all lines are drawn."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ticks = [p * 10**k for k in range(4) for p in (1, 1.5, 2, 3, 5, 7) if low <= p * 10**k <= high]
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticks(ticks)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set_ylabel("perplexity on the same targets")


def finish_panels(fig: Any, labels: list[list[tuple]], title: str, y: float) -> Any:
    """The y axis, which all panels share, the names of each panel's lines, and a title above the first. Returns fig."""
    perplexity_axis(fig.axes[0])
    for ax, ends in zip(fig.axes, labels, strict=True):
        plots.end_labels(ax, ends, space=22)
    fig.suptitle(title, fontsize=11, x=fig.axes[0].get_position().x0, y=y, ha="left")
    return fig


def over_lengths(rows: Rows, curves: Sequence[Line], title: str) -> Any:
    """A figure of perplexity against context length. Curves without rows are left out."""
    fig, ax = plt.subplots(figsize=(9, 5.2))
    ends = draw_over_lengths(ax, rows, curves)
    perplexity_axis(ax)
    plots.end_labels(ax, ends, space=34)
    shown = {run for run, *_ in curves}
    ax.set_title(f"{title}\n{describe_seeds([row for row in rows if run_of(row) in shown])}")
    return fig


def draw_over_lengths(ax: Any, rows: Rows, curves: Sequence[Line]) -> list[tuple]:
    """The lines of `over_lengths` and its x axis. Returns the labels of the lines."""
    L = trained_ctx(rows, "rope")
    ends = []
    for run, label, name, style in curves:
        if points := seed_losses(rows, run, label):
            ends.append((*draw_line(ax, points, style), name, style))
    plots.mark(ax, L, f"trained at {L}")
    plots.lengths_axis(ax, sorted({row["n"] for row in rows if run_of(row) == "rope" and row["label"] == "window"}))
    ax.set_xlabel("context length n (tokens)")
    return ends
