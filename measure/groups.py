"""Runs that differ only in their seed are a group: which runs do, and which of two groups has the lower loss."""

import itertools
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from conf.schema import RUN_CONTROL, TrainConfig, flatten
from measure.curves import Curve, Row, per_document_difference
from measure.gain import by_group
from measure.intervals import LEVEL, estimate, q_values
from measure.report import print_table, print_wrapped

FEWEST = 4  # seeds of each group: with fewer, a difference between groups has neither an interval nor a verdict
Rows = Mapping[int, Sequence[Row]]  # n -> the row of each seed
Configs = Mapping[str, TrainConfig]  # run -> its settings


def group_names(configs: Configs) -> dict[str, str]:
    """run -> the name of its group: that of the run with the lowest seed, without the seed: `rope` for rope-seed0.

    The runs of a group have the same settings, except seed, name and run control, and are independent trainings: no two
    have the same seed, and a fine-tuned run of ours (init=NAME) is not grouped with others. If another group has the
    short name already, the full name of the first run is taken.
    """
    groups: dict[str, dict[int, str]] = defaultdict(dict)
    for run, cfg in sorted(configs.items(), key=lambda item: (item[1].seed, item[0])):
        key = repr(sorted((k, repr(v)) for k, v in flatten(asdict(cfg)).items() if k not in (*RUN_CONTROL, "seed")))
        alone = cfg.seed in groups.get(key, ()) or (cfg.init and ":" not in cfg.init)
        groups[run if alone else key][cfg.seed] = run
    names: dict[str, str] = {}
    for first, *others in (of_seeds.values() for of_seeds in groups.values()):
        short = re.sub(rf"-(s|seed){configs[first].seed}(?=-|$)", "", first)
        taken = short in {"", *names.values(), *configs} - {first, *others}
        names |= dict.fromkeys([first, *others], first if taken else short)
    return names


def missing_seeds(rows: Sequence[Row], configs: Configs) -> str:
    """The trained runs of a group that are not among these rows, one for each seed, or the command that trains more."""
    names, shown, used = group_names(configs), {row.run for row in rows}, {row.seed for row in rows}
    group, typed = names[rows[0].run], configs[rows[0].run].typed
    kept = [x for x in typed if not x.startswith(("seed=", "name=", "fresh="))]
    if others := sorted(run for run in names if names[run] == group and run not in shown):
        return f"trained, but not evaluated or not named: {', '.join(others)}: name {group}"
    seeds = [str(seed) for seed in range(2 * FEWEST) if seed not in used][: FEWEST - len(rows)]
    return shlex.join(["python", "train.py", "-m", *kept, f"seed={','.join(seeds)}"])


def print_verdicts(curves: Sequence[Curve], names: Sequence[str], labels: Sequence[str], configs: Configs) -> None:
    """Print, for each method, how the loss of every other group differs from that of the first one, at each n >= L.

    names: of the groups. labels: of the methods. configs: of all trained runs.
    """
    groups = by_group(curves)
    for name, label in itertools.product(names[1:], labels):
        a, b = (groups.get((group, label), {}) for group in (name, names[0]))
        shared = sorted(n for n in a.keys() & b.keys() if a[n][0].documents > 1)
        L = min((rows[0].longest_trained_ctx for at in (a, b) for rows in at.values()), default=0)
        ns = shared[max(0, sum(n <= L for n in shared) - 1) :]  # from the longest one within both trained contexts
        if not ns:
            continue
        print(f"\n{name} against {names[0]}, {label}: loss in nats/token")
        few = [rows for rows in (a[ns[0]], b[ns[0]]) if len(rows) < FEWEST]
        text = f"verdict from {len(a[ns[0]])} and {len(b[ns[0]])} seeds: "
        if few:
            losses = {n: [" ".join(f"{row.loss:.3f}" for row in at[n]) for at in (a, b)] for n in ns}
            print_table({f"{n:>6}": dict(zip((name, names[0]), x, strict=True)) for n, x in losses.items()})
            text += f"none, because two trainings of one model differ by chance, past L = {L} by up to tenths "
            text += f"of a nat per token (results/matrix.md). At least {FEWEST} seeds of each are needed"
        else:
            text += f"{name} is {verdict(a, b, ns, L)}"
        print_wrapped(text)
        for rows in (rows for rows in few if rows[0].run in configs and not configs[rows[0].run].init):
            print(f"  {missing_seeds(rows, configs)}")


def verdict(a: Rows, b: Rows, ns: Sequence[int], L: int) -> str:
    """Print the differences of the losses, a - b, at these lengths, and return where a is better, worse or undecided.

    If the losses at the first length differ, and it is at most L, the rises of the losses since then are compared in
    place of the losses. A difference counts if q < 0.05 over the lengths.
    """

    def losses(at: Rows, n: int, rise: bool = False) -> np.ndarray:  # [seeds, documents]
        if rise:
            return np.array([per_document_difference(x, y) for x, y in zip(at[n], at[ns[0]], strict=True)])
        return np.array([row.document_losses(row.scored_windows) for row in at[n]])

    low, high = estimate(losses(a, ns[0]), losses(b, ns[0])).interval
    rises = ns[1:] if ns[0] <= L and not low <= 0 <= high else []
    found = [estimate(losses(a, n, n in rises), losses(b, n, n in rises)) for n in ns]
    q = q_values([x.p for x in found])
    lines, outcomes = {}, defaultdict(list)
    for n, x, q_of_n in zip(ns, found, q, strict=True):
        what = f"rise since {ns[0]}" if n in rises else "loss"
        lines[f"{n:>6}"] = {"": what, "difference [95 %]": str(x), "q": f"{q_of_n:.2g}"}
        if q_of_n < 1 - LEVEL:
            outcomes["better" if x.mean < 0 else "worse"].append(str(n))
        else:
            needed = x.seeds_needed(0, (1 - LEVEL) / len(q))
            more = f"{max(needed, x.seeds + 1)} seeds of each" if needed else "task.windows=32, not more seeds,"
            outcomes["undecided"].append(f"{n} ({more} would decide)")
    print_table(lines)
    why = f"; past {ns[0]} by the rise of the loss, because the losses at {ns[0]} differ" if rises else ""
    return "; ".join(f"{outcome} at n = {', '.join(at)}" for outcome, at in outcomes.items()) + why
