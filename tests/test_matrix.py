"""The study: its plan, its rows and its resuming. Claims and tables are in test_claims.py."""

import functools
import json
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch

from conf.errors import UserError
from conf.layer_schedule import resolve_layers
from conf.registry import yaml_values
from engine import checkpoint
from engine.run import Run
from measure.curves import read_curve
from measure.evaluation import NONE, WINDOW, Evaluation
from model import gpt
from model.scaling import NO_CHANGE, resolve
from studies import matrix, plan, processes
from studies.jobs import applicable_scalings, gather, shifted
from studies.plan import Job
from studies.rows import Rows, read_rows
from tests.helpers import ROOT, choices, command, eval_settings, run_train, train_settings
from train import train


@functools.cache
def committed_rows() -> Rows:
    """The rows of the published study, read one time: not to be changed."""
    new, old = ROOT / "results/matrix.jsonl", ROOT / "results/matrix-last64.jsonl"
    return read_rows(new if new.exists() else old)


NEW_COLUMNS = {"texts", "windows", "documents"}  # which rows of the first version may lack

# ---- the plan ----


@pytest.mark.parametrize("size", choices("study"))
def test_plan_trains_every_encoding_base_and_extension_with_every_seed(size):
    size = plan.load_size(size)
    jobs = plan.planned_jobs(size, size.seeds)
    assert len({job.name for job in jobs}) == len(jobs)
    for seed in size.seeds:
        names = {job.name for job in jobs if job.seed == seed}
        newer = {job.name for job in plan.layer_jobs(size, (seed,))}
        assert {f"{pos}-s{seed}" for pos in choices("pos")} <= names | newer
        assert names & newer == {f"{pos}-s{seed}" for pos in ("rope", "alibi", "none")}
        assert {f"base{base}-s{seed}" for base in plan.BASES} <= names
        assert {f"{m}-{n}-s{seed}" for m in plan.EXTENSIONS for n in size.finetune} <= names
    seen = set()
    for job in jobs:
        assert any(x in (job.part, job.name) for x in ("encodings", "base", "finetune"))
        if job.part != "finetune" or "scratch" in job.name:
            assert f"seed={job.seed}" in job.train
            settings = [setting for setting in job.train if not setting.startswith("seed=")]
            kind = (job.part, *settings[1:])  # the same but for the seed and, in a part, the encoding
            if kind in seen:
                continue
            seen.add(kind)
            cfg = train_settings(*settings)
            assert cfg.steps == job.steps
            assert cfg.ctx == (4 * size.L if job.part == "finetune" else size.L)
            assert cfg.batch_tokens == size.training.batch_tokens


@pytest.mark.parametrize("size", ["default", "quick"])
def test_the_plan_of_layers_can_be_trained_and_evaluated_as_it_says(size):
    """Settings that train.py takes, parents that come first, and methods that apply to the run."""
    size = plan.load_size(size)
    jobs = plan.layer_jobs(size, (0, 1))
    names = [job.name for job in jobs]
    assert len({*names}) == len(names) and names.index("rope-s1") == len(names) // 2
    ten = ["gemma3", "swan", "sssl", "smollm3", "fox", "ssmax", "kerple", "fire", "drope", "abf"]
    assert {job.name for job in jobs if job.part == "layers"} == {f"{name}-s{s}" for name in ten for s in (0, 1)}
    for job in jobs[: len(jobs) // 2]:
        cfg = train_settings(*job.train)
        assert (cfg.steps, cfg.seed) == (job.steps, 0)
        assert cfg.ctx == (4 * size.L if job.name == "abf-s0" else size.L) and max(job.lengths) == max(size.lengths)
        if cfg.init:
            assert names.index(cfg.init) < names.index(job.name)
            parent = train_settings(*next(x.train for x in jobs if x.name == cfg.init))
            cfg = replace(cfg, model=parent.model, pretrained={"ctx": cfg.ctx})
            cfg.layers = resolve_layers(cfg) if cfg.layers else {}
        context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
        assert job.methods is not None
        for method in job.methods:
            change = resolve(yaml_values("scaling", method), context, 8 * size.L, 8 * size.L)
            assert change.effect(8 * size.L, context) != NO_CHANGE.effect(8 * size.L, context), (job.name, method)


def test_scaling_applies_to_the_window_layers_in_the_control_only():
    jobs = {job.name: job for job in plan.layer_jobs(plan.load_size("quick"), (0,))}
    kinds = {}
    for name in ("gemma3-s0", "gemma3_all_scaled-s0"):
        cfg = train_settings(*jobs[name].train)
        layers = resolve_layers(cfg) if cfg.init else cfg.layers
        kinds[name] = [(kind, layers[kind]["scaled"], layers[kind]["window"]) for kind in "LG"]
    assert kinds["gemma3-s0"] == [("L", False, 16), ("G", True, None)]
    assert kinds["gemma3_all_scaled-s0"] == [("L", True, 16), ("G", True, None)]


def test_a_table_of_positions_gets_rows_for_the_longest_length():
    """Found by the knob, not by the encoding's name."""
    size = plan.load_size("default")
    for job in plan.encoding_jobs(size, 0, first=True):
        pos = job.name.removesuffix("-s0")
        has_table = "max_positions" in yaml_values("pos", pos)
        assert (f"pos.max_positions={max(size.lengths)}" in job.train) == has_table
    assert any("pos.max_positions=8192" in job.train for job in plan.planned_jobs(size, (0,)))


def opened(name: str) -> Run:
    return Run.open(name, runs="runs", cache=".cache")


def test_a_run_is_evaluated_with_the_scalings_that_apply_to_it(here):
    run_train("steps=1", "name=a")
    names = applicable_scalings(opened("a"), 512)
    assert {"pi", "ntk", "yarn", "rerope", "logn", "window_sink"} <= set(names)
    assert not {"none", "window", "longrope"} & set(names)
    run_train("steps=1", "name=b", "pos=alibi")
    assert "pi" not in applicable_scalings(opened("b"), 512)


def test_rows_have_the_columns_of_the_committed_ones(here):
    """Of a run and its curves, of a fine-tuned one, and of the shifted text: the same keys in the same order.

    Rows of the study's first version lack `windows`, and the shifted ones of that version more.
    """
    rows = [
        *read_rows(ROOT / "results/matrix-last64.jsonl"),
        *committed_rows(),
    ]  # the latter do not have every part yet
    columns = {(row["part"], row["label"] in ("shifted", "unshifted")): list(row) for row in rows}
    run_train("steps=1", "name=a-s0", "pos=rope_interleaved")
    run = opened("a-s0")
    settings = ("documents=3", "task.scored_tokens=32", "task.windows=2")
    evaluation = Evaluation(run, eval_settings("ctx=[32,64]", *settings), torch.device("cpu"))
    with evaluation.running([]):
        curves = {method.label: evaluation.curve(method) for method in (NONE, WINDOW)}
    size = replace(plan.load_size("quick"), documents=3, windows=2)
    for part, more in (("encodings", {}), ("finetune", {"method": "pi", "finetune_steps": 1, "percent": 50.0})):
        job = plan.Job(part, "a-s0", 0, (), 1, (32, 64), columns=more)
        gathered = gather(job, run, "python train.py name=a-s0")
        of_version = [x for x in gathered[0] if x in columns[part, False] or x not in NEW_COLUMNS]
        assert {tuple(row) for row in gathered} == {tuple(gathered[0])} and of_version == columns[part, False]
        assert [(row["label"], row["n"]) for row in gathered] == [(x, n) for x in ("none", "window") for n in (32, 64)]
    first, in_file = gathered[0], read_curve(evaluation.curve_file(NONE)).first
    assert first["nll"] == in_file.nll == curves["none"].first.nll and first["loss"] == in_file.loss
    assert first["windows"] == [0, 1] and len(first["nll"]) == 3 * 2
    assert first["pos"] == "rope" and first["in_window"] == run.validation["bits_per_byte"] and first["base"] == 10000
    job = plan.Job("references", "a-s0", 0, (), 1, (64,), methods=())
    assert [(row["label"], row["n"]) for row in gather(job, run, "")] == [("none", 64), ("window", 64)]
    job = plan.Job("encodings", "a-s0", 0, (), 1, (32, 64))
    for row in shifted(job, run, size, "python train.py name=a-s0"):
        assert [x for x in row if x in columns["encodings", True] or x not in NEW_COLUMNS] == columns["encodings", True]
        assert row["n"] == 32 and row["windows"] == [0, 1] and len(row["nll"]) == 3 * 2


@pytest.mark.parametrize(
    "which", ["alibi-s0,base100-s0", pytest.param("rope-s0,base100-s0,pi-5-s0", marks=pytest.mark.slow)]
)
@pytest.mark.process
def test_a_small_matrix_runs_and_skips_what_is_done(which, here, monkeypatch, capsys):
    """At a size of seconds, with another cache; the second call, in this process, does nothing."""
    (here / ".cache").rename(here / "elsewhere")
    args = ("smoke", "--only", which, "--out", "rows.jsonl", "--cache", "elsewhere")
    done = command("-m=studies.matrix", *args, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(x) for x in (here / "rows.jsonl").read_text().splitlines()]
    assert {r["name"] for r in rows} == set(which.split(",")) and not (here / ".cache").exists()
    first = which.split(",")[0]
    labels = {r["label"] for r in rows if r["name"] == first}
    assert {"none", "window", "logn", "shifted", "unshifted"} <= labels
    assert first != "rope-s0" or {"ntk", "rerope", "window_sink", "pi factor=fixed"} <= labels
    loss = {(r["name"], r["label"], r["n"]): r["loss"] for r in rows}
    assert abs(loss[first, "shifted", 32] - loss[first, "unshifted", 32]) < 1e-2
    row = next(r for r in rows if r["name"] == "base100-s0" and r["label"] == "window")
    assert row["gain"] == 0 and row["base"] == 100 and row["commit"]
    assert row["command"].startswith("python train.py pos=rope pos.base=100")
    before = (here / "rows.jsonl").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["matrix", *args])
    matrix.main()
    assert "0 to do" in capsys.readouterr().out
    assert (here / "rows.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.process
def test_a_small_plan_of_layers_runs_and_the_copies_for_other_scaling_have_the_same_weights(here, monkeypatch, capsys):
    names = ("rope-s0", "drope-s0", "swan-s0", "gemma3-s0", "gemma3_all_scaled-s0")
    args = ("smoke", "--plan", "layers", "--only", ",".join(names), "--out", "rows.jsonl")
    done = command("-m=studies.matrix", *args, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(x) for x in (here / "rows.jsonl").read_text().splitlines()]
    labels = {name: {row["label"] for row in rows if row["name"] == name} for name in names}
    assert labels["drope-s0"] == labels["swan-s0"] == {"none", "window", "logn"}
    assert labels["gemma3_all_scaled-s0"] == {"none", "window", "yarn"}
    loss = {(row["name"], row["label"], row["n"]): row["loss"] for row in rows}
    n = max(n for *_, n in loss)
    assert loss["gemma3_all_scaled-s0", "none", n] == loss["gemma3-s0", "none", n]
    assert loss["gemma3_all_scaled-s0", "yarn", n] != loss["gemma3-s0", "yarn", n]
    weights = [checkpoint.load(here / "runs/matrix-smoke" / name)["model"] for name in names[-2:]]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))
    monkeypatch.setattr(sys, "argv", ["matrix", *args])
    matrix.main()
    assert "0 to do" in capsys.readouterr().out


def test_the_settings_of_the_gpu_study_train_at_reduced_size(here):
    small = ["steps=2", "ctx=32", "batch_tokens=128", "micro_tokens=64", "val_windows=4", "data.vocab_size=512"]
    model = ["model.n_layers=2", "model.n_heads=2", "model.width=64"]
    train(train_settings("exp=h200", *small, *model, "name=h"))
    assert (here / "runs/h/ckpt.pt").exists()


def test_a_job_that_does_not_exist_is_a_user_error(here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["matrix", "smoke", "--only", "nope"])
    with pytest.raises(UserError, match="--only=nope: must be"):
        matrix.main()


def test_several_jobs_at_a_time_wait_for_the_runs_that_they_start_from():
    """Two overlap; a child begins after its parent; no job begins after a failure."""
    order, both = [], threading.Barrier(2, timeout=20)

    def job(name: str, *train: str) -> Job:
        return Job("encodings", name, 0, train, 1, (64,))

    def run(job: Job) -> list:
        order.append(f"{job.name} begins")
        if job.name in ("a", "b"):
            both.wait()  # fails unless both run at the same time
        if job.name == "bad":
            raise UserError("bad")
        order.append(f"{job.name} ends")
        return [{"name": job.name}]

    jobs = [job("a"), job("b"), job("child", "init=a"), job("other", "init=elsewhere")]
    rows = {job.name: rows for job, rows in processes.finished_jobs(jobs, run, 2)}
    assert rows == {job.name: [{"name": job.name}] for job in jobs}
    assert order.index("a ends") < order.index("child begins")
    order.clear()
    with pytest.raises(UserError, match="bad"):
        list(processes.finished_jobs([job("bad"), job("after", "init=bad"), job("last", "init=bad")], run, 1))
    assert order == ["bad begins"]


@pytest.mark.process
def test_past_its_minutes_it_stops_and_says_so(here):
    done = command("-m=studies.matrix", "quick", "--minutes", "0.02", "--out", "rows.jsonl", cwd=here)
    assert done.returncode == 1 and "run the same command again to resume" in done.stderr
    assert not (here / "rows.jsonl").exists()


def test_the_readme_quotes_what_the_rows_give():
    """In README.md and docs/*.md: the marked tables line by line, and every interval of three decimals."""
    readme = "".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    pages = ("matrix", "claims", "quick", "antecedents", "real", "layers")
    made = "".join((ROOT / f"results/{x}.md").read_text() for x in pages)
    blocks = re.findall(r"<!-- (gains|encodings) -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert len(blocks) == 2
    for line in (x for _, block in blocks for x in block.splitlines()):
        assert line in made.splitlines(), line
    one_line = " ".join(readme.split())  # an interval may be broken over two lines
    intervals = re.findall(r"[+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", one_line)
    assert intervals and [x for x in intervals if x not in made] == []


def test_the_committed_rows_say_where_they_come_from():
    rows = committed_rows()
    names = {job.name for job in plan.planned_jobs(plan.load_size("default"), (0, 1, 2))}
    for row in rows:
        assert row["name"] in names and re.fullmatch(r"[0-9a-f]{7,}", row["commit"]), row["name"]
        assert row["command"].startswith("python train.py ") and len(row["nll"]) == 32 * len(row.get("windows", [0]))


def test_a_damaged_file_of_rows_is_a_user_error(tmp_path):
    for text in ("", '{"name": "rope-s0"'):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(UserError, match="not rows that studies"):
            read_rows(tmp_path / "rows.jsonl")


def test_seeds_are_whole_numbers():
    assert plan.parse_seeds("0,2") == (0, 2)
    with pytest.raises(UserError, match="--seeds=0,x: must be whole numbers"):
        plan.parse_seeds("0,x")
