"""The gain of a method: how much lower its loss is than that of the better control, for one run and over its seeds."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from measure.curves import AnyRow, Curve, Row, per_document_difference
from measure.intervals import mean_interval

# The quantities of `over_seeds`
PERPLEXITY, BITS, ACCURACY = "perplexity", "bits per byte", "accuracy, %"
GAIN = "gain over the better control, nats per token"

Value = Sequence[Any]  # mean, low and high of its 95 % interval, the value of each seed [seeds]
Line = dict[int, dict[str, Value]]  # n -> quantity -> its value


# ---- the two controls ----


def controls(curves: Collection[Curve]) -> dict[str, dict[int, Row]]:
    """run -> n -> the row of the better control at this length, the bar that a method has to beat.

    The two controls give the model as many tokens as it was trained on: `window` limits the attention of each query,
    truncation the text. Truncation is no scaling at the longest trained length, on the same targets.
    """
    nones = {c.run: c.by_length() for c in curves if c.label == "none"}
    windows = [c for c in curves if c.label == "window"]
    return {c.run: {row.n: better_controls([row], nones)[0] for row in c.overall} for c in windows}


def better_controls(windows: list[AnyRow], nones: Mapping[str, Mapping[int, AnyRow]]) -> list[AnyRow]:
    """The better control of several seeds at one length: the same control for all, by the mean of their losses.

    windows: the window control's row of each seed. nones: run -> n -> its row without scaling.
    """
    pairs = [(w, t) for w in windows if (t := nones.get(w.run, {}).get(w.longest_trained_ctx)) and comparable(w, t)]
    if len(pairs) == len(windows) and np.mean([per_document_difference(w, t).mean() for w, t in pairs]) > 0:
        return [t for _, t in pairs]
    return windows


def comparable(window: Row, truncated: Row) -> bool:
    """Whether truncation is a control of this window: it has targets of the same texts, and fewer tokens."""
    a, b = ((row.texts, row.targets_per_window) for row in (window, truncated))
    shared = {*window.scored_windows} & {*truncated.scored_windows}
    return a == b and bool(shared) and not window.hits and window.n > truncated.n


# ---- one run ----


def gain(row: Row, control: Row) -> tuple[float, float, float]:
    """(mean, low, high) of the control's loss minus this row's loss, nats per token. Positive if the method is better.

    control: of `controls`, at the same length. On the windows that both rows have.
    """
    return mean_interval(per_document_difference(control, row)[None])


# ---- one method with several seeds ----


def by_group(curves: Collection[Curve]) -> dict[tuple[str, str], dict[int, list[Row]]]:
    """(group, method) -> n -> the row of each seed, at the lengths that all seeds have."""
    seeds: dict[tuple[str, str], list[dict[int, Row]]] = defaultdict(list)
    for c in sorted(curves, key=lambda c: c.first.seed):
        seeds[c.group, c.label].append(c.by_length())
    shared = {key: sorted(set.intersection(*map(set, of_seeds))) for key, of_seeds in seeds.items()}
    return {key: {n: [rows[n] for rows in seeds[key]] for n in ns} for key, ns in shared.items() if ns}


def lines_of(curves: Collection[Curve]) -> dict[tuple[str, str], Line]:
    """(group, method) -> its line. curves: with the controls, if the gain is wanted."""
    windows, nones = ({c.run: c.by_length() for c in curves if c.label == label} for label in ("window", "none"))
    groups = by_group(curves).items()
    return {key: {n: over_seeds(rows, windows, nones) for n, rows in at.items()} for key, at in groups}


def over_seeds(rows: list[Row], windows: Mapping, nones: Mapping[str, Mapping[int, Row]]) -> dict[str, Value]:
    """quantity -> its value for one method at one length, as far as the rows have it.

    rows: one for each seed; with one, intervals are over documents. windows, nones: run -> n -> its row of the window
    control, and without scaling.
    """
    if all(row.hits for row in rows):
        hits = 100 * np.array([row.hits for row in rows])  # [seeds, examples]
        return {ACCURACY: (*np.clip(mean_interval(hits), 0, 100), hits.mean(axis=1))}
    losses = np.array([row.loss for row in rows])
    mean, low, high = losses.mean(), rows[0].low, rows[0].high
    if len(rows) > 1:
        common = sorted(set.intersection(*({*row.scored_windows} for row in rows)))
        unaligned, *ends = mean_interval(np.stack([row.document_losses(common) for row in rows]))
        low, high = (mean + end - unaligned for end in ends)
    found: dict[str, Value] = {PERPLEXITY: [np.exp(np.minimum(x, 700)) for x in (mean, low, high, losses)]}
    bits = rows[0].bits_per_byte / rows[0].loss if rows[0].loss else math.nan  # the same for all these losses
    if math.isfinite(bits):
        found[BITS] = [bits * x for x in (mean, low, high, losses)]
    if all(row.n in windows.get(row.run, ()) for row in rows):
        better = better_controls([windows[row.run][row.n] for row in rows], nones)
        gains = np.stack([per_document_difference(a, b) for a, b in zip(better, rows, strict=True)])
        found[GAIN] = (*mean_interval(gains), gains.mean(axis=1))  # of [seeds, documents]
    return found
