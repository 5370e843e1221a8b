"""Runs that differ only in their seed are a group: which runs do, and which of two groups has the lower loss."""

import itertools
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from conf.schema import RUN_CONTROL, TrainConfig, flatten
from measure.curves import Curve, Row
from measure.gain import by_group
from measure.intervals import LEVEL, Estimate, estimate_between, interval_text, q_values
from measure.report import print_table

FEWEST = 4  # seeds of each group: with fewer, a difference between groups has neither an interval nor a verdict
CHANCE = 0.7  # nats per token: 95 % of the differences past L between two trainings of one model are smaller
PARENT = ("init", "pretrained.run", "pretrained.weights")  # differ between fine-tunings of several seeds
Rows = Mapping[int, Sequence[Row]]  # n -> the row of each seed

# ---- which runs are a group ----


def group_names(configs: Mapping[str, TrainConfig]) -> dict[str, str]:
    """run -> the name of its group: that of the run with the lowest seed, without the seed: `rope` for rope-seed0.

    The runs of a group have the same settings, except seed, name and run control. So have the runs that fine-tuned ones
    started from. A second run with one seed, or of one parent, is no further seed but a group of its own. A group has
    the full name of its first run if another has the shorter one.
    """
    groups: dict[str, dict[int | str, str]] = defaultdict(dict)
    for run, cfg in sorted(configs.items(), key=lambda item: (item[1].seed, item[0])):
        key, seed = settings(cfg), cfg.seed
        if parent := configs.get(cfg.init or ""):
            key = {k: v for k, v in key.items() if k not in PARENT} | {"parent": settings(parent)}
            seed = cfg.pretrained["weights"]
        groups[run if seed in groups[repr(key)] else repr(key)][seed] = run
    names: dict[str, str] = {}
    for first, *others in (of_seeds.values() for of_seeds in groups.values()):
        short = re.sub(rf"-(s|seed){configs[first].seed}(?=-|$)", "", first)
        taken = short in {"", *names.values(), *configs} - {first, *others}
        names |= dict.fromkeys([first, *others], first if taken else short)
    return names


def settings(cfg: TrainConfig) -> dict:
    """Those that the runs of a group share."""
    return {k: v for k, v in flatten(asdict(cfg)).items() if k not in (*RUN_CONTROL, "seed")}


def command_for_seeds(configs: Sequence[TrainConfig]) -> str:
    """The command that trains the seeds that a group of runs with these settings lacks, as far as it is known."""
    used = {cfg.seed for cfg in configs}
    seeds = [str(seed) for seed in range(2 * FEWEST) if seed not in used][: FEWEST - len(configs)]
    typed = configs[0].typed if configs and not configs[0].init else None
    kept = ["..."] if typed is None else [x for x in typed if not x.startswith(("seed=", "name=", "fresh="))]
    return shlex.join(["python", "train.py", "-m", *kept, f"seed={','.join(seeds)}"])


# ---- which of two groups is better ----


def print_verdicts(
    curves: Sequence[Curve], names: Sequence[str], labels: Collection[str], configs: Mapping[str, TrainConfig]
) -> None:
    """Print, for each method, the difference of the loss of every other group to the first one at each n >= L.

    names: of the groups. labels: of the methods. configs: run -> settings, of all trained runs.
    """
    groups = by_group(curves)
    for name, label in itertools.product(dict.fromkeys(names[1:]), labels):
        a, b = (groups.get((group, label), {}) for group in (name, names[0]))
        shared = sorted(n for n in a.keys() & b.keys() if a[n][0].documents > 1)
        L = min((rows[0].longest_trained_ctx for at in (a, b) for rows in at.values()), default=0)
        ns = shared[max(0, sum(n <= L for n in shared) - 1) :]  # from the longest one within both trained contexts
        if not ns:
            continue
        pair = {name: {n: a[n] for n in ns}, names[0]: {n: b[n] for n in ns}}
        seeds = {group: len(at[ns[0]]) for group, at in pair.items()}
        of_seeds = f"{seeds[name]} and {seeds[names[0]]} seeds"
        method = "" if label == "none" else f", both with {label}"
        print(f"\nloss of {name} and of {names[0]}{method}, nats/token; {of_seeds}")
        if min(seeds.values()) >= FEWEST:
            print(f"verdict from {of_seeds}: {name} is {verdict(*pair.values(), L)}")
            continue
        lines = {n: {group: " ".join(f"{row.loss:.3f}" for row in at[n]) for group, at in pair.items()} for n in ns}
        print_table({f"{n:>6}": cells for n, cells in lines.items()})
        print(f"no verdict: {of_seeds} decide nothing, because two trainings of one model differ by chance,")
        print(f"past L = {L} by up to {CHANCE} nats/token. Missing are {FEWEST} seeds of each:")
        names_of = group_names(configs)
        for group in (group for group, S in seeds.items() if S < FEWEST):
            print(f"  {group}: {command_for_seeds([configs[run] for run, x in names_of.items() if x == group])}")


def verdict(a: Rows, b: Rows, L: int) -> str:
    """Print the differences of the losses, a - b, at each length, and return where a is better, worse or undecided.

    If those at the longest length up to L differ, the rises of the losses since then are compared instead of the losses.
    A difference counts if q < 0.05 over the lengths.
    """

    def difference(n: int, *since: int) -> Estimate:
        both = [[rows[m] for m in (n, *since)] for rows in (a, b)]
        windows = sorted(set.intersection(*({*row.scored_windows} for rows in both for at in rows for row in at)))
        losses = [[np.array([row.document_losses(windows) for row in at]) for at in rows] for rows in both]
        return estimate_between(*(at_n - sum(at_start) for at_n, *at_start in losses))

    start = min(a)
    low, high = difference(start).interval
    rise = start <= L and not low <= 0 <= high
    found = {n: difference(n, *[start] * (rise and n > start)) for n in a}
    q = q_values([min(1.0, 2 * min(x.p_above(0), x.p_below(0))) for x in found.values()])
    lines, outcomes = {}, defaultdict(list)
    for (n, x), q_of_n in zip(found.items(), q, strict=True):
        what = f"rise since {start}" if rise and n > start else "loss"
        lines[f"{n:>6}"] = {
            "of the": what,
            "difference [95 %]": interval_text(x.mean, *x.interval),
            "q": f"{q_of_n:.2g}",
        }
        outcome, more = "better" if x.mean < 0 else "worse", ""
        if q_of_n >= 1 - LEVEL:
            needed = x.seeds_needed(0, (1 - LEVEL) / len(q))
            more = f"{max(needed, x.seeds + 1)} seeds of each" if needed else "not more seeds but task.windows=32"
            outcome, more = "undecided", f" ({more} would decide)"
        outcomes[outcome].append(f"{n}{more}")
    print_table(lines)
    why = f"; past {start} by the rise of the loss, because the losses at {start} differ" if rise else ""
    return "; ".join(f"{outcome} at n = {', '.join(at)}" for outcome, at in outcomes.items()) + why
