"""The study: its plan, its rows and its resuming. Claims and tables are in test_claims.py."""

import json
import queue
import re
import signal
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from conf import layer_schedule
from conf.errors import UserError
from conf.registry import yaml_values
from engine import checkpoint
from measure.curves import write_jsonl
from model import gpt
from model.scaling import NO_CHANGE, resolve
from studies import gain_parts, matrix, plan
from studies.jobs import gather, stopping
from studies.plan import Job
from studies.rows import RESULTS, StudyRow, read_rows
from tests.helpers import ROOT, choices, command, eval_settings, opened, run_eval, run_train, study_row, train_settings

pytestmark = pytest.mark.process


@pytest.mark.parametrize("size", choices("study"))
def test_plans_train_every_encoding_schedule_and_extension_with_every_seed(size):
    size = plan.load_size(size)
    jobs = [job for name in ("rope", "encodings") for job in plan.planned_jobs(name, size, (0, 1))]
    names = {(job.part, job.name) for job in jobs}
    assert len(names) == len(jobs)
    for seed in (0, 1):
        everything = {*choices("pos"), *choices("layers"), *plan.OTHERS} - {"uniform", "olmo3"}
        assert {("encodings", f"{name}-s{seed}") for name in everything} <= names
        assert {("base", f"base{base}-s{seed}") for base in plan.BASES} <= names
        extensions = [(k, m) for k, methods in plan.EXTENSIONS.items() for m in methods]
        assert {("finetune", f"{m}-{k}L-s{seed}") for k, m in extensions} <= names
    for job in jobs:  # a table of positions is found by its knob
        name = job.name.removesuffix("-s0")
        has_table = name in choices("pos") and "max_positions" in yaml_values("pos", name)
        assert (f"pos.max_positions={job.longest}" in job.train) == has_table or job.seed == 1


@pytest.mark.parametrize("name, size", [*((name, "default") for name in plan.PLANS), ("ladder", "small")])
def test_a_plan_can_be_trained_and_evaluated_as_it_says(name, size):
    """Settings that train.py takes, parents that come first, and methods that apply to the run."""
    size = plan.load_size(size)
    jobs = plan.planned_jobs(name, size, (0,))
    names = [job.name for job in jobs]
    for job in jobs:
        if job.model:
            continue  # it is not trained
        cfg = train_settings(*job.train)
        assert cfg.seed == 0
        divisor = (plan.SHORTER | {"ladder-3.7M-third": 3}).get(job.name.removesuffix("-s0"), 1)
        tuned = {"gemma3_all_scaled-s0": 1, "drope_qk_norm-s0": size.training.steps}.get(job.name, size.finetune_steps)
        assert cfg.steps == (tuned if cfg.init else size.training.steps // divisor)
        if cfg.init:
            assert names.index(cfg.init) < names.index(job.name)
            parent = train_settings(*next(x.train for x in jobs if x.name == cfg.init))
            cfg = replace(cfg, model=parent.model, pretrained={"ctx": cfg.ctx})
            if cfg.layers:
                cfg.layers = layer_schedule.resolve(cfg.layers, cfg.model.n_layers, cfg.ctx, cfg.pos)
        context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
        if job.name.startswith("gemma3"):  # scaling applies to the window layers in the control only
            assert cfg.layers.types["G"].scaled and cfg.layers.types["L"].scaled == ("all_scaled" in job.name)
        for method in {m for evaluation in job.evaluations for m in evaluation.methods} - {"none"}:
            change = resolve(yaml_values("scaling", method), context, 8 * size.L, 8 * size.L)
            assert change.effect(8 * size.L, context) != NO_CHANGE.effect(8 * size.L, context), (job.name, method)
    if name == "ladder":
        assert [train_settings(*job.train).model.width for job in jobs[:6:2]] == [128, 256, 384]


def test_rows_are_those_of_the_evaluation_with_the_columns_of_the_study(here):
    run_train("steps=1", "name=a-s0", "pos=rope_interleaved")
    size = replace(plan.load_size("quick"), documents=3, windows=2)
    evaluations = (plan.Evaluation((32, 64, 128), ("yarn",)),)
    job = Job("rope", "a-s0", 0, (), evaluations)
    run, lengths = opened("a-s0"), "ctx=[32,64,128]"
    run_eval("run=a-s0", lengths, "scaling=yarn", "by_antecedent=true", *plan.targets(job, size))
    rows = gather(job, run, eval_settings(*plan.targets(job, size)))
    assert {(x.label, x.n) for x in rows} == {(x, n) for x in ("none", "window", "yarn") for n in (32, 64, 128)}
    assert {(x.part, x.base) for x in rows} == {("rope", 10000.0)}
    assert rows[0].in_window == run.validation["bits_per_byte"] and rows[0].commit
    [file] = Path("runs/a-s0/eval/groups").glob("antecedent-yarn-*.jsonl")
    published = {x["group"]: x for x in map(json.loads, file.read_text().splitlines()) if x["n"] == 128}
    [row] = [x for x in rows if (x.label, x.n) == ("yarn", 128)]
    assert {group: sum(counts) for group, (_, counts) in row.groups.items()} == {
        group: x["targets"] for group, x in published.items() if x["targets"]
    }
    for group, (nats, counts) in row.groups.items():
        assert sum(nats) / sum(counts) == pytest.approx(published[group]["loss"], abs=1e-4)


def test_rows_that_another_command_adds_are_kept(tmp_path, monkeypatch):
    def jobs(todo, run, at_a_time):
        write_jsonl(tmp_path / "rows.jsonl", [study_row("rope", "none", 64, 0, [1.0])])
        yield todo[0], [study_row("alibi", "none", 64, 0, [2.0])]

    monkeypatch.setattr(matrix, "finished_jobs", jobs)
    argv = "matrix smoke --plan encodings --only alibi-s0 --out".split()
    monkeypatch.setattr(sys, "argv", [*argv, str(tmp_path / "rows.jsonl")])
    matrix.main()
    assert [row.run for row in read_rows(tmp_path / "rows.jsonl").rows] == ["rope-s0", "alibi-s0"]


def test_a_small_matrix_runs_and_skips_what_is_done(here, monkeypatch, capsys):
    """At a size of seconds, with another cache; the second call does nothing."""
    (here / ".cache").rename(here / "elsewhere")
    job = "smoke --plan encodings --only alibi-s0"
    monkeypatch.setattr(sys, "argv", ["matrix", *job.split(), "--out", "rows.jsonl", "--cache", "elsewhere"])
    matrix.main()
    rows = read_rows(here / "rows.jsonl")
    assert {row.label for row in rows.rows} == {"none", "window"} and not (here / ".cache").exists()
    [row] = rows.find("alibi", "window", 64).values()
    assert "pos=alibi" in row.command.split()
    before = (here / "rows.jsonl").stat().st_mtime_ns
    matrix.main()
    assert "0 to do" in capsys.readouterr().out
    assert (here / "rows.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_model_from_elsewhere_is_evaluated_and_copies(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    from tests.gguf_files import write_gguf

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_gguf(tmp_path / "model.gguf", quantisation="Q8_0")
    found = {
        "REAL": f"gguf:{tmp_path}/model.gguf",
        "REAL_CTX": 64,
        "REAL_TOKENS": 8,
        "REAL_DOCUMENTS": {"sympy": 3},
        "COPIED_AT": 2,
    }
    for name, value in found.items():
        monkeypatch.setattr(plan, name, value)
    monkeypatch.setattr(sys, "argv", ["matrix", "smoke", "--plan", "real", "--out", "real.jsonl"])
    matrix.main()
    rows = read_rows(tmp_path / "real.jsonl")
    lengths = {
        label: {n for run, at, n in rows.by_condition if run == "smollm2-sympy" and at == label}
        for label in ("none", "rerope + logn")
    }
    assert lengths == {"none": {8, 16, 32, 64, 128}, "rerope + logn": {64, 128}}
    assert gain_parts.part_of_gain(rows, "smollm2-sympy", "yarn", 128, reward=True).shape == (1, 3)
    [copied] = rows.find("copying-smollm2", "yarn", 128).values()
    assert len(copied.hits) == 4 and copied.part == "real"


@pytest.mark.slow
def test_rope_has_all_methods_and_its_fine_tunings_a_headroom(here):
    done = command("-m=studies.matrix", "smoke", "--only", "rope-s0,none-4L-s0", "--out", "rows.jsonl", cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(here / "rows.jsonl")
    labels = {row.label for row in rows.rows if row.name == "rope"}
    assert {"ntk", "rerope", "ntk_by_parts", "pi factor=8.0", "yarn + logn"} <= labels
    reward = gain_parts.part_of_gain(rows, "rope", "yarn", 256, reward=True)
    assert gain_parts.headroom(rows, "rope", 256).shape == reward.shape == (1, 4)


@pytest.mark.slow
def test_the_copy_for_other_scaling_has_the_same_weights(here):
    names = ("rope-s0", "drope-s0", "swan-s0", "gemma3-s0", "gemma3_all_scaled-s0")
    args = ("--plan", "encodings", "--only", ",".join(names), "--out", "rows.jsonl")
    done = command("-m=studies.matrix", "smoke", *args, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(here / "rows.jsonl")
    assert {row.label for row in rows.rows if row.name in ("drope", "swan")} == {"none", "window", "logn"}
    assert rows.losses("gemma3_all_scaled", "none", 256) == rows.losses("gemma3", "none", 256)
    assert rows.losses("gemma3_all_scaled", "yarn", 256) != rows.losses("gemma3", "yarn", 256)
    weights = [checkpoint.load(here / "runs/matrix-smoke" / name)["model"] for name in names[-2:]]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))


@pytest.mark.parametrize("size", choices("study"))
def test_plans_share_a_folder_of_runs_and_their_tasks_have_room(size):
    size = plan.load_size(size)
    jobs = [job for name in plan.PLANS for job in plan.planned_jobs(name, size, (0,))]
    trained: dict[str, set] = {}
    for job in jobs:
        trained.setdefault(job.name, set()).add(job.train)
        lengths = [n for evaluation in job.evaluations for n in evaluation.lengths]
        assert job.task == "matched" or min(lengths) >= 128
    assert [name for name, trainings in trained.items() if len(trainings) > 1] == []


def test_a_job_that_does_not_exist_is_a_user_error(here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["matrix", "smoke", "--only", "nope"])
    with pytest.raises(UserError, match="--only=nope: must be"):
        matrix.main()


def test_several_jobs_at_a_time_wait_for_the_runs_that_they_start_from():
    """Two overlap; a child begins after its parent; no job begins after a failure."""
    order, both = [], threading.Barrier(2, timeout=20)

    def job(name: str, *train: str) -> Job:
        return Job("encodings", name, 0, train, ())

    def run(job: Job) -> list:
        order.append(f"{job.name} begins")
        if job.name in ("a", "b"):
            both.wait()  # fails unless both run at the same time
        if job.name == "bad":
            raise UserError("bad")
        order.append(f"{job.name} ends")
        return [{"name": job.name}]

    jobs = [job("a"), job("b"), job("child", "init=a"), job("other", "init=elsewhere")]
    rows = {job.name: rows for job, rows in matrix.finished_jobs(jobs, run, 2)}
    assert rows == {job.name: [{"name": job.name}] for job in jobs}
    assert order.index("a ends") < order.index("child begins")
    order.clear()
    with pytest.raises(UserError, match="bad"):
        list(matrix.finished_jobs([job("bad"), job("after", "init=bad"), job("last", "init=bad")], run, 1))
    assert order == ["bad begins"]


def test_a_signal_that_does_not_wake_the_main_thread_stops_a_study():
    """One that comes just before it begins to wait, or that the system gives to another thread."""
    stopped: queue.Queue[bool] = queue.Queue()

    def run(job: Job) -> list:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        stopped.put(stopping.wait(timeout=20))
        return []

    before = signal.signal(signal.SIGUSR1, matrix.interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(matrix.finished_jobs([Job("encodings", "a", 0, (), ())], run, 1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stopped.get(timeout=30)


def test_the_pages_quote_intervals_of_generated_pages_and_of_the_log():
    """Of three decimals, in docs/*.md; those of README.md and findings.md are made by studies.numbers."""

    def text(*pages: Path) -> str:  # without its broken lines
        return " ".join(" ".join(page.read_text() for page in pages).split())

    pages = ("matrix", "claims", "quick", "real", "encodings", "recommend", "numbers", "log")
    made = text(*(RESULTS / f"{x}.md" for x in pages), ROOT / "docs/board.md")
    docs = text(*sorted((ROOT / "docs").glob("*.md")))
    intervals = re.findall(r"[+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", docs)
    assert intervals and [x for x in intervals if x not in made] == []


@pytest.mark.parametrize("name", ["rope", "encodings"])
def test_the_committed_rows_say_where_they_come_from(name):
    for row in read_rows(RESULTS / f"{name}.jsonl").rows:
        assert re.fullmatch(r"[0-9a-f]{7,}", row.commit) and row.command.startswith("python train.py ")
        assert len(row.nll) == 32 * len(row.scored_windows)


def test_the_page_of_the_rows_explains_every_field():
    page = (RESULTS / "rows.md").read_text().split("## Fields")[1]
    explained = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)))
    assert sorted(explained) == sorted(field.name for field in fields(StudyRow))


@pytest.mark.parametrize("content", ["", "[1]\n", "3\n", '{"n": 1}\n', "{", "\x00\n"])
def test_a_damaged_file_of_rows_is_a_user_error(content, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match="not rows that studies"):
        read_rows(tmp_path / "rows.jsonl")
