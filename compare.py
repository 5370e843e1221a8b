"""Lay the evaluated curves of any runs over each other, offline: python compare.py [RUN ...]

Prints one table and draws one figure of every curve that eval.py has measured on the same targets.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from conf.errors import one_line_errors
from report import gain
from studies import pictures
from studies.pictures import OKABE_ITO

Curve = list[dict]  # one row for each length, as eval.py writes them
DASHES = ["-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (5, 1, 1, 1, 1, 1))]


def read(path: Path) -> Curve:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [{**row, "age": path.stat().st_mtime} for row in rows]
    except (OSError, ValueError):
        raise ValueError(f"{path}: not a curve that eval.py wrote: delete it and measure again") from None


def select(curves: list[Curve], targets: str) -> list[Curve]:
    """Those measured on these targets, of each run and label the one that reaches furthest; the controls first.

    A run that was trained on, or anew, since some of its curves were measured keeps those of its newest weights only.
    """
    curves = [c for c in curves if c[0]["targets"] == targets]
    weights = {c[0]["run"]: c[0]["weights"] for c in sorted(curves, key=lambda c: c[0]["age"])}
    chosen: dict[tuple, Curve] = {}
    for c in sorted(curves, key=lambda c: (c[0]["ctx"], c[0]["age"])):
        if c[0]["weights"] == weights[c[0]["run"]]:
            chosen[c[0]["run"], c[0]["label"]] = c
    order = {"none": 0, "window": 1}
    return sorted(chosen.values(), key=lambda c: (c[0]["run"], order.get(c[0]["label"], 2), c[0]["label"]))


def draw(curves: list[Curve], path: Path, title: str, only: list[str] | None = None) -> None:
    """Bits per byte and perplexity against context length, each line labelled at its end.

    The bands are 95 % intervals of each curve's difference from its run's window control. only: labels to show.
    """
    controls = {c[0]["run"]: {row["n"]: row for row in c} for c in curves if c[0]["label"] == "window"}
    curves = [c for c in curves if only is None or c[0]["label"] in only]
    runs = sorted({c[0]["run"] for c in curves})
    labels = list(dict.fromkeys(c[0]["label"] for c in curves if c[0]["label"] != "window"))
    fig, ax = plt.subplots(figsize=(9, 5.2), dpi=150)
    ends = []
    for curve in curves:
        first, control = curve[0], controls.get(curve[0]["run"], {})
        by_run = len(runs) > 1
        color = OKABE_ITO[(runs.index(first["run"]) if by_run else labels.index(first["label"])) % 8] \
            if by_run or first["label"] != "window" else pictures.CONTROL  # fmt: skip
        style = (
            (0, (2, 1.5)) if first["label"] == "window" else DASHES[labels.index(first["label"]) % 6 if by_run else 0]
        )
        bits = np.array([row["bits_per_byte"] for row in curve])
        # The interval of the difference from the run's own control: documents differ more than methods do, and that
        # part is common to all curves.
        gains = np.array([gain(row, control.get(row["n"], row)) for row in curve]) * bits[:, None]
        gains /= np.array([row["loss"] for row in curve])[:, None]
        low, high = bits + gains[:, 0] - gains[:, 2], bits + gains[:, 0] - gains[:, 1]
        ns = [row["n"] for row in curve]
        ax.plot(ns, bits, color=color, linestyle=style, marker="o", markersize=3, linewidth=1.6)
        ax.fill_between(ns, low, high, color=color, alpha=0.15, linewidth=0)
        text = "window control" if first["label"] == "window" else first["label"]
        text = "no scaling" if text == "none" and not by_run else text
        several = len({c[0]["label"] for c in curves}) > 1
        ends.append((bits[-1], (f"{first['run']}, {text}" if several else first["run"]) if by_run else text, color))
    marks = {c[0]["train_ctx"]: "trained at" for c in curves}
    reached = {c[0].get("extended_ctx", c[0]["train_ctx"]) for c in curves}
    marks |= {n: "extended to" for n in reached if n not in marks}
    for L, what in sorted(marks.items()):
        pictures.mark(ax, L, f"{what} {L}")
    pictures.lengths_axis(ax, sorted({row["n"] for c in curves for row in c}))
    ax.set_xlabel("context: tokens given, n")
    ax.set_ylabel("bits per byte of the same targets")
    # ln(perplexity) is bits/byte times a constant of the target set, so the second axis is exact
    nats = np.log(2) * curves[0][0]["bytes"] / curves[0][0]["tokens"]
    right = ax.secondary_yaxis("right", functions=(lambda b: b * nats, lambda p: p / nats))
    low, high = (y * nats for y in ax.get_ylim())
    ticks = [
        p
        for p in (1, 2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 70, 100, 200, 500, 1e3, 2e3, 5e3, 1e4)
        if low <= np.log(p) <= high
    ]
    right.set_yticks(np.log(ticks), [f"{p:g}" for p in ticks])
    right.tick_params(labelsize=8, pad=1, direction="in", colors="#666666")
    ax.annotate("perplexity", (1, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
                   ha="right", color="#666666", fontsize=9)  # fmt: skip
    pictures.end_labels(ax, ends)
    ax.set_title(f"{title}\nbands: 95 % of the difference from the window control", fontsize=10, loc="left")
    pictures.save(fig, path)


def print_gains(shown: list[Curve], chosen: list[Curve], ns: list[int]) -> None:
    """Each curve's gain over its run's window control past L, with its interval; the best at the shortest n first."""
    controls = {c[0]["run"]: {row["n"]: row for row in c} for c in chosen if c[0]["label"] == "window"}
    lines = []
    for c in shown:
        control = controls.get(c[0]["run"], {})
        gains = {row["n"]: gain(row, control[row["n"]]) for row in c if row["n"] in control}
        cells = [f"{gains[n][0]:+.3f} [{gains[n][1]:+.3f}, {gains[n][2]:+.3f}]" if n in gains else "" for n in ns]
        lines.append((-gains[ns[0]][0] if ns and ns[0] in gains else 0, f"{c[0]['run']}  {c[0]['label']}", cells))
    wide = max(len(name) for _, name, _ in lines) + 2
    print("gain over the window control, nats/token [95 %]\n" + " " * wide + "".join(f"{n:>26}" for n in ns))
    for _, name, cells in sorted(lines):
        print(f"{name:<{wide}}" + "".join(f"{cell:>26}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="*", help="names of runs; all of them if none is named")
    parser.add_argument("--only", help="labels to keep, such as none,window; all of them otherwise")
    parser.add_argument("--gain", action="store_true", help="also each curve's gain over its window control")
    parser.add_argument("--runs", default="runs", help="the folder of runs")
    parser.add_argument("--out", default="compare.png", help="the figure, in the folder of runs unless it has a /")
    args = parser.parse_args()
    for name in args.run:
        if not (Path(args.runs) / name).is_dir():
            raise ValueError(f"{name}: no such run in {args.runs}/")
        if not list(Path(args.runs, name, "eval").glob("*.jsonl")):
            raise ValueError(f"{name}: has not been evaluated yet: python eval.py run={name}")
    files = [f for f in Path(args.runs).glob("*/eval/*.jsonl") if not args.run or f.parent.parent.name in args.run]
    if not files:
        raise ValueError(f"no evaluated curve in {args.runs}/: first: python eval.py ctx=8192 scaling=ntk")
    curves = [read(f) for f in files]
    # The targets that most runs share, and of those the ones with the most curves
    shared = Counter(t for t, _ in {(c[0]["targets"], c[0]["run"]) for c in curves})
    counts = Counter(c[0]["targets"] for c in curves)
    targets = max(counts, key=lambda t: (shared[t], counts[t]))
    chosen = select(curves, targets)
    labels = sorted({c[0]["label"] for c in chosen})
    only = args.only.split(",") if args.only else labels
    if unknown := [k for k in only if k not in labels]:
        raise ValueError(f"--only {args.only}: no curve is labelled {unknown[0]}; there are {', '.join(labels)}")
    shown = [c for c in chosen if c[0]["label"] in only]
    first = chosen[0][0]
    print(f"bits/byte of the last {first['score']} tokens of {first['documents']} held-out documents, given n tokens")
    wide = max(len(f"{c[0]['run']}  {c[0]['label']}") for c in shown) + 2
    ns = sorted({row["n"] for c in shown for row in c})
    print(" " * wide + f"{'L':>6}" + "".join(f"{n:>8}" for n in ns))
    for c in shown:
        by_n = {row["n"]: f"{row['bits_per_byte']:.3f}" for row in c}
        name = f"{c[0]['run']}  {c[0]['label']}"
        print(f"{name:<{wide}}{c[0]['train_ctx']:>6}" + "".join(f"{by_n.get(n, ''):>8}" for n in ns))
    if args.gain:
        print_gains([c for c in chosen if c[0]["label"] in only], chosen, [n for n in ns if n > first["train_ctx"]])
    if left := len(curves) - counts[targets]:
        print(f"left out: {left} curves on other targets (another ctx, score or corpus), which do not compare")
    out = Path(args.out) if "/" in args.out else Path(args.runs) / args.out
    draw(chosen, out, "Loss against context length, on the same targets", only)
    print(f"figure: {out}")


if __name__ == "__main__":
    one_line_errors(main)()
