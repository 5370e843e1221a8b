"""Which scaling to deploy at a length: methods with one factor for all lengths, measured in rounds, and the choice.

A deployed model has a fixed factor, ctx / L, so it pays a tax at shorter lengths, which is measured at L. All losses
are those of the same targets: at a length n the last n tokens up to them are given. A round scores one window with all
methods; the first rounds take one window of each document, later ones the next. Intervals are t intervals over
documents, because a bootstrap over fewer than 16 is too narrow.
"""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from conf.errors import check
from conf.registry import yaml_values
from engine.progress import progress_bar
from engine.run import Run
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.intervals import estimate, interval_text
from measure.tasks import Piece
from model.scaling import ContextChange, NotApplicable

# In the order in which they are measured
CANDIDATES = {"YaRN": "yarn", "NTK": "ntk", "Llama 3's ramp": "llama3", "ReRoPE, log-n": "rerope logn", "PI": "pi"}
HOPELESS = 1.0  # nats per token: a method that is worse by more in its first window is not measured further
Values = dict[str, list[list[float]]]  # label -> its values of each round
Arrays = Mapping[str, np.ndarray]  # label -> a value of each document
Work = Mapping[str, Callable[[int], list[float]]]  # label -> what measures its values of one round


def about_context(run: Run) -> list[str]:
    """The context that a run was trained at, and what is doubtful about it, a line each."""
    L, longest, scaling, layers = (
        run.context.train_ctx,
        run.context.longest_trained_ctx,
        run.cfg.scaling,
        run.cfg.layers,
    )
    lines = [f"L = {L}" + (f", extended to {longest} with scaling={scaling['kind']}" if longest > L else "")]
    if isinstance(s := scaling.get("factor"), int | float) and round(s * L) != longest:
        lines.append(f"doubtful: the factor {s:g} times {L} is not max_position_embeddings={longest}")
    windows = {layers.types[letter].window or longest for letter in layers.pattern} if layers else set()
    return lines + [f"some layers see only {window} tokens" for window in windows if window < longest]


def candidates(run: Run, ctx: int, added: Method) -> list[Method]:
    """The usual methods that apply, and `added`, as a deployed model has them. UserError if there is none."""
    methods = {label: [yaml_values("scaling", x) for x in names.split()] for label, names in CANDIDATES.items()}
    methods |= {added.label: added.scalings} if added not in (NONE, WINDOW) else {}
    fixed, found = {("factor", "auto"): "fixed", ("always", False): True}, []
    for label, scalings in methods.items():
        deployed = [k | {x: new for (x, old), new in fixed.items() if k.get(x) == old} for k in scalings]
        with contextlib.suppress(NotApplicable):
            run.change(deployed, ctx, ctx)
            found.append(Method(label, deployed))
    right = "a model with layers that rotate and see all tokens: to others only window and truncation apply"
    check(bool(found), "run", run.name, right)
    return found


# ---- measure ----


def rounds(count: int, work: Work, until: float, needed: int, hopeless: Callable[[Values], set[str]]) -> Values:
    """The values in each round: at most `count` rounds, at least two, no third that would end after `until`.

    work: in order of importance: where half of the time is over in the first round, only the first `needed` are done.
    until: of time.monotonic(). hopeless: labels that are not measured any more. Ctrl-C ends the rounds; before the
    second one is complete it is raised.
    """
    values, i, start = {label: [] for label in work}, 0, time.monotonic()
    seconds = max(until - start, 1.0)
    try:
        with progress_bar(seconds, "{elapsed}") as bar:
            for i in range(count):
                began = time.monotonic()
                for k, (label, measure) in enumerate(work.items()):
                    late = i == 0 and k >= needed and began + seconds / 2 < time.monotonic()
                    if not late and len(values[label]) == i and label not in hopeless(values):
                        bar.set_postfix_str(f"window {i + 1}, {label}", refresh=False)
                        values[label].append(measure(i))
                        check(bool(np.isfinite(values[label][i]).all()), label, values[label][i], "finite losses")
                        bar.total = max(seconds, time.monotonic() - start)  # two rounds may take longer
                        bar.update(time.monotonic() - start - bar.n)
                if i and 2 * time.monotonic() - began > until:
                    break
    except KeyboardInterrupt:
        if i < 2:
            raise
        return {label: x[:i] for label, x in values.items()}
    return values


class Comparison(NamedTuple):
    """The methods at ctx and at L, in nats per token; arrays have a value for each document."""

    control: str  # the better one
    loss: float  # of that control
    gains: Arrays  # over it at ctx
    taxes: Arrays  # at L, of methods that were measured


def compare(evaluation: Evaluation, methods: Sequence[Method], until: float) -> Comparison:
    """Measure methods and controls in rounds. evaluation: of task=matched, with ctx=[L, ctx]."""
    L, ctx = evaluation.lengths
    (piece,), documents = evaluation.task.pieces(ctx), len(evaluation.task.names)
    order = np.arange(len(piece.tokens)).reshape(documents, -1).T.flatten()  # one window of each document first

    def losses(i: int, method: Method, lengths: Sequence[int]) -> list[float]:
        parts = [(n, Piece(piece.tokens[order[i : i + 1], -n:], piece.targets[order[i : i + 1]])) for n in lengths]
        return [float(evaluation.measure(part, evaluation.change(method, n)).mean()) for n, part in parts]

    controls = [f"truncation to {L}", f"a window of {L}"]
    jobs = {controls[0]: (NONE, [L]), controls[1]: (WINDOW, [ctx]), **{m.label: (m, [ctx, L]) for m in methods}}
    jobs |= {NONE.label: (NONE, [ctx])}

    def hopeless(values: Values) -> set[str]:
        bar = min((values[label][0][0] for label in controls if values[label]), default=math.inf)
        return {label for label, x in values.items() if x and x[0][0] > bar + HOPELESS}.difference(controls)

    def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x = a[: len(b)] - b[: len(a)]  # over the rounds that both have
        return np.array([x[d::documents].mean() for d in range(min(documents, len(x)))])

    work = {label: functools.partial(losses, method=m, lengths=lengths) for label, (m, lengths) in jobs.items()}
    values = {label: np.array(x) for label, x in rounds(len(order), work, until, 3, hopeless).items() if x}
    truncated, window = (values[label][:, 0] for label in controls)
    better = int(difference(truncated, window).mean() > 0)
    bar = (truncated, window)[better]
    gains = {label: difference(bar, x[:, 0]) for label, x in values.items()}
    taxes = {m.label: difference(values[m.label][:, 1], truncated) for m in methods if m.label in values}
    return Comparison(controls[better], bar.mean(), gains, taxes)


def recall(evaluation: Evaluation, methods: Sequence[Method], until: float) -> Arrays:
    """Label -> the percentage of answer tokens that are right in each text, at distances above the trained context.

    evaluation: of task=copying. Empty if it has no such distance.
    """
    L, pieces = evaluation.run.context.longest_trained_ctx, evaluation.task.pieces(evaluation.ctx)
    far = [p for p in pieces if p.distance is not None and p.distance > L]

    def share(i: int, change: ContextChange) -> list[float]:
        texts = [Piece(p.tokens[i : i + 1], p.targets[i : i + 1], p.scored) for p in far]
        return [100 * float(np.mean([evaluation.measure(x, change)[..., 1] for x in texts]))]

    work = {m.label: functools.partial(share, change=evaluation.change(m, evaluation.ctx)) for m in (WINDOW, *methods)}
    values = rounds(len(evaluation.task.names) if far else 0, work, until, 2, lambda values: set())
    return {label: np.array(x)[:, 0] for label, x in values.items() if x}


# ---- the choice ----


def interval(x: np.ndarray) -> tuple[float, float]:
    """The t interval of the mean; without bounds for a single value."""
    return estimate(x[None]).interval if len(x) > 1 else (-math.inf, math.inf)


def text(x: np.ndarray, form: str = "+.3f") -> str:
    return interval_text(x.mean(), *interval(x), form) if len(x) > 1 else f"{x.mean():{form}} (one window)"


def choose(gains: Arrays, taxes: Arrays) -> list[str]:
    """The methods that are better than the control and that cannot be told apart from the best; the least tax first.

    gains: over the better control at ctx; taxes: at L.
    """
    better = sorted((m for m in taxes if interval(gains[m])[0] > 0), key=lambda m: -gains[m].mean())
    alike = [m for m in better if m == better[0] or interval(gains[better[0]] - gains[m])[0] <= 0]
    return sorted(alike, key=lambda m: taxes[m].mean())


def sentences(found: Comparison, factors: Mapping[str, float], ctx: int, L: int) -> list[str]:
    """The choice in words. factors: label -> s; 1 of a method that has none."""
    control, _, gains, taxes = found
    if alike := choose(gains, taxes):
        chosen, *others = alike
        better = f"at {ctx} it is {text(gains[chosen])} nats/token better than {control}"
        factor = f" with factor {factors[chosen]:g}" * (factors[chosen] > 1)
        lines = [f"Use {chosen}{factor}: {better}; it costs {text(taxes[chosen])} at {L}."]
        return lines + [f"These texts do not tell it apart from {' or '.join(others)}, but it costs least."] * bool(
            others
        )
    first = max(taxes, key=lambda m: gains[m].mean())
    lines = [f"Nothing beats {control} on these texts: keep {L} tokens ({first} {text(gains[first])})."]
    high = interval(gains[first])[1]
    return lines + [f"Not settled: more minutes may show a gain of up to {high:.3f}."] * (high > 0)


def recall_sentence(hits: Arrays, L: int) -> tuple[list[str], str]:
    """(the method that copies more than the window control, if one does; a sentence). hits: of `recall`."""
    gains = {m: x - hits[WINDOW.label][: len(x)] for m, x in hits.items() if m != WINDOW.label}
    best = max(gains, key=lambda m: gains[m].mean())
    shares = ", ".join(f"{m} {x.mean():.0f} %" for m, x in hits.items())
    line = f"Copying from more than {L} tokens back, tokens right: {shares} ({best} {text(gains[best], '+.0f')})"
    if interval(gains[best])[0] > 0:
        return [best], f"{line}: use {best} if far passages must be found."
    return [], f"{line}: that does not decide either."
