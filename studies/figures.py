"""The figures of the study, from the rows of studies.matrix: python -m studies.figures

    encodings   perplexity against context length
    scaling     the same for the scaling methods on rope
    finetune    perplexity against the number of fine-tuning tokens
    base        perplexity against RoPE's base
    layers      the newer encodings, the layer schedules and the changed encodings of studies.matrix --plan layers

Each is written as PNG, SVG and PDF to results/. The same rows give the same files. A band is the range over seeds; with
fewer than three seeds, the seeds are points instead.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator

from conf.errors import user_errors_in_one_line
from conf.registry import ROOT
from measure import plots
from measure.plots import NAMES, color_of
from studies.figure_parts import (
    CONTROL,
    DASHED,
    DOTTED,
    MIXED,
    Line,
    describe_seeds,
    draw_line,
    draw_over_lengths,
    finish_panels,
    method_style,
    over_lengths,
    perplexity_axis,
    seed_losses,
    style_of,
)
from studies.plan import EXTENSIONS, NEWER_ENCODINGS
from studies.rows import Rows, read_both, read_rows, run_of, seeds_of, trained_ctx
from studies.spectrum import base_bound, scale_matched_base

HEAD_DIM = 64  # of every size of the study
METHODS = ("none", "pi", "ntk", "ntk_by_parts", "yarn", "rerope")  # of the figure `scaling`
# The panels of the figure `layers`: (run, label of the method, name, colour) of the lines
SCHEDULES = ("gemma3", "sssl", "smollm3", "swan", "window_only")
LAYER_PANELS = {
    "encodings": [(run, "none", run, color_of("encodings", run)) for run in (*NEWER_ENCODINGS, "sink_logits", "cope")],
    "layer schedules": [
        ("none", "none", "NoPE (none)", color_of("encodings", "none")),
        *((run, "none", run, color_of("encodings", f"rope+{run}")) for run in SCHEDULES),
        ("swan", "logn", "swan, logn", color_of("encodings", "rope+swan")),
        ("gemma3", "yarn", "gemma3, yarn", color_of("encodings", "rope+gemma3")),
    ],
    "rope, changed after its training": [
        ("drope", "none", "drope", color_of("changes", "drope")),
        ("drope", "logn", "drope, logn", color_of("changes", "drope")),
        ("abf", "none", "abf, trained at 4 L", color_of("changes", "abf")),
        ("rope_to_swan", "none", "rope_to_swan", color_of("changes", "rope_to_swan")),
        ("rope_to_swan", "logn", "rope_to_swan, logn", color_of("changes", "rope_to_swan")),
        ("rope", "yarn", "rope, yarn (not trained)", color_of("methods", "yarn")),
    ],
}
PANEL_DASHES = ("-", DASHED, DOTTED, MIXED)  # one after the other in a panel
FORMATS = (".png", ".svg", ".pdf")


def encodings(rows: Rows) -> Any:
    """Every encoding without scaling, and rope's window control."""
    names = sorted({run_of(row) for row in rows if row["part"] == "encodings"})
    curves = [(name, "none", "NoPE (none)" if name == "none" else name, style_of(name)) for name in names]
    window = ("rope", "window", "rope, window control", CONTROL)
    return over_lengths(rows, [*curves, window], "Extrapolation of each positional encoding past the trained context")


def scaling(rows: Rows) -> Any:
    """rope with the scaling methods of METHODS, and its window control."""
    curves = [("rope", method, NAMES.get(method, method), method_style(method)) for method in METHODS]
    window = ("rope", "window", NAMES["window"], CONTROL)
    return over_lengths(rows, [*curves, window], "Extrapolation of RoPE past the trained context, by scaling method")


def finetune(rows: Rows) -> Any:
    """Perplexity against the share of fine-tuning, in three panels: at L, at the fine-tuning context 4 L and at 8 L.

    A line for each method. At 0 % the method is applied to rope without fine-tuning.
    """
    rows = seeds_of(rows, "finetune")
    L = trained_ctx(rows, "rope")
    tuned = [row for row in rows if row["part"] == "finetune" and row["label"] == "none"]
    shares = sorted({row["percent"] for row in tuned if row["percent"]})  # % of the pre-training
    panels = ((L, "trained context"), (4 * L, "fine-tuning context"), (8 * L, "twice the fine-tuning context"))
    fig, axes = plt.subplots(1, len(panels), figsize=(15, 4.6), sharey=True)
    fig.subplots_adjust(wspace=0.75)  # room for the names at the ends of the lines
    labels = []  # of each panel
    for ax, (n, place) in zip(axes, panels, strict=True):
        labels.append([*draw_methods(ax, rows, tuned, shares, n), *draw_references(ax, rows, n, L, max(shares))])
        ax.set_title(f"{place}: n = {n} = {n // L} L")
        ax.set_xlabel("fine-tuning tokens (% of pre-training tokens)")
        ax.set_xticks([0, *shares], [f"{share:g}" for share in (0, *shares)], fontsize=8)
    title = f"RoPE trained at {L} and fine-tuned at {4 * L} (0 %: scaling without fine-tuning)\n{describe_seeds(tuned)}"
    return finish_panels(fig, labels, title, y=1.04)


def draw_methods(ax: Any, rows: Rows, tuned: Rows, shares: list[float], n: int) -> list[tuple]:
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
            style = method_style(method)
            ends.append((*draw_line(ax, points, style), NAMES.get(method, method), style))
    return ends


def draw_references(ax: Any, rows: Rows, n: int, L: int, end: float) -> list[tuple]:
    """Horizontal lines at length n up to x = end: the run from scratch, and past L rope's window control.

    At L the window control is the model itself, which is the point at 0 %. Returns the labels of the lines.
    """
    ends = []
    scratch = (f"scratch-{4 * L}", "none", f"from scratch at {4 * L}", {"color": "#8A8A8A", "linestyle": MIXED})
    window = ("rope", "window", NAMES["window"], CONTROL)
    for run, label, text, style in (scratch, window) if n > L else (scratch,):
        losses = seed_losses(rows, run, label).get(n)
        if losses is not None:
            perplexity = float(np.exp(losses.mean()))
            ax.axhline(perplexity, linewidth=1, **style)
            ends.append((end, perplexity, text, style))
    return ends


def base(rows: Rows) -> Any:
    """Perplexity against RoPE's base in pre-training, with a line for each of the lengths L, 2 L, 4 L and 8 L.

    Only seeds that the runs with other bases have are used, also for the default base.
    """
    rows = seeds_of(rows, "base")
    L = trained_ctx(rows, "rope")
    fig, ax = plt.subplots(figsize=(8, 4.8))
    runs = {float(row["base"]): run_of(row) for row in rows if row["part"] == "base"}
    runs[10000.0] = "rope"
    bases = sorted(runs)
    ends = []
    for k, n in enumerate((L, 2 * L, 4 * L, 8 * L)):
        points = {b: seed_losses(rows, runs[b], "none").get(n) for b in bases}
        points = {b: losses for b, losses in points.items() if losses is not None}
        style = {"color": plt.get_cmap("viridis")(0.85 * k / 3), "linestyle": "-"}
        ends.append((*draw_line(ax, points, style), f"n = {n}", style))
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
    plots.end_labels(ax, ends, space=22)
    ax.set_xlabel("base of RoPE in pre-training")
    seeds = describe_seeds([row for row in rows if run_of(row) in runs.values()])
    ax.set_title(f"RoPE with different bases, trained at {L} and evaluated at n tokens\n{seeds}")
    return fig


def layers(rows: Rows) -> Any:
    """Perplexity against context length of the runs of the plan `layers`, in a panel for each kind of them.

    All panels have rope, its window control and alibi.
    """
    references: list[Line] = [
        ("rope", "none", "rope", style_of("rope")),
        ("alibi", "none", "alibi", style_of("alibi")),
        ("rope", "window", "rope, window control", CONTROL),
    ]
    fig, axes = plt.subplots(1, len(LAYER_PANELS), figsize=(16, 5.2), sharey=True)
    fig.subplots_adjust(wspace=0.62)  # room for the names at the ends of the lines
    labels = []  # of each panel
    for ax, (title, lines) in zip(axes, LAYER_PANELS.items(), strict=True):
        curves = [
            (run, label, name, {"color": color, "linestyle": dashes})
            for (run, label, name, color), dashes in zip(lines, itertools.cycle(PANEL_DASHES), strict=False)
        ]
        labels.append(draw_over_lengths(ax, rows, [*references, *curves]))
        ax.set_title(title)
    L = trained_ctx(rows, "rope")
    seeds = describe_seeds(rows)
    seeds += ": a difference below that between two seeds of rope means little" if seeds == "one seed" else ""
    title = f"Newer encodings, layer schedules and changes of a trained rope beside rope and alibi, L = {L}\n{seeds}"
    return finish_panels(fig, labels, title, y=1.02)


# name of the file -> (its function, the part of the plan that it needs)
FIGURES = {
    "encodings": (encodings, "encodings"),
    "scaling": (scaling, "encodings"),
    "finetune": (finetune, "finetune"),
    "base": (base, "base"),
    "layers": (layers, "layers"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="The figures of the study, from the rows of the matrix")
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="the rows that studies.matrix wrote")
    old_rows = str(ROOT / "results/matrix-last64.jsonl")
    parser.add_argument("--old-rows", default=old_rows, help="rows of earlier targets, for figures without new rows")
    layer_rows = str(ROOT / "results/layers.jsonl")
    parser.add_argument("--layer-rows", default=layer_rows, help="the rows of studies.matrix --plan layers")
    parser.add_argument("--out", default=str(ROOT / "results"), help="the folder to write to")
    args = parser.parse_args()
    files = [*read_both(args.rows, args.old_rows)]
    files += [read_rows(Path(args.layer_rows))] if Path(args.layer_rows).exists() else []
    for name, (draw, part) in FIGURES.items():
        rows = next((rows for rows in files if any(row["part"] == part for row in rows)), None)
        if rows is None:
            print(f"{name}: no rows yet")
            continue
        path, fig = Path(args.out) / name, draw(rows)
        if rows is files[1] and files[0]:  # else all figures are of the same targets
            fig.text(0, -0.02, "earlier targets: the last 64 tokens of each document", fontsize=9, color="#666666")
        plots.save(fig, path, *FORMATS)
        print(*(path.with_suffix(suffix) for suffix in FORMATS))


if __name__ == "__main__":
    user_errors_in_one_line(main)()
