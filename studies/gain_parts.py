"""What gains and differences of the study consist of: tax and reward, headroom, far answers, chance, an equal RoPE."""

import math
from collections.abc import Sequence

import numpy as np

from measure.intervals import Estimate, estimate, half_width, mean_interval, ratio_interval
from studies.plan import SHORTER
from studies.rows import BAR, Rows, Seeds, difference

CATEGORIES = ("none", "< L / 4", "< L", "< n", ">= n")  # of targets, by the distance to their antecedent

# ---- tax and reward ----


def category(group: str, L: int, n: int) -> str:
    """Of a group of measure/breakdowns.py, such as `< 64`, in an evaluation at length n."""
    sign, _, edge = group.partition(" ")
    if sign in ("none", ">="):
        return ">= n" if edge else "none"
    return next((name for name, end in (("< L / 4", L / 4), ("< L", L), ("< n", n)) if int(edge) <= end), ">= n")


def gains_of_groups(rows: Rows, run: str, label: str, n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Group of targets -> the gain of all its targets, nats, and their number: both [seeds, documents].

    Of the seeds whose losses are known by group, of the same windows for both; empty if there are none.
    """
    bars, methods, found = rows.find(run, BAR, n), rows.find(run, label, n), {}
    seeds = [(bars[seed], methods[seed]) for seed in sorted(bars.keys() & methods.keys())]
    known = [(a, b) for a, b in seeds if a.groups and b.groups and a.scored_windows == b.scored_windows]
    pairs = [(bar.groups, method.groups) for bar, method in known]
    for group in pairs[0][1] if pairs else ():
        gains = np.array([np.subtract(bar[group][0], method[group][0]) for bar, method in pairs])
        found[group] = gains, np.array([method[group][1] for _, method in pairs])
    return found


def part_of_gain(rows: Rows, run: str, label: str, n: int, reward: bool) -> np.ndarray:
    """The part of a gain from targets with an antecedent between L and n back (the reward), or all others (the tax).

    Nats per token of all targets [seeds, documents]: the two add up to the gain.
    """
    groups = gains_of_groups(rows, run, label, n)
    chosen = [nats for name, (nats, _) in groups.items() if (category(name, rows.trained_ctx, n) == "< n") == reward]
    return sum(chosen, np.zeros(1)) / sum(counts for _, counts in groups.values()) if groups else np.array([])


def fine_tuned(rows: Rows, run: str, n: int) -> Seeds:
    """The better run that was fine-tuned at n tokens, directly or with YaRN, from the same seeds of this one."""
    prefix = "" if run == "rope" else f"{run}-"
    found = (rows.find(f"{prefix}{method}-{n // rows.trained_ctx}L", "none", n) for method in ("none", "yarn"))
    return min(filter(None, found), key=lambda seeds: difference(seeds, rows.find(run, BAR, n)).mean(), default={})


def headroom(rows: Rows, run: str, n: int) -> np.ndarray:
    """How much lower the loss of the better fine-tuned run is than the better control's, [seeds, documents]."""
    return difference(rows.find(run, BAR, n), fine_tuned(rows, run, n))


def share_of_headroom(rows: Rows, run: str, label: str, n: int) -> tuple[float, float, float] | None:
    """The gain of a run with this method in the headroom, with its interval, on the seeds that have both.

    None without seeds, or where the interval of the headroom is not above 0.
    """
    three = rows.find(run, BAR, n), rows.find(run, label, n), fine_tuned(rows, run, n)
    shared = set.intersection(*map(set, three))
    bar, method, tuned = ({seed: seeds[seed] for seed in shared} for seeds in three)
    gains, most = difference(bar, method), difference(bar, tuned)
    if not shared or mean_interval(most)[1] <= 0:
        return None
    return ratio_interval(gains, most)


def beyond_window(rows: Rows, run: str, label: str, n: int) -> np.ndarray:
    """Of a task: by how much the share of right tokens at the longest distance exceeds the window control's, which does
    not see that far, [seeds, examples].
    """
    found, windows = (rows.find(run, at, n) for at in (label, "window"))
    pairs = [(found[seed].answers, windows[seed].answers) for seed in found]
    return np.array([np.subtract(a[max(a, key=int)], b[max(b, key=int)]) for a, b in pairs])


# ---- differences between runs ----


def chance(losses: np.ndarray, trainings: int) -> float:
    """What 95 % of the differences stay below, of the mean of so many trainings with that of so many others, nats.

    losses: of trainings that differ only in the seed.
    """
    return float(half_width(2 * losses.var(ddof=1) / trainings, len(losses) - 1))


def growth(sizes: Sequence[float], gains: Sequence[np.ndarray]) -> Estimate:
    """How much a gain grows when the parameters are tenfold: the slope of the least-squares line, nats per token.

    gains: of each size, of independent trainings on the same documents, [seeds, documents].
    """
    x = np.log10(sizes)
    *others, last = (weight * gain for weight, gain in zip((x - x.mean()) / x.var() / len(x), gains, strict=True))
    return estimate(last, *(-each for each in others))


def rise_of_rope(rows: Rows, run: str, n: int) -> np.ndarray:
    """How much the loss of a rope without scaling that has this run's loss at L rises to n tokens [seeds, documents].

    Interpolated between rope and the runs of SHORTER; that of rope for lower losses, and empty for higher ones.
    """
    L, ropes = rows.trained_ctx, [name for name in ("rope", *SHORTER) if rows.find(name, "none", n)]
    loss, *losses = (rows.losses(name, "none", L).mean() for name in (run, *ropes))
    known = sorted(zip(losses, ropes, strict=True))
    if not known or loss > known[-1][0]:
        return np.array([])
    rises = [difference(rows.find(run, "none", n), rows.find(run, "none", L)) for _, run in known]
    place = float(np.interp(loss, [x for x, _ in known], range(len(known))))
    low, high, share = rises[int(place)], rises[math.ceil(place)], place % 1
    seeds = min(len(low), len(high))
    return (1 - share) * low[:seeds] + share * high[:seeds]
