"""The pictures of the study, from the rows of studies.matrix: python -m studies.figures

encodings: loss against context length, bands over seeds. scaling: the same for the methods on rope. finetune: loss
against fine-tuning tokens. base: loss against RoPE's base. Each as PNG and SVG under results/.
"""

import argparse
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, NullLocator

from conf.errors import one_line_errors
from conf.registry import ROOT
from studies import pictures
from studies.matrix import EXTENSIONS, read, run_of
from studies.pictures import CONTROL, OKABE_ITO
from studies.spectrum import base_bound, scale_matched_base
from studies.tables import seeds_of

Rows = list[dict]
HEAD_DIM = 64  # of every size of the study
SHOWN = dict(zip(("none", "pi", "ntk", "ntk_by_parts", "yarn", "rerope"), OKABE_ITO, strict=False))  # and their colours
DASHED, DOTTED, MIXED = (0, (5, 1.5)), (0, (2, 1.5)), (0, (5, 1.5, 1.5, 1.5))
STYLES = {  # of the encodings: the same in every picture, one blue for all that only rotate; others take what is left
    "rope": ("#0072B2", "-"), "rope_interleaved": ("#0072B2", DASHED), "rope_partial": ("#0072B2", MIXED),
    "rope_proportional": ("#0072B2", DOTTED), "xpos": ("#56B4E9", "-"), "alibi": ("#D55E00", "-"),
    "t5_bias": ("#E69F00", "-"), "learned": ("#009E73", "-"), "sinusoidal": ("#CC79A7", "-"), "none": ("#7F7F7F", "-"),
}  # fmt: skip


def seeds(rows: Rows, run: str, label: str) -> dict[int, np.ndarray]:
    """n -> losses of all seeds, nats per token."""
    found = defaultdict(list)
    for r in rows:
        if (run_of(r), r["label"]) == (run, label):
            found[r["n"]].append(r["loss"])
    return {n: np.array(losses) for n, losses in sorted(found.items())}


def bands(rows: Rows) -> str:
    """What the bands are, in words; fewer seeds of some runs are said, too."""
    of_runs = defaultdict(set)
    for r in rows:
        of_runs[run_of(r)].add(r["seed"])
    counts = sorted({len(found) for found in of_runs.values()})
    if counts[-1] == 1:
        return "one seed"
    return f"bands: the range of {' or '.join(map(str, counts))} seeds"


def line(ax: Any, points: dict[float, np.ndarray], color: str, style: Any = "-", **how: Any) -> float:
    """The mean over seeds and a band from the least to the most; returns the last mean."""
    x = list(points)
    means = [np.exp(v.mean()) for v in points.values()]
    ax.plot(x, means, color=color, linestyle=style, marker="o", markersize=3, linewidth=1.6, **how)
    low, high = ([np.exp(f(v)) for v in points.values()] for f in (np.min, np.max))
    ax.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    return means[-1]


def perplexity_axis(ax: Any) -> None:
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    ticks = [p * 10**k for k in range(4) for p in (1, 1.5, 2, 3, 5, 7) if low <= p * 10**k <= high]
    ax.yaxis.set_minor_locator(NullLocator())
    ax.set_yticks(ticks)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set_ylabel("perplexity of the same targets")


def over_lengths(rows: Rows, curves: list[tuple[str, str, str, str, Any]], title: str) -> Any:
    """curves: (run, label, name, colour, style of the line)."""
    fig, ax = plt.subplots(figsize=(9, 5.2), dpi=150)
    L = rows[0]["train_ctx"]
    ends = []
    for run, label, name, color, style in curves:
        if points := seeds(rows, run, label):
            ends.append((line(ax, points, color, style), name, color))
    pictures.mark(ax, L, f"trained at {L}")
    pictures.lengths_axis(ax, sorted({r["n"] for r in rows if r["label"] == "window" and r["part"] == "encodings"}))
    perplexity_axis(ax)
    pictures.end_labels(ax, ends, space=6, styles={name: style for _, _, name, _, style in curves})
    ax.set_xlabel("context: tokens given, n")
    shown = {run for run, *_ in curves}
    ax.set_title(f"{title}\n{bands([r for r in rows if run_of(r) in shown])}", fontsize=10, loc="left")
    return fig


def encodings(rows: Rows) -> Any:
    names = sorted({run_of(r) for r in rows if r["part"] == "encodings"})
    styles = STYLES | dict(zip(sorted({*names} - {*STYLES}), cycle([(c, MIXED) for c in OKABE_ITO[::-1]])))
    curves = [(name, "none", "NoPE (none)" if name == "none" else name, *styles[name]) for name in names]
    window = ("rope", "window", "rope, window control", CONTROL, DOTTED)
    return over_lengths(rows, [*curves, window], "Encodings read past the context trained at")


def scaling(rows: Rows) -> Any:
    called = {"none": "no scaling", "window": "window control"}
    methods = {x: (color, "-") for x, color in SHOWN.items()} | {"window": (CONTROL, DOTTED)}
    curves = [("rope", x, called.get(x, x), *style) for x, style in methods.items()]
    return over_lengths(rows, curves, "RoPE read past its context by each method")


def finetune(rows: Rows) -> Any:
    """Three panels, inside, at and beyond the target; a line for each method, from no fine-tuning on."""
    rows = seeds_of(rows, "finetune")
    L = rows[0]["train_ctx"]
    own = [r for r in rows if r["part"] == "finetune" and r["label"] == "none"]
    fig, axes = plt.subplots(1, 3, figsize=(13, 4.6), dpi=130, sharey=True)
    shares = sorted({r["percent"] for r in own if r["percent"]})
    labels = []
    for ax, n, where in zip(axes, (L, 4 * L, 8 * L), ("inside", "at the target", "beyond it"), strict=True):
        ends: list[tuple[float, str, str]] = []
        labels.append(ends)
        for method in EXTENSIONS:
            points = {0.0: seeds(rows, "rope", method).get(n, np.array([]))}
            for share in shares:
                found = [r["loss"] for r in own if (r["method"], r["percent"], r["n"]) == (method, share, n)]
                points[share] = np.array(found)
            points = {x: v for x, v in points.items() if len(v)}
            if points:
                ends.append((line(ax, points, SHOWN[method]), "direct" if method == "none" else method, SHOWN[method]))
        for run, label, name in (
            (f"scratch-{4 * L}", "none", f"from scratch at {4 * L}"),
            ("rope", "window", "window control"),
        ):
            found = seeds(rows, run, label).get(n)
            if found is not None:
                ax.axhline(np.exp(found.mean()), color=CONTROL, linewidth=1, linestyle=DOTTED)
                ends.append((float(np.exp(found.mean())), name, CONTROL))
        ax.grid(axis="y", alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(f"{where}: n = {n} = {n // L} L", fontsize=10, loc="left")
        ax.set_xlabel("fine-tuning tokens, % of pre-training")
        ax.set_xticks([0, *shares], [f"{x:g}" for x in (0, *shares)], fontsize=8)
    perplexity_axis(axes[0])  # shared: the limits are known once all are drawn
    for ax, ends in zip(axes, labels, strict=True):
        pictures.end_labels(ax, ends, space=6)
    title = f"RoPE trained at {L}, fine-tuned at {4 * L} (0 %: the method alone); {bands(own)}"
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    fig.tight_layout(w_pad=4)
    return fig


def base(rows: Rows) -> Any:
    """Loss against RoPE's base, at several lengths."""
    rows = seeds_of(rows, "base")
    L = rows[0]["train_ctx"]
    fig, ax = plt.subplots(figsize=(8, 4.8), dpi=150)
    runs = {float(r["base"]): run_of(r) for r in rows if r["part"] == "base"}
    runs |= {10000.0: "rope"}
    ends = []
    for n, color in zip((L, 2 * L, 4 * L, 8 * L), OKABE_ITO, strict=False):
        points = {b: seeds(rows, run, "none").get(n) for b, run in sorted(runs.items())}
        ends.append((line(ax, {b: v for b, v in points.items() if v is not None}, color), f"n = {n}", color))
    ax.set_xscale("log")
    ax.set_xticks(sorted(runs), [f"{b:,.0f}" for b in sorted(runs)], fontsize=8)
    ax.xaxis.set_minor_locator(NullLocator())
    bound, matched = base_bound(HEAD_DIM, L), scale_matched_base(HEAD_DIM, L)
    said = f"{bound:,.0f}: base bound for {L} (Men et al.)\n{matched:,.0f}: slowest pair turns as in Llama 2"
    for x, style in ((bound, "-"), (matched, DOTTED)):
        ax.axvline(x, color="#999999", linewidth=1, linestyle=style)
    ax.annotate(said, (bound, 1), xycoords=("data", "axes fraction"), xytext=(4, -4), textcoords="offset points",
                va="top", color="#666666", fontsize=8)  # fmt: skip
    perplexity_axis(ax)
    ax.set_ylim(top=ax.get_ylim()[1] * 1.3)  # room for the words above
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    pictures.end_labels(ax, ends, space=8)
    ax.set_xlabel("RoPE's base")
    own = [r for r in rows if run_of(r) in runs.values()]
    ax.set_title(f"RoPE's base in pre-training at {L}, read at n\n{bands(own)}", fontsize=10, loc="left")
    return fig


FIGURES = {"encodings": encodings, "scaling": scaling, "finetune": finetune, "base": base}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=str(ROOT / "results/matrix.jsonl"), help="what studies.matrix wrote")
    parser.add_argument("--out", default=str(ROOT / "results"), help="the folder")
    args = parser.parse_args()
    rows = read(Path(args.rows))
    plt.rcParams["svg.hashsalt"] = "ropewalk"
    for name, draw in FIGURES.items():
        part = {"scaling": "encodings"}.get(name, name)
        if not any(r["part"] == part for r in rows):
            print(f"{name}: no rows yet")
            continue
        for suffix in ("png", "svg"):
            path = Path(args.out) / f"{name}.{suffix}"
            pictures.save(draw(rows), path)
            print(path)


if __name__ == "__main__":
    one_line_errors(main)()
