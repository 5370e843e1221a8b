"""The study: its plan, its resuming, and the verdicts on published claims, recomputed from the committed rows."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from conf.errors import UserError
from conf.registry import yaml_values
from engine.run import Run
from measure.curves import read_curve
from measure.evaluation import NONE, WINDOW, Evaluation
from measure.tasks import build as build_task
from studies import claims, matrix, tables
from studies.claims import FAILS, HOLDS, MISSING, UNSEEN
from studies.published import CLAIMS, At, Check, DecayCheck, worse
from studies.rows import interval, read_rows
from tests.helpers import ROOT, choices, command, eval_settings, run_train, train_settings
from train import train

COMMITTED = ROOT / "results/matrix.jsonl"

# ---- the plan ----


@pytest.mark.parametrize("size", matrix.SIZES)
def test_plan_trains_every_encoding_base_and_extension_with_every_seed(size):
    size = matrix.SIZES[size]
    jobs = matrix.plan(size, size.seeds)
    assert len({job.name for job in jobs}) == len(jobs)
    for seed in size.seeds:
        names = {job.name for job in jobs if job.seed == seed}
        assert {f"{pos}-s{seed}" for pos in choices("pos")} <= names
        assert {f"base{base}-s{seed}" for base in matrix.BASES} <= names
        assert {f"{m}-{n}-s{seed}" for m in matrix.EXTENSIONS for n in size.finetune} <= names
    for job in jobs:
        assert any(x in (job.part, job.name) for x in ("encodings", "base", "finetune"))
        if job.part != "finetune" or "scratch" in job.name:
            assert f"seed={job.seed}" in job.train
            cfg = train_settings(*(setting for setting in job.train if not setting.startswith("seed=")))
            assert cfg.steps == job.steps
            assert cfg.ctx == (4 * size.L if job.part == "finetune" else size.L)
            assert cfg.batch_tokens == size.batch_tokens


def test_a_table_of_positions_gets_rows_for_the_longest_length():
    """Found by the knob, not by the encoding's name."""
    size = matrix.SIZES["default"]
    for job in matrix.encoding_jobs(size, 0, first=True):
        pos = job.name.removesuffix("-s0")
        has_table = "max_positions" in yaml_values("pos", pos)
        assert (f"pos.max_positions={max(size.lengths)}" in job.train) == has_table
    assert any("pos.max_positions=8192" in job.train for job in matrix.plan(size, (0,)))


def opened(name: str) -> Run:
    return Run.open(name, runs="runs", cache=".cache")


def test_a_run_is_evaluated_with_the_scalings_that_apply_to_it(here):
    run_train("steps=1", "name=a")
    names = matrix.applicable_scalings(opened("a"), 512)
    assert {"pi", "ntk", "yarn", "rerope", "logn", "window_sink"} <= set(names)
    assert not {"none", "window", "longrope"} & set(names)
    run_train("steps=1", "name=b", "pos=alibi")
    assert "pi" not in matrix.applicable_scalings(opened("b"), 512)


def test_rows_have_the_columns_of_the_committed_ones(here):
    """Of a run and its curves, of a fine-tuned one, and of the shifted text: the same keys in the same order."""
    columns = {(row["part"], row["label"] in ("shifted", "unshifted")): list(row) for row in read_rows(COMMITTED)}
    run_train("steps=1", "name=a-s0", "pos=rope_interleaved")
    run = opened("a-s0")
    cfg = eval_settings("ctx=[32,64]", "documents=3", "task.scored_tokens=32")
    evaluation = Evaluation(run, build_task(cfg.task), cfg, torch.device("cpu"))
    with evaluation.running(curves=2, by_position=0):
        curves = {method.label: evaluation.curve(method) for method in (NONE, WINDOW)}
    size = replace(matrix.SIZES["quick"], documents=3)
    for part, more in (("encodings", {}), ("finetune", {"method": "pi", "finetune_steps": 1, "percent": 50.0})):
        job = matrix.Job(part, "a-s0", 0, (), 1, (32, 64), columns=more)
        gathered = matrix.gather(job, run, "python train.py name=a-s0")
        assert {tuple(row) for row in gathered} == {tuple(columns[part, False])}
        assert [(row["label"], row["n"]) for row in gathered] == [(x, n) for x in ("none", "window") for n in (32, 64)]
    first, in_file = gathered[0], read_curve(evaluation.curve_file(NONE)).first
    assert first["nll"] == in_file.nll == curves["none"].first.nll and first["loss"] == in_file.loss
    assert first["pos"] == "rope" and first["in_window"] == run.validation["bits_per_byte"] and first["base"] == 10000
    job = matrix.Job("encodings", "a-s0", 0, (), 1, (32, 64))
    for row in matrix.shifted(job, run, size, "python train.py name=a-s0"):
        assert list(row) == columns["encodings", True] and row["n"] == 32


@pytest.mark.parametrize(
    "which", ["alibi-s0,base100-s0", pytest.param("rope-s0,base100-s0,pi-5-s0", marks=pytest.mark.slow)]
)
@pytest.mark.process
def test_a_small_matrix_runs_and_skips_what_is_done(which, here):
    """At a size of seconds; the second call does nothing."""
    args = ("quick", "--only", which, "--out", "rows.jsonl")
    done = command("-m=studies.matrix", *args, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(x) for x in (here / "rows.jsonl").read_text().splitlines()]
    assert {r["name"] for r in rows} == set(which.split(","))
    first = which.split(",")[0]
    labels = {r["label"] for r in rows if r["name"] == first}
    assert {"none", "window", "logn", "window_sink", "shifted", "unshifted"} <= labels
    assert first != "rope-s0" or {"ntk", "rerope", "pi factor=fixed"} <= labels
    loss = {(r["name"], r["label"], r["n"]): r["loss"] for r in rows}
    assert abs(loss[first, "shifted", 32] - loss[first, "unshifted", 32]) < 1e-2
    row = next(r for r in rows if r["name"] == "base100-s0" and r["label"] == "window")
    assert row["gain"] == 0 and row["base"] == 100 and row["commit"]
    assert row["command"].startswith("python train.py pos=rope pos.base=100")
    before = (here / "rows.jsonl").stat().st_mtime_ns
    done = command("-m=studies.matrix", *args, cwd=here)
    assert done.returncode == 0 and "0 to do" in done.stdout
    assert (here / "rows.jsonl").stat().st_mtime_ns == before
    done = command("-m=studies.matrix", "quick", "--only", "nope", cwd=here)
    assert done.returncode == 1 and done.stderr.startswith("error: --only=nope: must be")


def test_the_settings_of_the_gpu_study_train_at_reduced_size(here):
    small = ["steps=2", "ctx=32", "batch_tokens=128", "micro_tokens=64", "val_windows=4", "data.vocab_size=512"]
    model = ["model.n_layers=2", "model.n_heads=2", "model.width=64"]
    train(train_settings("exp=h200", *small, *model, "name=h"))
    assert (here / "runs/h/ckpt.pt").exists()


@pytest.mark.process
def test_past_its_minutes_it_stops_and_says_so(here):
    done = command("-m=studies.matrix", "quick", "--minutes", "0.02", "--out", "rows.jsonl", cwd=here)
    assert done.returncode == 1 and "run the same command again to resume" in done.stderr
    assert not (here / "rows.jsonl").exists()


# ---- verdicts ----

A, B = At("a", "none", 512), At("b", "none", 512)


def test_interval_covers_seeds_and_documents():
    delta = np.array([[1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    mean, low, high = interval(delta)
    assert mean == 2 and low == 1 and high == 3  # the seeds' spread
    mean, low, high = interval(delta.T)
    assert mean == 2 and low == 1 and high == 3  # the documents'
    assert interval(np.ones((3, 5))) == (1, 1, 1)


@pytest.mark.parametrize(
    "check, result, want",
    [
        (Check(A, B), (0.1, 0.05, 0.2), HOLDS),
        (Check(A, B), (-0.1, -0.2, -0.05), FAILS),
        (Check(A, B), (0.1, -0.05, 0.2), UNSEEN),
        (Check(A, B, 0.1), (0.1, 0.05, 0.2), UNSEEN),
        (Check(A, B, 0.02, less=True), (0.0, -0.01, 0.01), HOLDS),
        (Check(A, B, 0.02, less=True), (0.1, 0.05, 0.2), FAILS),
        (Check(A, B), None, MISSING),
    ],
)
def test_verdict_follows_the_interval(check, result, want):
    assert claims.verdict([(check, result)]) == want
    assert claims.verdict([(check, result), (Check(A, B), (1, 1, 1))]) == want
    if want != MISSING:
        assert claims.verdict([(check, result), (Check(A, B), (-1, -1, -1))]) == FAILS


def test_a_claim_is_measured_on_the_right_rows():
    def row(name: str, label: str, n: int, seed: int, nll: list[float]) -> dict:
        return {"name": f"{name}-s{seed}", "label": label, "n": n, "seed": seed, "nll": nll, "tokens": 4}

    rows = [row("rope", "none", 512, s, [4.0, 8.0]) for s in (0, 1)] + [row("rope", "yarn", 512, 1, [2.0, 4.0])]
    check = worse("rope", "none", 512, "rope", "yarn", 512)
    (mean, low, high), seeds = claims.measure(rows, check)
    assert (mean, low, high, seeds) == (1.5, 1.0, 2.0, 1)  # nats per token, two tokens a document
    assert claims.measure(rows, worse("rope", "none", 512, "xpos", "yarn", 512)) == (None, 0)


def test_claims_go_by_the_context_trained_at():
    about = {"name": "learned-s0", "label": "none", "seed": 0, "train_ctx": 64, "tokens": 2}
    rows = [{**about, "n": n, "nll": [x, x]} for n, x in ((64, 1.0), (128, 3.0))]
    assert "learned @128 - learned @64 > 0: +2.000 [+2.000, +2.000] | 1 | **holds**" in claims.report(rows)


def test_every_claim_names_rows_that_the_plan_makes():
    size = matrix.SIZES["default"]
    jobs = {job.name.rpartition("-s")[0]: job for job in matrix.plan(size, size.seeds)}
    for claim in CLAIMS:
        assert claim.source and claim.reported and claim.checks
        checks = [claims.in_tokens(c, size.L) for c in claim.checks]
        for check, at in ((c, at) for c in checks for at in (c.a, c.b)):
            if isinstance(check, DecayCheck):  # not from rows, but from the table of the decay study
                assert len(check.values([], at)[0]) == 2048 - at.n
                continue
            assert at.run in jobs, at
            assert at.n in jobs[at.run].lengths
            name = at.label.split()[0]
            assert name in (*choices("scaling"), "shifted", "unshifted")


def test_claims_md_is_what_the_rows_give():
    rows = read_rows(COMMITTED)
    assert (ROOT / "results/claims.md").read_text() == claims.report(rows)


def test_matrix_md_is_what_the_rows_give():
    rows = read_rows(COMMITTED)
    assert (ROOT / "results/matrix.md").read_text() == tables.report(rows)


def test_the_readme_quotes_what_the_rows_give():
    """In README.md and docs/*.md: the marked tables line by line, and every interval of three decimals."""
    readme = "".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    made = "".join((ROOT / "results" / name).read_text() for name in ("matrix.md", "claims.md"))
    blocks = re.findall(r"<!-- (gains|encodings) -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert len(blocks) == 2
    for line in (x for _, block in blocks for x in block.splitlines()):
        assert line in made.splitlines(), line
    one_line = " ".join(readme.split())  # an interval may be broken over two lines
    intervals = re.findall(r"[+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", one_line)
    assert intervals and [x for x in intervals if x not in made] == []


def test_tables_show_means_ranges_and_gains():
    def row(seed: int, label: str, loss: float) -> dict:
        nll = [2 * loss, 2 * loss]  # of two tokens each
        return {"name": f"rope-s{seed}", "seed": seed, "label": label, "n": 512, "nll": nll, "tokens": 4}

    rows = [row(s, label, np.log(p)) for s, label, p in
            ((0, "none", 10), (0, "window", 10), (1, "none", 40), (1, "window", 10), (0, "pi", 30))]  # fmt: skip
    assert tables.perplexity(rows, "rope", "none", 512) == "20.0 (10.0-40.0)"
    assert tables.perplexity(rows, "rope", "pi", 512) == "30.0"
    assert tables.perplexity(rows, "rope", "yarn", 512) == ""
    assert tables.gain(rows, "rope", "pi", 512) == "-1.099 [-1.099, -1.099]"
    assert tables.gain(rows, "rope", "none", 512).startswith("-0.693 [-1.386, ")


def test_the_committed_rows_say_where_they_come_from():
    rows = read_rows(COMMITTED)
    names = {job.name for job in matrix.plan(matrix.SIZES["default"], (0, 1, 2))}
    for row in rows:
        assert row["name"] in names and re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), row["name"]
        assert row["command"].startswith("python train.py ") and len(row["nll"]) == 32


def test_claims_without_rows_is_one_line(here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["claims", "--rows", "none.jsonl"])
    with pytest.raises(UserError, match=r"first python -m studies\.matrix"):
        claims.main()


def test_a_damaged_file_of_rows_is_a_user_error(tmp_path):
    for text in ("", '{"name": "rope-s0"'):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(UserError, match="not rows that studies"):
            read_rows(tmp_path / "rows.jsonl")


def test_seeds_are_whole_numbers():
    assert matrix.parse_seeds("0,2") == (0, 2)
    with pytest.raises(UserError, match="--seeds=0,x: must be whole numbers"):
        matrix.parse_seeds("0,x")


def test_the_decay_claim_without_its_table_is_a_user_error(tmp_path, monkeypatch):
    from studies import published

    monkeypatch.setattr(published, "ROOT", tmp_path)
    check = published.decays_less(5000, than=500)
    with pytest.raises(UserError, match=r"first python -m studies\.decay"):
        claims.measure([], claims.in_tokens(check, 256))
