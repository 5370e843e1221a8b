"""A search for LongRoPE's divisors, one for each RoPE pair, on training text: python -m studies.divisors run=NAME ctx=N

Prints the divisors and the command that evaluates them on held-out text (scaling=longrope), and draws which pairs break
if they are interpolated, or are not. After Ding et al. 2024 (arXiv 2402.13753): an evolutionary search that starts from
the divisors of YaRN, NTK and PI, and in which they do not decrease from fast to slow pairs. Its objective is the loss
of the second half of 8 texts of ctx tokens, which do not overlap but may be of the same training document. It ends
after `minutes` or so many `tries`; the same tries= and seed= find the same divisors if minutes= does not end it first.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from conf.errors import check, user_errors
from conf.registry import build_from_knobs, yaml_values
from conf.schema import TrainedRunConfig
from engine import device as devices
from engine.progress import progress_bar
from engine.run import Run
from measure import plots
from model.spectrum import rotations
from studies.spectrum import plot_by_pair, scaled

METHODS = {x: yaml_values("scaling", x) for x in ("yarn", "ntk", "pi", "none", "longrope")}
LONGROPE, STARTS = METHODS["longrope"], ("yarn", "ntk", "pi")
KEPT, WINDOWS = 4, 8  # so many of the best are varied; so many texts
DEFAULTS = {"minutes": 5.0, "tries": 9999, "seed": 0, "runs": "runs", "cache": ".cache", "out": "results/divisors.png"}


def training_windows(corpus: Any, ctx: int, count: int, seed: int) -> Tensor:
    """Windows of training text, int64 [count, ctx + 1], which neither overlap nor cross the end of a document.

    UserError if there are too few.
    """
    ends = [-1, *np.flatnonzero(corpus.train == corpus.encoding.eot_token).tolist(), len(corpus.train)]
    starts = [i for last, end in itertools.pairwise(ends) for i in range(last + 1, end - ctx, ctx + 1)]
    check(len(starts) >= count, "ctx", ctx, f"less: the training documents have {len(starts)} such texts, not {count}")
    windows = [corpus.train[i : i + ctx + 1] for i in np.random.default_rng(seed).choice(starts, count, replace=False)]
    return torch.from_numpy(np.stack(windows).astype(np.int64))


@torch.inference_mode()
def loss(run: Run, windows: Tensor, method: dict[str, Any]) -> float:
    """The mean loss of the second half of windows [B, n + 1], nats per token: at context lengths from n / 2 to n."""
    n = windows.shape[1] - 1
    parts, change = windows.split(max(1, 2048 // n)), run.change([method], n, n)
    with devices.autocast(windows.device, "auto"):
        losses = [run.model.losses(x[:, :-1], x[:, -(n // 2) :], change=change) for x in parts]
    mean = torch.cat(losses).mean().item()
    check(math.isfinite(mean), "run", run.name, f"another: with scaling={method['kind']} its loss is {mean}")
    return mean


def evolve(loss: Callable[[list], float], starts: list, most: float, seed: int, tries: int, end: float) -> list[float]:
    """The divisors with the least loss among starts and up to `tries`, until `end` (of time.monotonic()).

    A try is the mean of two of the best, or one of them, of which a random range of pairs is raised or lowered. Pairs
    beside the range go along where divisors would decrease. They are between 1 and `most`.
    """
    found, rng = [(loss(x), x) for x in starts], np.random.default_rng(seed)
    while len(found) < tries and time.monotonic() < end:
        best = np.log([x for _, x in sorted(found)[:KEPT]])
        logs, step = best[rng.integers(len(best), size=2)].mean(axis=0), rng.normal() * math.log(most) / 4
        first, last = np.sort(rng.integers(len(logs), size=2))
        logs[first : last + 1] += step
        logs = np.maximum.accumulate(logs) if step > 0 else np.minimum.accumulate(logs[::-1])[::-1]
        x = np.exp(logs.clip(0, math.log(most))).round(3).tolist()
        found.append((loss(x), x))
    return min(found)[1]


def search(ctx: int, run: str, minutes: float, tries: int, seed: int, runs: str, cache: str, out: str) -> None:
    """Measure single pairs, then search until `minutes` are over; print and draw the result."""
    check(min(seed, minutes) >= 0, "seed, minutes", f"{seed}, {minutes}", "at least 0")
    device, end = devices.start("auto", "auto"), time.monotonic() + 60 * minutes
    opened = Run.open(TrainedRunConfig(run=run, runs=runs, cache=cache, scaling=METHODS["pi"]), device, ctx)
    L, inv_freq = opened.context.train_ctx, opened.context.inv_freq
    check(ctx > L, "ctx", ctx, f"above {L}, up to which {opened.name} was trained")
    texts, others = training_windows(opened.corpus, ctx, 2 * WINDOWS, seed).to(device).split(WINDOWS)
    s, pairs = ctx / L, range(len(inv_freq))
    with progress_bar(60 * minutes, "{elapsed}") as bar:

        def measure(method: dict[str, Any], windows: Tensor = texts) -> float:
            bar.update(60 * minutes - max(end - time.monotonic(), 0) - bar.n)
            return loss(opened, windows, method)

        def single_pairs(own: float, rest: float) -> list[float]:
            """What the divisor `own` of each pair alone adds to the loss with `rest` for all, on two of the texts."""
            each = [[rest] * len(pairs), *([own if i == j else rest for i in pairs] for j in pairs)]
            base, *losses = [measure(LONGROPE | {"long": x, "attention_factor": 1.0}, texts[:2]) for x in each]
            return [x - base for x in losses]

        changes = {"only this pair": single_pairs(s, 1.0), "all others": single_pairs(1.0, s)}
        starts = {x: (inv_freq / scaled(opened.context, METHODS[x], ctx)).tolist() for x in STARTS}
        best = evolve(lambda x: measure(LONGROPE | {"long": x}), [*starts.values()], 1.25 * s, seed, tries, end)
    print(f"nats/token at {ctx // 2} to {ctx} tokens of training text: that of the search, other text")
    for name, knobs in {**METHODS, "longrope": LONGROPE | {"long": best}}.items():
        print(f"{name:<10}{measure(knobs):7.4f}{measure(knobs, others):9.4f}")
    long = ",".join(f"{x:.4g}" for x in best)
    print(f"python eval.py run={run} runs={runs} cache={cache} ctx={ctx} scaling=longrope scaling.long=[{long}]")
    lines, title = {"longrope (searched)": best, **starts}, f"{run}: divisors from L = {L} to {ctx} tokens"
    draw((lines, changes), title, rotations(inv_freq, L), Path(out))


def draw(panels: tuple[dict[str, list], dict[str, list]], title: str, turns: Tensor, path: Path) -> None:
    """Lines by pair: divisors by method, and what interpolating changes. turns: of each pair within L."""
    fig, axes = plots.pyplot().subplots(2, 1, figsize=(9, 7.5), sharex=True)
    axes[0].set(title=title, ylabel="divisor of the frequency")
    axes[1].set(xlabel="rotary pair, from high to low frequency", ylabel="interpolated: change of the loss, nats/token")
    for ax, lines in zip(axes, panels, strict=True):
        plot_by_pair(ax, lines)
        ax.set_ymargin(0.15)
        plots.mark(ax, int((turns >= 1).sum()) - 0.5, "less than a rotation within L")
        plots.end_labels(ax, space=16)
    plots.save(fig, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help=f"run, ctx, and {DEFAULTS}")
    given: Any = OmegaConf.from_dotlist(parser.parse_args().settings)
    build_from_knobs(search, {**DEFAULTS, **given}, "")


if __name__ == "__main__":
    user_errors(main)()
