"""The output of eval.py: the table of an evaluation, and sentences about the gain, the tax and the headroom."""

import math

from torch import Tensor

from measure.curves import Curve, Row
from measure.statistics import bootstrap, difference, gain

# Below these gains, in nats per token, a run hardly uses distant context: twice the noise between our runs, and a small
# difference between a passage and its repetition
SMALL_GAIN, SMALL_COPY = 0.02, 0.1


def print_curves(none: Curve, window: Curve, requested: Curve) -> None:
    """Print the table of one evaluation: no scaling, the window control and the requested method at each length.

    Below it the gain at the longest length, and the tax at the longest length within L. All curves have the same
    lengths.
    """
    L, extended = none.first.train_ctx, none.first.extended_ctx
    shown = {"none": none, "window": window, requested.label: requested}
    names, units = "".join(f"{name[:16]:>17}" for name in shown), f"{'ppl  bits/byte':>17}" * len(shown)
    print(f"\n{'':13}{names}{requested.label[:16] + ', 95 %':>23}{'gain over window, 95 %':>27}")
    print(f"{'n':>7}{'n/L':>6}{units}{'factor':>8}{'ppl':>15}{'nats/token':>27}")
    for i, row in enumerate(requested.rows):
        cells = "".join(f"{c.rows[i].ppl:>10.2f}{c.rows[i].bits_per_byte:>7.3f}" for c in shown.values())
        interval = f"{math.exp(row.low):.1f} .. {math.exp(row.high):.1f}"
        mean, low, high = gain(row, window.rows[i])
        gained = f"{mean:>+9.3f} [{low:+.3f}, {high:+.3f}]"
        print(f"{row.n:>7}{row.n / L:>6.3g}{cells}{row.factor:>8.3g}{interval:>15}{gained}")
    if requested.rows[-1].n > extended and requested.label != "window":
        print("\n" + verdict(requested.rows[-1], window.rows[-1]))
    inside = [i for i, row in enumerate(requested.rows) if row.n <= L]
    if inside and requested.label not in ("none", "window"):
        print(tax(requested.rows[inside[-1]], none.rows[inside[-1]]))


def verdict(row: Row, window: Row) -> str:
    """A sentence: the gain of a method at one length, and whether its interval excludes 0."""
    mean, low, high = gain(row, window)
    comparison = "better than" if low > 0 else "worse than" if high < 0 else "no different from"
    return (
        f"gain over the window control at n={row.n} ({row.n / row.train_ctx:g}x): {mean:+.3f} nats/token "
        f"[{low:+.3f}, {high:+.3f}]: {comparison} seeing only {window.window} tokens at a time"
    )


def tax(row: Row, none: Row) -> str:
    """A line: the increase of the loss at a length within the trained context. row: the method; none: no scaling."""
    mean, low, high = difference(row, none)
    price = f"{mean:+.3f} nats/token [{low:+.3f}, {high:+.3f}]" if mean else "0, nothing is changed there"
    return f"tax inside the trained context (n={row.n}, factor {row.factor:g}): {price}"


def headroom(none: Curve, copy_gain: Tensor) -> str:
    """A line: how much this run gains from distant context within L, with a note if this is little.

    none: the curve without scaling, for the loss at L / 2 and at L. copy_gain: nats [documents, tokens], from
    Evaluation.copy_gain.
    """
    L, rows = none.first.train_ctx, none.by_length()
    n = copy_gain.numel()
    per_document = copy_gain.sum(dim=1).numpy()
    copy, (copy_low, copy_high) = per_document.sum() / n, bootstrap(per_document, n)
    line = f"headroom: a passage repeated within L costs {copy:.2f} nats/token less [{copy_low:.2f}, {copy_high:.2f}]"
    if L not in rows or L // 2 not in rows:
        return line
    mean, low, high = difference(rows[L // 2], rows[L])
    line += f"; the farther half of L saves {mean:+.3f} [{low:+.3f}, {high:+.3f}]"
    if mean < SMALL_GAIN or low <= 0 or copy < SMALL_COPY:
        line += "\n  that is little: this run can show which methods break past L, but not which ones use context there"
    return line
