"""The gain of a method on groups of targets, such as those whose text occurred before at some distance.

Computed from the losses of single targets that Evaluation.curve writes beside every curve; nothing is measured again.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, check
from engine.tracking import wandb_module
from measure.curves import Curve, Row, better_control, losses_file, write_jsonl
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.tasks.matched import Matched


@dataclass(frozen=True)
class Groups:
    """A partition of the targets."""

    title: str  # antecedent, key_tokens: part of file names
    axis: str  # what the groups are, for the figure
    names: list[str]
    group: np.ndarray  # int [documents, windows, scored]: the group of each target of the windows scored up to NEAR


def report(evaluation: Evaluation, curves: dict[str, Curve], method: Method, groups: Groups, project: str) -> None:
    """Print the table of a method's gains by group, write rows and picture to runs/NAME/eval/groups, log to wandb."""
    rows = group_rows(evaluation, curves, method, groups)
    print_groups(rows, groups, method.label)
    identity = f"{evaluation.curve_file(method).name} {evaluation.targets} {groups.axis} {groups.names}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:8]
    name = f"{groups.title}-{method.label.replace(' ', '-')}-ctx{evaluation.ctx}-{key}"
    folder, run = evaluation.run.folder / "eval" / "groups", evaluation.run
    write_jsonl(folder / f"{name}.jsonl", rows)
    draw(rows, groups, f"{run.name}: gain of {method.label} over the better control", folder / f"{name}.png")
    if log := wandb_module("measure.wandb_curves"):
        log.log_table(project, evaluation, method, groups.title, rows, folder / f"{name}.png")
    print(f"rows and picture: {folder}/{name}.*")


def matched_task(evaluation: Evaluation, setting: str) -> Matched:
    """The task of the evaluation. UserError unless it is `matched`, whose targets have a place in a document."""
    if not isinstance(evaluation.task, Matched):
        raise UserError(f"{setting}: is for task=matched only, and this is task={evaluation.task.label}")
    L = evaluation.run.context.longest_trained_ctx
    check(evaluation.lengths[-1] > L, "ctx", evaluation.ctx, f"above the trained context {L}: {setting} shows gains")
    return evaluation.task


def target_losses(file: Path, row: Row) -> np.ndarray:
    """Nats of each target of a row in a file of curves, [documents, windows of the row, scored].

    UserError if they are missing, damaged, or of another row.
    """
    path = losses_file(file, row)
    try:
        with path.open("rb") as f:  # not np.load, which also opens other formats
            losses = np.lib.format.read_array(f, allow_pickle=False).astype(np.float64)
        if np.allclose(losses.sum(axis=1), row.nll, rtol=1e-4, atol=1e-3):
            return losses.reshape(row.documents, len(row.windows), -1)
    except (OSError, ValueError, TypeError, LookupError, EOFError, MemoryError):
        pass
    raise UserError(f"{path}: no losses of single targets: evaluate again with fresh=true")


def group_rows(evaluation: Evaluation, curves: dict[str, Curve], method: Method, groups: Groups) -> list[dict]:
    """For each length above the trained context and each group: share of the targets, losses and gain [95 %].

    loss, control: nats per token of the method and of the better control, on the targets of this group. gain: their
    difference with the interval over documents, None for a group without targets.
    """
    none, files = curves["none"].by_length(), {m.label: evaluation.curve_file(m) for m in (NONE, WINDOW, method)}
    task, rows = matched_task(evaluation, groups.title), []
    for row, window in zip(curves[method.label].rows, curves["window"].rows, strict=True):
        if row.n <= evaluation.run.context.longest_trained_ctx:
            continue
        bar = better_control(window, none)
        picked = [bar.windows.index(w) for w in row.windows]
        # If the method changes nothing at this length, only the losses without scaling are in a file
        same = not losses_file(files[method.label], row).exists() and row.nll == none[row.n].nll
        losses = target_losses(files["none" if same else method.label], row)
        control = target_losses(files[bar.label], bar)[:, picked]
        group = groups.group[:, [task.near.index(w) for w in row.windows]]
        for i, name in enumerate(groups.names):
            inside = group == i  # [documents, windows, scored]
            counts = inside.sum(axis=(1, 2))
            loss, reference = ((x * inside).sum(axis=(1, 2)) for x in (losses, control))
            mean, low, high = ratio(reference - loss, counts)
            rows.append(
                {"run": row.run, "label": row.label, "n": row.n, "group": name, "targets": int(counts.sum()),
                 "share": round(float(inside.mean()), 4), "loss": ratio(loss, counts)[0],
                 "control": ratio(reference, counts)[0], "gain": mean, "low": low, "high": high}
            )  # fmt: skip
    return rows


def ratio(sums: np.ndarray, counts: np.ndarray, draws: int = 4000) -> tuple[float | None, float | None, float | None]:
    """(mean, low, high) of sum(sums) / sum(counts) with the 95 % bootstrap interval over documents, both [documents].

    Nones for a group without targets.
    """
    if not counts.sum():
        return None, None, None
    picks = np.random.default_rng(0).integers(len(sums), size=(draws, len(sums)))
    totals = counts[picks].sum(axis=1)
    values = sums[picks].sum(axis=1)[totals > 0] / totals[totals > 0]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(sums.sum() / counts.sum()), float(low), float(high)


def print_groups(rows: Sequence[dict[str, Any]], groups: Groups, label: str) -> None:
    """A line for each group: its share of the targets, the loss of the control, and the gain at each length."""
    ns = sorted({row["n"] for row in rows})
    print(f"\ngain of {label} over the better control by {groups.title}, nats/token [95 %]")
    print(f"{groups.title:>16}{'targets':>9}{'control':>9}" + "".join(f"{f'n={n}':>25}" for n in ns))
    for name in groups.names:
        of_group = sorted((row for row in rows if row["group"] == name), key=lambda row: row["n"])
        gains = [f"{r['gain']:+.3f} [{r['low']:+.3f}, {r['high']:+.3f}]" if r["targets"] else "" for r in of_group]
        control = f"{of_group[0]['control']:.3f}" if of_group[0]["targets"] else ""
        share = f"{100 * of_group[0]['share']:.1f} %"
        print(f"{name:>16}{share:>9}{control:>9}" + "".join(f"{cell:>25}" for cell in gains))


def draw(rows: Sequence[dict[str, Any]], groups: Groups, title: str, path: Path) -> None:
    """A line for each length: the gain of each group, with its 95 % interval."""
    import matplotlib.pyplot as plt

    from measure import plots

    fig, ax = plt.subplots(figsize=(8, 4.6), dpi=140)
    ns = sorted({row["n"] for row in rows})
    for k, n in enumerate(ns):
        shown = [(groups.names.index(r["group"]), r) for r in rows if r["n"] == n and r["targets"]]
        x = [i + 0.08 * (k - (len(ns) - 1) / 2) for i, _ in shown]
        y = [r["gain"] for _, r in shown]
        errors = [[r["gain"] - r["low"] for _, r in shown], [r["high"] - r["gain"] for _, r in shown]]
        ax.errorbar(x, y, errors, fmt="o", markersize=4, capsize=2, linewidth=1.2,
                    color=plt.get_cmap("viridis")(0.85 * k / len(ns)), label=f"n = {n}")  # fmt: skip
    shares = {r["group"]: r["share"] for r in rows if r["n"] == ns[0]}
    names = [f"{name}\n{100 * shares[name]:.1f} %" for name in groups.names]
    ax.set_xticks(range(len(names)), names, fontsize=8)
    ax.axhline(0, color="#999999", linewidth=1)
    ax.grid(axis="y", alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel(f"{groups.axis} (share of the targets)")
    ax.set_ylabel("gain, nats per token")
    ax.legend(fontsize=8, frameon=False)
    ax.set_title(title, fontsize=10, loc="left")
    plots.save(fig, path)
