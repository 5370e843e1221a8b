"""The figures of the study, from the rows of studies.matrix: python -m studies.figures

    encodings   perplexity against context length, with the range over seeds as a band
    scaling     the same for the scaling methods on rope
    finetune    perplexity against the number of fine-tuning tokens
    base        perplexity against RoPE's base

Each is written as PNG and SVG to results/. The same rows give the same files.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from conf.errors import user_errors_in_one_line
from conf.registry import ROOT, choices
from measure import plots
from measure.plots import CONTROL, OKABE_ITO
from studies.plan import EXTENSIONS
from studies.rows import Rows, mean_losses, read_both, run_of, seeds_of
from studies.spectrum import base_bound, scale_matched_base

HEAD_DIM = 64  # of every size of the study
DASHED, DOTTED, MIXED = (0, (5, 1.5)), (0, (2, 1.5)), (0, (5, 1.5, 1.5, 1.5))
METHOD_COLORS = {
    "none": "#0072B2",
    "pi": "#D55E00",
    "ntk": "#009E73",
    "ntk_by_parts": "#CC79A7",
    "yarn": "#E69F00",
    "rerope": "#56B4E9",
}
# (colour, line) of the encodings, the same in every figure. Encodings that only rotate have the same blue and different
# lines. An encoding that is not listed gets its colour in `style_of`.
ENCODING_STYLES = {
    "rope": ("#0072B2", "-"),
    "rope_interleaved": ("#0072B2", DASHED),
    "rope_partial": ("#0072B2", MIXED),
    "rope_proportional": ("#0072B2", DOTTED),
    "xpos": ("#56B4E9", "-"),
    "alibi": ("#D55E00", "-"),
    "t5_bias": ("#E69F00", "-"),
    "learned": ("#009E73", "-"),
    "sinusoidal": ("#CC79A7", "-"),
    "none": ("#7F7F7F", "-"),
}


def style_of(name: str) -> tuple[str, Any]:
    """(colour, line) of an encoding. One that is not in ENCODING_STYLES has a dash-dotted line, and its colour is
    taken from the end of the palette, by its place in the alphabet."""
    if name in ENCODING_STYLES:
        return ENCODING_STYLES[name]
    others = sorted({*choices("pos"), name} - ENCODING_STYLES.keys())
    return OKABE_ITO[::-1][others.index(name) % len(OKABE_ITO)], MIXED


# ---- values from the rows ----


def seed_losses(rows: Rows, run: str, label: str) -> dict[int, np.ndarray]:
    """n -> the losses of all seeds, nats per token [seeds]."""
    ns = sorted({row["n"] for row in rows if (run_of(row), row["label"]) == (run, label)})
    return {n: np.array(list(mean_losses(rows, run, label, n).values())) for n in ns}


def describe_bands(rows: Rows) -> str:
    """For the title: the number of seeds whose range the bands show. It can differ between the runs of a figure."""
    seeds = defaultdict(set)
    for row in rows:
        seeds[run_of(row)].add(row["seed"])
    counts = sorted({len(of_one_run) for of_one_run in seeds.values()})
    if counts[-1] == 1:
        return "one seed"
    return f"bands: range over {' or '.join(map(str, counts))} seeds"


# ---- parts of the figures ----


def draw_line(ax: Any, points: dict[int, np.ndarray] | dict[float, np.ndarray], color: str, style: Any = "-") -> float:
    """Draw exp(mean loss over seeds) as a line and the range over seeds as a band.

    points: x -> losses [seeds], nats per token. Returns the perplexity at the last x, for the label of the line.
    """
    x = list(points)
    means = [np.exp(losses.mean()) for losses in points.values()]
    low, high = ([np.exp(end(losses)) for losses in points.values()] for end in (np.min, np.max))
    ax.plot(x, means, color=color, linestyle=style, marker="o", markersize=3, linewidth=1.6)
    ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    return means[-1]


def perplexity_axis(ax: Any) -> None:
    """A logarithmic y axis with round numbers as ticks. Call it after all lines are drawn."""
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ticks = [p * 10**k for k in range(4) for p in (1, 1.5, 2, 3, 5, 7) if low <= p * 10**k <= high]
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticks(ticks)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set_ylabel("perplexity on the same targets")


def open_frame(ax: Any) -> None:
    """Horizontal grid lines, and no box around the axes."""
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


# ---- the figures ----


def over_lengths(rows: Rows, curves: list[tuple[str, str, str, str, Any]], title: str) -> Any:
    """A figure of perplexity against context length.

    curves: (run, label of the method, name in the figure, colour, line style). Curves without rows are left out.
    """
    fig, ax = plt.subplots(figsize=(9, 5.2), dpi=150)
    L = rows[0]["train_ctx"]
    ends = []
    for run, label, name, color, style in curves:
        if points := seed_losses(rows, run, label):
            ends.append((draw_line(ax, points, color, style), name, color))
    plots.mark(ax, L, f"trained at {L}")
    plots.lengths_axis(
        ax, sorted({row["n"] for row in rows if row["label"] == "window" and row["part"] == "encodings"})
    )
    perplexity_axis(ax)
    heights = plots.end_labels(ax, ends, space=34)
    for _, _, name, color, style in curves:  # a piece of the line before its name, for lines of the same colour
        if name in heights:
            ax.plot([1.015, 1.06], [heights[name]] * 2, color=color, linestyle=style, linewidth=1.6,
                    transform=ax.transAxes, clip_on=False)  # fmt: skip
    ax.set_xlabel("context length n (tokens)")
    shown = {run for run, *_ in curves}
    bands = describe_bands([row for row in rows if run_of(row) in shown])
    ax.set_title(f"{title}\n{bands}", fontsize=10, loc="left")
    return fig


def encodings(rows: Rows) -> Any:
    """Every encoding without scaling, and rope's window control."""
    names = sorted({run_of(row) for row in rows if row["part"] == "encodings"})
    curves = [(name, "none", "NoPE (none)" if name == "none" else name, *style_of(name)) for name in names]
    window = ("rope", "window", "rope, window control", CONTROL, DOTTED)
    return over_lengths(rows, [*curves, window], "Extrapolation of each positional encoding past the trained context")


def scaling(rows: Rows) -> Any:
    """rope with the scaling methods of METHOD_COLORS, and its window control."""
    curves = [
        ("rope", method, "no scaling" if method == "none" else method, color, "-")
        for method, color in METHOD_COLORS.items()
    ]
    window = ("rope", "window", "window control", CONTROL, DOTTED)
    return over_lengths(rows, [*curves, window], "Extrapolation of RoPE past the trained context, by scaling method")


def finetune(rows: Rows) -> Any:
    """Perplexity against the share of fine-tuning, in three panels: at L, at the fine-tuning context 4 L and at 8 L.

    A line for each method. At 0 % the method is applied to rope without fine-tuning.
    """
    rows = seeds_of(rows, "finetune")
    L = rows[0]["train_ctx"]
    tuned = [row for row in rows if row["part"] == "finetune" and row["label"] == "none"]
    shares = sorted({row["percent"] for row in tuned if row["percent"]})  # % of the pre-training
    panels = ((L, "trained context"), (4 * L, "fine-tuning context"), (8 * L, "twice the fine-tuning context"))
    fig, axes = plt.subplots(1, len(panels), figsize=(13, 4.6), dpi=130, sharey=True)
    labels = []  # of each panel: (perplexity, text, colour) of its lines
    for ax, (n, place) in zip(axes, panels, strict=True):
        ends = [*draw_methods(ax, rows, tuned, shares, n), *draw_references(ax, rows, n, L)]
        labels.append(ends)
        open_frame(ax)
        ax.set_title(f"{place}: n = {n} = {n // L} L", fontsize=10, loc="left")
        ax.set_xlabel("fine-tuning tokens (% of pre-training tokens)")
        ax.set_xticks([0, *shares], [f"{share:g}" for share in (0, *shares)], fontsize=8)
    perplexity_axis(axes[0])  # shared by all panels, so the limits are known only now
    for ax, ends in zip(axes, labels, strict=True):
        plots.end_labels(ax, ends, space=6)
    title = f"RoPE trained at {L} and fine-tuned at {4 * L} (0 %: scaling without fine-tuning); {describe_bands(tuned)}"
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    fig.tight_layout(w_pad=4)
    return fig


def draw_methods(ax: Any, rows: Rows, tuned: Rows, shares: list[float], n: int) -> list[tuple[float, str, str]]:
    """Perplexity at length n against the share of fine-tuning, for each method. Returns the labels of the lines."""
    ends = []
    for method in EXTENSIONS:
        points = {0.0: seed_losses(rows, "rope", method).get(n, np.array([]))}
        for share in shares:
            names = {run_of(row) for row in tuned if (row["method"], row["percent"]) == (method, share)}
            losses = [seed_losses(tuned, name, "none").get(n, np.array([])) for name in names]
            points[share] = np.concatenate(losses or [np.array([])])
        points = {share: losses for share, losses in points.items() if len(losses)}
        if points:
            color = METHOD_COLORS[method]
            ends.append((draw_line(ax, points, color), "direct" if method == "none" else method, color))
    return ends


def draw_references(ax: Any, rows: Rows, n: int, L: int) -> list[tuple[float, str, str]]:
    """Horizontal lines at length n: the run from scratch and rope's window control. Returns their labels."""
    ends = []
    scratch = (f"scratch-{4 * L}", "none", f"from scratch at {4 * L}")
    for run, label, text in (scratch, ("rope", "window", "window control")):
        losses = seed_losses(rows, run, label).get(n)
        if losses is not None:
            perplexity = float(np.exp(losses.mean()))
            ax.axhline(perplexity, color=CONTROL, linewidth=1, linestyle=DOTTED)
            ends.append((perplexity, text, CONTROL))
    return ends


def base(rows: Rows) -> Any:
    """Perplexity against RoPE's base in pre-training, with a line for each of the lengths L, 2 L, 4 L and 8 L.

    Only seeds that the runs with other bases have are used, also for the default base.
    """
    rows = seeds_of(rows, "base")
    L = rows[0]["train_ctx"]
    fig, ax = plt.subplots(figsize=(8, 4.8), dpi=150)
    runs = {float(row["base"]): run_of(row) for row in rows if row["part"] == "base"}
    runs[10000.0] = "rope"
    bases = sorted(runs)
    ends = []
    for n, color in zip((L, 2 * L, 4 * L, 8 * L), OKABE_ITO, strict=False):
        points = {b: seed_losses(rows, runs[b], "none").get(n) for b in bases}
        points = {b: losses for b, losses in points.items() if losses is not None}
        ends.append((draw_line(ax, points, color), f"n = {n}", color))
    ax.set_xscale("log")
    ax.set_xticks(bases, [f"{b:,.0f}" for b in bases], fontsize=8)
    ax.xaxis.set_minor_locator(NullLocator())

    # two published rules for the base, as vertical lines
    bound, matched = base_bound(HEAD_DIM, L), scale_matched_base(HEAD_DIM, L)
    text = (
        f"{bound:,.0f}: lower bound on the base for L = {L} (Men et al.)\n"
        f"{matched:,.0f}: slowest pair rotates as often as in Llama 2"
    )
    for x, style in ((bound, "-"), (matched, DOTTED)):
        ax.axvline(x, color="#999999", linewidth=1, linestyle=style)
    ax.annotate(text, (bound, 1), xycoords=("data", "axes fraction"), xytext=(4, -4), textcoords="offset points",
                va="top", color="#666666", fontsize=8)  # fmt: skip

    perplexity_axis(ax)
    ax.set_ylim(top=ax.get_ylim()[1] * 1.3)  # room for the text above
    open_frame(ax)
    plots.end_labels(ax, ends, space=8)
    ax.set_xlabel("base of RoPE in pre-training")
    bands = describe_bands([row for row in rows if run_of(row) in runs.values()])
    ax.set_title(
        f"RoPE with different bases, trained at {L} and evaluated at n tokens\n{bands}", fontsize=10, loc="left"
    )
    return fig


# name of the file -> (its function, the part of the matrix that it needs)
FIGURES = {
    "encodings": (encodings, "encodings"),
    "scaling": (scaling, "encodings"),
    "finetune": (finetune, "finetune"),
    "base": (base, "base"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The figures of the study, from the rows of the matrix")
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="the rows that studies.matrix wrote")
    old_rows = str(ROOT / "results/matrix-last64.jsonl")
    parser.add_argument("--old-rows", default=old_rows, help="rows of earlier targets, for figures without new rows")
    parser.add_argument("--out", default=str(ROOT / "results"), help="the folder to write to")
    args = parser.parse_args()
    files = read_both(args.rows, args.old_rows)
    plt.rcParams["svg.hashsalt"] = "ropewalk"  # the same rows give the same file
    for name, (draw, part) in FIGURES.items():
        rows = next((rows for rows in files if any(row["part"] == part for row in rows)), None)
        if rows is None:
            print(f"{name}: no rows yet")
            continue
        for suffix in ("png", "svg"):
            path, fig = Path(args.out) / f"{name}.{suffix}", draw(rows)
            if rows is files[1] and files[0]:  # else all figures are of the same targets
                fig.text(0, -0.02, "earlier targets: the last 64 tokens of each document", fontsize=9, color="#666666")
            plots.save(fig, path)
            print(path)


if __name__ == "__main__":
    user_errors_in_one_line(main)()
