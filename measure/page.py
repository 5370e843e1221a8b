"""Curves as one HTML page that opens without a network: choose runs and methods, hover for values and intervals.

Everything is in the file: the data as JSON, and BokehJS, which draws them. The layout and the code of the page are in
page.html, the computations here.
"""

import html
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from engine.checkpoint import write_atomically
from measure.curves import Curve, Row, better_controls, per_document_difference
from measure.mixed_effects import estimate
from measure.statistics import bootstrap, gain

QUANTITIES = {  # key -> name
    "perplexity": "perplexity",
    "bits": "bits per byte",
    "gain": "gain over the better control, nats per token",
    "accuracy": "accuracy, %",
}
POSITIVE = ("perplexity", "bits")  # which can have a logarithmic axis
MANY_CURVES = 12  # the page opens with fewer than all of them


def write_page(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Write the page. curves: on the same targets, with the controls. UserError if Bokeh is not installed."""
    data = json.dumps(page_data(curves), allow_nan=False).replace("<", "\\u003c")  # no name can end the script
    parts = {"<!-- BOKEH -->": bokeh_scripts(), "TITLE": html.escape(title), "DATA": data}
    page = Path(__file__).with_suffix(".html").read_text()
    page = re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], page)
    write_atomically(path, lambda f: f.write(page.encode()))


def bokeh_scripts() -> str:
    """The script elements with all of BokehJS. UserError if Bokeh is not installed."""
    try:
        from bokeh.resources import Resources
    except ImportError:
        raise UserError("--html: needs Bokeh, which is not installed: pip install -e '.[page]'") from None
    return Resources(mode="inline", components=["bokeh", "bokeh-api"]).render()


# ---- the data of the page ----


def page_data(curves: Sequence[Curve]) -> dict[str, Any]:
    """What page.html reads: the curves with all values, intervals and colours. Every number is finite or None.

    Runs that differ only in their seed (`rope-s0` and `rope-s1`) are one run, `rope`.
    """
    from measure.plots import NAMES, color_of

    seeds: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for curve in curves:
        seeds[run_without_seed(curve.first), curve.label].append(curve)
    labels = list(dict.fromkeys(label for _, label in seeds))
    found: list[dict[str, Any]] = []
    for (run, label), of_seeds in seeds.items():
        first = of_seeds[0].first
        encoding = first.pos.split()[0]
        same_color = [other for other in labels if other.split()[0] == label.split()[0]]
        found.append(
            {
                "run": run,
                "method": label,
                "L": first.train_ctx,
                "encoding": encoding,
                "method_color": color_of("methods", label),
                "encoding_color": color_of("encodings", encoding),
                "variant": same_color.index(label),
                "points": points(of_seeds, seeds.get((run, "window"), []), seeds.get((run, "none"), [])),
            }
        )
    first = curves[0].first
    used = [key for key in QUANTITIES if any(key in point for curve in found for point in curve["points"])]
    return {
        "quantities": [{"key": key, "name": QUANTITIES[key], "positive": key in POSITIVE} for key in used],
        "names": NAMES,
        "initial": initial_view(found),
        "curves": found,
        "note": f"The tokens that task={first.task} scores in {first.documents} held-out documents, given n tokens of "
        "context; L is the trained context. Intervals: 95 %; of one seed over documents, of several over seeds and "
        "documents. Runs that differ only in their seed are one curve, the mean; where there are two seeds, each is a "
        "hollow point.",
    }


def run_without_seed(row: Row) -> str:
    """`rope` for the run rope-s1 of seed 1, otherwise the name of the run."""
    name, _, seed = row.run.rpartition("-s")
    return name if name and seed == str(row.seed) else row.run


def initial_view(curves: list[dict[str, Any]]) -> dict[str, Any]:
    """Which runs and methods are shown when the page opens, and what has the colours.

    Of many curves: the run with the most methods, with those methods that other runs have, too.
    """
    methods: dict[str, list[str]] = defaultdict(list)  # of each run
    for curve in curves:
        methods[curve["run"]].append(curve["method"])
    runs, shown = list(methods), list(dict.fromkeys(label for labels in methods.values() for label in labels))
    if len(curves) > MANY_CURVES and len(runs) > 1:
        runs = [max(runs, key=lambda run: len(methods[run]))]
        shown = [m for m in methods[runs[0]] if sum(m in labels for labels in methods.values()) > 1]
    several = len({curve["encoding"] for curve in curves if curve["run"] in runs}) > 1
    return {"runs": runs, "methods": shown, "color": "encoding" if several else "method"}


def points(curves: list[Curve], windows: list[Curve], nones: list[Curve]) -> list[dict[str, Any]]:
    """A point for each length n that all seeds have. curves: of one method, one for each seed.

    windows, nones: of the same runs, the window control and no scaling.
    """
    by_length = [curve.by_length() for curve in curves]
    control = {curve.run: curve.by_length() for curve in windows}
    none = {curve.run: curve.by_length() for curve in nones}
    found = []
    for n in sorted(set.union(*(set(rows) for rows in by_length))):
        rows = [rows[n] for rows in by_length if n in rows]
        window = [control.get(row.run, {}).get(n) for row in rows]
        bar = better_controls([w for w in window if w], none) if all(window) else []
        found.append({"n": n, "seeds": [row.seed for row in rows], **quantities(rows, bar)})
    return found


def quantities(rows: list[Row], bar: list[Row]) -> dict[str, Any]:
    """The values of one method at one length: of each seed, their mean and its 95 % interval.

    rows: of the seeds. bar: the rows of the better control, or empty.
    """
    losses = [row.loss for row in rows]
    windows = sorted(set.intersection(*({*row.windows} for row in rows)))
    low, high = rows[0].low, rows[0].high
    if len(rows) > 1:
        spread = estimate(np.stack([row.document_losses(windows) for row in rows]))
        low, high = (np.mean(losses) + end - spread.mean for end in spread.interval)
    found = {"perplexity": value(np.exp(np.minimum(losses, 700)), np.exp(np.mean(losses)), np.exp(low), np.exp(high))}
    bits = rows[0].bits_per_byte / rows[0].loss  # the same for all losses on these targets
    if math.isfinite(bits):
        found["bits"] = value(bits * np.array(losses), bits * np.mean(losses), bits * low, bits * high)
    if bar:
        found["gain"] = value(*gains(rows, bar))
    if all(row.hits for row in rows):
        hits = 100 * np.array([row.hits for row in rows])  # [seeds, examples]
        low, high = estimate(hits).interval if len(rows) > 1 else bootstrap(hits[0])
        found["accuracy"] = value(hits.mean(axis=1), hits.mean(), low, high)
        del found["perplexity"]
        found.pop("bits", None)
        found.pop("gain", None)
    return found


def gains(rows: list[Row], bar: list[Row]) -> tuple[list[float], float, float, float]:
    """(of each seed, mean, low, high), nats per token: the losses of the control minus those of the rows."""
    if len(rows) == 1:
        mean, low, high = gain(rows[0], bar[0])
        return [mean], mean, low, high
    delta = np.stack([per_document_difference(control, row) for row, control in zip(rows, bar, strict=True)])
    result = estimate(delta)  # [seeds, documents]
    return delta.mean(axis=1).tolist(), result.mean, *result.interval


def value(values: Any, mean: Any, low: Any, high: Any) -> dict[str, Any]:
    """One value of the page. Six digits are enough for it; infinity and NaN are not JSON."""

    def short(x: Any) -> float | None:
        return float(f"{x:.6g}") if math.isfinite(x) else None

    return {"value": short(mean), "low": short(low), "high": short(high), "values": [short(x) for x in values]}
