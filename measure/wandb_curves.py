"""Curves as wandb runs: one run for one curve, so that the curves of any runs can share a panel.

A run's config and name tell any two measurements apart. Its history is the curve, its summary has the columns of the
runs table.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from engine.wandb_log import Log, new_id, run_config
from measure.curves import Curve, Row
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.gain import controls, gain
from measure.intervals import mean_interval
from measure.report import effective_context
from measure.tasks import Task

LOG2 = "eval/log2_n_over_L"  # the x axis: 0 at the trained context L, 1 at twice of it


def log_curve(project: str, evaluation: Evaluation, method: Method, curves: dict[str, Curve], figure: Path) -> None:
    """Log a curve: its points and picture, and the columns of the runs table.

    curves: label -> curve, also none and window; aligned (measure/curves.py, `align`), so that losses at long n differ
    from those of the rows in their file.
    """
    curve, none = curves[method.label], curves[NONE.label].by_length()
    (bars,) = controls(curves.values()).values()  # of one run: n -> the row of the better control
    config = curve_config(evaluation, method)
    name = curve_name(config)

    def log_all(wandb: Any, run: Any) -> None:
        run.define_metric(LOG2, hidden=True)
        run.define_metric("eval/*", step_metric=LOG2)
        for end in ("low", "high"):  # drawn around their values, not in panels of their own
            for key in ("loss", "gain", "accuracy"):
                run.define_metric(f"eval/{key}_{end}", step_metric=LOG2, hidden=True)
        for row in curve.overall:
            run.log(point(row, bars[row.n]), step=row.n)
        run.log({"eval/figure": wandb.Image(str(figure))}, step=curve.overall[-1].n)
        run.summary.update(summary(curve, none, bars, evaluation.task) | {"n_parameters": config["n_parameters"]})

    # The id is new: a curve that is measured again (fresh=true) is another run
    about = {"group": config["run"], "name": name, "id": new_id(name), "config": config}
    with Log(project=project, job_type="eval", **about) as log:
        log(log_all)


# ---- what tells measurements apart ----


def curve_config(evaluation: Evaluation, method: Method) -> dict[str, Any]:
    """The config of a curve's run: the keys of its training, and under `eval` what was measured.

    device and dtype are those of the evaluation.
    """
    run, scaling = evaluation.run, method.scalings[0]
    measured: dict[str, Any] = {"label": method.label, "scaling": scaling}
    measured |= {"plus": [knobs["kind"] for knobs in method.scalings[1:]], "lengths": evaluation.lengths}
    measured |= evaluation.facts | {"targets": short_hash(evaluation.target_keys)}
    here = {"device": evaluation.device.type, "dtype": evaluation.dtype_name, "n_parameters": run.model.n_parameters()}
    return {**run_config(run.name, run.cfg), **here, "eval": measured}


def curve_name(config: dict[str, Any]) -> str:
    """The name on screen of a curve's run: first the method, as names are cut; last a hash of what was measured."""
    e, dtype = config["eval"], config["dtype"]
    key = short_hash([e, config["device"], dtype])[:4]
    return f"{e['label']} {config['run']} {e['task']} ctx{e['ctx']} docs{e['documents']} {dtype} {key}"


def short_hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


# ---- what is logged ----


def interval(name: str, values: tuple[float, float, float]) -> dict[str, float]:
    """(mean, low, high) as NAME, NAME_low and NAME_high. Without what is not a number: the interval of one document."""
    named = zip((name, f"{name}_low", f"{name}_high"), values, strict=True)
    return {key: value for key, value in named if not math.isnan(value)}


def point(row: Row, bar: Row) -> dict[str, float]:
    """The values of one length. bar: the row of the better control at this length."""
    values = {"log2_n_over_L": math.log2(row.n / row.train_ctx), "factor": row.factor}
    values |= {"ppl": row.ppl, "bits_per_byte": row.bits_per_byte}
    values |= interval("loss", (row.loss, row.low, row.high)) | interval("gain", gain(row, bar))
    if row.hits:
        values |= interval("accuracy", mean_interval(np.array([row.hits])))
    return {f"eval/{key}": value for key, value in values.items()}


def summary(curve: Curve, none: dict[int, Row], bars: dict[int, Row], task: Task) -> dict[str, float]:
    """The columns of the runs table. L is the context of pre-training; without the length of a column it is absent.

    ppl@L, bits_per_byte@L; gain@2x and gain@4x: the gain at 2 L and 4 L, nats per token; cost@L: the increase of the
    loss at the longest length up to L; longest_not_worse; effective_context: of tasks with an answer; minutes: of the
    measurement.
    """
    rows, L = curve.by_length(), curve.first.train_ctx
    columns: dict[str, float] = {"minutes": sum(row.seconds for row in curve.overall) / 60}
    if L in rows:
        columns |= {"ppl@L": rows[L].ppl, "bits_per_byte@L": rows[L].bits_per_byte}
    for multiple in (2, 4):
        if row := rows.get(multiple * L):
            columns |= interval(f"gain@{multiple}x", gain(row, bars[row.n]))
    inside = [n for n in rows if n <= L]
    if inside and curve.label not in (NONE.label, WINDOW.label):
        columns |= interval("cost@L", gain(none[inside[-1]], rows[inside[-1]]))
    columns["longest_not_worse"] = longest_not_worse(curve, bars)
    if task.accuracy:
        columns |= interval("effective_context", effective_context(curve, task.threshold))
    return columns


def longest_not_worse(curve: Curve, bars: dict[int, Row]) -> int:
    """The longest length n such that the curve is not worse than the better control at any length up to n.

    Worse: the interval of the gain is below 0. Lengths up to the trained context count as not worse: there the control
    sees everything, and `cost@L` says what is lost. 0 if no length was measured.
    """
    beyond = [row for row in curve.overall if row.n > row.longest_trained_ctx]
    worse = [row.n for row in beyond if gain(row, bars[row.n])[2] < 0]
    return max((row.n for row in curve.overall if not worse or row.n < worse[0]), default=0)
