"""What compare.py prints: curves of several runs on the same targets, and their gains over the better control."""

from collections import Counter
from collections.abc import Sequence

from measure.curves import Curve, controls, select
from measure.statistics import gain


def select_shared(curves: Sequence[Curve], texts: str) -> list[Curve]:
    """The curves on these texts as `select` returns them, at each length on the targets that most rows have."""
    count = Counter((row.n, row.targets) for c in curves for row in c.rows if row.texts == texts)
    return select(curves, texts, {n: key for (n, key), _ in reversed(count.most_common())})


def print_comparison(curves: Sequence[Curve]) -> None:
    """Print bits per byte of curves on the same targets: a line for each curve, a column for each length.

    L is the context that the run was pre-trained at, in tokens.
    """
    first = curves[0].first
    print(
        f"bits/byte of the tokens that task={first.task} scores in {first.documents} held-out documents, given n tokens"
    )
    width = max(len(f"{c.run}  {c.label}") for c in curves) + 2
    ns = sorted({row.n for c in curves for row in c.rows})
    print(" " * width + f"{'L':>6}" + "".join(f"{n:>8}" for n in ns))
    for c in curves:
        cells = {row.n: f"{row.bits_per_byte:.3f}" for row in c.rows}
        print(f"{f'{c.run}  {c.label}':<{width}}{c.first.train_ctx:>6}" + "".join(f"{cells.get(n, ''):>8}" for n in ns))


def print_gains(shown: Sequence[Curve], curves: Sequence[Curve]) -> None:
    """Print the gain of each curve over its run's better control for n > L, sorted by the gain at the smallest such n.

    shown: the curves to print. curves: these and the controls of their runs (none and window).
    """
    bars = controls(curves)
    ns = sorted({row.n for c in shown for row in c.rows if row.n > curves[0].first.train_ctx})
    lines = []
    for c in shown:
        bar = bars.get(c.run, {})
        gains = {row.n: gain(row, bar[row.n]) for row in c.rows if row.n in bar}
        cells = [f"{gains[n][0]:+.3f} [{gains[n][1]:+.3f}, {gains[n][2]:+.3f}]" if n in gains else "" for n in ns]
        order = -gains[ns[0]][0] if ns and ns[0] in gains else 0.0  # by the gain at the shortest length
        lines.append((order, f"{c.run}  {c.label}", cells))
    width = max(len(name) for _, name, _ in lines) + 2
    print(
        "gain over the better control (window, truncation), nats/token [95 %]\n"
        + " " * width
        + "".join(f"{n:>26}" for n in ns)
    )
    for _, name, cells in sorted(lines):
        print(f"{name:<{width}}" + "".join(f"{cell:>26}" for cell in cells))


def print_left_out(curves: Sequence[Curve], texts: str) -> None:
    """Name the curves on other texts than these, a line for each run and texts. texts: the key `Row.texts`."""
    labels: dict[tuple, set[str]] = {}
    for curve in curves:
        for row in (row for row in curve.rows if row.texts != texts):
            labels.setdefault((row.run, row.task, row.documents, row.texts), set()).add(row.label)
    if labels:
        print("left out, because they are on other texts (another task, corpus or documents) and cannot be compared:")
    for (run, task, documents, _), names in sorted(labels.items()):
        print(f"  {run}: task={task}, {documents} documents or examples: {', '.join(sorted(names))}")
