"""What eval.py by_antecedent=true shows in addition: gains by the distance of each target to its antecedent.

The antecedent is the latest earlier place in the document where the target's last five tokens (four before it and the
target) occurred. A model that copies can predict such a target from it, if it can use context at that distance. Targets
without one gain little from any context. The groups are computed from the losses of single targets that are in a file
beside every curve; nothing is measured again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, check, ensure
from conf.schema import EvalConfig
from data.held_out import ngram_hashes
from engine.files import locked
from measure.curves import Curve, Row, losses_file, write_jsonl
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.gain import controls
from measure.intervals import interval_text, ratio_interval
from measure.report import print_table
from measure.tasks.matched import Matched

NGRAM = 5
EDGES = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # of the distances to the antecedent, tokens


@dataclass(frozen=True)
class Groups:
    """A partition of the targets."""

    names: list[str]
    windows: list[int]  # those scored up to NEAR
    group: np.ndarray  # int [documents, windows, scored]: the group of each of their targets

    def sums(self, windows: list[int], *losses: np.ndarray) -> Iterator[tuple[str, np.ndarray, list[np.ndarray]]]:
        """(its name, the number of its targets, the sums of their nats) of each group, all [documents].

        losses: of the targets of these windows, [documents, windows, scored].
        """
        group = self.group[:, [self.windows.index(w) for w in windows]]
        for i, name in enumerate(self.names):
            inside = group == i
            yield name, inside.sum(axis=(1, 2)), [(x * inside).sum(axis=(1, 2)) for x in losses]


# ---- the groups ----


def requested_groups(evaluation: Evaluation, cfg: EvalConfig) -> Groups | None:
    """Those of by_antecedent=true. UserError for tasks whose targets have no place in a document, and without n > L."""
    if not cfg.by_antecedent:
        return None
    task, L, setting = evaluation.task, evaluation.run.context.longest_trained_ctx, "by_antecedent=true"
    if not isinstance(task, Matched):
        raise UserError(f"{setting}: is for task=matched only, and this is task={task.label}")
    check(evaluation.lengths[-1] > L, "ctx", evaluation.ctx, f"above the trained context {L}: {setting} shows gains")
    return antecedent_groups(task, evaluation.ctx)


def antecedents(tokens: np.ndarray, n: int = NGRAM) -> np.ndarray:
    """int64 [N]: tokens back to the latest earlier occurrence of the n-gram that ends here; 0 if there is none."""
    hashes = ngram_hashes(tokens, n)
    order = np.argsort(hashes, kind="stable")  # equal n-grams follow one another, in the order of their positions
    distances = np.zeros(len(tokens), dtype=np.int64)
    same = hashes[order][1:] == hashes[order][:-1]
    distances[order[1:][same] + n - 1] = np.diff(order)[same]
    return distances


def antecedent_groups(task: Matched, ctx: int) -> Groups:
    """The targets by the distance to their antecedent: none, < 64, < 256, ..., up to ctx, the longest length."""
    edges = [edge for edge in EDGES if edge < ctx] + [ctx]
    repeats = [antecedents(d.tokens) for d in task.documents]
    s = task.scored_tokens
    distances = [[d[end - s : end] for end in ends[task.near]] for d, ends in zip(repeats, task.ends, strict=True)]
    group = np.where(np.array(distances) == 0, 0, 1 + np.searchsorted(edges, distances, side="right"))
    names = ["none", *(f"< {edge}" for edge in edges), f">= {edges[-1]}"]
    return Groups(names, task.near, group)


# ---- their gains ----


def target_losses(file: Path, row: Row) -> np.ndarray:
    """Nats of each target of a row in a file of curves, [documents, windows of the row, scored].

    UserError if the file of losses is missing.
    """
    path = losses_file(file, row)
    ensure(path.exists(), f"{path}: no losses of single targets: evaluate again with fresh=true")
    return np.load(path).astype(np.float64).reshape(row.documents, len(row.scored_windows), -1)


def group_rows(evaluation: Evaluation, curves: dict[str, Curve], method: Method, groups: Groups) -> list[dict]:
    """For each length above the trained context and each group: share of the targets, losses and gain [95 %].

    loss, control: nats per token of the method and of the better control, on the targets of this group. gain: their
    difference with the interval over documents, None for a group without targets.
    """
    none, files = curves["none"].by_length(), {m.label: evaluation.curve_file(m) for m in (NONE, WINDOW, method)}

    def losses_of(row: Row, windows: list[int]) -> np.ndarray:
        # If a method, or the window, changes nothing at this length, only the losses without scaling are in a file
        same = not losses_file(files[row.label], row).exists() and row.nll == none[row.n].nll
        losses = target_losses(files["none" if same else row.label], row)
        return losses[:, [row.scored_windows.index(w) for w in windows]]

    (bars,) = controls(curves.values()).values()  # of one run
    rows = []
    for row in (x for x in curves[method.label].rows if x.n > evaluation.run.context.longest_trained_ctx):
        losses, control = (losses_of(x, row.scored_windows) for x in (row, bars[row.n]))
        for name, counts, (loss, reference) in groups.sums(row.scored_windows, losses, control):
            found: dict[str, Any] = {"run": row.run, "label": row.label, "n": row.n, "group": name}
            found |= {"targets": int(counts.sum()), "share": round(counts.sum() / losses.size, 4)}
            found |= dict.fromkeys(("loss", "control", "gain", "low", "high"))  # None for a group without targets
            if counts.any():
                found |= {"loss": loss.sum() / counts.sum(), "control": reference.sum() / counts.sum()}
                found |= zip(("gain", "low", "high"), ratio_interval(reference - loss, counts), strict=True)
            rows.append(found)
    return rows


def show_groups(evaluation: Evaluation, curves: dict[str, Curve], method: Method, groups: Groups) -> None:
    """Print the gains of a method by group, and write their rows. curves: label -> curve.

    A group's line has its share of the targets, the loss of the control, and the gain at each length. The name of the
    file tells weights, method (as the curve's file), length and texts apart.
    """
    rows, curve = group_rows(evaluation, curves, method, groups), evaluation.curve_file(method)
    lines: dict[str, dict] = {}
    for r in rows:
        cells = lines.setdefault(r["group"], {"share": f"{100 * r['share']:.1f} %"})
        if r["targets"]:
            cells.setdefault("control", f"{r['control']:.3f}")
            cells[r["n"]] = interval_text(r["gain"], r["low"], r["high"])
    print(f"\ngain of {method.label} over the better control by antecedent, nats/token [95 %]")
    print_table(lines)
    file = curve.parent / f"groups/antecedent-{curve.stem}-ctx{evaluation.ctx}-{evaluation.texts}.jsonl"
    with locked(curve.parent, wait=True):  # another evaluation of this run may write the same file
        write_jsonl(file, rows)
    print(f"rows: {file}")
