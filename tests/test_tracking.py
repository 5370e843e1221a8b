"""wandb: what a training and its evaluations log to a stand-in, to offline runs, and to a server on this machine."""

import dataclasses
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import wandb

from conf.registry import describe
from engine import checkpoint, tracking, wandb_runs, wandb_training
from engine.code_version import commit
from engine.run import Run
from measure import wandb_curves
from measure.comparison import select_shared
from measure.curves import controls, read_curve
from measure.evaluation import Evaluation, requested_method
from measure.statistics import gain
from studies import dashboard
from tests.helpers import command, eval_settings, import_or_skip, run_eval, run_train, train_smoke_runs


class FakeRun:
    """Keeps what is logged to a wandb run."""

    url, offline, disabled = "", True, False

    def __init__(self, **about: Any):
        self.about = SimpleNamespace(**about)
        self.id = about["run_id"]
        self.rows: dict[int, dict[str, Any]] = {}
        self.metrics: dict[str, dict[str, Any]] = {}
        self.artifacts: list[tuple[str, wandb.Artifact]] = []
        self.summary: dict[str, Any] = {}

    @property
    def dir(self) -> str:
        return str(Path.cwd() / "wandb" / "offline-run-1" / "files")

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.rows.setdefault(step or 0, {}).update(values)

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics[name] = options

    def log_artifact(self, artifact: wandb.Artifact) -> None:
        self.artifacts.append(("made", artifact))

    def _log_artifact(self, artifact: wandb.Artifact, **how: bool) -> None:
        assert how["use_after_commit"]
        self.artifacts.append(("used", artifact))


@pytest.fixture
def logged(monkeypatch) -> list[FakeRun]:
    """The runs that are opened in place of wandb's."""
    runs: list[FakeRun] = []

    @contextmanager
    def open_run(project, job_type, group, name, run_id, config, **options) -> Generator[FakeRun]:
        about = {"project": project, "job_type": job_type, "group": group, "name": name, "config": config}
        runs.append(FakeRun(run_id=run_id, **about, **options))
        yield runs[-1]

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb_runs, "open_run", open_run)
    return runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> Path:
    """A folder with the smoke run runs/x."""
    return train_smoke_runs(tmp_path_factory.mktemp("trained"), cache, ("name=x", "dtype=float32"))


@pytest.fixture
def in_trained(trained, monkeypatch) -> Path:
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "argv", ["test"])
    return trained


def flat(config: dict, prefix: str = "") -> dict[str, Any]:
    """Nested keys as wandb shows them: pos.kind."""
    parts = [flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v} for k, v in config.items()]
    return {key: value for part in parts for key, value in part.items()}


# ---- names, ids and config ----


def evaluation_of(run: Run, *overrides: str) -> tuple[Evaluation, str]:
    cfg = eval_settings("documents=4", "dtype=float32", *overrides)
    return Evaluation(run, cfg, torch.device("cpu")), requested_method(cfg)


def test_name_config_and_id_tell_any_two_measurements_apart(in_trained):
    """All six in one project were called `rope none`, with one config."""
    run = Run.open("x", runs="runs", cache=".cache")
    measured = [
        evaluation_of(run, "ctx=256"), evaluation_of(run, "ctx=128"), evaluation_of(run, "ctx=[64,256]"),
        evaluation_of(run, "ctx=256", "task=sliding"), evaluation_of(run, "ctx=256", "task=prefix"),
        evaluation_of(run, "ctx=256", "documents=5"), evaluation_of(run, "ctx=256", "multiples=[1.5]"),
        evaluation_of(run, "ctx=256", "task.scored_tokens=32"), evaluation_of(run, "ctx=256", "dtype=bfloat16"),
        evaluation_of(run, "ctx=256", "scaling=pi"), evaluation_of(run, "ctx=256", "scaling=pi", "plus=logn"),
        evaluation_of(dataclasses.replace(run, digest="f" * 64), "ctx=256"),
    ]  # fmt: skip
    on_gpu, method = evaluation_of(run, "ctx=256")
    on_gpu.device = torch.device("meta")
    configs = [wandb_curves.curve_config(*pair) for pair in [*measured, (on_gpu, method)]]
    for a, b in itertools.combinations(configs, 2):
        (name_a, id_a), (name_b, id_b) = wandb_curves.name_and_id(a), wandb_curves.name_and_id(b)
        assert a != b and name_a != name_b and id_a != id_b
    first = configs[0]
    assert first["eval"] == {
        "label": "none", "scaling": {"kind": "none"}, "plus": [], "task": "matched", "ctx": 256, "documents": 4,
        "lengths": [64, 128, 256], "texts": measured[0][0].texts, "targets": first["eval"]["targets"],
        "weights": run.digest[:12], "step": 20,
    }  # fmt: skip
    assert (first["device"], first["dtype"], first["commit"]) == ("cpu", "float32", commit())
    name, run_id = wandb_curves.name_and_id(first)
    assert name.startswith("x none matched ctx256 docs4 float32 ") and run_id.startswith("x-none-matched-ctx256-")
    assert wandb_curves.name_and_id(wandb_curves.curve_config(*evaluation_of(run, "ctx=256"))) == (name, run_id)


def test_train_and_eval_runs_have_the_same_keys(in_trained, logged, cache):
    run_train("name=y", "pos=rope_partial", "steps=2", "save_every=2")
    run_eval("run=y", "ctx=128", "documents=4", "scaling=pi", "plus=logn")
    training, *curves = logged
    assert [run.about.job_type for run in logged] == ["train", "eval", "eval", "eval"]
    assert {run.about.group for run in logged} == {"y"}
    assert len({run.id for run in logged}) == 4 and all(run.id.startswith("y-") for run in logged)
    assert not any(set(run.id) & set("/\\#?%: ") for run in logged)
    ours = flat(training.about.config)
    for run in curves:
        theirs = flat(run.about.config)
        assert ours.keys() == {key for key in theirs if not key.startswith("eval.")}
        measured_here = ("device", "dtype", "commit")
        assert {k: ours[k] for k in ours if k not in measured_here} == {
            k: theirs[k] for k in ours if k not in measured_here
        }
    assert ours["pos.kind"] == "rope" and ours["encoding"] == "rope_partial" == describe(
        "pos", {**training.about.config["pos"]}
    )
    assert ours["dtype"] in ("float32", "bfloat16") and ours["n_parameters"] > 100_000
    pi = curves[-1].about.config["eval"]
    assert pi["scaling"]["kind"] == "pi" and pi["plus"] == ["logn"]


# ---- ids ----


def test_a_resumed_training_has_the_id_of_the_first_part_and_a_new_one_another(here, logged):
    run_train("name=x", "steps=4", "save_every=2")
    state = checkpoint.load(Path("runs/x"))
    checkpoint.save(Path("runs/x"), {**{k: v for k, v in state.items() if k != "cfg"}, "step": 2})
    run_train("name=x", "steps=4", "save_every=2")
    run_train("name=x", "steps=4", "save_every=2", "fresh=true")
    first, resumed, fresh = logged
    assert first.id == resumed.id != fresh.id and resumed.about.resume
    assert min(resumed.rows) > 2 and max(first.rows) == 4
    assert set(first.rows) == set(fresh.rows) and "train/loss" in first.rows[4] and "train/val_loss" in first.rows[4]


def test_the_id_of_a_training_is_kept_in_its_folder(tmp_path):
    first = wandb_training.training_id(tmp_path, start=0)
    assert wandb_training.training_id(tmp_path, start=5) == first == (tmp_path / "wandb_id").read_text()
    assert wandb_training.training_id(tmp_path, start=0) != first
    (tmp_path / "wandb_id").unlink()  # of a run that was trained with wandb disabled
    assert wandb_training.training_id(tmp_path, start=5) == (tmp_path / "wandb_id").read_text()


def test_a_curve_that_is_measured_again_has_the_same_id(in_trained, logged):
    for _ in range(2):
        run_eval("run=x", "ctx=128", "documents=4", "fresh=true")
    ids = [run.id for run in logged]
    assert len(ids) == 4 and ids[:2] == ids[2:] and not any(hasattr(run.about, "resume") for run in logged)


# ---- what is logged ----


def test_a_curve_has_points_rows_picture_columns_and_its_weights(in_trained, logged):
    run_eval("run=x", "ctx=256", "documents=5", "scaling=pi", "fresh=true")
    _, _, run = logged
    files = [read_curve(file) for file in Path("runs/x/eval").glob("*.jsonl")]
    texts = next(c for c in files if c.label == "pi").rows[-1].texts  # other tests evaluate the run on other texts
    curves = select_shared(files, texts)
    rows = {c.label: c.by_length() for c in curves}
    (bars,) = controls(curves).values()
    assert list(run.rows) == [64, 128, 256]  # n is the step
    for n, values in run.rows.items():
        row, gained = rows["pi"][n], gain(rows["pi"][n], bars[n])
        assert values["eval/log2_n_over_L"] == np.log2(n / 64)
        assert (values["eval/loss"], values["eval/loss_low"], values["eval/loss_high"]) == (row.loss, row.low, row.high)
        assert (values["eval/gain"], values["eval/gain_low"], values["eval/gain_high"]) == gained
        assert (values["eval/ppl"], values["eval/bits_per_byte"]) == (row.ppl, row.bits_per_byte)
    assert run.metrics["eval/*"]["step_metric"] == "eval/log2_n_over_L"
    assert all(run.metrics[f"eval/{key}"]["hidden"] for key in ("log2_n_over_L", "loss_low", "gain_high"))
    useful = {"loss", "ppl", "bits_per_byte", "factor", "gain", "rows", "figure"}
    panels = {key for row in run.rows.values() for key in row if not run.metrics.get(key, {}).get("hidden")}
    assert panels == {f"eval/{key}" for key in useful}

    columns = run.summary
    assert (columns["ppl@L"], columns["bits_per_byte@L"]) == (rows["pi"][64].ppl, rows["pi"][64].bits_per_byte)
    for name, n in (("gain@2x", 128), ("gain@4x", 256)):
        assert tuple(columns[f"{name}{end}"] for end in ("", "_low", "_high")) == gain(rows["pi"][n], bars[n])
    assert columns["tax"] == 0 and columns["longest_not_worse"] in (64, 128, 256)
    assert columns["minutes"] == pytest.approx(sum(row.seconds for row in rows["pi"].values()) / 60)
    assert columns["n_parameters"] == run.about.config["n_parameters"] > 0

    table, figure = run.rows[256]["eval/rows"], run.rows[256]["eval/figure"]
    assert isinstance(table, wandb.Table) and isinstance(figure, wandb.Image)
    cells = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    assert [row["n"] for row in cells] == [64, 128, 256] and "nll" not in table.columns
    assert cells[-1]["gain_low"] == gain(rows["pi"][256], bars[256])[1]

    (used, weights), (made, of_rows) = run.artifacts
    assert (used, weights.type, made, of_rows.type) == ("used", "weights", "made", "rows")
    assert [Path(name).suffix for name in of_rows.manifest.entries] == [".jsonl"]


def test_training_and_evaluation_name_the_same_weights(here, logged, monkeypatch):
    """An artifact is identified by its content: the training makes it, and its evaluations use it."""
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    run_train("name=x", "steps=2", "save_every=2")
    run_eval("run=x", "ctx=128", "documents=4")
    training, none, _ = logged
    (_, weights), (_, file) = training.artifacts
    ((_, used), _) = none.artifacts
    assert (weights.name, weights.digest) == (used.name, used.digest) and file.type == "checkpoint"
    assert list(file.manifest.entries) == ["ckpt.pt"] and training.about.finish_timeout > wandb_runs.FINISH
    assert training.summary["minutes"] > 0 and training.summary["n_parameters"] > 0
    monkeypatch.delenv("WANDB_LOG_MODEL")
    run_train("name=z", "steps=2", "save_every=2")
    assert [artifact.type for _, artifact in logged[-1].artifacts] == ["weights"]
    assert logged[-1].about.finish_timeout == wandb_runs.FINISH <= 10


def test_the_longest_length_that_is_not_worse():
    """By hand: gains of whole documents at 64, 128, 256, 512, and L = 64."""
    row = dataclasses.replace(read_curve(Path(__file__).parent / "data" / "curve_format2.jsonl").first, hits=[])

    def at(n: int, loss: float):
        nll = [loss * 10 + i * 1e-3 for i in range(4)]
        change = {"n": n, "train_ctx": 64, "extended_ctx": 64, "documents": 4, "tokens": 40, "windows": [0]}
        return dataclasses.replace(row, nll=nll, **change)

    def longest(*losses: float) -> int:
        ns = (32, 64, 128, 256, 512)
        curve = wandb_curves.Curve([at(n, loss) for n, loss in zip(ns, losses, strict=False)])
        return wandb_curves.longest_not_worse(curve, {n: at(n, 2.0) for n in ns})

    assert longest(2, 2, 2, 2, 2) == longest(2, 2, 1, 1, 1) == 512
    assert longest(2, 2, 1, 3, 1) == 128 and longest(2, 2, 3, 1, 1) == 64
    assert longest(3, 3, 1, 1, 1) == 512  # a tax within L is another column
    assert longest(2) == 32


def test_an_answer_has_accuracy_and_the_effective_context(in_trained, logged):
    run_eval("run=x", "task=recall", "ctx=256", "documents=4")
    none, _ = logged
    assert 0 <= none.rows[256]["eval/accuracy"] <= 1 and none.summary["effective_context"] in (0, *none.rows)
    table = none.rows[256]["eval/rows"]
    assert {row[table.columns.index("distance")] for row in table.data} > {None}


def test_a_breakdown_is_a_run_with_its_table(in_trained, logged):
    run_eval("run=x", "ctx=256", "documents=6", "scaling=pi", "by_antecedent=true")
    (breakdown,) = [run for run in logged if run.about.job_type != "eval"]
    assert breakdown.about.config["eval"]["by"] == "antecedent" and breakdown.about.name.endswith("by antecedent")
    assert isinstance(breakdown.rows[0]["antecedent/gains"], wandb.Table)
    assert breakdown.id not in [run.id for run in logged if run is not breakdown]


# ---- problems with wandb ----


@pytest.fixture
def fake_init(monkeypatch) -> list[dict]:
    """wandb.init that fails as the server does not answer: the calls. What was said and has failed is forgotten."""
    calls: list[dict] = []

    def init(**options: Any) -> Any:
        calls.append(options)
        run = FakeRun(run_id=options["id"])
        run.finish = lambda exit_code: None
        return run

    monkeypatch.setattr(wandb_runs, "_said", set())
    monkeypatch.setattr(wandb_runs, "_failed", set())
    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(base_url=free_address())))
    return calls


def free_address() -> str:
    """Of this machine, where nothing listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


def open_two(**options: Any) -> None:
    for name in "ab":
        with wandb_runs.open_run("project", "eval", "g", name, name, {}, **options):
            pass


def test_a_server_that_does_not_answer_is_remembered_and_said_once(fake_init, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    began = time.monotonic()
    open_two()
    assert time.monotonic() - began < 5
    assert [call["mode"] for call in fake_init] == ["offline", "offline"]
    out, err = capsys.readouterr()
    assert err.count("wandb: online did not start (no answer from http://127.0.0.1:") == 1 == len(err.splitlines())
    assert out == "wandb: offline; to upload: wandb sync --yes ./wandb\n"


@pytest.mark.parametrize("gone", [True, False])
def test_the_end_of_a_run_is_bounded_and_a_server_that_has_gone_is_remembered(gone, fake_init, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    answers = iter([True, not gone, True, True])  # at the beginning and at the end of each run

    def check_server(url: str) -> None:
        if not next(answers):
            raise ConnectionError("no answer from the server")

    def timed_out(exit_code: int) -> None:
        raise TimeoutError

    real = wandb.init

    def init(**options: Any) -> Any:
        run = real(**options)
        run.settings = options["settings"]
        if options["mode"] == "online":
            run.finish, run.offline, run.url, run.project_url = timed_out, False, "https://a/b/runs/c", "https://a/b"
        return run

    monkeypatch.setattr(wandb_runs, "check_server", check_server)
    monkeypatch.setattr(wandb, "init", init)
    open_two()
    assert [call["mode"] for call in fake_init] == ["online", "offline" if gone else "online"]
    for call in fake_init:
        assert 0 < call["settings"].finish_timeout <= 10 and call["settings"].finish_timeout_raises
        assert call["settings"].x_disable_stats  # an evaluation of a second
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "wandb: https://a/b"
    reason = "no answer from the server" if gone else "the upload takes long"
    assert f"wandb: {reason}" in err and "; to upload the rest: wandb sync --yes --include-online" in err


def test_exceptions_of_the_body_pass_and_mark_the_run_as_failed(fake_init, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    codes: list[int] = []
    real = wandb.init

    def init(**options: Any) -> Any:
        run = real(**options)
        run.finish = lambda exit_code: codes.append(exit_code)
        return run

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(KeyError), wandb_runs.open_run("p", "train", "g", "n", "i", {}, resume=True):
        raise KeyError
    assert codes == [1] and fake_init[0]["resume"] == "allow"
    open_two()
    assert codes == [1, 0, 0] and fake_init[-1]["resume"] is None


def test_training_and_evaluation_never_die_of_wandb(here, monkeypatch, capsys):
    """Nothing works: neither the server nor wandb.init nor a call to a run."""
    real = wandb.init

    def broken(*args, mode=None, **kwargs):
        if mode != "disabled":
            raise wandb.errors.CommError("no route to host")
        run = real(*args, mode=mode, **kwargs)
        run.log = run.log_artifact = None
        return run

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", broken)
    monkeypatch.setattr(wandb_runs, "_said", set())
    monkeypatch.setattr(wandb_runs, "_failed", set())
    monkeypatch.setattr(wandb_runs, "check_server", lambda url: None)
    run_train("steps=2", "name=x")
    run_eval("run=x", "ctx=128", "documents=4")
    err = capsys.readouterr().err
    assert err.count("wandb: online did not start (no route to host)") == 1
    assert "wandb: TypeError" in err and "something is missing in wandb, nothing else is affected" in err
    assert checkpoint.load(Path("runs/x"))["step"] == 2 and list(Path("runs/x/eval").glob("none-*.jsonl"))


def test_wandb_is_not_imported_where_nothing_is_logged(monkeypatch, capsys):
    def forbidden(name: str) -> None:
        raise ImportError("protobuf is too old")

    monkeypatch.setattr(tracking.importlib, "import_module", forbidden)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert tracking.wandb_module("x") is None and capsys.readouterr().err == ""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracking.distributed, "rank", lambda: 1)
    assert tracking.wandb_module("x") is None and capsys.readouterr().err == ""
    monkeypatch.setattr(tracking.distributed, "rank", lambda: 0)
    assert tracking.wandb_module("x") is None
    assert capsys.readouterr().err.startswith("wandb: cannot be imported (ImportError: protobuf is too old)")


# ---- offline ----


@pytest.mark.slow
@pytest.mark.process
def test_offline_runs_can_be_read_back_and_uploaded_with_the_printed_command(here):
    """No account, no terminal, no network: training and evaluation each leave a run that wandb itself reads."""
    env = {"WANDB_MODE": "offline", "NETRC": "/nonexistent", "WANDB_API_KEY": ""}
    outputs = []
    for script, *args in (("train.py", "exp=smoke"), ("eval.py", "run=x", "ctx=128", "scaling=pi", "documents=4")):
        done = command(script, *args, *(["name=x"] if script == "train.py" else []), cwd=here, **env)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    (line,) = {line for out in outputs for line in out.splitlines() if line.startswith("wandb: ")}
    assert all(out.count("wandb: ") == 1 for out in outputs)
    upload = line.partition("to upload: ")[2].split()
    assert upload[0] == "wandb"
    dry = subprocess.run(
        [sys.executable, "-m", *upload, "--dry-run"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "WANDB_SILENT": "false"},
    )  # fmt: skip
    assert dry.returncode == 0 and "run-x-pi" in dry.stdout + dry.stderr, dry.stderr

    read = {}
    for folder in sorted(Path("wandb").glob("offline-run-*")):
        inspect = [sys.executable, "-m", "wandb", "leet", "inspect", str(folder), "--json"]
        lines = subprocess.run(inspect, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
        records = [json.loads(line) for line in lines]
        run = next(r["run"] for r in records if r["type"] == "run")
        assert folder.name.endswith(run["run_id"])  # readable: `wandb leet` lists the folders
        read[" ".join(run["display_name"].split()[:2])] = run, records
    assert set(read) == {"x", "x none", "x window", "x pi"}
    run, records = read["x"]
    assert run["job_type"] == "train" and run["config"]["update"]["pos"]["kind"] == "rope" and run["resume"]
    assert "train/val_bits_per_byte" in json.dumps(records) and "train/tokens_per_s" in json.dumps(records)
    run, records = read["x pi"]
    assert run["job_type"] == "eval" and run["config"]["update"]["pos"]["kind"] == "rope"
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert [row["_step"] for row in history] == [64, 128] and all("eval/gain_low" in row for row in history)
    kinds = [r["artifact"]["type"] for r in records if r["type"] == "artifact"]
    assert sorted(kinds) == ["rows", "run_table", "weights"]


# ---- the saved view ----


def test_the_view_has_log_axes_and_groups_by_encoding(monkeypatch, capsys):
    import_or_skip("wandb_workspaces")
    from wandb_workspaces.workspaces import internal

    saved = []

    def upsert(view: Any) -> dict:
        saved.append(json.loads(view.spec.model_dump_json(by_alias=True, exclude_none=True)))
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    monkeypatch.setattr(internal, "upsert_view2", upsert)
    monkeypatch.setattr(wandb, "login", lambda **how: True)
    monkeypatch.setattr(wandb, "Api", lambda **how: SimpleNamespace(default_entity="me"))
    monkeypatch.setattr("wandb_workspaces.workspaces.interface.get_app_url", lambda api: "https://wandb.example")
    monkeypatch.setattr(sys, "argv", ["dashboard", "--project", "p"])
    dashboard.main()
    assert "view saved: https://wandb.example/me/p?nw=abc" in capsys.readouterr().out
    section = saved[0]["section"]
    (runs,) = section["runSets"]
    assert [group["name"] for group in runs["grouping"]] == ["encoding.value", "eval.value.label"]
    assert all(runs["runFeed"]["columnPinned"][f"summary:{name}"] for name in ("ppl@L", "gain@2x_low", "tax"))
    panels = [panel["config"] for s in section["panelBankConfig"]["sections"] for panel in s["panels"]]
    by_title = {config.get("chartTitle"): config for config in panels}
    assert by_title["perplexity"]["metrics"] == ["eval/ppl"] and by_title["perplexity"]["xAxis"] == "_step"
    assert by_title["perplexity"]["xLogScale"] and by_title["perplexity"]["yLogScale"]


def test_every_name_of_the_view_is_logged(in_trained, logged):
    """The columns and the metrics of the panels, by an evaluation with losses, one with answers, and a training."""
    import_or_skip("wandb_workspaces")
    run_train("name=w", "steps=2")
    run_eval("run=w", "ctx=256", "documents=4", "scaling=pi")
    run_eval("run=w", "ctx=256", "documents=4", "task=recall")
    assert set(dashboard.COLUMNS) <= {key for run in logged for key in run.summary}
    names = {key for run in logged for row in run.rows.values() for key in row}
    for section in dashboard.view("me", "p").sections:
        for panel in section.panels:
            asked = {*getattr(panel, "y", ()), *getattr(panel, "media_keys", ())}
            assert asked <= names, panel


def test_without_a_login_the_command_says_what_to_click(monkeypatch, capsys):
    monkeypatch.setattr(wandb, "login", lambda **how: False)
    monkeypatch.setattr(sys, "argv", ["dashboard"])
    with pytest.raises(SystemExit) as stop:
        dashboard.main()
    out = capsys.readouterr().out
    assert stop.value.code == 1 and "not saved (not logged in: wandb login)" in out and "tick Log scale" in out


# ---- a server that is compatible with wandb's, on this machine ----


class Server:
    """`openwandb serve` with a data folder, on a port of its own."""

    key = "local" + 40 * "0"

    def __init__(self, program: str, folder: Path):
        self.program, self.folder, self.url = program, folder, free_address()
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2]
        argv = [self.program, "serve", "--host", "127.0.0.1", "-p", port, "--data-dir", str(self.folder)]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self.answers)

    def answers(self) -> bool:
        try:
            wandb_runs.check_server(self.url)
            return True
        except ConnectionError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def env(self) -> dict[str, str]:
        """Of a command that logs to this server."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": self.key, "WANDB_MODE": "online"}

    def get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}/api/v2/{path}", headers={"x-wandb-api-key": self.key})
        return json.load(urllib.request.urlopen(request, timeout=30))

    def runs(self) -> list[dict]:
        return self.get("projects/default/ropewalk/runs")["runs"]

    def steps(self, run_id: str, metric: str) -> list[int]:
        return [point["step"] for point in self.get(f"runs/{run_id}/metrics?key={metric}")["metrics"]]


def wait_until(condition: Callable[[], Any], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.2)


@pytest.fixture
def server(tmp_path) -> Generator[Server]:
    program = shutil.which("openwandb")
    if not program:
        pytest.skip("needs a wandb-compatible server: pip install openwandb, in an environment of its own")
    server = Server(program, tmp_path / "server")
    yield server
    server.kill()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_shows_one_run_for_a_resumed_training_and_six_for_six_evaluations(server, here, monkeypatch):
    """Two minutes and more: each wandb run takes seconds to open and to end."""
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "120")  # on a busy machine
    train = ("train.py", "exp=smoke", "name=x", "log_every=5")
    done = command(*train, cwd=here, **server.env)
    assert done.returncode == 0 and f"wandb: {server.url}/default/ropewalk/runs/x-" in done.stdout, done.stderr
    state = checkpoint.load(Path("runs/x"))
    checkpoint.save(Path("runs/x"), {**{k: v for k, v in state.items() if k != "cfg"}, "step": 10})
    assert command(*train, cwd=here, **server.env).returncode == 0
    (training,) = server.runs()
    assert set(server.steps(training["run_id"], "train/loss")) == {5, 10, 15, 20}
    assert training["summary"]["minutes"] > 0 and training["config"]["pos"]["value"]["kind"] == "rope"

    evaluations = [["ctx=128"], ["ctx=256"], ["ctx=[64,192]"], ["ctx=128", "task=sliding"],
                   ["ctx=128", "task=prefix"], ["ctx=128", "documents=5"]]  # fmt: skip
    for settings in [*evaluations, ["ctx=128", "fresh=true"]]:  # the last is the first again
        done = command("eval.py", "run=x", "documents=4", *settings, cwd=here, **server.env)
        assert done.returncode == 0 and f"wandb: {server.url}/default/ropewalk\n" in done.stdout, done.stderr
    runs = {run["display_name"]: run for run in server.runs() if run["run_id"] != training["run_id"]}
    assert len(server.runs()) == 1 + 2 * len(evaluations) == 1 + len(runs)  # none and window
    for run in runs.values():
        assert set(server.steps(run["run_id"], "eval/loss")) == set(run["config"]["eval"]["value"]["lengths"])
        assert run["config"]["pos"] == training["config"]["pos"] and run["summary"]["ppl@L"] > 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_that_dies_costs_at_most_15_seconds_and_nothing_else(server, here):
    argv = [
        sys.executable,
        str(Path(wandb_runs.ROOT) / "train.py"),
        "exp=smoke",
        "name=x",
        "steps=800",  # long enough that wandb sends the first steps before the last is trained
        "save_every=800",
    ]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(wandb_runs.ROOT), **server.env}
    training = subprocess.Popen(argv, cwd=here, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: server.runs() and "train/loss" in server.runs()[0]["summary"])
    server.kill()
    assert training.stdout and not Path("runs/x/ckpt.pt").exists()  # it is still training
    trained = next(line for line in training.stdout if line.startswith("trained runs/x"))  # after the end of the run
    saved, waited = Path("runs/x/ckpt.pt").stat().st_mtime, time.time()
    _, err = training.communicate(timeout=240)
    assert training.returncode == 0 and trained and checkpoint.load(Path("runs/x"))["step"] == 800, err
    assert (
        waited - saved < 15 and time.time() - saved < 30
    )  # the second: with the end of the process, on a busy machine
    upload = next(line for line in err.splitlines() if "upload the rest: " in line).partition("rest: ")[2].split()

    done = command("eval.py", "run=x", "ctx=128", "scaling=pi", "documents=4", cwd=here, **server.env)
    waited = time.time() - Path("runs/x/eval/ctx128.png").stat().st_mtime
    assert done.returncode == 0 and waited < 15 and done.stderr.count("wandb: online did not start") == 1
    assert "to upload: wandb sync --yes ./wandb" in done.stdout

    server.start()  # nothing is lost: what could not be sent is uploaded with the printed commands
    for args in (upload, ["wandb", "sync", "--yes", "./wandb"]):
        subprocess.run([sys.executable, "-m", *args], cwd=here, env=env, check=True, capture_output=True, timeout=600)
    runs = {" ".join(run["display_name"].split()[:2]): run["run_id"] for run in server.runs()}
    assert set(runs) == {"x", "x none", "x window", "x pi"}
    assert set(server.steps(runs["x"], "train/loss")) == set(range(10, 801, 10))
    assert server.steps(runs["x pi"], "eval/loss") == [64, 128]
