"""The verdicts on published claims, and the tables: recomputed from the committed rows, and on rows made by hand."""

import functools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from conf.errors import UserError
from measure.mixed_effects import Estimate, estimate
from studies import checks, claims, layers, plan, tables
from studies.checks import At, Check, DecayCheck, no_worse, worse
from studies.claims import HOLDS, MISSING, OLD, REFUTED
from studies.published import CLAIMS
from studies.rows import BAR, Rows, bar, by_window, losses, minus, per_document, read_both, read_rows
from tests.helpers import ROOT, choices, layer_study_rows

NEW, LAST64 = ROOT / "results/matrix.jsonl", ROOT / "results/matrix-last64.jsonl"
A, B = At("a", "none", 512), At("b", "none", 512)


@functools.cache
def committed() -> tuple[Rows, Rows]:
    """The new and the old rows of the published study, read one time: not to be changed."""
    return read_both(str(NEW), str(LAST64))


def old_row(name: str, label: str, n: int, seed: int, nats: list[float], L: int = 256) -> dict:
    """A row of the first study: `nats` of documents, two tokens each."""
    return {"part": "encodings", "name": f"{name}-s{seed}", "label": label, "n": n, "seed": seed, "train_ctx": L,
            "nll": [2 * x for x in nats], "tokens": 2 * len(nats)}  # fmt: skip


def new_row(name: str, label: str, n: int, seed: int, nats: dict[int, list[float]], L: int = 256) -> dict:
    """A row with several windows of two tokens: window -> nats per token of each document."""
    by_document = np.array(list(nats.values())).T  # [documents, windows]
    row = old_row(name, label, n, seed, by_document.ravel().tolist(), L)
    return row | {"windows": list(nats), "documents": len(by_document)}


# ---- rows ----


def test_windows_of_old_and_new_rows():
    [(window, values)] = by_window(old_row("rope", "none", 512, 0, [1.0, 2.0, 3.0])).items()
    assert window == 0 and values.tolist() == [1, 2, 3]
    found = by_window(new_row("rope", "none", 512, 0, {0: [1.0, 2.0], 5: [3.0, 4.0], 7: [5.0, 6.0]}))
    assert {w: x.tolist() for w, x in found.items()} == {0: [1, 2], 5: [3, 4], 7: [5, 6]}


def test_differences_are_of_the_seeds_and_windows_that_both_rows_have():
    rows = [
        new_row("rope", "none", 256, 0, {0: [1.0, 1.0], 5: [2.0, 3.0]}),
        new_row("rope", "none", 256, 1, {0: [1.0, 1.0], 5: [4.0, 4.0]}),
        new_row("rope", "none", 8192, 0, {5: [7.0, 9.0]}),
        new_row("rope", "none", 8192, 1, {6: [7.0, 7.0]}),  # no window in common
        new_row("rope", "none", 8192, 2, {5: [7.0, 7.0]}),  # no such seed at 256
    ]
    difference = minus(losses(rows, "rope", "none", 8192), losses(rows, "rope", "none", 256))
    assert list(difference) == [0] and per_document(difference).tolist() == [[5, 6]]
    assert minus(losses(rows, "rope", "none", 8192), losses(rows, "xpos", "none", 256)) == {}


def test_windows_of_a_document_are_averaged():
    rows = [new_row("rope", "none", 256, s, {0: [1.0, 1.0], 1: [3.0, 5.0]}) for s in (0, 1)]
    assert per_document(losses(rows, "rope", "none", 256)).tolist() == [[2, 3], [2, 3]]


@pytest.mark.parametrize("window, want", [(2.0, "window"), (4.0, "truncation")])
def test_the_bar_is_the_better_control_on_common_windows(window, want):
    rows = [new_row("rope", "none", 256, s, {0: [9.0, 9.0], 5: [3.0, 3.0]}) for s in (0, 1)]
    rows += [new_row("rope", "window", 8192, s, {5: [window, window]}) for s in (0, 1)]
    values, name = bar(rows, "rope", 8192)
    assert name == want and values[0][5].tolist() == [min(window, 3.0)] * 2
    assert losses(rows, "rope", BAR, 8192).keys() == {0, 1}
    assert bar(rows, "xpos", 8192) == ({}, "")


def test_the_bar_with_only_one_control():
    rows = [old_row("rope", "window", 512, 0, [1.0, 1.0])]
    assert bar(rows, "rope", 512)[1] == "window"
    assert bar([old_row("rope", "none", 256, 0, [1.0, 1.0])], "rope", 512)[1] == "truncation"


def test_either_file_of_rows_may_be_missing(tmp_path):
    missing, text = tmp_path / "missing.jsonl", LAST64 if LAST64.exists() else NEW
    assert read_both(str(text), str(missing)) == (read_rows(text), [])
    assert read_both(str(missing), str(text)) == ([], read_rows(text))
    with pytest.raises(UserError, match=r"first python -m studies\.matrix"):
        read_both(str(missing), str(missing))


def test_claims_without_rows_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["claims", "--rows", "none.jsonl", "--old-rows", "none64.jsonl"])
    with pytest.raises(UserError, match=r"first python -m studies\.matrix"):
        claims.main()


def test_the_command_writes_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = LAST64 if LAST64.exists() else NEW
    for study, title in ((claims, "# Published claims"), (tables, "# The rows of the matrix")):
        argv = ["study", "--rows", "none.jsonl", "--old-rows", str(rows), "--out", "out.md"]
        monkeypatch.setattr(sys, "argv", argv)
        study.main()
        assert Path("out.md").read_text().startswith(title) and OLD in capsys.readouterr().out


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


def test_a_claim_holds_exactly_if_the_intervals_exclude_the_margins():
    for low in (-0.01, 0.01):
        measured = [(Check(A, B), result(0.1 + low, 0.1))]
        assert (claims.decide(measured)[0] == HOLDS) == (measured[0][1].interval[0] > 0)


def test_refuting_one_of_several_checks_needs_more_than_refuting_one():
    barely = (Check(A, B), result(-0.10, 0.095))  # p is a little below 0.05
    assert claims.decide([barely])[0] == REFUTED
    assert claims.decide([barely, (Check(A, B), result(1, 0.01))])[0].startswith("undecided")


def test_p_of_a_claim_is_that_of_its_worst_check():
    one, other = (Check(A, B), result(0.10, 0.05)), (Check(A, B), result(0.10, 0.09))
    p = [claims.decide([x])[1] for x in (one, other)]
    assert claims.decide([one, other])[1] == max(p) < 0.05
    assert p[0] == pytest.approx(2 * one[1].p_above(0))


def test_more_seeds_decide_as_announced():
    """The announced number of seeds is the first one whose expected interval excludes the margin."""
    check, measured = Check(A, B), result(0.10, 0.15)
    seed = measured.components[0]
    for S, decided in ((3, False), (4, True)):
        assert (claims.decide([(check, Estimate(0.10, seed / S, S - 1.0, S, 32))])[0] == HOLDS) == decided


def test_a_claim_is_measured_on_the_right_rows():
    rows = [old_row("rope", "none", 512, s, [2.0, 4.0, 6.0]) for s in (0, 1)]
    rows += [old_row("rope", "yarn", 512, 1, [1.0, 2.0, 6.0])]
    check = worse("rope", "none", 512, "rope", "yarn", 512)
    found = check.measure(rows)
    assert (found.mean, found.seeds, found.documents) == (1.0, 1, 3)
    assert found.interval == estimate(np.array([[1.0, 2.0, 0.0]])).interval
    assert worse("rope", "none", 512, "xpos", "yarn", 512).measure(rows) is None


def test_a_rise_is_measured_from_the_own_loss_at_the_trained_length():
    rows = [old_row(run, "none", n, 0, [x, x + 1]) for run, n, x in
            (("rope", 256, 1.0), ("rope", 512, 5.0), ("t5_bias", 256, 4.0), ("t5_bias", 512, 6.0))]  # fmt: skip
    check = Check(At("rope", "none", 512), At("t5_bias", "none", 512), since=256)
    assert check.measure(rows).mean == (5 - 1) - (6 - 4)


def test_absolute_differences_do_not_cancel():
    rows = [new_row("learned", "shifted", 128, 0, {0: [1.0, 3.0], 1: [3.0, 1.0]})]
    rows += [new_row("learned", "unshifted", 128, 0, {0: [2.0, 2.0], 1: [2.0, 2.0]})]
    assert claims.in_tokens(checks.shift_changes("learned"), 256).measure(rows).mean == 1


def test_margins_depend_on_the_length_and_on_the_runs():
    assert no_worse("rope", "ntk", 1, "rope", "none", 1).margin == 0.02
    assert no_worse("rope", "ntk", 2, "rope", "none", 1).margin == 0.04
    assert no_worse("alibi", "none", 16, "alibi", "none", 1).margin == 0.04
    assert no_worse("xpos", "none", 1, "rope", "none", 1).margin == 0.04
    assert no_worse("xpos", "none", 1.25, "rope", "none", 1).margin == 0.24
    for table in (checks.MARGINS_BETWEEN_RUNS, checks.MARGINS_WITHIN_A_RUN):
        assert list(table) == sorted(table)


# ---- the claims ----


def test_every_claim_names_rows_that_the_plan_makes():
    size = plan.load_size("default")
    jobs = {job.name.rpartition("-s")[0]: job for job in plan.planned_jobs(size, size.seeds)}
    for claim in CLAIMS:
        assert claim.source and claim.reported and claim.checks
        checks = [claims.in_tokens(c, size.L) for c in claim.checks]
        for check, at in ((c, at) for c in checks for at in (c.a, c.b)):
            if isinstance(check, DecayCheck):  # not from rows, but from the table of the decay study
                assert math.isfinite(check.score(at))
                continue
            assert at.run in jobs, at
            assert at.label.split()[0] in (*choices("scaling"), "shifted", "unshifted", BAR)
            # Lengths that no row has yet are reported as not run
            assert at.n in jobs[at.run].lengths or at.n / size.L in (1.125, 1.25, 5), at


def test_every_claim_about_layers_names_rows_that_their_plan_makes():
    rows = layer_study_rows()
    for claim in layers.LAYER_CLAIMS:
        assert claim.source and claim.reported and claim.checks
        for check in claim.checks:
            assert claims.in_tokens(check, 256).measure(rows) is not None, claim.text
    missing = layers.report([row for row in rows if not row["name"].startswith("swan")])
    verdicts = [line.rsplit("|", 2)[1].strip() for line in missing.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [f"**{MISSING}**" == verdict for verdict in verdicts] == [n in (0, 1, 2) for n in range(len(verdicts))]


@pytest.mark.parametrize("better", [True, False])
def test_claims_about_layers_have_the_sign_of_their_text(better):
    """All hold where the losses of the runs that they favour rise less past L, and none in the opposite case."""
    rises = {"rope": 4, "none": 3, "window_only": 4, "gemma3_all_scaled": 4, "drope": -1, "abf": -1}
    rises |= {"fox": 0, "kerple": -0.1, "fire": -0.3}  # of the others: 2
    rows = []
    for row in layer_study_rows((0, 1, 2)):
        run = row["name"][:-3]
        rise = 0 if row["label"] == "logn" else rises.get(run, 2)
        if not better:
            rise = 2 if row["label"] == "logn" else 5 - rise
        loss = 3 + 0.1 * rise * max(0, math.log2(row["n"] / 256)) + 0.5 * (run == "drope" and not better)
        rows.append(row | {"nll": [64 * (loss + document / 1000) for document in range(8)], "loss": loss})
    lines = [line for line in layers.report(rows).splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(lines) == len(layers.LAYER_CLAIMS)
    for line in lines:
        assert line.endswith(f"**{HOLDS if better else REFUTED}** |"), line


def test_the_report_of_layers_is_written_by_its_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in layer_study_rows()))
    monkeypatch.setattr(sys, "argv", ["layers", "--rows", "rows.jsonl", "--out", "layers.md"])
    layers.main()
    text = Path("layers.md").read_text()
    assert text == capsys.readouterr().out[:-1] == layers.report(layer_study_rows())
    perplexities, gains = [line for line in text.splitlines() if line.startswith("| `swan`, logn |")]
    rows = [row for row in layer_study_rows() if row["name"] == "swan-s0"]
    of_swan = {(row["label"], row["n"]): np.mean(row["nll"]) / 64 for row in rows}
    lengths = [n for label, n in of_swan if label == "logn"]
    assert perplexities.split("|")[2:-1] == [f" {np.exp(of_swan['logn', n]):.1f} " for n in lengths]
    # Past L, over the better control: the window control, or no scaling at L
    bars = {n: min(of_swan["window", n], of_swan["none", 256]) for n in lengths if n > 256}
    shown = [float(cell.split()[0]) for cell in gains.split("|")[2:-1]]
    assert shown == pytest.approx([bars[n] - of_swan["logn", n] for n in bars], abs=6e-4) and len(bars) == 5
    [abf] = [line for line in text.splitlines() if line.startswith("| `abf` |") and "[" in line]
    assert abf.split("|")[2:4] == ["  ", "  "] and abf.count("[") == 3  # it was trained at 1024
    monkeypatch.setattr(sys, "argv", ["layers", "--rows", "layers.jsonl"])
    with pytest.raises(UserError, match=r"first python -m studies\.matrix --plan layers"):
        layers.main()


def test_claims_by_construction_hold_in_the_rows():
    """All but 9, which compares two trainings: it must not be refuted."""
    rows, old = committed()
    for claim in CLAIMS:
        if claim.by_construction:
            verdict, _ = claims.decide(claims.measure(claim, rows, old, 256)[0])
            assert verdict == HOLDS or ("Interleaved" in claim.text and verdict != REFUTED)


def test_old_rows_are_used_where_a_claim_has_no_new_ones_and_marked():
    old = [old_row("learned", "none", n, s, [x, x + s, x]) for n, x in ((256, 1.0), (512, 5.0)) for s in (0, 1)]
    new = [new_row("sinusoidal", "none", n, s, {0: [x, x], 1: [x, x + s]}) for n, x in ((256, 1.0), (512, 9.0))
           for s in (0, 1)]  # fmt: skip
    lines = claims.report(new, old).splitlines()
    line_of = {number: line for number in (1, 2, 3) for line in lines if line.startswith(f"| {number} |")}
    assert "learned @512 - learned @256 > 0: +4.000" in line_of[1] and line_of[1].endswith(f"**holds**, {OLD} |")
    assert "sinusoidal @512 - sinusoidal @256 > 0: +8.000" in line_of[2] and line_of[2].endswith("**holds** |")
    assert line_of[3].endswith(f"| 0 |  | **{MISSING}** |")


def test_claims_go_by_the_context_trained_at():
    rows = [old_row("learned", "none", n, 0, [x, 2 * x], L=64) for n, x in ((64, 1.0), (128, 30.0))]
    assert "learned @128 - learned @64 > 0: +43.500 [" in claims.report(rows, [])
    assert "(one seed: documents only)" in claims.report(rows, [])


def test_pi_against_no_scaling_has_a_verdict_for_every_length():
    lines = claims.pi_section(*committed(), 256)
    verdicts = {float(x.split("|")[1]): x.split("|")[5] for x in lines[1:]}
    assert {2, 4, 8, 16, 32} <= verdicts.keys()
    assert all(re.search(r"PI is (better|worse)|undecided \(", text) for text in verdicts.values())
    assert claims.pi_section([], [], 256) == [claims.PI_CURVE]


def test_the_decay_claim_is_exact_and_without_its_table_a_user_error(tmp_path, monkeypatch):
    check = claims.in_tokens(checks.decays_less(5000, than=500), 256)
    assert check.measure([]).variance == 0 and re.fullmatch(
        r".*: \+0\.\d{3}", claims.describe(check, check.measure([]))
    )
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"first python -m studies\.decay"):
        check.measure([])


# ---- the tables ----


def test_tables_show_means_and_ranges():
    rows = [old_row("rope", label, 512, s, [math.log(p)] * 2)
            for s, label, p in ((0, "none", 10), (1, "none", 40), (0, "pi", 30))]  # fmt: skip
    assert tables.perplexity(rows, "rope", "none", 512) == "20.0 (10.0-40.0)"
    assert tables.perplexity(rows, "rope", "pi", 512) == "30.0"
    assert tables.perplexity(rows, "rope", "yarn", 512) == ""


def test_gains_are_over_the_bar_with_q_over_all_cells():
    conditions = (("none", 256, 2.0), ("window", 512, 3.0), ("yarn", 512, 1.5))
    rows = [old_row("rope", label, n, s, [x + 0.1 * s, x + 0.2]) for label, n, x in conditions for s in (0, 1)]
    yarn = tables.gain(rows, "rope", "yarn", 512)
    assert yarn.mean == pytest.approx(0.5)  # over truncation, which is better than the window control
    assert tables.gain(rows, "rope", "window", 512).mean == pytest.approx(-1)
    assert tables.gain(rows, "rope", "pi", 512) == ""
    rows += [old_row("rope", "window", 1024, s, [1.0, 1.0]) for s in (0, 1)]
    assert tables.gain(rows, "rope", "window", 1024) == "the bar"

    first, second = Estimate(0.1, 0.0004, 10.0), Estimate(-0.2, 0.04, 10.0)
    p = [2 * first.p_above(0), 2 * second.p_below(0)]
    cells = tables.gain_cells([["the bar", first], [second, ""]])
    assert cells[0][0] == "the bar" and cells[1][1] == ""
    assert cells[0][1].endswith(f" q={2 * p[0]:.3f}") and cells[0][1].startswith("+0.100 [+0.055, +0.145]")
    assert cells[1][0].endswith(f" q={p[1]:.2f}")


def test_the_noise_floor_is_rope_against_itself():
    rows = [old_row("rope", "none", 256, s, [x, x]) for s, x in ((0, 1.0), (1, 1.5), (2, 2.0))]
    rows += [old_row("rope_interleaved", "none", 256, s, [x, x]) for s, x in ((0, 1.25), (1, 1.5), (2, 2.5))]
    assert tables.noise_section(rows, "")[-2].startswith("| 256 | +0.250 [")
    assert tables.noise_section(rows, "")[-2].endswith("] | 3 | 0.500 | 1.000 |")


def test_tables_of_old_rows_are_marked():
    old = committed()[1] or committed()[0]
    text = tables.report([], old)
    headings = [x for x in text.splitlines() if x.startswith("## ")]
    assert len(headings) == 8 and all(x.endswith(f"({OLD})") for x in headings)


def test_lengths_with_fewer_windows_are_named():
    rows = [new_row("rope", "none", n, 0, {w: [1.0, 2.0] for w in windows}) for n, windows in
            ((256, range(8)), (512, range(8)), (8192, (5,)))]  # fmt: skip
    assert tables.targets_text(rows) == ("8 windows", " (fewer windows: 1 at n = 8192)")


# ---- the committed texts ----


def test_claims_md_is_what_the_rows_give():
    assert (ROOT / "results/claims.md").read_text() == claims.report(*committed())


def test_matrix_md_is_what_the_rows_give():
    assert (ROOT / "results/matrix.md").read_text() == tables.report(*committed())


def test_layers_md_is_what_the_rows_give():
    assert (ROOT / "results/layers.md").read_text() == layers.report(read_rows(ROOT / "results/layers.jsonl"))
