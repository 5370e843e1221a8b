"""The figures: one colour for a name in all of them, names that do not overlap, seeds as points, three formats."""

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Annotation, Text

from conf.registry import yaml_values
from measure import plots
from measure.curves import Curve
from measure.report import Losses
from model.scaling import TrainedContext
from model.spectrum import frequencies
from studies import choosing, decay, figures, spectrum
from studies.rows import RESULTS, Rows, read_rows
from tests.helpers import A_ROW, curve_of, encoding_rows

plt = plots.pyplot()
METHOD_OF = {text: label for label, text in plots.NAMES.items()}  # from the name in a figure to the label


@pytest.fixture(scope="module", autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def rows() -> Rows:
    return read_rows(RESULTS / "rope.jsonl")


def drawn(function: Callable, *args: Any) -> Any:
    """Call a function that saves one figure, and return the figure instead."""
    saved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save", lambda fig, *_: saved.append(fig))
        function(*args)
    return saved[0]


@pytest.fixture(scope="module")
def all_figures(rows) -> dict[str, Any]:
    """Every figure with methods or encodings in it, by name."""
    trained = TrainedContext("rope", 256, frequencies(64, 10000.0))
    by_method = spectrum.rotations_by_method(trained, 8.0)
    by_base = {f"base {base}": decay.decay(frequencies(64, base), 512) for base in decay.BASES}
    short = TrainedContext("rope", 64, frequencies(64, 10000.0))
    scaled = {name: spectrum.scaled(short, yaml_values("scaling", name), 512) for name in decay.SCALINGS}
    by_scaling = {name: decay.decay(inv_freq, 512) for name, inv_freq in scaled.items()}
    return {
        "encodings": figures.encodings(read_rows(RESULTS / "adamw.jsonl")),
        "scaling": figures.scaling(rows),
        "base": figures.base(encoding_rows((0, 1, 2))),
        "reach": figures.reach(encoding_rows()),
        "spectrum": drawn(spectrum.draw, by_method, 256, "title", Path("x.png")),
        "decay": drawn(decay.draw, by_base, by_scaling, Path("x.png")),
        "choosing": choosing.draw(),
        "compare": drawn(Losses().draw, methods_of_one_run(), Path("x.png"), "title"),
        "one evaluation": drawn(Losses().draw, methods_of_one_run()[:3], Path("x.png"), "title"),
        "three contexts": drawn(Losses().draw, runs_of_three_contexts(), Path("x.png"), "$\\frac{$"),
    }


def methods_of_one_run() -> list[Curve]:
    """Nine curves that end at different lengths, and two of them at the same loss."""
    short, long = (64, 128, 256), (64, 128, 256, 512, 1024)
    labels = ["none", "window", "ntk", "pi", "yarn", "yarn factor=fixed", "dynamic_ntk", "rerope", "llama3"]
    return [
        curve_of("rope", label, {n: 3 + 0.01 * (i // 2) * n / 64 for n in (short if i % 3 == 2 else long)})
        for i, label in enumerate(labels)
    ]


def runs_of_three_contexts() -> list[Curve]:
    """Their names are no formulas."""
    return [curve_of(f"$\\x$ at {L}", "none", {64: 3.0, 8192: 3.1}, L=L) for L in (64, 96, 128)]


def names_at_line_ends(fig: Any) -> list[Annotation]:
    return [a for a in fig.findobj(Annotation) if a.arrow_patch is not None]


# ---- colours ----


def test_a_method_and_an_encoding_have_one_colour_in_all_figures(all_figures):
    seen: dict[str, set[str]] = {}
    for figure, fig in all_figures.items():
        kind = "encodings" if "encodings" in figure else "methods"
        for name in names_at_line_ends(fig):
            label = METHOD_OF.get(name.get_text().removeprefix("rope, "), name.get_text())
            label = "none" if label == "NoPE (none)" else label
            if label.split()[0] in plots.COLORS[kind] or label == "window":
                kind_of_name = "methods" if label == "window" else kind
                assert name.get_color() == plots.color_of(kind_of_name, label), (figure, label)
                colors = {to_hex(line.get_color()).upper() for line in name.axes.lines}
                assert name.get_color() in colors, (figure, label)  # of the line, too
                seen.setdefault(f"{kind_of_name} {label}", set()).add(figure)
    assert {"spectrum", "scaling", "decay", "compare", "one evaluation"} <= seen["methods none"]
    assert len(seen["methods pi"]) >= 3 and len(seen["methods window"]) >= 5 and seen["encodings rope"]


def test_a_new_method_has_a_colour_that_does_not_depend_on_the_figure():
    assert plots.color_of("methods", "half_pi") in plots.COLORS["others"]
    assert plots.color_of("methods", "half_pi share=0.5 + logn") == plots.color_of("methods", "half_pi")
    assert plots.color_of("methods", "yarn factor=fixed") == plots.COLORS["methods"]["yarn"]


def test_with_several_encodings_the_colour_is_theirs_and_the_dashes_are_the_methods():
    curves = [
        curve_of(run, label, {64: 3.0 + 0.1 * i, 128: 3.2 + 0.1 * j}, pos)
        for i, (run, pos) in enumerate([("rope-s0", "rope"), ("rope-s1", "rope base=500.0"), ("alibi", "alibi")])
        for j, label in enumerate(("none", "window", "ntk"))
    ]
    fig = drawn(Losses().draw, curves, Path("x.png"), "title")
    lines = [line for line in fig.axes[0].lines if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
    names = {a.get_text(): a.get_color() for a in names_at_line_ends(fig)}
    assert names["rope-s1, ntk"] == plots.COLORS["encodings"]["rope"] != names["alibi, no scaling"]
    assert len({(line.get_color(), line.get_marker(), str(line._dash_pattern)) for line in lines}) == plots.MOST < 9


def test_of_four_groups_a_picture_has_their_best_methods():
    curves = [
        curve_of(run, label, {64: 3.0, 128: 3 + 0.1 * i - 0.01 * j})
        for i, run in enumerate("abcd")
        for j, label in enumerate(("none", "window", "pi", "yarn"))
    ]
    chosen = [(c.group, c.label) for c in plots.by_importance(curves)]
    assert chosen[:8] == [(run, label) for label in ("yarn", "window") for run in "abcd"]
    assert {label for _, label in chosen[12:]} == {"pi"}


# What is left of linear RGB with protanopia and deuteranopia (Machado et al. 2009, severity 1), and RGB -> XYZ (sRGB)
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]


@pytest.mark.parametrize("kind", ["methods", "encodings"])
@pytest.mark.parametrize("sight", [np.eye(3).tolist(), PROTANOPIA, DEUTERANOPIA], ids=["full", "protan", "deutan"])
def test_colours_are_apart_for_colour_blind_readers_too(kind, sight):
    rgb = np.array([to_rgb(color) for color in plots.COLORS[kind].values()])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array(XYZ) @ (np.array(sight) @ linear.T).clip(0.001, 1) / [[0.9505], [1], [1.0888]])
    lab = np.stack((116 * y, 500 * (x - y), 200 * (y - z)))  # CIE 1976
    distances = np.linalg.norm(lab[:, None] - lab[:, :, None], axis=0)
    assert distances[np.triu_indices(len(rgb), 1)].min() > 10


# ---- names at the ends of the lines ----


def boxes(texts: list[Text], fig: Any) -> dict[Text, Any]:
    fig.canvas.draw()
    return {text: Text.get_window_extent(text) for text in texts}  # of the text alone, without the leader


def overlaps(a: Any, b: Any) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1  # pixels


def test_names_do_not_overlap_in_any_figure(all_figures):
    for figure, fig in all_figures.items():
        marks = [a for a in fig.findobj(Annotation) if a.get_text().startswith("trained at")]
        titles = [title for ax in fig.axes for title in (ax.title, ax._left_title)]
        legends = [text for ax in fig.axes if ax.get_legend() for text in ax.get_legend().get_texts()]
        texts = [*names_at_line_ends(fig), *marks, *titles, *legends]
        found = boxes([text for text in texts if text.get_text()], fig)
        assert len(found) >= 4, figure
        for a, b in itertools.combinations(found, 2):
            assert not overlaps(found[a], found[b]), (figure, a.get_text(), b.get_text())
        for name, ax in itertools.product(names_at_line_ends(fig), fig.axes):
            assert not overlaps(found[name], ax.get_window_extent()), (figure, name.get_text(), "on a panel")


# ---- seeds, axes, references ----


def test_fewer_than_three_seeds_are_points_without_a_band():
    _, ax = plt.subplots()
    two, three, style = np.array([3.0, 3.5]), np.array([3.0, 3.2, 3.5]), {"color": "#000000"}
    figures.draw_line(ax, ({1: two, 2: three, 3: three}, "a", style))
    assert ax.lines[0].get_label() == "a" and ax.lines[0].get_xydata()[-1].tolist() == [3, np.exp(three.mean())]
    [band] = [c for c in ax.collections if isinstance(c, PolyCollection)]
    assert band.get_datalim(ax.transData).x0 == 2  # and nothing where there are two seeds
    assert ax.lines[-1].get_xydata().tolist() == [[1.0, np.exp(3.0)], [1.0, np.exp(3.5)]]


def test_lines_are_the_mean_losses_of_the_rows(all_figures, rows):
    panel, colors = all_figures["scaling"].axes[0], plots.COLORS["methods"]
    [yarn] = [line for line in panel.lines if line.get_color() == colors["yarn"]]
    want = [np.exp(rows.losses("rope", "yarn", int(n)).mean()) for n in yarn.get_xdata()]
    assert yarn.get_ydata().tolist() == want and max(yarn.get_xdata()) == 2048
    of = read_rows(RESULTS / "adamw.jsonl")
    want = [np.exp(of.losses("gemma3", x, n).mean()) for x, n in (("none", 256), ("none", 2048), ("yarn", 2048))]
    assert [dict(zip(*line.get_data()[::-1], strict=True))[0] for line in figures.reach(of).axes[0].lines] == want


@pytest.mark.parametrize("loss", [2.882, 3.5, 7.0])
def test_the_perplexity_axis_has_round_perplexities_where_they_belong(loss):
    fig = drawn(Losses().draw, [curve_of("alibi", "none", {64: 2.88, 128: loss}, "alibi")], Path("x.png"), "title")
    [right] = fig.axes[0].child_axes
    nats = np.log(2) * A_ROW.bytes / A_ROW.tokens
    shown = [float(label.get_text()) for label in right.get_yticklabels()]
    assert len(shown) > 1 and np.exp(right.get_yticks() * nats) == pytest.approx(shown, rel=1e-4)


# ---- files ----


def test_the_command_writes_the_same_files_in_three_formats_again(tmp_path, monkeypatch):
    chosen = {draw: source for draw, source in figures.FIGURES.items() if draw is figures.scaling}
    monkeypatch.setattr(figures, "FIGURES", chosen)
    for folder in ("a", "b"):
        argv = ["figures", "--out", str(tmp_path / folder)]
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(sys, "argv", argv)
        figures.main()
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        first, second = ((tmp_path / folder / f"scaling{suffix}").read_bytes() for folder in ("a", "b"))
        assert first.startswith(start) and first == second
