"""What a corpus repays of a method, predicted from its repeats alone: python -m studies.repeats

A method past L gains on targets that can be copied from between L and n back, and loses on others (reward and tax,
results/matrix.md). If that is all it does, its gain on another corpus follows from the shares of
these targets there:

    predicted gain = sum over the categories of (share in the other corpus) * (gain per target, of rope on sympy)

The categories (studies/gain_parts.py) are the distance to the antecedent of a target (measure/breakdowns.py), in
multiples of L and n, since the small model has L = 256 and the real one 8192. Nothing is evaluated: the shares need the
text only. Writes results/repeats.md, with the measured gains beside the predictions where there are rows.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from conf.errors import user_errors
from conf.registry import yaml_values
from data import corpus as corpora
from data.corpus import HeldOut
from hf.families import read_settings
from hf.open import open_checkpoint, read_corpus
from measure import tasks
from measure.breakdowns import antecedent_groups
from measure.tasks.matched import Matched
from studies.gain_parts import CATEGORIES, category, gains_of_groups
from studies.plan import REAL, REAL_CTX, REAL_DOCUMENTS, REAL_TOKENS, load_size
from studies.rows import RESULTS, Rows, fill, header, line, publish, read_rows
from studies.tables import gain

METHODS = ("yarn", "rerope + logn", "ntk", "pi")


def gains_by_category(rows: Rows, label: str, n: int) -> dict[str, np.ndarray]:
    """Category -> the gain per target of rope, nats [seeds]."""
    nats: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1))
    targets: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(1))
    for group, (gains, counts) in gains_of_groups(rows, "rope", label, n).items():
        name = category(group, rows.trained_ctx, n)
        nats[name], targets[name] = nats[name] + gains.sum(axis=1), targets[name] + counts.sum(axis=1)
    return {name: nats[name] / targets[name] for name in nats}


def shares(corpus: HeldOut, L: int, n: int, longest: int, documents: int, **knobs: int) -> dict[str, float]:
    """Category -> its share of the targets that an evaluation up to `longest` with these knobs scores at length n."""
    task = tasks.build(yaml_values("task", "matched") | knobs, corpus, longest, documents)
    assert isinstance(task, Matched)
    groups = antecedent_groups(task, longest)
    scored = groups.group[:, [task.near.index(window) for window in task.windows(n)]]
    found: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for i, group in enumerate(groups.names):
        found[category(group, L, n)] += float((scored == i).mean())
    return found


def corpora_of_the_study(cache: str) -> Iterator[tuple[str, str, int, int, dict[str, float]]]:
    """(plan, run, L, n, shares) of each run and length of which the gains are predicted."""
    size = load_size("default")
    knobs = {"windows": size.windows, "scored_tokens": size.scored_tokens}
    runs = ("rope", "rope", "sympy"), ("books", "books-rope", "books"), ("ladder", "ladder-3.7M", "python")
    for plan, run, data in runs:
        corpus = corpora.prepare(yaml_values("data", data), cache)
        for n in size.lengths(2, 4, 8):
            yield plan, run, size.L, n, shares(corpus, size.L, n, 8 * size.L, size.documents, **knobs)
    source = open_checkpoint(REAL)
    _, vocab_size, _ = read_settings(source.config, ctx=1, train_ctx=None)
    for data, documents in REAL_DOCUMENTS.items():
        corpus = read_corpus(source, yaml_values("data", data), vocab_size)
        n, knobs = 2 * REAL_CTX, {"scored_tokens": REAL_TOKENS}
        yield "real", f"smollm2-{data}", REAL_CTX, n, shares(corpus, REAL_CTX, n, n, documents, **knobs)


def report(rows: Rows, cache: str) -> str:
    """The text of results/repeats.md. rows: of the plan rope."""
    of_corpora = header(["run", "n / L", *CATEGORIES])
    predictions = header(["run", "n / L", "method", "predicted", "measured"])
    for plan, run, L, n, found in corpora_of_the_study(cache):
        path = RESULTS / f"{plan}.jsonl"
        of_corpora.append(line([f"`{run}`", f"{n // L}", *(f"{100 * found[name]:.1f} %" for name in CATEGORIES)]))
        for label in METHODS:
            gains = gains_by_category(rows, label, n // L * rows.trained_ctx)
            predicted = sum((found[name] * of_seeds for name, of_seeds in gains.items()), np.zeros(1))
            measured = gain(read_rows(path), run, label, n) if path.exists() else ""
            cells = [f"{predicted.mean():+.3f} ({predicted.min():+.3f} to {predicted.max():+.3f})"]
            cells.append(str(measured))
            predictions.append(line([f"`{run}`", f"{n // L}", f"`{label}`", *cells]))
    return fill("repeats.md", shares=of_corpora, predictions=predictions, seeds=len(predicted))


@user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description="Gains predicted from the repeats of a corpus: results/repeats.md")
    parser.add_argument("--cache", default=".cache", help="the folder of prepared corpora (default .cache)")
    publish("repeats.md", report(read_rows(RESULTS / "rope.jsonl"), parser.parse_args().cache))


if __name__ == "__main__":
    main()
