"""The HTML page of curves: its numbers, its menus, and that it needs nothing outside."""

import dataclasses
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import compare
from measure import page, plots
from measure.curves import Curve, write_jsonl
from measure.gain import ACCURACY, BITS, GAIN, PERPLEXITY, Value, better_controls, controls, gain, lines_of
from studies import figures, tables
from studies.rows import RESULTS, read_rows
from tests.helpers import curve_of, error_of, import_or_skip

LOSSES = {64: 3.0, 128: 3.4, 256: 3.9}


def curves_of_runs() -> list[Curve]:
    """rope with seeds 0 and 1, and alibi, each with two controls and ntk."""
    curves = []
    for k, (run, pos) in enumerate([("rope-s0", "rope"), ("rope-s1", "rope"), ("alibi", "alibi")]):
        for label in ("none", "window", "ntk"):
            losses = {n: loss + 0.1 * (label == "window") - 0.05 * k for n, loss in LOSSES.items()}
            curve = curve_of(run, label, losses, pos, seed=k)
            curves.append(dataclasses.replace(curve, named=pos))
    return curves


def value(curves: list[Curve], run: str, label: str, n: int) -> dict[str, Value]:
    return lines_of(curves)[run, label][n]


# ---- the numbers ----


def test_the_numbers_of_one_seed_are_those_that_compare_prints():
    curves = curves_of_runs()
    found = value(curves, "alibi", "ntk", 128)
    row = next(c for c in curves if c.run == "alibi" and c.label == "ntk").by_length()[128]
    want = [row.ppl, math.exp(row.low), math.exp(row.high), row.ppl]
    assert [*found[PERPLEXITY][:3], *found[PERPLEXITY][3]] == pytest.approx(want)
    assert found[BITS][0] == pytest.approx(row.bits_per_byte)
    assert found[GAIN][:3] == pytest.approx(gain(row, controls(curves)["alibi"][128]), abs=1e-9)
    assert ACCURACY not in found


def test_a_loss_of_0_has_no_bits_per_byte():
    curves = [curve_of("x", label, {64: 0.0, 128: 1.0}) for label in ("none", "window")]
    assert BITS not in value(curves, "x", "none", 64) and BITS in value(curves, "x", "none", 128)


def test_seeds_are_one_curve():
    assert {run for run, _ in lines_of(curves_of_runs())} == {"rope", "alibi"}
    mean, low, _, seeds = value(curves_of_runs(), "rope", "none", 256)[PERPLEXITY]
    assert mean == pytest.approx(math.sqrt(math.prod(seeds))) and len(seeds) == 2
    assert low < min(seeds)  # two seeds: a wide interval


def test_the_page_of_the_study_has_the_numbers_of_its_tables():
    rows = read_rows(RESULTS / "rope.jsonl")
    of_rope = [row for row in rows.rows if row.name == "rope" and row.label in ("none", "window", "yarn")]
    curves = figures.curves_of(of_rope)
    for n in (512, 2048):
        found, want = value(curves, "rope", "yarn", n), tables.gain(rows, "rope", "yarn", n)
        assert found[GAIN][:3] == pytest.approx((want.mean, *want.interval))
        assert sorted(found[PERPLEXITY][3]) == pytest.approx(sorted(np.exp(rows.losses("rope", "yarn", n))))


def test_tasks_with_an_answer_show_their_accuracy():
    hits = [1.0] * 24 + [0.0] * 8
    curves = [curve_of("rope", label, LOSSES, hits=hits) for label in ("none", "window")]
    found = value(curves, "rope", "none", 128)
    assert list(found) == [ACCURACY] and found[ACCURACY][0] == 75
    assert 55 < found[ACCURACY][1] < 70 < 80 < found[ACCURACY][2] < 95


def test_the_control_of_several_seeds_is_the_same_for_all():
    """Truncation is better for seed 1 only, but by more: it is the control of both."""
    pairs = [(f"rope-s{seed}", loss) for seed, loss in ((0, 2.9), (1, 3.5))]
    rows = [curve_of(run, "window", {128: loss}).by_length()[128] for run, loss in pairs]
    truncated = {run: curve_of(run, "none", {64: 3.0}).by_length() for run, _ in pairs}
    assert [row.n for row in better_controls(rows, truncated)] == [64, 64]
    assert better_controls(rows[:1], truncated) == rows[:1]
    del truncated["rope-s0"]
    assert better_controls(rows, truncated) == rows  # a control that one seed lacks is none of all


# ---- the menus ----


def test_menus_choose_quantities_runs_and_methods():
    figure = page.draw(curves_of_runs(), "title")
    quantities, choices = (menu["buttons"] for menu in figure["layout"]["updatemenus"])
    assert [button["label"] for button in quantities] == [PERPLEXITY, BITS, GAIN]
    data, axis = quantities[2]["args"]
    assert len(data["y"]) == len(figure["data"]) == 6 and axis["yaxis.type"] == "linear"
    first, row = figure["data"][3], curves_of_runs()[6].first  # alibi without scaling
    assert first["y"][0] + first["error_y.array"][0] == pytest.approx(math.exp(row.high))
    assert first["y"][0] - first["error_y.arrayminus"][0] == pytest.approx(math.exp(row.low))
    shown = {button["label"]: button["args"][0] for button in choices}
    assert shown["run alibi"]["visible"] == [False] * 3 + [True] * 3
    assert shown["run alibi"]["line.color"][5] == plots.COLORS["methods"]["ntk"]
    assert shown["method ntk"]["visible"] == [False, False, True] * 2
    assert shown["method ntk"]["line.color"][5] == plots.COLORS["encodings"]["alibi"]


# ---- the commands ----


def test_without_plotly_one_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    for curve in curves_of_runs():
        write_jsonl(tmp_path / "runs" / curve.run / "eval" / f"{curve.label}.jsonl", curve.rows)
    error = error_of(compare.main, ["--html"], monkeypatch)
    assert error == "error: --html: needs Plotly, which is not installed: pip install -e '.[page]'"


def test_compare_writes_a_page_that_refers_to_nothing_outside(tmp_path, monkeypatch, capsys):
    import_or_skip("plotly")
    monkeypatch.chdir(tmp_path)
    for curve in [*curves_of_runs(), curve_of("</script><b>", "none", LOSSES)]:
        write_jsonl(tmp_path / "runs" / curve.run.strip("</>") / "eval" / f"{curve.label}.jsonl", curve.rows)
    monkeypatch.setattr(sys, "argv", ["compare.py", "--html"])
    compare.main()
    assert "page: runs/compare.html" in capsys.readouterr().out
    text = Path("runs/compare.html").read_text()
    assert "Curves of runs, task=" in text and not re.search(r"<(script|link)\b[^>]*\b(src|href)=", text)
    assert "</script><b>" not in text  # no name of a run ends the script
