"""Curves as one HTML page that opens without a network (compare.py --html, studies.figures --page), drawn by Plotly.

Menus choose the quantity, and the runs or methods; a click in the legend hides a curve, a double click all others.
Runs that differ only in their seed are one curve, their mean.
"""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError
from engine.files import write_atomically
from measure.curves import Curve
from measure.gain import BITS, PERPLEXITY, Line, lines_of
from measure.intervals import interval_text
from measure.plots import NAMES, color_of

LOGARITHMIC = (PERPLEXITY, BITS)


def write_page(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Write the page. curves: on the same targets, with the controls. UserError if Plotly is not installed."""
    try:
        from plotly import graph_objects as go
    except ImportError:
        raise UserError("--html: needs Plotly, which is not installed: pip install -e '.[page]'") from None
    figure = go.Figure(draw(curves, f"{html.escape(title)}: means over seeds, with 95 % intervals"))
    write_atomically(path, lambda f: f.write(figure.to_html(include_plotlyjs=True).encode()))


def draw(curves: Sequence[Curve], title: str) -> dict[str, Any]:
    """A trace for each line, in the legend by run, and the menus with what their buttons change, as Plotly reads it."""
    lines, encodings = lines_of(curves), {curve.group: curve.encoding for curve in curves}
    by_method = [color_of("methods", label) for _, label in lines]
    by_encoding = [color_of("encodings", encodings[run]) for run, _ in lines]
    choices = [("all runs and methods", [True] * len(lines), by_encoding if len({*by_encoding}) > 1 else by_method)]
    for chosen in dict.fromkeys(run for run, _ in lines):
        choices.append((f"run {html.escape(chosen)}", [run == chosen for run, _ in lines], by_method))
    for chosen in dict.fromkeys(label for _, label in lines):
        choices.append((f"method {NAMES.get(chosen, chosen)}", [label == chosen for _, label in lines], by_encoding))
    selection = [button("restyle", text, {"visible": on, "line.color": colors}) for text, on, colors in choices]

    quantities, values = [], []
    for quantity in dict.fromkeys(q for line in lines.values() for at in line.values() for q in at):
        values.append([points(line, quantity) for line in lines.values()])
        columns = {key: [of_line[key] for of_line in values[-1]] for key in values[-1][0]}
        axis = {"yaxis.title.text": quantity, "yaxis.type": "log" if quantity in LOGARITHMIC else "linear"}
        quantities.append(button("update", quantity, columns, axis))

    traces = []
    for (run, label), first, color in zip(lines, values[0], choices[0][2], strict=True):
        name, line = NAMES.get(label, label), {"color": color, "dash": "dot" if label == "window" else "solid"}
        look = {"name": name, "line": line, "legendgroup": run, "legendgrouptitle_text": html.escape(run)}
        hover = f"{html.escape(run)}, {name}<br>n = %{{x}}: %{{text}}<extra></extra>"
        traces.append(first | look | {"mode": "lines+markers", "hovertemplate": hover})

    contexts = {row.train_ctx for curve in curves for row in curve.rows}
    place = {"xanchor": "left", "y": 1.1}
    layout = quantities[0]["args"][1] | {
        **{"title_text": title, "title_y": 0.98, "title_yanchor": "top", "margin_t": 140},  # above the menus
        "xaxis": {"title_text": "context length n, tokens", "type": "log", "tickvals": [2**k for k in range(4, 24)]},
        "shapes": [{"type": "line", "x0": L, "x1": L, "yref": "paper", "y0": 0, "y1": 1} for L in contexts],
        "updatemenus": [{"buttons": quantities, "x": 0, **place}, {"buttons": selection, "x": 0.3, **place}],
        "legend_groupclick": "toggleitem",
        "template": "plotly_white",
        "height": 780,
    }
    return {"data": traces, "layout": layout}


def button(way: str, text: str, *args: dict[str, Any]) -> dict[str, Any]:
    """way: Plotly's function that the button calls with these arguments."""
    return {"method": way, "label": text, "args": args}


def points(line: Line, quantity: str) -> dict[str, Any]:
    """Plotly's keys of one quantity: x, y, intervals, and the text under the pointer, with the values of the seeds."""
    at = {n: values[quantity] for n, values in line.items() if quantity in values}
    mean, low, high = np.array([value[:3] for value in at.values()]).reshape(-1, 3).T
    texts = [f"{interval_text(*v[:3], '.4g')}, seeds {', '.join(f'{x:.4g}' for x in v[3])}" for v in at.values()]
    return {"x": [*at], "y": mean, "error_y.array": high - mean, "error_y.arrayminus": mean - low, "text": texts}
