"""Which scaling to deploy at a length: methods with one factor for all lengths, measured in rounds, and the choice.

A deployed model has a fixed factor, ctx / L, which costs something at shorter lengths: measured at L. All losses
are those of the same targets: at a length n the last n tokens up to them are given. A round scores one window with all
methods; the first rounds take one window of each document, later ones the next.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from conf.errors import check
from conf.registry import yaml_values
from engine.progress import progress_bar
from engine.run import Run
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.intervals import interval_text, mean_interval
from measure.tasks import Piece
from model.scaling import NotApplicable

# In the order in which they are measured
CANDIDATES = {"YaRN": "yarn", "NTK": "ntk", "Llama 3's ramp": "llama3", "ReRoPE, log-n": "rerope logn", "PI": "pi"}
NEEDED = 3  # both controls and YaRN, or the window control and two methods
Arrays = Mapping[str, np.ndarray]  # label -> a value of each document


def about_context(run: Run) -> list[str]:
    """The context that a run was trained at, and what is doubtful about it, a line each."""
    L, longest = run.context.train_ctx, run.context.longest_trained_ctx
    scaling, layers = run.cfg.scaling, run.cfg.layers
    factor = scaling.get("factor")
    lines = [f"L = {L}, extended to {longest} with scaling={scaling['kind']}" if longest > L else f"L = {L}"]
    if isinstance(factor, int | float) and round(factor * L) != longest:
        lines.append(f"doubtful: the factor {factor:g} times {L} is not max_position_embeddings={longest}")
    windows = {layers.types[letter].window or longest for letter in layers.pattern} if layers else set()
    return lines + [f"some layers see only {window} tokens" for window in windows if window < longest]


def candidates(run: Run, ctx: int, added: Method) -> list[Method]:
    """The usual methods that apply, and `added`, as a deployed model has them. UserError if there is none."""
    methods = {label: [yaml_values("scaling", x) for x in names.split()] for label, names in CANDIDATES.items()}
    if added not in (NONE, WINDOW) and added.scalings not in methods.values():
        methods = {added.label: added.scalings} | methods
    fixed, found = {("factor", "auto"): "fixed", ("always", False): True}, []
    for label, scalings in methods.items():
        deployed = [k | {x: new for (x, old), new in fixed.items() if k.get(x) == old} for k in scalings]
        with contextlib.suppress(NotApplicable):
            position_map = run.change(deployed, ctx, ctx).position_map
            auto = vars(position_map) if position_map else {}  # what auto is at ctx: of group and leak
            found.append(Method(label, [k | {x: auto[x] for x in k if k[x] == "auto" and x in auto} for k in deployed]))
    right = "a model with layers that rotate and see all tokens: to others only window and truncation apply"
    check(bool(found), "run", run.name, right)
    return found


# ---- measure ----


def rounds(count: int, labels: Sequence[str], measure: Callable[[str, int], list[float]], until: float) -> Arrays:
    """Label -> what measure(label, i) returns for each round i, [rounds, values]; there are at most `count` rounds.

    At least two, and no third that would end after `until` (of time.monotonic()). labels: the most important first; if
    half of the time is over in the first round, the rounds are of those measured until then, at least NEEDED. Ctrl-C
    ends the rounds; within the first two it is raised.
    """
    values: dict[str, list[list[float]]] = {}
    i, start = 0, time.monotonic()
    seconds = max(until - start, 1.0)
    try:
        with progress_bar(seconds, "{elapsed}") as bar:
            for i in range(count):
                began = time.monotonic()
                for label in labels:
                    bar.set_postfix_str(f"window {i + 1}, {label}", refresh=False)
                    values.setdefault(label, []).append(measure(label, i))
                    bar.update(min(time.monotonic() - start, seconds) - bar.n)
                    if i == 0 and len(values) >= NEEDED and time.monotonic() > start + seconds / 2:
                        break
                labels = list(values)
                if i and 2 * time.monotonic() - began > until:
                    break
    except KeyboardInterrupt:
        if i < 2:
            raise
        values = {label: x[:i] for label, x in values.items()}
    for label, x in values.items():
        check(bool(np.isfinite(x).all()), label, "NaN or Inf", "finite")
    return {label: np.array(x) for label, x in values.items()}


def compare(evaluation: Evaluation, methods: Sequence[Method], until: float) -> tuple[str, float, Arrays, Arrays]:
    """Measure methods and controls in rounds. evaluation: of task=matched, with ctx=[L, ctx].

    Returns the better control, its loss, the gains over it at ctx, and the costs at L of the methods that were
    measured, in nats per token.
    """
    L, ctx = evaluation.lengths
    (piece,), documents = evaluation.task.pieces(ctx), len(evaluation.task.names)
    order = np.arange(len(piece.tokens)).reshape(documents, -1).T.flatten()  # one window of each document first
    truncation, window = f"truncation to {L}", f"a window of {L}"
    jobs = {truncation: (NONE, [L]), window: (WINDOW, [ctx]), **{m.label: (m, [ctx, L]) for m in methods}}
    jobs |= {NONE.label: (NONE, [ctx])}

    def losses(label: str, i: int) -> list[float]:
        method, lengths = jobs[label]
        parts = [(n, Piece(piece.tokens[order[i : i + 1], -n:], piece.targets[order[i : i + 1]])) for n in lengths]
        return [float(evaluation.measure(part, evaluation.change(method, n)).mean()) for n, part in parts]

    values = rounds(len(order), list(jobs), losses, until)
    measured = range(min(documents, len(values[truncation])))
    means = {label: np.array([x[d::documents].mean(axis=0) for d in measured]) for label, x in values.items()}
    control = min((truncation, window), key=lambda label: means[label].mean())
    gains = {label: means[control][:, 0] - x[:, 0] for label, x in means.items()}
    costs = {m.label: means[m.label][:, 1] - means[truncation][:, 0] for m in methods if m.label in means}
    costs |= {NONE.label: 0 * means[truncation][:, 0]} if NONE.label in means else {}
    return control, means[control].mean(), gains, costs


def recall(evaluation: Evaluation, methods: Sequence[Method], until: float) -> Arrays:
    """Label -> the percentage of answer tokens that are right in each text, at distances above the trained context.

    evaluation: of task=copying. Empty if it has no such distance.
    """
    L, pieces = evaluation.run.context.longest_trained_ctx, evaluation.task.pieces(evaluation.ctx)
    far = [p for p in pieces if p.distance is not None and p.distance > L]
    changes = {m.label: evaluation.change(m, evaluation.ctx) for m in (WINDOW, *methods)}

    def share(label: str, i: int) -> list[float]:
        texts = [Piece(p.tokens[i : i + 1], p.targets[i : i + 1], p.scored) for p in far]
        return [float(np.mean([evaluation.measure(x, changes[label])[..., 1] for x in texts]))]

    values = rounds(len(evaluation.task.names) if far else 0, list(changes), share, until)
    return {label: 100 * x[:, 0] for label, x in values.items()}


# ---- the choice ----


def interval(x: np.ndarray) -> tuple[float, float]:
    """The t interval of the mean of at least two values."""
    return mean_interval(x[None])[1:]


def text(x: np.ndarray, form: str = "+.3f") -> str:
    return interval_text(*mean_interval(x[None]), form)


def choose(gains: Arrays, costs: Arrays) -> list[str]:
    """The methods that are better than the control and that cannot be told apart from the best; the least cost first.

    gains: over the better control at ctx; costs: at L.
    """
    better = sorted((m for m in costs if interval(gains[m])[0] > 0), key=lambda m: -gains[m].mean())
    alike = [m for m in better if m == better[0] or interval(gains[better[0]] - gains[m])[0] <= 0]
    return sorted(alike, key=lambda m: costs[m].mean())


def sentences(control: str, gains: Arrays, costs: Arrays, factors: Mapping[str, float], ctx: int, L: int) -> list[str]:
    """The choice in words. factors: label -> s, of methods that have one."""
    if alike := choose(gains, costs):
        chosen, *others = alike
        factor = f" with factor {factors[chosen]:g}" if factors.get(chosen, 1) > 1 else ""
        better = f"at {ctx} it is {text(gains[chosen])} nats/token better than {control}"
        name = "no scaling" if chosen == NONE.label else chosen
        lines = [f"Use {name}{factor}: {better}; it costs {text(costs[chosen])} at {L}."]
        if others:
            lines.append(f"These texts do not tell it apart from {' or '.join(others)}, but it costs least.")
        return lines
    first = max(costs, key=lambda m: gains[m].mean())
    lines = [f"Nothing beats {control} on these texts: keep {L} tokens ({first} {text(gains[first])})."]
    if (high := interval(gains[first])[1]) > 0:
        lines.append(f"Not settled: more minutes may show a gain of up to {high:.3f}.")
    return lines


def recall_sentence(hits: Arrays, L: int) -> tuple[list[str], str]:
    """(the method that copies more than the window control, if one does; a sentence). hits: of `recall`."""
    gains = {m: x - hits[WINDOW.label] for m, x in hits.items() if m != WINDOW.label}
    best = max(gains, key=lambda m: gains[m].mean())
    shares = ", ".join(f"{m} {x.mean():.0f} %" for m, x in hits.items())
    line = f"Copying from more than {L} tokens back, tokens right: {shares} ({best} {text(gains[best], '+.0f')})"
    if interval(gains[best])[0] > 0:
        return [best], f"{line}: use {best} if far passages must be found."
    return [], f"{line}: that does not decide either."
