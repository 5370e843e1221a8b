"""Which scaling to deploy at a length: methods with one factor for all lengths, measured in rounds, and the choice.

A deployed model has a fixed factor, ctx / L, so it pays a tax at shorter lengths, which is measured at L. All losses
are those of the same targets: at a length n the last n tokens up to them are given. A round scores one window with all
methods; the first rounds take one window of each document, later ones the next. Intervals are t intervals over
documents, because a bootstrap over fewer than 16 is too narrow.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from conf.errors import UserError
from conf.registry import yaml_values
from engine.run import Run, check_fits
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.intervals import estimate, interval_text
from measure.tasks import Piece
from model.scaling import NotApplicable

CANDIDATES = {"YaRN": "yarn", "NTK": "ntk", "Llama 3's ramp": "llama3", "PI": "pi", "ReRoPE, log-n": "rerope logn"}
HOPELESS = 1.0  # nats per token: a method that is worse by more in its first window is not measured further
SMALL = 0.02  # nats per token: the gain that the number of documents is given for
Values = dict[str, list[list[float]]]  # label -> its values of each round
Arrays = Mapping[str, np.ndarray]  # label -> a value of each document

# ---- the model and the methods ----


def about_context(run: Run) -> list[str]:
    """What is known of the context that a run was trained at, and what is doubtful about it, a line each."""
    L, longest, scaling = run.context.train_ctx, run.context.longest_trained_ctx, run.cfg.scaling
    factor, schedule = scaling.get("factor"), run.cfg.layers
    windows = [schedule.types[letter].window for letter in schedule.pattern] if schedule else []
    narrow = [window for window in windows if window and window < longest]
    lines = [f"L = {L}" + (f", extended to {longest} with scaling={scaling['kind']}" if longest > L else "")]
    if isinstance(factor, int | float) and round(factor * L) != longest:
        lines.append(f"doubtful: its factor {factor:g} times {L} is not max_position_embeddings={longest}")
    elif not run.step and longest == L:
        lines[0] += ", by its config or train_ctx=; some configs state what is served, not what was trained"
    if narrow:
        lines.append(f"{len(narrow)} of {len(windows)} layers see a window of {min(narrow)} tokens, less than that")
    return lines


def deployed(label: str, scalings: Sequence[dict]) -> Method:
    """The method as a deployed model has it at all lengths: a factor of ctx / L, and maps of positions also up to L."""
    at_all = {"factor": ("auto", "fixed"), "always": (False, True)}
    return Method(label, [k | {x: new for x, (old, new) in at_all.items() if k.get(x) == old} for k in scalings])


def candidates(run: Run, ctx: int, added: Method) -> list[Method]:
    """The usual methods, as far as they apply to this run, and another. NotApplicable if that one does not apply."""
    found = []
    for label, names in CANDIDATES.items():
        method = deployed(label, [yaml_values("scaling", name) for name in names.split()])
        try:
            run.change(method.scalings, ctx, ctx)
            found.append(method)
        except NotApplicable:
            continue
    if added not in (NONE, WINDOW):
        check_fits(run.cfg, run.model.pos, ctx, added.scalings)
        found.append(deployed(added.label, added.scalings))
    return found


# ---- rounds ----


def rounds(
    count: int,
    work: Mapping[str, Callable[[int], list[float]]],
    until: float,
    bar: tqdm,
    needed: int = 0,
    hopeless: Callable[[Values], set[str]] = lambda values: set(),
) -> Values:
    """Label -> its values in each round: at most `count` rounds, at least two, no third that would end after `until`.

    work: functions of the number of the round, in order of importance: where half of the time is over in the first
    round, only the first `needed` of them are done. hopeless: labels that are not measured any more. until: of
    time.monotonic(). Ctrl-C ends the rounds; before the second one is complete it is raised.
    """
    values: Values = {label: [] for label in work}
    i, start = 0, time.monotonic()
    shown = start
    try:
        for i in range(count):
            began = time.monotonic()
            for k, (label, measure) in enumerate(work.items()):
                late = i == 0 and k >= needed and time.monotonic() - start > (until - start) / 2
                if late or len(values[label]) < i or label in hopeless(values):
                    continue
                bar.set_postfix_str(f"round {i + 1}, {label}", refresh=False)
                values[label].append(measure(i))
                if not np.isfinite(values[label][i]).all():
                    raise UserError(f"{label}: the loss is not finite (NaN or Inf)")
                before, shown = shown, time.monotonic()
                bar.update(min(shown - before, (bar.total or 0) - bar.n))
            if i and 2 * time.monotonic() - began > until:
                break
    except KeyboardInterrupt:
        if i < 2:
            raise
    return values


# ---- perplexity ----


@dataclass(frozen=True)
class Comparison:
    """The methods at one length and at L, in nats per token: see `compare`. Arrays have a value for each document."""

    ctx: int
    L: int  # the longest trained context
    control: str  # the better one
    loss: float  # of that control
    gains: Arrays  # over it at ctx, of methods and controls and without scaling
    taxes: Arrays  # at L, of methods
    rise: np.ndarray  # of the loss without scaling from L / 2 to L
    hopeless: list[str]  # measured in one round
    unmeasured: list[str]  # for lack of time


def compare(evaluation: Evaluation, methods: Sequence[Method], until: float, bar: tqdm) -> Comparison:
    """Measure methods and controls in rounds. evaluation: of task=matched, with ctx=[L / 2, L, ctx]."""
    half, L, ctx = evaluation.lengths
    (piece,), documents = evaluation.task.pieces(ctx), len(evaluation.task.names)
    order = np.arange(len(piece.tokens)).reshape(documents, -1).T.flatten()  # one window of each document first

    def losses(i: int, method: Method, lengths: Sequence[int]) -> list[float]:
        row = order[i : i + 1]
        parts = {n: Piece(piece.tokens[row, -n:], piece.targets[row]) for n in lengths}
        return [float(evaluation.measure(part, evaluation.change(method, n)).mean()) for n, part in parts.items()]

    truncation, window = f"truncation to {L}", f"a window of {L}"
    jobs = {truncation: (NONE, (L, half)), window: (WINDOW, (ctx,)), **{m.label: (m, (ctx, L)) for m in methods}}
    jobs[NONE.label] = (NONE, (ctx,))
    work = {label: functools.partial(losses, method=m, lengths=n) for label, (m, n) in jobs.items()}

    def hopeless(values: Values) -> set[str]:
        """Those that were far worse than a control in their first window."""
        bars = [values[label][0][0] for label in (truncation, window) if values[label]]
        return {label for label, x in values.items() if x and x[0][0] > min(bars) + HOPELESS} - {truncation, window}

    values = rounds(len(order), work, until, bar, 3, hopeless)
    at_ctx = {label: [x[0] for x in of_rounds] for label, of_rounds in values.items() if of_rounds}
    control = min((truncation, window), key=lambda label: difference(at_ctx[label], at_ctx[window], documents).mean())
    at_L = {m.label: [x[1] for x in values[m.label]] for m in methods if values[m.label]}
    return Comparison(
        ctx=ctx,
        L=L,
        control=control,
        loss=float(np.mean(at_ctx[control])),
        gains={label: difference(at_ctx[control], x, documents) for label, x in at_ctx.items()},
        taxes={label: difference(x, at_ctx[truncation], documents) for label, x in at_L.items()},
        rise=difference(at_ctx[truncation], [x[1] for x in values[truncation]], documents),
        hopeless=[label for label, x in at_ctx.items() if len(x) == 1],
        unmeasured=[label for label, x in values.items() if not x],
    )


def difference(a: Sequence[float], b: Sequence[float], documents: int) -> np.ndarray:
    """a - b of each document, over the rounds that both have. [at most documents]"""
    both = min(len(a), len(b))
    x = np.array(a[:both]) - np.array(b[:both])
    return np.array([x[d::documents].mean() for d in range(min(documents, both))])


# ---- recall ----


def recall(evaluation: Evaluation, methods: Sequence[Method], until: float, bar: tqdm) -> Arrays:
    """Label -> the percentage of answer tokens that are right in each text, at distances above the trained context.

    evaluation: of task=copying. Empty if it has no such distance.
    """
    ctx, longest = evaluation.ctx, evaluation.run.context.longest_trained_ctx
    far = [p for p in evaluation.task.pieces(ctx) if p.distance is not None and p.distance > longest]

    def share(i: int, method: Method) -> list[float]:
        texts = [Piece(p.tokens[i : i + 1], p.targets[i : i + 1], p.scored) for p in far]
        hits = [evaluation.measure(text, evaluation.change(method, ctx))[..., 1].mean() for text in texts]
        return [100 * float(np.mean(hits))]

    work = {m.label: functools.partial(share, method=m) for m in (WINDOW, *methods)} if far else {}
    values = rounds(len(evaluation.task.names) if far else 0, work, until, bar, needed=2)
    both = min((len(x) for x in values.values() if x), default=0)
    return {label: np.array(x[:both])[:, 0] for label, x in values.items() if x}


# ---- the choice ----


def interval(x: np.ndarray) -> tuple[float, float]:
    """The t interval of the mean; without bounds for a single value."""
    return estimate(x[None]).interval if len(x) > 1 else (-math.inf, math.inf)


def text(x: np.ndarray, form: str = "+.3f") -> str:
    return interval_text(x.mean(), *interval(x), form) if len(x) > 1 else f"{x.mean():{form}} (one window)"


def choose(gains: Arrays, taxes: Arrays) -> tuple[str | None, list[str]]:
    """(the method to use, or None if none is better than the control; all that cannot be told apart from the best).

    Of those the one with the smallest tax is used. gains: over the better control at ctx; taxes: at L.
    """
    better = [m for m in taxes if interval(gains[m])[0] > 0]
    if not better:
        return None, []
    best = max(better, key=lambda m: gains[m].mean())
    common = {m: min(len(gains[m]), len(gains[best])) for m in better}
    alike = [m for m, k in common.items() if interval(gains[best][:k] - gains[m][:k])[0] <= 0]
    return min(alike, key=lambda m: taxes[m].mean()), alike


def sentences(found: Comparison, factors: Mapping[str, str]) -> list[str]:
    """The choice in words. factors: method -> ` with factor 2`, or nothing."""
    (chosen, alike), gains = choose(found.gains, found.taxes), found.gains
    first, *rest = sorted(found.taxes, key=lambda m: -gains[m].mean())
    if chosen:
        better = f"at {found.ctx} it is {text(gains[chosen])} nats/token better than {found.control}"
        lines = [f"Use {chosen}{factors[chosen]}: {better}; it costs {text(found.taxes[chosen])} at {found.L}."]
        if others := [m for m in alike if m != chosen]:
            lines.append(f"Of {' and '.join([chosen, *others])}, which these texts do not tell apart, it costs least.")
        elif rest:
            lines.append(f"The next best is {rest[0]} with {text(gains[rest[0]])}.")
        return lines
    high = interval(gains[first])[1]
    lines = [f"Nothing beats {found.control} on these texts: keep {found.L} tokens ({first} {text(gains[first])})."]
    if high > SMALL:
        needed = math.ceil(len(gains[first]) * ((high - gains[first].mean()) / SMALL) ** 2)
        lines.append(f"Not settled: it may gain up to {high:.3f}; to see a gain of {SMALL}, score {needed} documents.")
    return lines


def recall_sentence(hits: Arrays, least: int) -> tuple[str | None, str]:
    """(the method that copies more than the window control, or None; a sentence). hits: of `recall`."""
    gains = {m: x - hits[WINDOW.label] for m, x in hits.items() if m != WINDOW.label}
    best = max(gains, key=lambda m: gains[m].mean())
    shares = ", ".join(f"{m} {x.mean():.0f} %" for m, x in hits.items())
    line = f"Copying from more than {least} tokens back, tokens right: {shares} ({best} {text(gains[best], '+.0f')})"
    if interval(gains[best])[0] > 0:
        return best, f"{line}: use {best} if far passages must be found."
    return None, f"{line}: that does not decide either."
