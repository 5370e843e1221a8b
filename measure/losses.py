"""How eval.py shows losses: the table and the figure, and sentences about the gain and the tax.

measure/accuracy.py has the same functions for tasks with an answer.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from measure.curves import Curve, Row, better_control
from measure.statistics import difference, gain
from measure.tasks import Task


def print_curves(task: Task, none: Curve, window: Curve, *others: Curve) -> None:
    """Print the table of one evaluation: no scaling, the window control and the requested method at each length.

    Below it the gain at the longest length, and the tax at the longest length within L. All curves have the same
    lengths.
    """
    requested = others[0] if others else none
    L, extended = none.first.train_ctx, none.first.extended_ctx
    shown = {"none": none, "window": window, requested.label: requested}
    bars = [better_control(row, none.by_length()) for row in window.rows]
    names, units = "".join(f"{name[:16]:>17}" for name in shown), f"{'ppl  bits/byte':>17}" * len(shown)
    print(f"\n{'':14}{names}{requested.label[:16] + ', 95 %':>23}{'gain over control, 95 %':>27}")
    print(f"{'n':>7}{'n/L':>7}{units}{'factor':>8}{'ppl':>15}{'nats/token':>27}")
    for i, (row, bar) in enumerate(zip(requested.rows, bars, strict=True)):
        cells = "".join(f"{c.rows[i].ppl:>10.2f}{c.rows[i].bits_per_byte:>7.3f}" for c in shown.values())
        interval = f"{math.exp(min(row.low, 700)):.1f} .. {math.exp(min(row.high, 700)):.1f}"
        mean, low, high = gain(row, bar)
        gained = f"{mean:>+9.3f} [{low:+.3f}, {high:+.3f}]{'' if bar.label == 'window' else ' t'}"
        print(f"{row.n:>7}{row.n / L:>7.2g}{cells}{row.factor:>8.3g}{interval:>15}{gained}")
    if any(bar.label != "window" for bar in bars):
        print(f"t: the better control is truncation: only the last {extended} tokens are given")
    if len({len(row.windows) for row in none.rows}) > 1:
        print("long lengths score fewer windows: their losses are those at L plus the difference on these windows")
    if requested.rows[-1].n > extended and requested.label != "window":
        lowest, guess = min(row.loss for row in none.rows), task.guess
        untrained = f"no verdict: the lowest loss is {lowest:.2f} nats/token, and that of a random guess {guess:.2f}"
        print("\n" + (untrained if lowest > 0.85 * guess else verdict(requested.rows[-1], bars[-1])))
    inside = [i for i, row in enumerate(requested.rows) if row.n <= L]
    if inside and requested.label not in ("none", "window"):
        print(tax(requested.rows[inside[-1]], none.rows[inside[-1]]))


def verdict(row: Row, bar: Row) -> str:
    """A sentence: the gain of a method at one length, and whether its interval excludes 0."""
    mean, low, high = gain(row, bar)
    comparison = "better than" if low > 0 else "worse than" if high < 0 else "no different from"
    truncated = bar.label != "window"
    control = f"being given only {bar.n} tokens" if truncated else f"seeing only {bar.window} tokens at a time"
    gained = f"{mean:+.3f} nats/token [{low:+.3f}, {high:+.3f}]"
    return f"gain over the better control at n={row.n} ({row.n / row.train_ctx:g}x): {gained}: {comparison} {control}"


def tax(row: Row, none: Row) -> str:
    """A line: the increase of the loss at a length within the trained context. row: the method; none: no scaling."""
    mean, low, high = difference(row, none)
    price = f"{mean:+.3f} nats/token [{low:+.3f}, {high:+.3f}]" if mean else "0, nothing is changed there"
    return f"tax inside the trained context (n={row.n}, factor {row.factor:g}): {price}"


def draw_curves(curves: Sequence[Curve], path: Path, title: str, task: Task) -> None:
    """The figure of one evaluation."""
    from measure import plots

    plots.draw_curves(curves, path, title)
