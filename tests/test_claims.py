"""The verdicts on published claims, and the tables: recomputed from the committed rows, and on rows made by hand."""

import functools
import json
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from conf.errors import UserError
from measure.intervals import Estimate, estimate
from studies import claims, layers, plan, tables
from studies.claims import HOLDS, MISSING, REFUTED, At, Check, DecayCheck, read_check, read_claims
from studies.rows import BAR, MATRIX, OLD, Rows, StudyRow, difference, read_rows, read_sources, study_row
from tests.helpers import ROOT, choices, layer_study_rows

A, B = At("a", "none", 512), At("b", "none", 512)


@functools.cache
def committed() -> list[Rows]:
    """The rows of the published study, read one time: not to be changed."""
    return read_sources(MATRIX)


def row(run: str, label: str, n: int, seed: int, nats: dict[int, list[float]] | list[float], L: int = 256) -> StudyRow:
    """A row of windows of two tokens: window -> nats per token of each document, or these of one window."""
    by_window = nats if isinstance(nats, dict) else {0: nats}
    by_document = np.array(list(by_window.values())).T  # [documents, windows]
    values = {"name": f"{run}-s{seed}", "label": label, "n": n, "seed": seed, "train_ctx": L, "part": "encodings"}
    values |= {"nll": (2 * by_document.ravel()).tolist(), "tokens": 2 * by_document.size, "windows": list(by_window)}
    return study_row(values | {"loss": by_document.mean()})


# ---- rows ----


def test_differences_are_of_the_seeds_and_windows_that_both_rows_have():
    rows = Rows(
        [
            row("rope", "none", 256, 0, {0: [1.0, 1.0], 5: [2.0, 3.0]}),
            row("rope", "none", 256, 1, {0: [1.0, 1.0], 5: [4.0, 4.0]}),
            row("rope", "none", 8192, 0, {5: [7.0, 9.0]}),
            row("rope", "none", 8192, 1, {6: [7.0, 7.0]}),  # no window in common
            row("rope", "none", 8192, 2, {5: [7.0, 7.0]}),  # no such seed at 256
        ]
    )
    assert difference(rows.find("rope", "none", 8192), rows.find("rope", "none", 256)).tolist() == [[5, 6]]
    assert len(difference(rows.find("rope", "none", 8192), rows.find("xpos", "none", 256))) == 0


def test_either_file_of_rows_may_be_missing(tmp_path):
    missing = tmp_path / "missing.jsonl"
    assert len(read_sources([missing, MATRIX[1]])) == 1
    with pytest.raises(UserError, match=r"first python -m studies\.matrix"):
        read_sources([missing, missing])


# ---- verdicts ----


def result(mean: float, half: float) -> Estimate:
    """An estimate of 3 seeds and 32 documents with the 95 % interval mean +- half, decided by the seeds."""
    variance = (half / 4.302653) ** 2  # t of 2 degrees of freedom
    return Estimate(mean, variance, 2.0, 3, 32, (3 * variance, 0.0, 0.0))


@pytest.mark.parametrize(
    "check, measured, want",
    [
        (Check(A, B), result(0.10, 0.05), HOLDS),
        (Check(A, B), result(-0.10, 0.05), REFUTED),
        (Check(A, B), result(0.10, 0.15), "undecided (4 seeds would decide)"),
        (Check(A, B, 0.1), result(0.10, 0.05), "undecided (no number of seeds would decide: more documents needed)"),
        (Check(A, B, 0.02, less=True), result(0.0, 0.01), HOLDS),
        (Check(A, B, 0.02, less=True), result(0.1, 0.05), REFUTED),
        (Check(A, B), Estimate(0.1, 0.01, 31.0, 1, 32), "undecided (one seed)"),
        (Check(A, B), None, MISSING),
    ],
)
def test_verdict_follows_the_interval(check, measured, want):
    assert claims.decide([(check, measured)])[0] == want
    # a second check that is met changes nothing but the level at which one is not met
    assert claims.decide([(check, measured), (Check(A, B), result(1, 0.01))])[0] == want
    if want != MISSING:
        assert claims.decide([(check, measured), (Check(A, B), result(-1, 0.01))])[0] == REFUTED


def test_p_of_a_claim_is_that_of_its_worst_check_and_refuting_one_of_several_needs_more():
    one, other = (Check(A, B), result(0.10, 0.05)), (Check(A, B), result(0.10, 0.09))
    p = [claims.decide([x])[1] for x in (one, other)]
    assert claims.decide([one, other])[1] == max(p) < 0.05
    assert p[0] == pytest.approx(2 * one[1].p_above(0))
    barely = (Check(A, B), result(-0.10, 0.095))  # p is a little below 0.05
    assert claims.decide([barely])[0] == REFUTED
    assert claims.decide([barely, (Check(A, B), result(1, 0.01))])[0].startswith("undecided")


# ---- the claims ----


def test_a_check_is_measured_as_it_is_written():
    rows = [row("rope", "none", 512, s, [2.0, 4.0, 6.0]) for s in (0, 1)]
    rows += [row("rope", "yarn", 512, 1, [1.0, 2.0, 6.0]), row("rope", "none", 256, 1, [1.0, 1.0, 1.0])]
    rows += [row("t5_bias", "none", n, 1, [x] * 3) for n, x in ((256, 4.0), (512, 6.0))]

    def measure(text: str) -> Estimate | None:
        return read_check(text, 256).measure(Rows(rows))

    found = measure("rope @2 > rope yarn @2")
    assert (found.mean, found.seeds, found.documents) == (1.0, 1, 3)
    assert found.interval == estimate(np.array([[1.0, 2.0, 0.0]])).interval
    assert measure("rope @2 > xpos yarn @2") is None
    assert measure("rope @2 > t5_bias @2 since @1").mean == (4 - 1) - (6 - 4)


@pytest.mark.parametrize(
    "text, want",
    [
        ("a pi factor=fixed @1 > a @1 by 0.5", Check(At("a", "pi factor=fixed", 4), At("a", "none", 4), 0.5)),
        ("a @0.5 is no worse than a @1", Check(At("a", "none", 2), At("a", "none", 4), 0.02, less=True)),
        ("a @16 is no worse than a @1", Check(At("a", "none", 64), At("a", "none", 4), 0.04, less=True)),
        ("a @1 is no worse than b @1", Check(At("a", "none", 4), At("b", "none", 4), 0.04, less=True)),
        ("a @1.25 is no worse than b @1", Check(At("a", "none", 5), At("b", "none", 4), 0.24, less=True)),
        ("a x @1 differs from a y @1", Check(At("a", "x", 4), At("a", "y", 4), 0.02, absolute=True)),
        ("a x @1 equals a y @1", Check(At("a", "x", 4), At("a", "y", 4), 0.02, less=True, absolute=True)),
    ],
)
def test_checks_and_their_margins(text, want):
    assert read_check(text, 4) == want


@pytest.mark.process
def test_every_claim_names_rows_that_the_plan_makes():
    size = plan.load_size("default")
    jobs = {job.name.rpartition("-s")[0]: job for job in plan.planned_jobs(size, size.seeds)}
    for claim in read_claims("matrix", size.L):
        assert claim.source and claim.reported and claim.checks
        for check, at in ((c, at) for c in claim.checks for at in (c.a, c.b)):
            if isinstance(check, DecayCheck):  # not from rows
                assert math.isfinite(check.score(at))
                continue
            assert at.run in jobs, at
            assert at.label.split()[0] in (*choices("scaling"), "shifted", "unshifted", BAR)
            # Lengths that no row has yet are reported as not run
            assert at.n in jobs[at.run].lengths or at.n / size.L in (1.125, 1.25, 5), at
    for claim in read_claims("layers", 256):
        assert all(check.measure(layer_study_rows()) is not None for check in claim.checks), claim.claim


def verdicts(text: str) -> list[str]:
    return [line.rsplit("|", 2)[1].strip() for line in text.splitlines() if re.match(r"\| \d+ \|", line)]


def test_a_claim_without_rows_is_not_run():
    rows = [row for row in layer_study_rows().rows if row.name != "swan"]
    found = verdicts(layers.report([Rows(rows)]))
    assert [f"**{MISSING}**" == verdict for verdict in found] == [n in (0, 1, 2) for n in range(len(found))]


@pytest.mark.parametrize("better", [True, False])
def test_claims_about_layers_have_the_sign_of_their_text(better):
    """All hold where the losses of the runs that they favour rise less past L, and none in the opposite case."""
    rises = {"rope": 4, "none": 3, "window_only": 4, "gemma3_all_scaled": 4, "drope": -1, "abf": -1}
    rises |= {"fox": 0, "kerple": -0.1, "fire": -0.3}  # of the others: 2

    def loss(run: str, label: str, n: int) -> float:
        rise = 0 if label == "logn" else rises.get(run, 2)
        if not better:
            rise = 2 if label == "logn" else 5 - rise
        return 3 + 0.1 * rise * max(0, math.log2(n / 256)) + 0.5 * (run == "drope" and not better)

    found = verdicts(layers.report([layer_study_rows((0, 1, 2), loss)]))
    assert found == [f"**{HOLDS if better else REFUTED}**"] * len(read_claims("layers", 256))


def test_old_rows_are_used_where_a_claim_has_no_new_ones_and_marked():
    old = [row("learned", "none", n, s, [x, x + s, x]) for n, x in ((256, 1.0), (512, 5.0)) for s in (0, 1)]
    new = [row("sinusoidal", "none", n, s, [x, x + s]) for n, x in ((256, 1.0), (512, 9.0)) for s in (0, 1)]
    lines = claims.report([Rows(new), Rows(old, OLD)]).splitlines()
    line_of = {number: line for number in (1, 2, 3) for line in lines if line.startswith(f"| {number} |")}
    assert "learned @512 - learned @256 > 0: +4.000" in line_of[1] and line_of[1].endswith(f"**holds**, {OLD} |")
    assert "sinusoidal @512 - sinusoidal @256 > 0: +8.000" in line_of[2] and line_of[2].endswith("**holds** |")
    assert line_of[3].endswith(f"| 0 |  | **{MISSING}** |")
    headings = [x for x in tables.report(committed()[1:]).splitlines() if x.startswith("## ")]
    assert len(headings) == 8 and all(x.endswith(f"({OLD})") for x in headings)


# ---- the tables ----


def test_gains_are_over_the_bar_with_q_over_all_cells():
    conditions = (("none", 256, 2.0), ("window", 512, 3.0), ("yarn", 512, 1.5), ("window", 1024, 1.0))
    rows = Rows([row("rope", label, n, s, [x + 0.1 * s, x + 0.2]) for label, n, x in conditions for s in (0, 1)])
    assert tables.gain(rows, "rope", "yarn", 512).mean == pytest.approx(0.5)  # over truncation, which is better
    assert tables.gain(rows, "rope", "window", 512).mean == pytest.approx(-1)
    assert tables.gain(rows, "rope", "pi", 512) == "" and tables.gain(rows, "rope", "window", 1024) == "the bar"

    first, second = Estimate(0.1, 0.0004, 10.0), Estimate(-0.2, 0.04, 10.0)
    p = [2 * first.p_above(0), 2 * second.p_below(0)]
    cells = tables.gain_cells([["the bar", first], [second, ""]])
    assert cells[0][0] == "the bar" and cells[1][1] == ""
    assert cells[0][1].endswith(f" q={2 * p[0]:.3f}") and cells[0][1].startswith("+0.100 [+0.055, +0.145]")
    assert cells[1][0].endswith(f" q={p[1]:.2f}")


def test_the_report_of_layers_is_written_by_its_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = layer_study_rows()
    Path("rows.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in made.rows))
    monkeypatch.setattr(sys, "argv", ["layers", "--rows", "rows.jsonl", "--out", "layers.md"])
    layers.report_command(layers.report, "layers.md")
    text = Path("layers.md").read_text()
    assert text == capsys.readouterr().out[:-1]
    perplexities, _ = [line for line in text.splitlines() if line.startswith("| `swan`, logn |")]
    losses = [np.mean(row.nll) / 64 for row in made.rows if (row.run, row.label) == ("swan-s0", "logn")]
    assert perplexities.split("|")[2:-1] == [f" {np.exp(loss):.1f} " for loss in losses]


def test_a_number_of_claims_md_by_hand():
    """Claim 3, from the JSON of the committed rows alone."""
    nats: dict[int, dict[int, np.ndarray]] = {256: {}, 512: {}}
    for text in MATRIX[0].read_text().splitlines():
        row = json.loads(text)
        if row["name"].startswith("rope-s") and row["label"] == "none" and row["n"] in nats:
            per_window = len(row["nll"]) * np.array(row["nll"]).reshape(32, -1) / row["tokens"]
            nats[row["n"]][row["seed"]] = per_window.mean(axis=1)
    delta = np.stack([nats[512][seed] - nats[256][seed] for seed in (0, 1, 2)])
    low, high = estimate(delta).interval
    text = f"rope @512 - rope @256 > 0.69: {delta.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
    assert text in (ROOT / "results/claims.md").read_text()


# ---- the committed texts ----


def test_claims_by_construction_hold_in_the_rows():
    """All but 9, which compares two trainings: it must not be refuted."""
    for claim in read_claims("matrix", 256):
        if claim.by_construction:
            verdict, _ = claims.decide(claims.measure(claim, committed())[0])
            assert verdict == HOLDS or ("Interleaved" in claim.claim and verdict != REFUTED)


@pytest.mark.parametrize("study, name", [(claims, "claims"), (tables, "matrix"), (layers, "layers")])
def test_the_texts_are_what_the_rows_give(study, name):
    sources = [read_rows(ROOT / "results/layers.jsonl")] if study is layers else committed()
    assert (ROOT / f"results/{name}.md").read_text() == study.report(sources)
