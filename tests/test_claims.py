"""The verdicts on published claims, and the tables: recomputed from the committed rows, and on rows made by hand."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from conf.errors import UserError
from measure.intervals import Estimate, estimate
from studies import claims, gain_parts, plan, repeats, tables
from studies.claims import HOLDS, MISSING, REFUTED, At, Check, Claim, Result, read_check, read_claims
from studies.rows import BAR, RESULTS, Rows, compare, difference, read_rows
from tests.helpers import encoding_rows, study_row as row

A, B = At("a", "none", 512), At("b", "none", 512)


# ---- rows ----


def test_differences_are_of_the_seeds_and_windows_that_both_rows_have():
    rows = Rows(
        [
            row("rope", "none", 256, 0, {0: [1.0, 1.0], 5: [2.0, 3.0]}),
            row("rope", "none", 256, 1, {0: [1.0, 1.0], 5: [4.0, 4.0]}),
            row("rope", "none", 8192, 0, {5: [7.0, 9.0]}),
            row("rope", "none", 8192, 1, {5: [9.0, 9.0]}),
            row("rope", "none", 8192, 2, {5: [7.0, 7.0]}),  # no such seed at 256
        ]
    )
    assert difference(rows.find("rope", "none", 8192), rows.find("rope", "none", 256)).tolist() == [[5, 6], [5, 5]]
    assert len(difference(rows.find("rope", "none", 8192), rows.find("xpos", "none", 256))) == 0


def test_seeds_of_one_lineage_are_paired_and_those_of_others_are_independent():
    rng = np.random.default_rng(0)
    nats = {run: rng.normal(3, 0.3, (5, 6)) for run in ("rope", "yarn-4L", "alibi")}
    rows = Rows(
        [
            row(run, "none", 512, s, nats[run][s].tolist(), command=f"init=rope-s{s}" if run == "yarn-4L" else "")
            for run in nats
            for s in range(5)
        ]
    )
    rope, tuned, alibi = (rows.find(run, "none", 512) for run in nats)
    assert compare(rope, tuned) == estimate(nats["rope"] - nats["yarn-4L"])
    assert compare(rope, alibi) == estimate(nats["rope"], nats["alibi"])
    assert compare(rope, {s: alibi[s] for s in range(3)}) is None  # too few seeds for independent trainings
    assert compare(rope, {s: tuned[s] for s in range(3)}) is not None


def test_rope_interleaved_counts_as_further_trainings_of_rope():
    rows = Rows([row(run, "none", 512, 0, [x, x]) for run, x in (("rope", 3.0), ("rope_interleaved", 4.0))])
    assert rows.losses("rope", "none", 512).tolist() == [3.0, 4.0]


def test_a_missing_file_of_rows_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"first python -m studies\.matrix --plan books"):
        read_rows(tmp_path / "books.jsonl")


# ---- verdicts ----


def result(mean: float, half: float) -> Estimate:
    """An estimate of 3 seeds and 32 documents with the 95 % interval mean +- half, decided by the seeds."""
    variance = (half / 4.302653) ** 2  # t of 2 degrees of freedom
    return Estimate(mean, variance, 2.0, 3, 32, (3 * variance, 0.0, 0.0))


def verdict(*measured: tuple[Check, Estimate | None], **about) -> str:
    """Of one claim alone, whose q is its p."""
    checks, found = zip(*measured, strict=True)
    result = Result(Claim(1, "claim", "source", "reported", list(checks), **about), list(found), 3)
    return result.verdict(min(result.p) if result.p else None)


@pytest.mark.parametrize(
    "check, measured, want",
    [
        (Check(A, B), result(0.10, 0.05), HOLDS),
        (Check(A, B), result(-0.10, 0.05), REFUTED),
        (Check(A, B), result(0.10, 0.15), "undecided (4 seeds would decide)"),
        (Check(A, B, 0.1), result(0.10, 0.05), "undecided (no number of seeds would decide: more documents needed)"),
        (Check(A, B, 0.02, less=True), result(0.0, 0.01), HOLDS),
        (Check(A, B, 0.02, less=True), result(0.1, 0.05), REFUTED),
    ],
)
def test_verdict_follows_the_interval(check, measured, want):
    assert verdict((check, measured)) == want
    # a second check that is met changes nothing but the level at which one is not met
    assert verdict((check, measured), (Check(A, B), result(1, 0.01))) == want
    assert verdict((check, measured), (Check(A, B), result(-1, 0.01))) == REFUTED


def test_without_enough_seeds_or_budget_there_is_no_verdict():
    assert verdict((Check(A, B), None)).startswith("undecided (fewer than 4 seeds")
    assert verdict((Check(A, B), result(1, 0.01)), budget="0.1 tokens") == f"{claims.TOO_SMALL}: 0.1 tokens"
    barely = Result(Claim(1, "", "", "", [Check(A, B)]), [result(0.1, 0.095)], 3)  # p is a little below 0.05
    assert barely.verdict(min(barely.p)) == HOLDS and barely.verdict(0.06).startswith("undecided")


def test_p_of_a_claim_is_that_of_its_worst_check_and_refuting_one_of_several_needs_more():
    one, other = result(0.10, 0.05), result(0.10, 0.09)
    both = Result(Claim(1, "", "", "", [Check(A, B)] * 2), [one, other], 3)
    assert both.p[0] == pytest.approx(2 * other.p_above(0)) and both.p[0] < 0.05
    barely = (Check(A, B), result(-0.10, 0.095))
    assert verdict(barely) == REFUTED
    assert verdict(barely, (Check(A, B), result(1, 0.01))).startswith("undecided")


# ---- the claims ----


def test_a_check_is_measured_as_it_is_written():
    rows = [row("rope", "none", 512, s, [2.0, 4.0, 6.0]) for s in (0, 1)]
    rows += [row("rope", "yarn", 512, 1, [1.0, 2.0, 6.0]), *(row("rope", "none", 256, s, [1.0] * 3) for s in range(4))]
    rows += [row("t5_bias", "none", n, s, [x] * 3) for n, x in ((256, 4.0), (512, 6.0)) for s in range(4)]
    rows += [row("rope", "none", 512, s, [4.0] * 3) for s in (2, 3)]

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
        ("a pi factor=8.0 @1 > a @1 by 0.5", Check(At("a", "pi factor=8.0", 4), At("a", "none", 4), 0.5)),
        ("a @0.5 is no worse than a @1", Check(At("a", "none", 2), At("a", "none", 4), 0.02, less=True)),
        ("a @16 is no worse than a @1", Check(At("a", "none", 64), At("a", "none", 4), 0.04, less=True)),
        ("a @1 is no worse than b @1", Check(At("a", "none", 4), At("b", "none", 4), 0.04, less=True)),
    ],
)
def test_checks_and_their_margins(text, want):
    assert read_check(text, 4) == want


@pytest.mark.process
def test_every_claim_names_rows_that_the_plan_makes():
    size = plan.load_size("default")
    for name in ("rope", "encodings"):
        jobs = {job.name.rpartition("-s")[0]: job for job in plan.planned_jobs(name, size, (0,))}
        for claim in read_claims(name, size.L):
            assert claim.source and claim.reported and (claim.checks or claim.by_construction)
            for at in (at for check in claim.checks for at in (check.a, check.b)):
                made = {
                    " ".join([m, *(x.removeprefix("++scaling.").replace("plus=", "+ ") for x in evaluation.settings)])
                    for evaluation in jobs[at.run].evaluations
                    for m in ("none", "window", *evaluation.methods)
                    if at.n in evaluation.lengths
                }
                assert at.label in made | ({BAR} if "window" in made else set()), (at, made)
    numbers = [claim.number for name in ("rope", "encodings") for claim in read_claims(name, 256)]
    assert len(numbers) == len({*numbers}) > 50


def verdicts(rows: Rows) -> list[str]:
    """Of the claims about encodings that name runs of this study alone."""
    lines = claims.claims_section("encodings", rows, read_claims("encodings", 256))
    return [text.rsplit("|", 2)[1].strip() for text in lines]


def test_a_claim_without_rows_is_not_run():
    rows = [x for x in encoding_rows().rows if x.name != "swan"]
    found = dict(zip((c.number for c in read_claims("encodings", 256)), verdicts(Rows(rows)), strict=True))
    assert [number for number, text in found.items() if text == f"**{MISSING}**"] == ["L1", "L2", "L3"]


@pytest.mark.parametrize("better", [True, False])
def test_claims_about_encodings_have_the_sign_of_their_text(better):
    """All hold where the losses of the runs that they favour rise less past L, and none in the opposite case."""
    rises = {
        "rope": 4,
        "rope_interleaved": 4,
        "none": 3,
        "window_only": 4,
        "gemma3_all_scaled": 4,
        "abf": -1,
        "alibi": 0.1,
    }
    rises |= {"fox": 0, "kerple": -0.1, "fire": -0.3, "base500": 3, "base1000000": 5}  # of the others: 2

    def loss(run: str, label: str, n: int) -> float:
        rise = 0 if label == "logn" else rises.get(run, 2)
        if not better:
            rise = 2 if label == "logn" else 5 - rise
        return 3 + 0.1 * rise * max(0, math.log2(n / 256))

    lines = claims.claims_section("encodings", encoding_rows((0, 1, 2, 3), loss), read_claims("encodings", 256))
    found = {text.split("|")[1].strip(): text.rsplit("|", 2)[1].strip("* ") for text in lines}
    numbers = ("7", "8", "33", "L1", "L3", "L7", "L8", "L9", "L10", "L11", "L12", "L13")
    assert {number: found[number] for number in numbers} == dict.fromkeys(numbers, HOLDS if better else REFUTED)
    assert all(found[number].startswith(claims.TOO_SMALL) for number in ("L4", "L5", "L6"))


# ---- the tables ----


def test_gains_are_over_the_bar_with_q_over_all_cells():
    conditions = (("none", 256, 2.0), ("window", 512, 3.0), ("yarn", 512, 1.5), ("window", 1024, 1.0))
    rows = Rows([row("rope", label, n, s, [x + 0.1 * s, x + 0.2]) for label, n, x in conditions for s in (0, 1)])
    assert tables.gain(rows, "rope", "yarn", 512).mean == pytest.approx(0.5)  # over truncation, which is better
    assert tables.gain(rows, "rope", "window", 512).mean == pytest.approx(-1)
    assert tables.gain(rows, "rope", "pi", 512) == "" and tables.gain(rows, "rope", "window", 1024) == "the bar"
    wide = Rows([*rows.rows, row("rope", "ntk", 512, 0, [1.0, 1.2]), row("rope", "ntk", 512, 1, [2.1, 2.2])])
    assert tables.gain(wide, "rope", "ntk", 512) == "seeds +1.00 +0.00"

    first, second = Estimate(0.1, 0.0004, 10.0), Estimate(-0.2, 0.04, 10.0)
    p = [2 * first.p_above(0), 2 * second.p_below(0)]
    cells = [
        x.split("|")[2:-1] for x in tables.gain_table(["a", "b"], {"1": ["the bar", first], "2": [second, ""]})[2:]
    ]
    assert cells[0][0] == " the bar " and cells[1][1] == "  "
    assert cells[0][1].endswith(f" q={2 * p[0]:.3f} ") and cells[0][1].startswith(" +0.100 [+0.055, +0.145]")
    assert cells[1][0].endswith(f" q={p[1]:.2f} ")


def test_tax_and_reward_add_up_to_the_gain_which_is_a_share_of_the_headroom():
    rng, rows = np.random.default_rng(0), []
    names = ("none", "< 64", "< 512", ">= 512")
    counts = rng.integers(1, 9, (4, 6)).astype(float)
    for seed in range(4):
        for run, label, n in (("rope", "window", 512), ("rope", "yarn", 512), ("yarn-2L", "none", 512)):
            sums = rng.uniform(1, 2, (4, 6)) * counts - 0.3 * (run == "yarn-2L") * counts
            nats = (sums.sum(axis=0) / counts.sum(axis=0)).tolist()
            groups = {name: [sums[i].tolist(), counts[i].tolist()] for i, name in enumerate(names)}
            rows.append(row(run, label, n, seed, nats, groups=groups, command=f"init=rope-s{seed}"))
    rows = Rows(rows)
    reward, tax = (gain_parts.part_of_gain(rows, "rope", "yarn", 512, of) for of in (True, False))
    gains, most = rows.gain("rope", "yarn", 512), gain_parts.headroom(rows, "rope", 512)
    assert tax + reward == pytest.approx(gains) and tax.shape == (4, 6)
    of_window, of_yarn = (np.array(rows.find("rope", x, 512)[0].groups["< 512"][0]) for x in ("window", "yarn"))
    assert reward[0] == pytest.approx((of_window - of_yarn) / counts.sum(axis=0))
    assert most == pytest.approx(difference(rows.find("rope", "window", 512), rows.find("yarn-2L", "none", 512)))
    share, low, high = gain_parts.share_of_headroom(rows, "rope", "yarn", 512)
    assert share == pytest.approx(gains.mean() / most.mean()) and low < share < high
    # where the first seed was not evaluated with yarn and the last one not fine-tuned, two seeds have both
    fewer = [x for x in rows.rows if (x.label, x.seed) != ("yarn", 0) and (x.name, x.seed) != ("yarn-2L", 3)]
    share, *_ = gain_parts.share_of_headroom(Rows(fewer), "rope", "yarn", 512)
    assert share == pytest.approx(gains[1:3].mean() / most[1:3].mean())
    other = [replace(x, scored_windows=[5]) if x.label == "yarn" else x for x in rows.rows]
    assert gain_parts.gains_of_groups(Rows(other), "rope", "yarn", 512) == {}


def test_gains_of_categories_with_their_shares_are_the_gain():
    """0.5 nats on each of 6 targets that can be copied from past L, -0.1 on each of the 10 others."""
    counts = {"none": 7.0, "< 64": 1.0, "< 256": 2.0, "< 1024": 6.0}
    of_bar = {group: [[3.0 * n, 0.0], [n, 0.0]] for group, n in counts.items()}
    gains = {group: 0.5 if group == "< 1024" else -0.1 for group in counts}
    of_yarn = {group: [[(3 - gains[group]) * n, 0.0], [n, 0.0]] for group, n in counts.items()}
    rows = [row("rope", label, 1024, 0, [0, 0], groups=x) for label, x in (("window", of_bar), ("yarn", of_yarn))]
    found = repeats.gains_by_category(Rows(rows), "yarn", 1024)
    found = {name: x.item() for name, x in found.items()}
    assert found == pytest.approx({"none": -0.1, "< L / 4": -0.1, "< L": -0.1, "< n": 0.5})
    assert [gain_parts.category("< 1024", 256, n) for n in (512, 1024)] == [">= n", "< n"]
    assert gain_parts.category(">= 16384", 8192, 16384) == ">= n"


def test_rises_are_compared_with_those_of_rope_at_an_equal_loss():
    """RoPE's losses at L are 2.0 and 3.0, and rise by 1.0 and 0.2; at 2.25 the rise is a quarter of the way between."""
    losses = {"rope": (2.0, 3.0), "rope_quarter": (3.0, 3.2), "alibi": (2.25, 2.3), "none": (3.5, 3.5)}
    found = [(run, n, s, pair[n > 256] + s / 8) for run, pair in losses.items() for n in (256, 512) for s in range(4)]
    rows = Rows([row(run, "none", n, s, [x, x], part="encodings") for run, n, s, x in found])
    assert gain_parts.rise_of_rope(rows, "alibi", 512) == pytest.approx(np.full((4, 2), 0.8))
    assert len(gain_parts.rise_of_rope(rows, "none", 512)) == 0  # RoPE was always better at L
    cells = {x.split("|")[1].strip(): x.split("|")[5].strip() for x in tables.rises_section(rows)[2:]}
    assert cells["`alibi`"].startswith("-0.750") and cells["`none`"] == cells["`rope`"] == ""


def test_tasks_have_tokens_whole_answers_and_effective_contexts():
    near, far = [[1.0, 1.0], [1.0, 0.75]], [[0.75, 1.0], [0.25, 0.5]]  # of each seed
    answers = {256: [{"64": x} for x in near], 512: [{"64": x, "448": y} for x, y in zip(near, far, strict=True)]}
    made = [(n, s, found) for n, of_seeds in answers.items() for s, found in enumerate(of_seeds)]
    of_window = [(n, s, {distance: [0, 0] for distance in x}) for n, s, x in made]
    both = ("none", made), ("window", of_window)
    rows = [
        row("recall-rope", m, n, s, [0, 0], hits=np.mean([*x.values()], axis=0).tolist(), answers=x)
        for m, of in both
        for n, s, x in of
    ]
    cells, _ = tables.task_section(Rows([*rows, row("mqar-rope", "none", 256, 0, [0, 0], hits=[0, 0])]), "recall")[2:]
    _, name, seeds, *cells, contexts, own, near, far, beyond, _ = (cell.strip() for cell in cells.split("|"))
    assert (name, seeds, contexts, own, near, far) == ("`rope`", "2", *[">= 512 256"] * 2, "94", "62")
    assert beyond == "62 (38 to 88)"
    assert [(cell.split()[0], cell.split()[-1]) for cell in cells] == [("94", "75"), ("78", "50")]


def test_costs_are_hours_of_one_thread():
    made = {"part": "rope", "threads": 2, "train_seconds": 1800.0, "seconds": 900.0}
    rows = [row("rope", "none", n, s, [0, 0], **made) for s in (0, 1) for n in (256, 512)]
    assert tables.cost_section(Rows(rows))[2:] == ["| rope | 2 | 2.0 | 2.0 |"]


def test_a_number_of_claims_md_by_hand():
    """Claim 3, from the JSON of the committed rows alone."""
    nats: dict[int, dict[str, np.ndarray]] = {256: {}, 512: {}}
    for text in (RESULTS / "rope.jsonl").read_text().splitlines():
        x = json.loads(text)
        if re.match(r"rope(_interleaved)?-s", x["run"]) and x["label"] == "none" and x["n"] in nats:
            per_window = len(x["nll"]) * np.array(x["nll"]).reshape(32, -1) / x["tokens"]
            nats[x["n"]][x["run"]] = per_window.mean(axis=1)
    delta = np.stack([nats[512][run] - nats[256][run] for run in nats[256]])
    low, high = estimate(delta).interval
    text = f"rope @512 - rope @256 > 0.69: {delta.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
    assert text in (RESULTS / "claims.md").read_text()


# ---- the committed texts ----


@pytest.mark.parametrize("name, report", [("claims.md", claims.report), *tables.REPORTS.items()])
def test_the_texts_are_what_the_rows_give(name, report):
    assert (RESULTS / name).read_text() == report()
