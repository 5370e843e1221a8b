"""by_position=true of eval.py: the loss by position, from the first ctx tokens of each document in one pass.

Positions are grouped in buckets: 0 .. 63, 64 .. 127, 128 .. 255 and so on. A row has the keys from, to (the first and
the last position), loss (nats per token), low and high (its 95 % interval).
"""

import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from measure.curves import write_jsonl
from measure.evaluation import Evaluation, Method
from measure.statistics import bootstrap
from measure.tasks.prefix import Prefix


def loss_by_position(evaluation: Evaluation, method: Method) -> list[dict]:
    """The rows for one method at the longest length, one for each bucket of positions."""
    evaluation.bar.set_postfix_str(f"{method.label}, by position", refresh=False)
    change = evaluation.run.change(method.scalings, evaluation.ctx, evaluation.ctx)
    task = Prefix(evaluation.run.corpus, evaluation.ctx, len(evaluation.task.names))
    return position_rows(evaluation.measure(task.pieces(evaluation.ctx)[0], change))


def position_rows(nats: np.ndarray) -> list[dict]:
    """From nats [documents, ctx]: the mean loss of each bucket of positions, with its 95 % interval."""
    ctx = nats.shape[1]
    edges = [0, *(64 * 2**k for k in range(ctx.bit_length()) if 64 * 2**k < ctx), ctx]
    rows = []
    for start, end in itertools.pairwise(edges):
        per_document = nats[:, start:end].mean(axis=1)
        low, high = bootstrap(per_document)
        rows.append({"from": start, "to": end - 1, "loss": float(per_document.mean()), "low": low, "high": high})
    return rows


def print_and_write(evaluation: Evaluation, methods: Sequence[Method], rows_of: dict[str, list[dict]]) -> None:
    """Print the table and write the rows below runs/NAME/eval/positions. rows_of: label -> rows of `position_rows`."""
    print_positions(rows_of, evaluation.run.context.train_ctx)
    write_positions(evaluation, methods, rows_of)


def write_positions(evaluation: Evaluation, methods: Sequence[Method], rows_of: dict[str, list[dict]]) -> None:
    """Write the rows of all methods to one file under runs/NAME/eval/positions. rows_of: label of the method -> rows.

    The file's name contains a hash of the weights, the targets, the precision and the methods.
    """
    run, ctx, label = evaluation.run, evaluation.ctx, methods[-1].label
    identity = f"{run.digest} {evaluation.targets} {evaluation.dtype_name} {[(m.label, m.scalings) for m in methods]}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:8]
    rows = [{"run": run.name, "ctx": ctx, "label": k, **row} for k, rows in rows_of.items() for row in rows]
    write_jsonl(run.folder / "eval" / "positions" / f"{label.replace(' ', '-')}-ctx{ctx}-{key}.jsonl", rows)


def print_positions(rows_of: dict[str, list[dict]], L: int) -> None:
    """Print a line for each bucket of positions and a column for each method. rows_of: label -> rows; L: tokens."""
    print(
        "\nloss by position, nats/token: each bucket scores different tokens, so hard and easy places in the documents "
        "show here, too;\nonly the difference between columns of one line is due to the method"
    )
    print(f"{'positions':>13}" + "".join(f"{label[:16]:>17}" for label in rows_of))
    for rows in zip(*rows_of.values(), strict=True):
        bucket = f"{rows[0]['from']}-{rows[0]['to']}"
        past = "  past L" if rows[0]["from"] >= L else ""
        print(f"{bucket:>13}" + "".join(f"{row['loss']:>17.3f}" for row in rows) + past)
