"""What eval.py prints: the table of an evaluation, and sentences about the last length."""

import math

from torch import Tensor

from measure.curves import Curve, Row
from measure.statistics import bootstrap, difference, gain

# Below these, in nats per token, far context has little to give: two times the noise of our runs, and a copy that is
# hardly noticed
SMALL_GAIN, SMALL_COPY = 0.02, 0.1


def print_curves(none: Curve, window: Curve, requested: Curve) -> None:
    """The table of one evaluation, and what it says about the requested method."""
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
    """Whether a method beats the window control at this length."""
    mean, low, high = gain(row, window)
    comparison = "better than" if low > 0 else "worse than" if high < 0 else "no different from"
    return (
        f"gain over the window control at n={row.n} ({row.n / row.train_ctx:g}x): {mean:+.3f} nats/token "
        f"[{low:+.3f}, {high:+.3f}]: {comparison} seeing only {window.window} tokens at a time"
    )


def tax(row: Row, none: Row) -> str:
    """What a method costs inside the trained context, where nothing had to change."""
    mean, low, high = difference(row, none)
    price = f"{mean:+.3f} nats/token [{low:+.3f}, {high:+.3f}]" if mean else "0, nothing is changed there"
    return f"tax inside the trained context (n={row.n}, factor {row.factor:g}): {price}"


def headroom(none: Curve, copy_gain: Tensor) -> str:
    """How much this run can gain from far context at all. copy_gain: of Evaluation.copy_gain, [documents, tokens]."""
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
        line += "\n  that is little: this run can show what breaks past L, not who uses the context there"
    return line
