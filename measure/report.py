"""How curves are shown: tables, sentences and figures, of losses or of accuracies. eval.py and compare.py print them.

`Losses` and `Accuracy` have the same methods: print_evaluation for the curves of one evaluation, print_comparison for
those of any runs on the same texts, and draw.
"""

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measure import plots
from measure.curves import Curve, Row
from measure.gain import ACCURACY, BITS, GAIN, Value, by_group, controls, gain, lines_of
from measure.intervals import interval_text

WIDTH = 80  # columns of what is printed
OWN = 0.85  # of a model's own accuracy at the shortest length (NoLiMa, Modarressi et al. 2025, arXiv 2502.05167)
NO_LENGTH = 0  # the effective context of a method that is below the threshold at the shortest length


def print_table(lines: dict[str, dict[Any, str]], corner: str = "") -> None:
    """A line for each name, with its cells by their heads: texts in their order, then numbers in theirs.

    corner: the head of the names. Columns that do not fit are printed below the others.
    """
    found = dict.fromkeys(head for cells in lines.values() for head in cells)
    first, columns = max(map(len, (corner, *lines))), []
    for head in sorted(found, key=lambda head: head if isinstance(head, int) else 0):
        cells = [str(head), *(cells.get(head, "") for cells in lines.values())]
        sizes = [len(cell) for cell in cells]
        columns.append([" " * (2 + max(sizes) - size) + cell for cell, size in zip(cells, sizes, strict=True)])
    names = [f"{name:<{first}}" for name in (corner, *lines)]
    while columns:
        ends = itertools.accumulate(len(head) for head, *_ in columns)
        count = max(1, sum(first + end <= WIDTH for end in ends))
        for parts in zip(names, *columns[:count], strict=True):
            print("".join(parts).rstrip())
        columns = columns[count:]


def print_wrapped(text: str) -> None:
    print(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def ppl_text(ppl: float) -> str:
    return f"{ppl:.2f}" if ppl < 1000 else f"{ppl:.0f}" if ppl < 1e6 else f"{ppl:.0e}"


def values_of(quantity: str, shown: Sequence[Curve], curves: Sequence[Curve] = ()) -> dict[str, dict[int, Value]]:
    """`GROUP  METHOD` -> n -> a quantity of measure/gain.py. curves: with the controls of the runs, if not shown."""
    lines, keys = lines_of(curves or shown), by_group(shown)
    return {"  ".join(k): {n: at[quantity] for n, at in lines[k].items() if quantity in at} for k in keys}


def one_of_each(curves: Sequence[Curve]) -> list[Curve]:
    """A curve for each group and method: of one seed, at the lengths that all its seeds have."""
    return [Curve([rows[0] for rows in at.values()], named=group) for (group, _), at in by_group(curves).items()]


class Losses:
    """Tasks without right answers: matched and sliding."""

    def __init__(self, guess: float = math.inf):
        """guess: loss of guessing, nats per token; a model that is hardly better gets no verdict."""
        self.guess = guess

    def print_evaluation(self, curves: Sequence[Curve], requested: Curve) -> None:
        """Print the table of one evaluation: no scaling, the window control and the requested method at each length.

        Below it whether the method is better than the controls at the longest length. curves: these, with the same
        lengths; the requested one may be a control.
        """
        none, window = curves[:2]
        L, longest, label = none.first.train_ctx, none.first.longest_trained_ctx, requested.label
        (bars,) = controls([none, window]).values()  # of one run: n -> the row of the better control
        head = label if len(label) <= 8 else "method"
        truncated = [n for n, bar in bars.items() if bar.label != "window"]
        lines = {}
        for row in requested.rows:
            cells = {"n/L": f"{row.n / L:.2g}" if row.n < L else f"{row.n / L:.4g}"}
            same_n = {"none": none.by_length()[row.n], "window": window.by_length()[row.n], head: row}
            cells |= {name: ppl_text(x.ppl) for name, x in same_n.items()}
            cells |= {"bits": f"{row.bits_per_byte:.3f}", "factor": f"{row.factor:.4g}"}
            mark = (" t" if row.n in truncated else "  ") if truncated else ""
            lines[f"{row.n:>4}"] = cells | {"gain [95 %]": interval_text(*gain(row, bars[row.n])) + mark}
        print()
        print_wrapped(f"perplexity at n tokens; bits per byte of text, factor and gain of {label}")
        print_table(lines, "   n")
        print("gain: nats per token (1 nat is 1.44 bits) below the loss of the better control")
        truncation = f"; t: truncation is given only {longest}" if truncated else ""
        print_wrapped(f"control: window sees only {longest} tokens at a time{truncation}")
        if len({len(row.scored_windows) for row in none.rows}) > 1:
            print("at long n fewer windows are scored, and compared with the same ones at L")
        last = requested.rows[-1]
        if last.n > longest and label != "window":
            lowest = min(row.loss for row in none.rows)
            hardly = f"it hardly learned: its lowest loss is {lowest:.2f}, that of a guess {self.guess:.2f}"
            verdict = f"no verdict: {hardly}" if lowest > 0.85 * self.guess else self.verdict(last, bars[last.n])
            print_wrapped(verdict)

    def verdict(self, row: Row, bar: Row) -> str:
        """A sentence: whether the interval of a method's gain at one length excludes 0. bar: the better control."""
        _, low, high = gain(row, bar)
        if math.isnan(low):
            return "no verdict: one document has no interval"
        outcome = "better than" if low > 0 else "worse than" if high < 0 else "no different from"
        truncated = bar.label != "window"
        control = f"being given only {bar.n} tokens" if truncated else f"seeing only {bar.window} tokens at a time"
        return f"at n={row.n} {row.label} is {outcome} {control}"

    def print_comparison(self, shown: Sequence[Curve]) -> None:
        """Print bits per byte on the same targets: a line for each group and method, columns from L on.

        It is the mean over the seeds, which a column names, at the lengths that all of them have. The figure also has
        the lengths below L.
        """
        first, contexts = shown[0].first, sorted({c.first.train_ctx for c in shown})
        scored = f"the tokens that task={first.task} scores\nin {first.documents} held-out documents"
        print(f"bits/byte of {scored}, given n tokens; trained at L = {', '.join(map(str, contexts))}")
        bits, lines = values_of(BITS, shown), {}
        for key, rows in by_group(shown).items():
            seeds = ",".join(str(row.seed) for row in next(iter(rows.values())))
            cells = {n: f"{x[0]:.3f}" for n, x in bits["  ".join(key)].items() if n >= contexts[0]}
            lines["  ".join(key)] = {"seeds": seeds} | cells
        print_table(lines)

    def print_gains(self, shown: Sequence[Curve], curves: Sequence[Curve]) -> None:
        """Print the gain over the better control for n > L of each group and method.

        shown: the curves to print. curves: these and the controls of their runs (none and window).
        """
        gains, L = values_of(GAIN, shown, curves), shown[0].first.train_ctx
        print("\ngain over the better control (window, truncation), nats/token [95 %]")
        print_table({k: {n: interval_text(*x[:3]) for n, x in at.items() if n > L} for k, at in gains.items()})

    def draw(self, shown: Sequence[Curve], path: Path, title: str, curves: Sequence[Curve] = ()) -> None:
        """Bits per byte and perplexity against context length. curves: with the controls of the runs, if not shown.

        A line is the mean over the seeds of a group. Bands are 95 % intervals, over seeds and documents, of its
        difference from its better control. The interval of the curve itself would be much wider: documents differ more
        than methods do, and these differences are common to all curves.
        """
        nats = math.log(2) * shown[0].first.bytes / shown[0].first.tokens
        bits, gains = values_of(BITS, shown), values_of(GAIN, shown, curves)

        def band(curve: Curve) -> np.ndarray:
            key, ns = f"{curve.group}  {curve.label}", [row.n for row in curve.rows]
            mean, low, high = np.array([gains[key].get(n, (0, 0, 0))[:3] for n in ns]).T / nats
            line = np.array([bits[key].get(n, (0,))[0] for n in ns])
            return np.stack((line, line + mean - high, line + mean - low))

        title += "\nbands: 95 % of the difference from the better control, over seeds and documents"
        fig = plots.draw_curves(one_of_each(shown), band, title, "bits per byte (same targets at every n)", nats=nats)
        plots.save(fig, path)


class Accuracy:
    """Tasks with an answer, which is right or wrong."""

    def __init__(self, threshold: float, chance: float = 0.0):
        """threshold: the accuracy that counts as solved. chance: accuracy of guessing."""
        self.threshold, self.chance = threshold, chance

    def print_evaluation(self, curves: Sequence[Curve], requested: Curve) -> None:
        """Print all curves of one evaluation. requested: one of them."""
        self.print_comparison(curves)

    def print_comparison(self, shown: Sequence[Curve]) -> None:
        """Print the accuracy of each curve at each length, then by distance, and the effective contexts."""
        runs = {f"{c.run}  {c.label}": c for c in shown}
        ns, L = sorted({row.n for c in shown for row in c.overall}), shown[0].first.train_ctx
        by_chance = f"chance {100 * self.chance:.0f} %, " if self.chance else ""
        print(f"\naccuracy of the answer in % [95 %], all distances together, at n tokens; {by_chance}L = {L}")
        values = values_of(ACCURACY, shown)
        print_table({k: {n: interval_text(*x[:3], ".0f") for n, x in at.items()} for k, at in values.items()})
        for n in [n for n in ns if n > L] or ns[-1:]:
            print(f"\nn={n}, by distance of the answer, tokens")
            by_distance = {name: c.answers(n) for name, c in runs.items()}
            print_table({k: {d: f"{100 * np.mean(x):.0f}" for d, x in at.items()} for k, at in by_distance.items()})
        print("\nwhole answers right, %")
        print_table({k: {n: f"{whole_answers(c.answers(n)):.0f}" for n in c.by_length()} for k, c in runs.items()})
        print("\neffective context [95 %]: the longest n up to which the accuracy is at every length at least")
        lines = {}
        for name, c in runs.items():
            ns = [row.n for row in c.overall]
            levels = {f"{100 * self.threshold:g} %": self.threshold}
            levels[f"{100 * OWN:g} % of the accuracy at {ns[0]}"] = OWN * (c.overall[0].accuracy or math.inf)
            found = {k: [describe_context(n, ns) for n in effective_context(c, x)] for k, x in levels.items()}
            lines[name] = {k: f"{n} [{low}, {high}]" for k, (n, low, high) in found.items()}
        print_table(lines)

    def draw(self, shown: Sequence[Curve], path: Path, title: str, curves: Sequence[Curve] = ()) -> None:
        """Accuracy against context length, with 95 % bands."""
        values = values_of(ACCURACY, shown)

        def percentages(curve: Curve) -> np.ndarray:
            return np.array([x[:3] for x in values[f"{curve.group}  {curve.label}"].values()]).T

        levels = [100 * y for y in (self.threshold, self.chance) if y]
        title += "\nbands: 95 %; dotted: threshold of the effective context" + (" and chance" if self.chance else "")
        plots.save(plots.draw_curves(one_of_each(shown), percentages, title, "accuracy of the answer, %", levels), path)


def whole_answers(answers: dict[str, list[float]]) -> float:
    """The share of answers with all tokens right, %, over all distances and examples."""
    return 100 * float(np.mean([np.equal(hits, 1) for hits in answers.values()]))


def describe_context(n: int, ns: Sequence[int]) -> str:
    """`512`, `>= 2048` at the longest evaluated length, `< 128` below the shortest."""
    return f"< {ns[0]}" if n == NO_LENGTH else f">= {n}" if n == ns[-1] else str(n)


def effective_context(curve: Curve, threshold: float, draws: int = 2000) -> tuple[int, int, int]:
    """(n, low, high): the largest evaluated n up to which the accuracy is at least `threshold`, with its 95 % interval.

    The interval is a bootstrap over examples; it takes evaluated lengths only. NO_LENGTH if there is no such n.
    """
    rows = curve.overall
    hits = np.array([row.hits for row in rows])  # [lengths, examples]
    picks = np.random.default_rng(0).integers(hits.shape[1], size=(draws, hits.shape[1]))
    means = np.concatenate((hits.mean(axis=1)[:, None], hits[:, picks].mean(axis=2)), axis=1)  # [lengths, 1 + draws]
    solved = np.cumprod(means >= threshold, axis=0).sum(axis=0)  # how many lengths from the shortest one on
    values = np.array([NO_LENGTH, *(row.n for row in rows)])[solved]
    low, high = np.percentile(values[1:], [2.5, 97.5], method="inverted_cdf")
    return int(values[0]), int(low), int(high)
