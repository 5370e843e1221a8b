"""The figures of the study, from the rows of studies.matrix: python -m studies.figures

    encodings   perplexity against context length, of seven encodings
    scaling     the same for the scaling methods on rope
    base        perplexity against RoPE's base
    reach       every encoding and layer schedule at L and at 8 L, with its best method, too
    real        the scaling methods on a real model, on code and on books
    ladder      the scaling methods on rope, by size

Each is written as PNG, SVG and PDF to results/. The same rows give the same files. A band is the range over seeds; with
fewer than three seeds, the seeds are points instead. `--page FILE` writes the rows as an HTML page instead.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import LogLocator, NullLocator

from conf.errors import user_errors
from measure import plots
from measure.curves import Curve
from measure.page import write_page
from measure.plots import CONTROL_DASHES, NAMES, color_of
from studies.plan import LADDER, REAL_DOCUMENTS
from studies.rows import RESULTS, Rows, StudyRow, read_rows
from studies.spectrum import base_bound

HEAD_DIM = 64  # of every size of the study
FEWEST_FOR_A_BAND = 3  # seeds: the range of two of them says little
ENCODINGS = ("rope", "alibi", "fox", "kerple", "xpos", "none", "t5_bias")  # of the figure `encodings`
METHODS = ("none", "pi", "ntk", "ntk_by_parts", "yarn", "rerope", "rerope + logn")  # of the figure `scaling`
FORMATS = (".png", ".svg", ".pdf")
PERPLEXITY = "perplexity on the same targets"

Style = dict[str, Any]  # colour and dashes of a line
Line = tuple[dict[Any, np.ndarray], str, Style]  # (x -> losses [seeds], nats per token; its name; its style)

DASHED = (0, (5, 1.5))
CONTROL = {"color": color_of("methods", "window"), "linestyle": CONTROL_DASHES}


# ---- lines ----


def over_lengths(rows: Rows, run: str, label: str, name: str, style: Style) -> Line:
    """n -> the losses, of a run with a method."""
    ns = sorted({n for name, at, n in rows.by_condition if (name, at) == (run, label)})
    return {n: rows.losses(run, label, n) for n in ns}, name, style


def draw_line(ax: Any, line: Line) -> None:
    """Draw exp(mean loss over seeds) as a line and the range over seeds as a band; two seeds as points instead."""
    points, name, style = line
    x = list(points)
    means = [float(np.exp(losses.mean())) for losses in points.values()]
    enough = [len(losses) >= FEWEST_FOR_A_BAND for losses in points.values()]
    low, high = ([np.exp(end(losses)) for losses in points.values()] for end in (np.min, np.max))
    ax.plot(x, means, marker="o", label=name, **style)
    ax.fill_between(x, low, high, where=enough, color=style["color"], alpha=0.15, linewidth=0)
    seeds = [(at, np.exp(loss)) for at, losses in points.items() if len(losses) == 2 for loss in losses]
    if seeds:
        look = {"markersize": 4.5, "markerfacecolor": "none", "markeredgewidth": 0.9, "color": style["color"]}
        ax.plot(*zip(*seeds, strict=True), "o", **look)


def describe_seeds(rows: Rows, runs: Iterable[str]) -> str:
    """For the title: how many trainings the curves of these runs are the mean of, and what bands and points show."""
    names = {*runs}
    counts = sorted({len(seeds) for (run, *_), seeds in rows.by_condition.items() if run in names})
    if counts == [1]:
        return "one seed"
    text = f"mean of {counts[0]} to {counts[-1]} trainings" if counts[1:] else f"mean of {counts[0]} trainings"
    text += f"; bands: the range of {FEWEST_FOR_A_BAND} or more" if counts[-1] >= FEWEST_FOR_A_BAND else ""
    return text + ("; hollow points: single seeds" if any(1 < n < FEWEST_FOR_A_BAND for n in counts) else "")


def round_numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis at round numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=99))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def finish(fig: Any, space: int = 22) -> Any:
    """A logarithmic y axis, which all panels share, and the names of each panel's lines."""
    first = fig.axes[0]
    first.set(yscale="log", ylabel=PERPLEXITY)
    round_numbers(first.yaxis)
    for ax in fig.axes:
        plots.end_labels(ax, space)
    return fig


# ---- the figures ----


def over_context(
    rows: Rows, panels: Mapping[str, Sequence[Line]], width: float, between: float | None = None, space: int = 22
) -> Any:
    """Perplexity against context length. panels: title -> the lines of a panel, of which those with rows are drawn.

    width: of the figure, inches. between: two panels, in widths of one: room for the names at the ends of the lines.
    """
    fig, axes = plots.pyplot().subplots(1, len(panels), figsize=(width, 5.2), sharey=True, squeeze=False)
    fig.subplots_adjust(wspace=between)
    for ax, (title, lines) in zip(axes.flat, panels.items(), strict=True):
        for line in lines:
            if line[0]:
                draw_line(ax, line)
        plots.mark(ax, rows.trained_ctx, f"trained at {rows.trained_ctx}")
        plots.lengths_axis(ax, sorted({n for points, *_ in lines for n in points}))
        ax.set(xlabel="context length n (tokens)", title=title)
    return finish(fig, space)


def encodings(rows: Rows) -> Any:
    """The encodings of ENCODINGS without scaling, and rope's window control."""
    present = rows.runs("encodings")
    runs = {run: "NoPE (none)" if run == "none" else run for run in ENCODINGS if run in present}
    lines = [over_lengths(rows, run, "none", name, {"color": color_of("encodings", run)}) for run, name in runs.items()]
    lines.append(over_lengths(rows, "rope", "window", "rope, window control", CONTROL))
    title = f"Extrapolation of positional encodings past the trained context\n{describe_seeds(rows, runs)}"
    return over_context(rows, {title: lines}, width=9, space=34)


def scaling(rows: Rows) -> Any:
    """rope with the scaling methods of METHODS, and its window control."""
    styles = {m: {"color": color_of("methods", m), "linestyle": DASHED if "+" in m else "-"} for m in METHODS}
    styles["window"] = CONTROL
    lines = [over_lengths(rows, "rope", m, NAMES.get(m, m), style) for m, style in styles.items()]
    title = "Extrapolation of RoPE past the trained context, by scaling method"
    return over_context(rows, {f"{title}\n{describe_seeds(rows, ['rope'])}": lines}, width=9, space=34)


def panels_of(rows: Rows, runs: Iterable[str]) -> Any:
    """Scaling methods and the window control, in a panel for each run."""
    methods, panels = dict.fromkeys(label for _, label, _ in rows.by_condition), {}
    styles = {m: {"color": color_of("methods", m), "linestyle": "-"} for m in methods} | {"window": CONTROL}
    for run in runs:
        panels[run] = [over_lengths(rows, run, m, NAMES.get(m, m), style) for m, style in styles.items()]
    return over_context(rows, panels, width=6.5 * len(panels), between=0.4)


def real(rows: Rows) -> Any:
    """The real model, on each corpus."""
    return panels_of(rows, [f"smollm2-{corpus}" for corpus in REAL_DOCUMENTS])


def ladder(rows: Rows) -> Any:
    """rope at each size."""
    return panels_of(rows, [run for size in LADDER if (run := f"ladder-{size}") in rows.runs("ladder")])


def base(rows: Rows) -> Any:
    """Perplexity against RoPE's base in pre-training, with a line for each of the lengths L, 2 L, 4 L and 8 L."""
    found = {row.base: row.name for row in rows.rows if row.part == "base" and row.name.startswith("base")}
    runs, L = dict(sorted({10000.0: "rope", **found}.items())), rows.trained_ctx
    fig, ax = plots.pyplot().subplots(figsize=(8, 4.8))
    for k, n in enumerate((L, 2 * L, 4 * L, 8 * L)):
        points = {b: losses for b, run in runs.items() if len(losses := rows.losses(run, "none", n))}
        draw_line(ax, (points, f"n = {n}", {"color": plots.pyplot().get_cmap("viridis")(0.85 * k / 3)}))
    ax.set(xscale="log", yscale="log")
    ax.set_xticks(list(runs), [f"{b:,.0f}" for b in runs], fontsize=8, rotation=15, ha="right")
    ax.xaxis.set_minor_locator(NullLocator())

    bound = base_bound(HEAD_DIM, L)
    plots.mark(ax, bound, f"{bound:,.0f}: lower bound for L = {L} (Men et al.)", 1)
    ax.set_ylim(top=ax.get_ylim()[1] * 1.3)  # room for the text above
    title = f"RoPE with different bases, trained at {L} and evaluated at n tokens"
    ax.set(xlabel="base of RoPE in pre-training", title=f"{title}\n{describe_seeds(rows, runs.values())}")
    return finish(fig)


def reach(rows: Rows) -> Any:
    """A line for each encoding and schedule: perplexity at L, at 8 L, and at 8 L with its best method, best first."""
    L, best = rows.trained_ctx, {}
    for run in rows.runs("encodings"):
        labels = [label for name, label, n in rows.by_condition if (name, n) == (run, 8 * L) and label != "window"]
        best[run] = min(labels, key=lambda label: rows.losses(run, label, 8 * L).mean())
    runs = sorted(best, key=lambda run: rows.losses(run, best[run], 8 * L).mean())
    own = {run: label for run, label in best.items() if label != "none"}
    fig, ax = plots.pyplot().subplots(figsize=(9, 1.6 + 0.24 * len(runs)))
    for name, n, labels, marker, color in (
        (f"at L = {L}", L, dict.fromkeys(runs, "none"), "|", "#333333"),
        ("at 8 L", 8 * L, dict.fromkeys(runs, "none"), "o", color_of("methods", "none")),
        ("at 8 L, with the method named", 8 * L, own, "D", color_of("methods", "yarn")),
    ):
        losses = {runs.index(run): rows.losses(run, label, n) for run, label in labels.items()}
        means, low, high = ([np.exp(of(x)) for x in losses.values()] for of in (np.mean, np.min, np.max))
        ax.plot(means, list(losses), marker, color=color, markersize=10 if marker == "|" else 5, label=name)
        ax.hlines(list(losses), low, high, color=color, linewidth=2, alpha=0.5)
    names = [run + (f", {own[run]}" if run in own else "") for run in runs]
    counts = [[len(rows.losses(run, of, 8 * L)) for of in dict.fromkeys(("none", best[run]))] for run in runs]
    ax.set_yticks(range(len(runs)), [f"{name} {n}" for name, n in zip(names, counts, strict=True)], fontsize=8)
    ax.set(xscale="log", ylim=(len(runs) - 0.5, -0.5), xlabel=PERPLEXITY)
    round_numbers(ax.xaxis)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8)
    ax.set_title("Encodings and layer schedules past L\n[trainings without, with the method], lines: their range")
    return fig


# The figures -> the plan and its part that each needs
FIGURES = {
    encodings: ("encodings", "encodings"),
    scaling: ("rope", "rope"),
    base: ("encodings", "base"),
    reach: ("encodings", "encodings"),
    real: ("real", "real"),
    ladder: ("ladder", "ladder"),
}


def curves_of(rows: Sequence[StudyRow]) -> list[Curve]:
    """A curve for each run and method; seeds are in one group."""
    found = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.n):
        found[row.run, row.label].append(row)
    return [Curve(of_one, named=of_one[0].name) for of_one in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description="The figures of the study, from the rows of studies.matrix")
    parser.add_argument("--rows", type=Path, default=RESULTS, help="the folder of the rows that studies.matrix wrote")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder to write to")
    parser.add_argument("--page", type=Path, help="write the rows of --plan as an HTML page, instead of figures")
    parser.add_argument("--plan", default="rope", help="of the page")
    args = parser.parse_args()
    if args.page:
        rows = read_rows(args.rows / f"{args.plan}.jsonl")
        write_page(curves_of(rows.rows), args.page, f"The study: {args.plan}")
        print(f"page: {args.page}")
        return
    for draw, (plan, part) in FIGURES.items():
        name, file = draw.__name__, args.rows / f"{plan}.jsonl"
        rows = read_rows(file) if file.exists() else Rows([])
        if not rows.runs(part):
            print(f"{name}: no rows yet")
            continue
        plots.save(draw(rows), args.out / name, *FORMATS)
        print(*(f"{args.out / name}{suffix}" for suffix in FORMATS))


if __name__ == "__main__":
    user_errors(main)()
