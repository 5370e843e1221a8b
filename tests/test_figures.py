"""The figures: one colour for a name in all of them, names that do not overlap, seeds as points, three formats."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Annotation, Text

from measure import plots
from measure.curves import Curve
from model.scaling import TrainedContext
from model.spectrum import frequencies
from studies import decay, figure_parts, figures, spectrum
from studies.rows import Rows, read_both
from tests.helpers import A_ROW, ROOT, curve_of, layer_study_rows

METHOD_OF = {text: label for label, text in plots.NAMES.items()}  # from the name in a figure to the label


@pytest.fixture(scope="module", autouse=True)
def figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def rows() -> tuple[Rows, Rows]:
    return read_both(str(ROOT / "results/matrix.jsonl"), str(ROOT / "results/matrix-last64.jsonl"))


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
    new, old = rows
    trained = TrainedContext("rope", 256, frequencies(64, 10000.0))
    by_method = spectrum.rotations_by_method(trained, 8.0)
    by_base = {f"base {base}": decay.decay(frequencies(64, base), 512) for base in decay.BASES}
    by_scaling = {name: decay.decay(decay.scaled_frequencies(name, 64, 512, 64), 512) for name in decay.SCALINGS}
    return {
        "encodings": figures.encodings(new),
        "encodings of the old rows": figures.encodings(old),
        "scaling": figures.scaling(new),
        "finetune": figures.finetune(old),
        "base": figures.base(old),
        "layers and encodings": figures.layers(layer_study_rows()),
        "spectrum": drawn(spectrum.draw, by_method, 256, "title", Path("x.png")),
        "decay": drawn(decay.draw, by_base, by_scaling, 64, 512, 64, Path("x.png")),
        "compare": drawn(plots.draw_curves, methods_of_one_run(), Path("x.png"), "title"),
        "one evaluation": drawn(plots.draw_curves, methods_of_one_run()[:3], Path("x.png"), "title"),
    }


def methods_of_one_run() -> list[Curve]:
    """Nine curves that end at different lengths, and two of them at the same loss."""
    short, long = (64, 128, 256), (64, 128, 256, 512, 1024)
    labels = ["none", "window", "ntk", "pi", "yarn", "yarn factor=fixed", "dynamic_ntk", "rerope", "llama3"]
    return [
        curve_of("rope", label, {n: 3 + 0.01 * (i // 2) * n / 64 for n in (short if i % 3 == 2 else long)})
        for i, label in enumerate(labels)
    ]


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
    assert {"spectrum", "scaling", "finetune", "decay", "compare", "one evaluation"} <= seen["methods none"]
    assert len(seen["methods pi"]) >= 4 and len(seen["methods window"]) >= 5 and len(seen["encodings rope"]) == 3


def test_the_lines_of_a_panel_of_layers_differ_in_colour_or_dashes(all_figures):
    """The ten runs are in one panel each, and the references in all."""
    shown: dict[str, int] = {}
    for ax in all_figures["layers and encodings"].axes:
        lines = [line for line in ax.lines if len(line.get_xdata()) > 2]
        assert len({(line.get_color(), str(line._dash_pattern)) for line in lines}) == len(lines)
        for name in (a.get_text() for a in ax.texts if a.arrow_patch is not None):
            shown[name] = shown.get(name, 0) + 1
            kind = "encodings" if name in plots.COLORS["encodings"] else "changes"
            color = plots.COLORS[kind].get(name) or plots.COLORS["encodings"].get(f"rope+{name}")
            [drawn_color] = {a.get_color() for a in ax.texts if a.get_text() == name}
            assert color in (None, drawn_color), name
    assert shown["rope"] == shown["alibi"] == shown["rope, window control"] == 3
    ten = ("gemma3", "swan", "sssl", "smollm3", "fox", "ssmax", "kerple", "fire", "drope", "abf, trained at 4 L")
    assert all(shown[name] == 1 for name in (*ten, "swan, logn", "gemma3, yarn", "drope, logn"))


def lab(color: str) -> np.ndarray:
    """CIE L*a*b* of an sRGB colour, in which equal distances look equally different."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb > 0.04045, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ linear / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", ["methods", "encodings"])
def test_the_colours_of_the_table_can_be_told_apart(kind):
    table = plots.COLORS[kind]
    for a, b in itertools.combinations(table, 2):
        assert np.linalg.norm(lab(table[a]) - lab(table[b])) > 20, (a, b)  # 2.3 is a just noticeable difference
    assert all(np.linalg.norm(lab(color) - lab("#FFFFFF")) > 20 for color in table.values())


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
    fig = drawn(plots.draw_curves, curves, Path("x.png"), "title")
    lines = [line for line in fig.axes[0].lines if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
    names = {a.get_text(): a.get_color() for a in names_at_line_ends(fig)}
    assert names["rope-s1, ntk"] == plots.COLORS["encodings"]["rope"] != names["alibi, ntk"]
    assert len({(line.get_color(), line.get_marker(), str(line._dash_pattern)) for line in lines}) == 9


# ---- names at the ends of the lines ----


def boxes(texts: list[Text], fig: Any) -> dict[Text, Any]:
    fig.canvas.draw()
    return {text: Text.get_window_extent(text) for text in texts}  # of the text alone, without the leader


def overlaps(a: Any, b: Any) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1  # pixels


def test_names_do_not_overlap_in_any_figure(all_figures):
    for figure, fig in all_figures.items():
        texts = [*names_at_line_ends(fig), *(ax.title for ax in fig.axes), *(ax._left_title for ax in fig.axes)]
        found = boxes([text for text in texts if text.get_text()], fig)
        assert len(found) >= 4, figure
        for a, b in itertools.combinations(found, 2):
            assert not overlaps(found[a], found[b]), (figure, a.get_text(), b.get_text())
        for name, ax in itertools.product(names_at_line_ends(fig), fig.axes):
            assert not overlaps(found[name], ax.get_window_extent()), (figure, name.get_text(), "on a panel")


def test_names_move_as_little_as_possible():
    fig, ax = plt.subplots()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    ys = {"alone": 0.9, "upper": 0.5, "middle": 0.5, "lower": 0.5}
    plots.end_labels(ax, [(1.0, y, name, {"color": "#000000"}) for name, y in ys.items()])
    heights = {a.get_text(): a.xyann[1] for a in names_at_line_ends(fig)}
    assert heights.pop("alone") == pytest.approx(0.9)
    assert np.mean(list(heights.values())) == pytest.approx(0.5)  # the group stays centred on its lines
    assert np.ptp(list(heights.values())) < 0.15


def test_a_line_that_ends_early_is_joined_to_its_name():
    fig = drawn(plots.draw_curves, methods_of_one_run(), Path("x.png"), "title")
    ends = {a.get_text(): a for a in names_at_line_ends(fig)}
    assert ends["ntk"].xy[0] == 256 and ends["pi"].xy[0] == 1024
    fig.canvas.draw()
    leader = ends["ntk"].arrow_patch.get_path().get_extents()
    assert leader.width > 100  # pixels: from the end at 256 to the right of the axes


def test_a_curve_on_top_of_another_leaves_both_visible():
    losses = {64: 3.0, 128: 3.1, 256: 3.3}
    labels = ("none", "window", "ntk", "dynamic_ntk")
    curves = [curve_of("rope", label, {n: loss + 0.1 * min(i, 2) for n, loss in losses.items()})
              for i, label in enumerate(labels)]  # fmt: skip
    curves.append(curve_of("rope", "pi", {n: loss + 0.205 for n, loss in losses.items()}))  # near them, but apart
    fig = drawn(plots.draw_curves, curves, Path("x.png"), "title")
    *_, ntk, dynamic, pi = (line for line in fig.axes[0].lines if line.get_marker() == "o")
    assert [line.get_linestyle() for line in (ntk, dynamic, pi)] == ["-", "--", "-"]
    assert {"ntk", "dynamic_ntk"} <= {a.get_text() for a in names_at_line_ends(fig)}


def test_marks_at_nearby_lengths_do_not_overlap():
    curves = [curve_of(f"at{L}", "none", {64: 3.0, 8192: 3.1}, L=L) for L in (64, 96, 128)]
    fig = drawn(plots.draw_curves, curves, Path("x.png"), "title")
    found = boxes([a for a in fig.findobj(Annotation) if a.get_text().startswith("trained at")], fig)
    assert len(found) == 3
    assert not any(overlaps(found[a], found[b]) for a, b in itertools.combinations(found, 2))


# ---- seeds, axes, references ----


def test_fewer_than_three_seeds_are_points_without_a_band(rows):
    _, ax = plt.subplots()
    two, three = np.array([3.0, 3.5]), np.array([3.0, 3.2, 3.5])
    assert figure_parts.draw_line(ax, {1.0: two, 2.0: three, 3.0: three}, {"color": "#000000"}) == (
        3.0,
        np.exp(three.mean()),
    )
    [band] = [c for c in ax.collections if isinstance(c, PolyCollection)]
    assert band.get_datalim(ax.transData).x0 == 2  # and nothing where there are two seeds
    assert ax.lines[-1].get_xydata().tolist() == [[1.0, np.exp(3.0)], [1.0, np.exp(3.5)]]
    assert ax.lines[-1].get_markerfacecolor() == "none"
    fig = figures.base(rows[1])
    assert all(len(c.get_paths()) == 0 for c in fig.axes[0].collections)  # one or two seeds each
    assert "hollow points: single seeds" in fig.axes[0].get_title(loc="left") + fig.axes[0].get_title()


@pytest.mark.parametrize("change", [0.0, 0.002, 0.02, 4.0])
def test_the_perplexity_axis_always_has_ticks(change):
    flat = curve_of("alibi", "none", {64: 2.88, 128: 2.881 + change}, "alibi")
    fig = drawn(plots.draw_curves, [flat], Path("x.png"), "title")
    fig.canvas.draw()
    [right] = fig.axes[0].child_axes
    low, high = right.get_ylim()
    assert sum(low <= tick <= high for tick in right.get_yticks()) >= 3
    bits = 2.88 * A_ROW.tokens / np.log(2) / A_ROW.bytes
    assert right._functions[0](bits) == pytest.approx(2.88)  # nats: the labels are its exponentials


def test_no_reference_line_is_drawn_twice(rows):
    plt.close("all")
    for ax in figures.finetune(rows[1]).axes:
        flat = [line for line in ax.lines if len({*line.get_ydata()}) == 1]
        assert len({str(line._dash_pattern) for line in flat}) == len(flat) >= 1
        assert len({round(float(line.get_ydata()[0]), 6) for line in flat}) == len(flat)


def test_the_decay_figure_has_four_panels_and_explains_its_symbols(all_figures):
    fig = all_figures["decay"]
    assert len(fig.axes) == 4 and all(ax.lines for ax in fig.axes)
    text = " ".join(t.get_text() for t in fig.texts)
    assert "B(m) = " in text and "Su's bound = " in text and "D = 64" in text


# ---- files ----


def test_the_same_figure_gives_the_same_files_in_three_formats(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        fig, ax = plt.subplots()
        ax.plot([1, 2], label="a line")
        plots.save(fig, tmp_path / folder / "figure.png", *figures.FORMATS)
    for suffix, start in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        first, second = ((tmp_path / folder / f"figure{suffix}").read_bytes() for folder in ("a", "b"))
        assert first.startswith(start) and first == second


def test_the_command_writes_three_formats(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "FIGURES", {"scaling": figures.FIGURES["scaling"]})
    monkeypatch.setattr(sys, "argv", ["figures", "--out", str(tmp_path), "--layer-rows", "none"])
    figures.main()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["scaling.pdf", "scaling.png", "scaling.svg"]
    assert "scaling.pdf" in capsys.readouterr().out


def test_the_figure_of_layers_has_rows_of_its_own(tmp_path, monkeypatch, capsys, rows):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in layer_study_rows()))
    monkeypatch.setattr(figures, "read_both", lambda *_: rows)  # reading them takes a second
    monkeypatch.setattr(figures, "FIGURES", {"layers": figures.FIGURES["layers"]})
    monkeypatch.setattr(figures, "FORMATS", (".svg",))
    monkeypatch.setattr(sys, "argv", ["figures", "--out", str(tmp_path), "--layer-rows", str(file)])
    figures.main()
    assert (tmp_path / "layers.svg").exists() and "layers.svg" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["figures", "--out", str(tmp_path), "--layer-rows", "missing"])
    figures.main()
    assert capsys.readouterr().out == "layers: no rows yet\n"


@pytest.mark.parametrize("name", ["encodings", "scaling", "finetune", "base", "spectrum", "decay"])
def test_every_figure_is_there_in_three_formats(name):
    assert all((ROOT / "results" / f"{name}.{kind}").stat().st_size > 5000 for kind in ("png", "svg", "pdf"))
