"""The study: its plan, its rows and its resuming. Claims and tables are in test_claims.py."""

import re
import sys
import threading
from dataclasses import asdict, replace

import pytest
import torch

from conf import layer_schedule
from conf.errors import UserError
from conf.registry import yaml_values
from engine import checkpoint
from engine.run import Run
from measure.evaluation import NONE, WINDOW, Evaluation
from model import gpt
from model.scaling import NO_CHANGE, resolve
from studies import matrix, plan
from studies.jobs import applicable_scalings, gather
from studies.plan import Job
from studies.rows import MATRIX, read_rows
from tests.helpers import ROOT, choices, command, eval_settings, run_train, train_settings

pytestmark = pytest.mark.process


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
    for job in {job.part: job for job in jobs if "init=" not in " ".join(job.train)}.values():  # one of each part
        cfg = train_settings(*job.train)
        assert (cfg.steps, cfg.seed, cfg.batch_tokens) == (job.steps, job.seed, size.training.batch_tokens)
        assert cfg.ctx == (4 * size.L if job.part == "finetune" else size.L)
    for job in plan.encoding_jobs(size, 0, first=True):  # a table of positions is found by its knob
        has_table = "max_positions" in yaml_values("pos", job.name.removesuffix("-s0"))
        assert (f"pos.max_positions={max(size.lengths)}" in job.train) == has_table


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
            if cfg.layers:
                cfg.layers = layer_schedule.resolve(cfg.layers, cfg.model.n_layers, cfg.ctx, cfg.pos)
        context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
        if "gemma3" in job.name:  # scaling applies to the window layers in the control only
            assert cfg.layers.types["G"].scaled and cfg.layers.types["L"].scaled == ("all_scaled" in job.name)
        assert job.methods is not None
        for method in job.methods:
            change = resolve(yaml_values("scaling", method), context, 8 * size.L, 8 * size.L)
            assert change.effect(8 * size.L, context) != NO_CHANGE.effect(8 * size.L, context), (job.name, method)


def opened(name: str) -> Run:
    return Run.open(name, runs="runs", cache=".cache")


def test_a_run_is_evaluated_with_the_scalings_that_apply_to_it(here):
    run_train("steps=1", "name=a")
    names = applicable_scalings(opened("a"), 512)
    assert {"pi", "ntk", "yarn", "rerope", "logn", "window_sink"} <= set(names)
    assert not {"none", "window", "longrope"} & set(names)
    run_train("steps=1", "name=b", "pos=alibi")
    assert "pi" not in applicable_scalings(opened("b"), 512)


def test_rows_are_those_of_the_evaluation_with_the_columns_of_the_study(here):
    run_train("steps=1", "name=a-s0", "pos=rope_interleaved")
    run = opened("a-s0")
    settings = ("documents=3", "task.scored_tokens=32", "task.windows=2")
    evaluation = Evaluation(run, eval_settings("ctx=[32,64]", *settings), torch.device("cpu"))
    with evaluation.running([]):
        curves = {method.label: evaluation.curve(method) for method in (NONE, WINDOW)}
    size = replace(plan.load_size("quick"), documents=3, windows=2)
    columns = {"method": "pi", "finetune_steps": 1, "percent": 50.0}
    rows = gather(plan.Job("finetune", "a-s0", 0, (), 1, (32, 64), columns=columns), run, size)
    assert [(row.label, row.n) for row in rows] == [(x, n) for x in ("none", "window") for n in (32, 64)]
    assert asdict(rows[0]).items() >= (columns | {"part": "finetune", "base": 10000.0}).items()
    assert asdict(rows[0]).items() >= asdict(curves["none"].first).items() and rows[0].scored_windows == [0, 1]
    assert rows[0].in_window == run.validation["bits_per_byte"] and rows[0].commit

    rows = gather(plan.Job("references", "a-s0", 0, (), 1, (64,), methods=()), run, size)
    assert [(row.label, row.n) for row in rows] == [("none", 64), ("window", 64)]
    rows = gather(plan.Job("encodings", "a-s0", 0, (), 1, (32, 64)), run, size)
    unscaled, unshifted, shifted = rows[0], *rows[-2:]
    assert [(row.label, row.n) for row in rows[-2:]] == [("unshifted", 32), ("shifted", 32)]
    assert unshifted.loss == pytest.approx(unscaled.loss) and unshifted.nll == pytest.approx(unscaled.nll, abs=1e-3)
    assert shifted.loss == pytest.approx(unscaled.loss, abs=1e-2) and shifted.low < shifted.loss < shifted.high


def test_a_small_matrix_runs_and_skips_what_is_done(here, monkeypatch, capsys):
    """At a size of seconds, with another cache; the second call, in this process, does nothing."""
    (here / ".cache").rename(here / "elsewhere")
    args = ("smoke", "--only", "alibi-s0,base100-s0", "--out", "rows.jsonl", "--cache", "elsewhere")
    done = command("-m=studies.matrix", *args, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(here / "rows.jsonl")
    assert {row.run for row in rows.rows} == {"alibi-s0", "base100-s0"} and not (here / ".cache").exists()
    labels = {row.label for row in rows.rows if row.run == "alibi-s0"}
    assert {"none", "window", "logn", "shifted", "unshifted"} <= labels
    [row] = rows.find("base100", "window", 64).values()
    assert row.base == 100 and row.command.startswith("python train.py pos=rope pos.base=100")
    before = (here / "rows.jsonl").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", ["matrix", *args])
    matrix.main()
    assert "0 to do" in capsys.readouterr().out
    assert (here / "rows.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_rope_has_all_methods(here):
    done = command("-m=studies.matrix", "smoke", "--only", "rope-s0", "--out", "rows.jsonl", cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    labels = {row.label for row in read_rows(here / "rows.jsonl").rows}
    assert {"ntk", "rerope", "window_sink", "pi factor=fixed", "yarn + logn", "shifted"} <= labels


@pytest.mark.slow
def test_the_copy_for_other_scaling_has_the_same_weights(here):
    names = ("rope-s0", "drope-s0", "swan-s0", "gemma3-s0", "gemma3_all_scaled-s0")
    args = ("--plan", "layers", "--only", ",".join(names), "--out", "rows.jsonl")
    done = command("-m=studies.matrix", "smoke", *args, cwd=here)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = read_rows(here / "rows.jsonl")
    assert {row.label for row in rows.rows if row.name in ("drope", "swan")} == {"none", "window", "logn"}
    assert rows.losses("gemma3_all_scaled", "none", 256) == rows.losses("gemma3", "none", 256)
    assert rows.losses("gemma3_all_scaled", "yarn", 256) != rows.losses("gemma3", "yarn", 256)
    weights = [checkpoint.load(here / "runs/matrix-smoke" / name)["model"] for name in names[-2:]]
    assert all(torch.equal(a, b) for a, b in zip(*(w.values() for w in weights), strict=True))


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
    rows = {job.name: rows for job, rows in matrix.finished_jobs(jobs, run, 2)}
    assert rows == {job.name: [{"name": job.name}] for job in jobs}
    assert order.index("a ends") < order.index("child begins")
    order.clear()
    with pytest.raises(UserError, match="bad"):
        list(matrix.finished_jobs([job("bad"), job("after", "init=bad"), job("last", "init=bad")], run, 1))
    assert order == ["bad begins"]


def test_past_its_minutes_it_stops_and_says_so(here):
    done = command("-m=studies.matrix", "quick", "--minutes", "0.02", "--out", "rows.jsonl", cwd=here)
    assert done.returncode == 1 and "run the same command again to resume" in done.stderr
    assert not (here / "rows.jsonl").exists()


def test_the_readme_quotes_what_the_rows_give():
    """In README.md and docs/*.md: the marked tables line by line, and every interval of three decimals."""
    readme = "".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    pages = ("matrix", "claims", "quick", "antecedents", "real", "layers", "recommend")
    made = "".join((ROOT / f"results/{x}.md").read_text() for x in pages) + (ROOT / "docs/board.md").read_text()
    blocks = re.findall(r"<!-- (gains|encodings) -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert len(blocks) == 2
    for line in (x for _, block in blocks for x in block.splitlines()):
        assert line in made.splitlines(), line
    one_line = " ".join(readme.split())  # an interval may be broken over two lines
    intervals = re.findall(r"[+-]\d\.\d{3} \[[+-]\d\.\d{3}, [+-]\d\.\d{3}\]", one_line)
    assert intervals and [x for x in intervals if x not in made] == []


def test_the_committed_rows_say_where_they_come_from():
    names = {job.name for job in plan.planned_jobs(plan.load_size("default"), (0, 1, 2))}
    for row in read_rows(MATRIX[0]).rows:
        assert row.run in names and re.fullmatch(r"[0-9a-f]{7,}", row.commit), row.run
        assert row.command.startswith("python train.py ") and len(row.nll) == 32 * len(row.scored_windows)


@pytest.mark.parametrize("content", ["", "[1]\n", "3\n", '{"n": 1}\n', "{", "\x00\n"])
def test_a_damaged_file_of_rows_is_a_user_error(content, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match="not rows that studies"):
        read_rows(tmp_path / "rows.jsonl")
