"""Curves as wandb runs: one run for one curve, so that the curves of any runs can share a panel.

A run's config and id tell any two measurements apart. Its history is the curve, its summary has the columns of the runs
table. This module is imported only through engine/tracking.py.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from engine import wandb_runs
from engine.code_version import commit
from engine.run import Run
from engine.wandb_training import run_config
from measure.accuracy import effective_context
from measure.curves import Curve, Row, controls
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.statistics import bootstrap, difference, gain
from measure.tasks import Task

NOT_IN_TABLE = ("nll", "windows", "hits", "scaling")  # fields of a Row
LOG2 = "eval/log2_n_over_L"  # the x axis: 0 at the trained context L, 1 at twice of it


def log_curves(
    project: str, evaluation: Evaluation, methods: Sequence[Method], curves: dict[str, Curve], figure: Path
) -> None:
    """Log the curves of these methods, a wandb run each. curves: label -> curve, also none and window."""
    (bars,) = controls(curves.values()).values()  # of one run
    none = curves[NONE.label].by_length()
    for method in methods:
        with wandb_runs.problems_are_said():
            log_curve(project, evaluation, method, curves[method.label], none, bars, figure)


def log_curve(
    project: str, evaluation: Evaluation, method: Method, curve: Curve, none: dict[int, Row], bars: dict[int, Row],
    figure: Path,
) -> None:  # fmt: skip
    """Log a curve: its points, rows and picture, the columns of the runs table, and the weights that it belongs to.

    none, bars: n -> the row without scaling, and that of the better control.
    """
    config = curve_config(evaluation, method)
    with wandb_runs.open_run(project, "eval", config["run"], *name_and_id(config), config) as run:
        run.define_metric(LOG2, hidden=True)
        run.define_metric("eval/*", step_metric=LOG2)
        for key in ("loss", "gain", "accuracy"):  # drawn around their values, not in panels of their own
            for end in ("low", "high"):
                run.define_metric(f"eval/{key}_{end}", step_metric=LOG2, hidden=True)
        for row in curve.overall:
            run.log(point(row, bars[row.n]), step=row.n)
        last = curve.overall[-1].n
        columns, cells = table(curve, bars)
        run.log({"eval/rows": wandb.Table(columns, cells), "eval/figure": wandb.Image(str(figure))}, step=last)
        run.summary.update({**summary(curve, none, bars, evaluation.task), "n_parameters": config["n_parameters"]})
        trained = evaluation.run
        weights = wandb_runs.weights_artifact(trained.name, trained.digest, run_config(trained.name, trained.cfg))
        rows = wandb.Artifact(f"rows-{run.id}", type="rows")
        rows.add_file(str(evaluation.curve_file(method)))
        wandb_runs.log_artifacts(run, inputs=[weights], outputs=[rows])


def log_table(
    project: str, evaluation: Evaluation, method: Method, title: str, rows: list[dict[str, Any]], figure: Path
) -> None:
    """Log the gains of a method by groups of targets: a wandb run with a table and a picture. title: of the groups."""
    config = curve_config(evaluation, method)
    config["eval"] |= {"by": title}
    with wandb_runs.problems_are_said():
        group, (name, run_id) = config["run"], name_and_id(config)
        with wandb_runs.open_run(project, title, group, f"{name} by {title}", run_id, config) as run:
            cells = wandb.Table(list(rows[0]), [list(row.values()) for row in rows])
            run.log({f"{title}/gains": cells, f"{title}/figure": wandb.Image(str(figure))})


# ---- what tells measurements apart ----


def curve_config(evaluation: Evaluation, method: Method) -> dict[str, Any]:
    """The config of a curve's run: the keys of its training, and under `eval` what was measured.

    device, dtype and commit are those of the evaluation.
    """
    run, scaling = evaluation.run, method.scalings[0]
    measured = {
        "label": method.label, "scaling": scaling, "plus": [knobs["kind"] for knobs in method.scalings[1:]],
        "task": evaluation.task.label, "ctx": evaluation.ctx, "documents": len(evaluation.task.names),
        "lengths": evaluation.lengths, "texts": evaluation.texts, "targets": _digest(evaluation.targets),
        "weights": run.digest[:12], "step": run.step,
    }  # fmt: skip
    here = {"device": evaluation.device.type, "dtype": evaluation.dtype_name, "commit": commit()}
    return {**run_config(run.name, run.cfg), "n_parameters": n_parameters(run), **here, "eval": measured}


def n_parameters(run: Run) -> int:
    """The number of parameters that were trained. In bfloat16 a tied head is stored apart (engine/device.py)."""
    model, tied = run.model, run.cfg.model.tied_head
    copied = model.head.weight.numel() if tied and model.head.weight is not model.tokens.weight else 0
    return model.n_parameters() - copied


def name_and_id(config: dict[str, Any]) -> tuple[str, str]:
    """(the name on screen, the id) of a curve's run.

    The same measurement has the same id, so that measuring it again replaces its run. The commit is not part of it.
    """
    e = config["eval"]
    identity = [e, config["device"], config["dtype"]]
    key = _digest(identity)[:4]
    name = f"{config['run']} {e['label']} {e['task']} ctx{e['ctx']} docs{e['documents']} {config['dtype']} {key}"
    return name, wandb_runs.stable_id(f"{config['run']}-{e['label']}-{e['task']}-ctx{e['ctx']}", identity)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


# ---- what is logged ----


def interval(name: str, values: tuple[float, float, float]) -> dict[str, float]:
    """(mean, low, high) as NAME, NAME_low and NAME_high. Without what is not a number: the interval of one document."""
    named = zip((name, f"{name}_low", f"{name}_high"), values, strict=True)
    return {key: value for key, value in named if not math.isnan(value)}


def point(row: Row, bar: Row) -> dict[str, float]:
    """The values of one length. bar: the row of the better control at this length."""
    values = {
        "log2_n_over_L": math.log2(row.n / row.train_ctx),
        **interval("loss", (row.loss, row.low, row.high)), **interval("gain", gain(row, bar)),
        "ppl": row.ppl, "bits_per_byte": row.bits_per_byte, "factor": row.factor,
    }  # fmt: skip
    if row.hits:
        values |= interval("accuracy", (float(np.mean(row.hits)), *bootstrap(np.array(row.hits))))
    return {f"eval/{key}": value for key, value in values.items()}


def summary(curve: Curve, none: dict[int, Row], bars: dict[int, Row], task: Task) -> dict[str, float]:
    """The columns of the runs table. L is the context of pre-training; without the length of a column it is absent.

    ppl@L, bits_per_byte@L; gain@2x and gain@4x: the gain at 2 L and 4 L, nats per token; tax: the increase of the loss
    at the longest length up to L; longest_not_worse: the longest length up to which no gain above the trained context
    is below 0 with its whole interval; effective_context: of tasks with an answer; minutes: of the measurement.
    """
    rows, L = curve.by_length(), curve.first.train_ctx
    columns: dict[str, float] = {"minutes": sum(row.seconds for row in curve.overall) / 60}
    if L in rows:
        columns |= {"ppl@L": rows[L].ppl, "bits_per_byte@L": rows[L].bits_per_byte}
    for multiple in (2, 4):
        if n := multiple * L if multiple * L in rows else None:
            columns |= interval(f"gain@{multiple}x", gain(rows[n], bars[n]))
    inside = [n for n in rows if n <= L]
    if inside and curve.label not in (NONE.label, WINDOW.label):
        columns |= interval("tax", difference(rows[inside[-1]], none[inside[-1]]))
    columns["longest_not_worse"] = longest_not_worse(curve, bars)
    if task.accuracy:
        columns |= interval("effective_context", effective_context(curve, task.threshold))
    return columns


def longest_not_worse(curve: Curve, bars: dict[int, Row]) -> int:
    """The longest length n such that the curve is not worse than the better control at any length up to n.

    Worse: the interval of the gain is below 0. Lengths up to the trained context count as not worse: there the control
    sees everything, and `tax` says what is lost. 0 if no length was measured.
    """
    longest = 0
    for row in curve.overall:
        if row.n > row.extended_ctx and gain(row, bars[row.n])[2] < 0:
            break
        longest = row.n
    return longest


def table(curve: Curve, bars: dict[int, Row]) -> tuple[list[str | int], list[list[Any]]]:
    """(columns, cells) of all rows of a curve, with the gains; a row of one distance of the answer has none."""
    values = [
        {key: value for key, value in asdict(row).items() if key not in NOT_IN_TABLE}
        | {"accuracy": row.accuracy}
        | ({"gain": None, "gain_low": None, "gain_high": None} if row.distance else _gain(row, bars[row.n]))
        for row in curve.rows
    ]
    return list(values[0]), [list(row.values()) for row in values]


def _gain(row: Row, bar: Row) -> dict[str, float | None]:
    return dict(zip(("gain", "gain_low", "gain_high"), gain(row, bar), strict=True))
