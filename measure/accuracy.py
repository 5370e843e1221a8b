"""Tasks with an answer: accuracy against context length, and the effective context of each method."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from measure.curves import Curve, Row
from measure.statistics import bootstrap
from measure.tasks import Task

NO_LENGTH = 0  # the effective context of a method that is below the threshold at the shortest length


def losses_and_hits(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each target, nats, and 1 where it has the largest logit, else 0: float32 [B, S, 2].

    logits: [B, S, V]. targets: int64 [B, S].
    """
    nats = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return torch.stack((nats, (logits.argmax(-1) == targets).float()), dim=-1)


def print_curves(task: Task, *curves: Curve) -> None:
    """Print the accuracies of one evaluation: no scaling, the window control and the requested method."""
    print_accuracy(curves, task.threshold, task.chance)


def print_accuracy(curves: Sequence[Curve], threshold: float, chance: float = 0.0) -> None:
    """Print the accuracy of each curve at each length, then by distance, and the effective contexts.

    curves: on the same texts; of several runs or several methods. threshold: the accuracy that counts as solved.
    """
    several_runs = len({c.run for c in curves}) > 1
    names = {id(c): f"{c.run} {c.label}" if several_runs else c.label for c in curves}
    ns, L = sorted({row.n for c in curves for row in c.overall}), curves[0].first.train_ctx
    width = max(len(name) for name in names.values()) + 2
    by_chance = f"chance {100 * chance:.0f} %, " if chance else ""
    print(f"\naccuracy of the answer in % [95 %], all distances together; {by_chance}L = {L}")
    print(" " * width + "".join(f"{f'n={n}':>16}" for n in ns))
    for c in curves:
        rows = c.by_length()
        print(f"{names[id(c)]:<{width}}" + "".join(f"{_cell(rows[n]) if n in rows else '':>16}" for n in ns))
    for n in [n for n in ns if n > L] or ns[-1:]:
        distances = sorted({row.distance for c in curves for row in c.rows if row.n == n and row.distance})
        print(f"\nn={n}, by distance of the answer, tokens\n" + " " * width + "".join(f"{d:>8}" for d in distances))
        for c in curves:
            rows_of = {row.distance: row for row in c.rows if row.n == n}
            cells = [f"{100 * (rows_of[d].accuracy or 0):.0f}" if d in rows_of else "" for d in distances]
            print(f"{names[id(c)]:<{width}}" + "".join(f"{cell:>8}" for cell in cells))
    print(
        f"\neffective context: the longest n up to which the accuracy is at least {100 * threshold:g} % at every length"
    )
    for c in curves:
        n, low, high = effective_context(c, threshold)
        ns = [row.n for row in c.overall]
        print(f"{names[id(c)]:<{width}}{describe_context(n, ns):>10} [{describe_context(low, ns)}, "
              f"{describe_context(high, ns)}]")  # fmt: skip


def _cell(row: Row) -> str:
    low, high = bootstrap(np.array(row.hits))
    return f"{100 * np.mean(row.hits):.0f} [{100 * low:.0f}, {100 * high:.0f}]"


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


def draw_curves(curves: Sequence[Curve], path: Path, title: str, task: Task) -> None:
    """The figure of one evaluation."""
    draw_accuracy(curves, path, f"{title}, task={task.label}", task.threshold, task.chance)


def draw_accuracy(curves: Sequence[Curve], path: Path, title: str, threshold: float, chance: float = 0.0) -> None:
    """Accuracy against context length, a line with its 95 % band for each curve, labelled at its end."""
    import matplotlib.pyplot as plt

    from measure import plots

    fig, ax = plt.subplots(figsize=(9, 5.2))
    ends = []
    for curve in curves:
        style, text = plots.curve_style(curve, curves)
        ns, values = [row.n for row in curve.overall], [100 * (row.accuracy or 0) for row in curve.overall]
        low, high = 100 * np.array([bootstrap(np.array(row.hits)) for row in curve.overall]).T
        ax.plot(ns, values, **style)
        ax.fill_between(ns, low, high, color=style["color"], alpha=0.12, linewidth=0)
        ends.append((ns[-1], values[-1], text, style))
    for i, (n, text) in enumerate(sorted(plots.context_marks(curves).items())):
        plots.mark(ax, n, text, i)
    for y in (threshold, *((chance,) if chance else ())):
        ax.axhline(100 * y, color="#999999", linewidth=1, linestyle=(0, (1, 2)))
    plots.lengths_axis(ax, sorted({row.n for c in curves for row in c.overall}))
    ax.set(xlabel="context length n, tokens", ylabel="accuracy of the answer, %", ylim=(-2, 102))
    plots.end_labels(ax, ends)
    dotted = "threshold of the effective context" + (" and chance" if chance else "")
    ax.set_title(f"{title}\nbands: 95 %; dotted: {dotted}")
    plots.save(fig, path)
