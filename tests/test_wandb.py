"""wandb: what a training and its evaluations log to a stand-in, and to offline runs that wandb itself reads."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import wandb

from conf.schema import flatten
from engine import checkpoint, wandb_log
from engine.run import Run
from measure.curves import read_curve, select_shared
from measure.evaluation import Evaluation, requested_method
from measure.gain import controls, gain
from measure.wandb_curves import curve_config, curve_name, longest_not_worse
from tests.helpers import command, curve_of, eval_settings, opened, run_eval, run_train, train_smoke_runs

pytestmark = pytest.mark.process


@pytest.fixture
def logged(monkeypatch) -> list[Mock]:
    """The runs that are opened in place of wandb's. about: the arguments of wandb.init."""
    runs: list[Mock] = []

    def init(**about: Any) -> Mock:
        folder = str(Path.cwd() / "wandb" / "offline-run-1" / "files")
        run = Mock(about=SimpleNamespace(**about), id=about["id"], dir=folder, offline=True, summary={})
        runs.append(run)
        return run

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb_log.say.cache_clear()
    monkeypatch.setattr(wandb_log, "_server_gone", "")
    monkeypatch.setattr(wandb, "init", init)
    return runs


def history(run: Mock) -> dict[int, dict[str, Any]]:
    """step -> what was logged there."""
    rows: dict[int, dict[str, Any]] = {}
    for call in run.log.call_args_list:
        rows.setdefault(call.kwargs.get("step", 0), {}).update(call.args[0])
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache) -> Path:
    """A folder with the smoke run runs/x."""
    return train_smoke_runs(tmp_path_factory.mktemp("trained"), cache, ("name=x", "dtype=float32"))


@pytest.fixture
def in_trained(trained, monkeypatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


# ---- names, ids and config ----

MEASUREMENTS = ["ctx=256", "ctx=128", "ctx=[64,256]", "task=sliding", "task=copying", "documents=5"]
MEASUREMENTS += ["task.scored_tokens=32", "dtype=bfloat16", "scaling=pi", "scaling=pi plus=logn"]


def config_of(run: Run, settings: str, device: str = "cpu") -> dict[str, Any]:
    cfg = eval_settings("ctx=256", "documents=4", "dtype=float32", *settings.split())
    evaluation = Evaluation(run, cfg, torch.device("cpu"))
    evaluation.device = torch.device(device)
    return curve_config(evaluation, requested_method(cfg))


def test_names_and_configs_tell_any_two_measurements_apart(in_trained):
    run = opened("x")
    configs = [config_of(run, settings) for settings in MEASUREMENTS]
    configs += [config_of(dataclasses.replace(run, digest="f" * 64), ""), config_of(run, "", device="meta")]
    assert len(set(map(curve_name, configs))) == len(set(map(str, configs))) == len(MEASUREMENTS) + 2
    first = configs[0]
    known = {"label": "none", "task": "matched", "ctx": 256, "documents": 4, "lengths": [64, 128, 256], "step": 20}
    assert first["eval"].items() >= {**known, "weights": run.digest[:12]}.items()
    assert curve_name(first) == curve_name(config_of(run, ""))


def test_a_training_and_its_evaluations_belong_together(here, logged):
    """By group, by the keys of their configs, and by the hash of the weights."""
    run_train("name=y", "pos=rope_partial", "steps=2")
    run_eval("run=y", "ctx=128", "documents=4", "scaling=pi", "plus=logn")
    training, *curves = logged
    assert [run.about.job_type for run in logged] == ["train", "eval", "eval", "eval"]
    assert {run.about.group for run in logged} == {"y"} and len({run.id for run in logged}) == 4
    ours = flatten(training.about.config)
    assert (ours["pos.kind"], ours["encoding"], ours["device"]) == ("rope", "rope_partial", "cpu")
    for run in curves:
        theirs = flatten(run.about.config)
        assert all(theirs[key] == ours[key] for key in ours if key not in ("device", "dtype", "commit"))
        assert {key for key in theirs if key not in ours} == {key for key in theirs if key.startswith("eval.")}
        assert theirs["eval.weights"] == training.summary["weights"]
    training.finish.assert_called_once_with(exit_code=0)
    assert training.summary["minutes"] > 0 and training.summary["n_parameters"] == ours["n_parameters"] > 10_000
    settings = training.about.settings
    assert settings.finish_timeout == wandb_log.FINISH <= 6 and settings.finish_timeout_raises
    assert settings.init_timeout == wandb_log.CONNECT <= 6 and os.environ["WANDB_ERROR_REPORTING"] == "false"


def test_a_resumed_training_keeps_its_id_and_what_is_done_again_has_a_new_one(here, logged):
    run_train("name=x", "steps=4", "save_every=2")
    state = torch.load("runs/x/ckpt.pt", weights_only=True)
    torch.save({**state, "step": 2}, "runs/x/ckpt.pt")
    run_train("name=x", "steps=4", "save_every=2")
    run_train("name=x", "steps=4", "save_every=2", "fresh=true")
    first, resumed, fresh = logged
    assert first.id == resumed.id != fresh.id and resumed.about.resume == "allow"
    assert min(history(resumed)) > 2 and max(history(first)) == 4 == max(history(fresh))
    assert {"train/loss", "train/val_loss", "train/val_bits_per_byte", "train/grad_norm"} <= history(first)[4].keys()
    for _ in range(2):
        run_eval("run=x", "ctx=128", "documents=4", "fresh=true")
    curves = logged[3:]
    assert len({run.id for run in curves}) == 4 and not any(run.about.resume for run in curves)
    assert [run.about.name for run in curves[:2]] == [run.about.name for run in curves[2:]]


# ---- what is logged of a curve ----


def test_a_curve_has_points_picture_and_columns(in_trained, logged):
    run_eval("run=x", "ctx=256", "documents=5", "scaling=pi", "fresh=true")
    *_, run = logged
    files = [read_curve(file) for file in Path("runs/x/eval").glob("*.jsonl")]
    texts = next(c for c in files if c.label == "pi").rows[-1].texts  # other tests evaluate the run on other texts
    curves = select_shared(files, texts)
    rows = next(c for c in curves if c.label == "pi").by_length()
    (bars,) = controls(curves).values()
    points = history(run)
    assert list(points) == [64, 128, 256]  # n is the step
    for n, values in points.items():
        row = rows[n]
        expected = {"log2_n_over_L": math.log2(n / 64), "ppl": row.ppl, "bits_per_byte": row.bits_per_byte}
        expected |= zip(("loss", "loss_low", "loss_high"), (row.loss, row.low, row.high), strict=True)
        expected |= zip(("gain", "gain_low", "gain_high"), gain(row, bars[n]), strict=True)
        assert values.items() >= {f"eval/{key}": value for key, value in expected.items()}.items()
    options = {call.args[0]: call.kwargs for call in run.define_metric.call_args_list}
    assert options["eval/*"]["step_metric"] == "eval/log2_n_over_L" and options["eval/gain_high"]["hidden"]

    columns = run.summary
    assert (columns["ppl@L"], columns["bits_per_byte@L"]) == (rows[64].ppl, rows[64].bits_per_byte)
    for name, n in (("gain@2x", 128), ("gain@4x", 256)):
        assert tuple(columns[f"{name}{end}"] for end in ("", "_low", "_high")) == gain(rows[n], bars[n])
    assert columns["cost@L"] == 0 and columns["minutes"] == pytest.approx(sum(r.seconds for r in rows.values()) / 60)
    assert columns["n_parameters"] == run.about.config["n_parameters"]

    assert isinstance(points[256]["eval/figure"], wandb.Image)


def test_an_answer_has_accuracy_and_the_effective_context(in_trained, logged):
    run_eval("run=x", "task=recall", "ctx=256", "documents=4")
    values, columns = history(logged[0]), logged[0].summary
    assert 0 <= values[256]["eval/accuracy_low"] <= values[256]["eval/accuracy"] <= 1
    assert columns["effective_context"] in (0, *values)


@pytest.mark.parametrize(
    "losses, longest",
    [
        ((2, 2, 2, 2, 2), 512),
        ((2, 2, 1, 1, 1), 512),
        ((2, 2, 1, 3, 1), 128),
        ((2, 2, 3, 1, 1), 64),
        ((2,), 32),
        ((3, 3, 1, 1, 1), 512),  # what is lost within L is another column
    ],
)
def test_the_longest_length_that_is_not_worse(losses, longest):
    """Losses at 32, 64 = L, 128, ...; those of the control are 2."""
    ns = (32, 64, 128, 256, 512)
    bars = curve_of("x", "pi", dict.fromkeys(ns, 2.0)).by_length()
    assert longest_not_worse(curve_of("x", "pi", dict(zip(ns, losses, strict=False))), bars) == longest


# ---- problems with wandb ----


@pytest.mark.parametrize("broken", ["login", "init", "log", "finish"])
def test_training_and_evaluation_never_die_of_wandb(broken, here, logged, monkeypatch, capsys):
    """One line says so, and what follows is logged offline: all of it if no run could be opened."""
    error, init = wandb.errors.CommError("no route to host"), wandb.init

    def broken_login(**_: Any) -> bool:
        if broken == "login":
            raise error
        return True

    def broken_init(**about: Any) -> Mock:
        if broken == "init" and about["mode"] == "online":
            raise error
        run = init(**about)
        run.offline = about["mode"] == "offline"
        run.attach_mock(Mock(side_effect=error), broken)
        return run

    monkeypatch.setattr(wandb, "login", broken_login)
    monkeypatch.setattr(wandb, "init", broken_init)
    monkeypatch.delenv("WANDB_MODE")
    run_train("steps=2", "name=x")
    run_eval("run=x", "ctx=128", "documents=4")
    out = capsys.readouterr().out
    assert checkpoint.load(Path("runs/x"))["step"] == 2 and list(Path("runs/x/eval").glob("none-*.jsonl"))
    modes = [run.about.mode for run in logged]
    opened = broken in ("log", "finish")
    assert modes == ["online" if opened else "offline", "offline", "offline"]
    assert out.count("CommError: no route to host; to upload the rest: wandb sync") == opened
    assert out.count("offline (CommError: no route to host); to upload: wandb sync") == 1


def test_exceptions_of_the_body_pass_and_mark_the_run_as_failed(logged):
    with pytest.raises(KeyError), wandb_log.Log(job_type="train", id="i", config={}):
        raise KeyError
    logged[0].finish.assert_called_once_with(exit_code=1)


@pytest.mark.parametrize("env", [{"WANDB_MODE": "disabled"}, {"RANK": "1", "WORLD_SIZE": "2"}])
def test_nothing_is_opened_where_nothing_is_logged(env, logged, monkeypatch, capsys):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with wandb_log.Log(job_type="train", id="i", config={}) as log:
        log(lambda wandb, run: 1 / 0)
    assert not logged and capsys.readouterr().out == ""


@pytest.mark.slow
def test_offline_runs_can_be_read_back_and_uploaded_with_the_printed_command(here):
    """No account, no terminal, no network: training and evaluation each leave a run that wandb itself reads."""
    env = {"WANDB_MODE": "offline", "NETRC": "/nonexistent", "WANDB_API_KEY": ""}
    out = ""
    for args in (("train.py", "exp=smoke", "name=x"), ("eval.py", "run=x", "ctx=128", "scaling=pi", "documents=4")):
        done = command(*args, cwd=here, **env)
        assert done.returncode == 0, done.stderr
        out += done.stdout

    def run_wandb(*args: str) -> str:
        env = {**os.environ, "WANDB_SILENT": "false"}
        done = subprocess.run([sys.executable, "-m", "wandb", *args], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert "run-pi-x" in run_wandb(*out.partition("to upload: wandb ")[2].splitlines()[0].split(), "--dry-run")
    read = {}
    for folder in Path("wandb").glob("offline-run-*"):
        records = [
            json.loads(x) for x in run_wandb("leet", "inspect", str(folder), "--json").splitlines() if x[:1] == "{"
        ]
        run = next(r["run"] for r in records if r["type"] == "run")
        read[" ".join(run["display_name"].split()[:2])] = [r["history"]["item"] for r in records if "history" in r]
    assert set(read) == {"x", "none x", "window x", "pi x"}
    assert any("train/val_bits_per_byte" in row for row in read["x"])
    assert [row["_step"] for row in read["pi x"]] == [64, 128] and all("eval/gain_low" in row for row in read["pi x"])
