"""What a user sees around the work itself: help, suggestions, the progress bar, the lines at start and end."""

import math
import re
import sys

import pytest

import train
from conf.command_line import answer_early
from conf.compose import eval_settings
from conf.help import explain, help_text
from conf.hydra_patches import exp_selects_runs, exp_sets_evaluation
from conf.registry import choices
from engine import finetune, progress
from engine.newest_run import newest_run
from tests.helpers import ROOT, command, run_eval, run_train, train_settings

# ---- help and names that do not exist ----


@pytest.mark.parametrize("config", ["train", "eval", "sample"])
def test_help_has_every_setting_with_its_comment_and_the_choices_of_groups(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--help"])
    text = help_text(config)
    yaml = (ROOT / "conf" / f"{config}.yaml").read_text()
    body = yaml.split("\n\n", 1)[1].split("hydra:")[0]
    assert all(line in text for line in body.splitlines())
    assert all(name in text for name in choices("scaling")) and "[none]" in text
    assert max(map(len, text.splitlines())) <= 132


def test_help_shows_the_settings_of_the_chosen_group_and_those_that_only_the_schema_has(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "pos=t5_bias", "--help"])
    text = help_text("train")
    assert "[t5_bias]" in text and "pos.buckets: 32" in text and "pos.base" not in text
    assert "model.mlp: gelu # gelu, gelu_exact, relu2, swiglu, geglu; gelu: tanh approximation" in text
    assert "model.n_layers: 4" in text and "optim.lr: 2e-3 # the peak" in text


@pytest.mark.parametrize(
    "config, argument, right",
    [
        ("train", "lr=3e-4", "lr: no such setting of train.py: did you mean optim.lr?"),
        ("train", "stepz=3", "stepz: no such setting of train.py: did you mean steps?"),
        ("train", "optim.lrr=3", "optim.lrr: no such setting of train.py: did you mean optim.lr?"),
        ("train", "pos=ropee", "pos=ropee: must be one of alibi, .*; did you mean rope\\?"),
        ("train", "pos=alibi,ropee", "pos=alibi,ropee: must be one of alibi, .*; did you mean rope\\?"),
        ("eval", "pos=alibi", "pos: no such setting of eval.py: it belongs to the training"),
        ("eval", "batch_tokens=1", "batch_tokens: no such setting of eval.py: it belongs to the training"),
        ("eval", "scaling=yarm", "did you mean yarn?"),
        ("sample", "promt=x", "promt: no such setting of sample.py: did you mean prompt?"),
    ],
)
def test_a_name_that_does_not_exist_is_answered_with_the_most_similar_one(config, argument, right, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{config}.py", argument])
    with pytest.raises(SystemExit) as stop:
        answer_early(config)
    message = str(stop.value.code)
    assert message.startswith("error: ") and (right in message or re.search(right, message))
    assert "\n" not in message and "+" not in message  # Hydra's advice is to append the wrong name


@pytest.mark.parametrize(
    "config, arguments",
    [
        ("train", ["pos=rope", "pos.base=500", "optim.lr=1e-3", "model.mlp=swiglu", "data.vocab_size=512"]),
        ("train", ["-m", "pos=none,rope", "seed=range(3)", "optim.lr=choice(1e-3,2e-3)", "hydra/launcher=joblib"]),
        ("train", ["scaling=yarn,pi", "scaling.factor=2", "-m"]),  # which knobs there are depends on the job
        ("train", ["exp=gpt2", "data.documents=3"]),  # the exp chooses the corpus
        ("eval", ["scaling=ntk", "++scaling.factor=fixed", "task=recall", "task.queries=2", "ctx=[64,128]"]),
        ("eval", ["exp=quick", "run=hf:a=b", "~plus"]),
        ("sample", ["prompt=x\nfoo=1", "run=rope"]),
    ],
)
def test_what_hydra_accepts_is_left_to_hydra(config, arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{config}.py", *arguments])
    answer_early(config)


def test_a_typo_and_help_are_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    for script, argument, right in (
        ("train", "pos=ropee", "error: pos=ropee"), ("train", "optim.lrr=1", "error: optim.lrr"),
        ("eval", "scaling=yarm", "error: scaling=yarm"), ("eval", "--help", ""), ("sample", "--help", ""),
    ):  # fmt: skip
        done = command(f"{script}.py", argument, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert done.stderr.startswith(right) and "torch was imported" not in done.stderr
        assert bool(right) or f"usage: python {script}.py" in done.stdout
    assert "torch was imported" in command("train.py", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}").stderr


@pytest.mark.parametrize("script", ["export.py", "-m=bench.rope", "-m=bench.step", "compare.py", "-m=studies.matrix"])
def test_every_command_has_a_help(script, tmp_path):
    done = command(script, "--help", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) > 2


def test_explain_in_a_notebook_takes_the_settings_of_training(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py"])
    assert explain("ipykernel_launcher", "stepz").startswith("stepz: no such setting of train.py: did you mean steps?")


# ---- exp=quick ----


def test_exp_quick_trains_a_small_model_and_sets_the_lengths_of_its_evaluation():
    quick = train_settings("exp=quick")
    assert (quick.ctx, quick.name) == (64, "rope-quick")
    assert (
        exp_sets_evaluation("exp=quick") == "eval_exp=quick" and exp_selects_runs("exp=quick") == "trained_with=quick"
    )
    cfg = eval_settings("eval_exp=quick", "scaling=yarn")
    assert (cfg.ctx, cfg.trained_with) == (1024, "quick")
    assert eval_settings("eval_exp=quick", "ctx=256").ctx == 256
    assert exp_sets_evaluation("exp=smoke") == "trained_with=smoke"  # no settings for its evaluation


# ---- the bar ----


def test_the_bar_in_a_log_file_is_a_line_each_time(capsys, monkeypatch):
    with progress.progress_bar(10, "step {n_fmt} of {total_fmt}") as bar:
        monkeypatch.setattr(bar, "mininterval", 0)
        for _ in range(2):
            bar.set_postfix_str("loss 3.123", refresh=False)
            bar.update(5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0% step 0 of 10" and lines[-1] == "100% step 10 of 10, loss 3.123"
    assert not any("\r" in line or "|" in line for line in lines)


def test_the_bar_of_a_training_has_loss_one_speed_and_the_time_left_at_this_speed():
    text = train.describe_point({"loss": 3.1234, "tokens_per_s": 2000.0}, tokens_left=240_000)
    assert text == "loss 3.123, 2,000 tokens/s, 0:02:00 left"
    assert "MFU 41.0%" in train.describe_point({"loss": 1.0, "tokens_per_s": 1.0, "mfu": 0.41}, 1)


# ---- the lines at the start and the end ----


def test_the_next_line_can_be_pasted(here, capsys):
    run_train("steps=1", "name=a", "runs=else where", "save_every=1")
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("next: ")]
    assert line == "next: python eval.py run=a ctx=1024 scaling=yarn 'runs=else where'"
    longer = ("init=a", "ctx=256", "runs=else where", "steps=1", "name=b", "val_windows=2")
    run_train(*longer)
    assert "next: python eval.py run=b ctx=8192 scaling=none 'runs=else where'" in capsys.readouterr().out


def test_an_untrained_model_gets_no_verdict_and_is_the_last_choice(here, capsys):
    run_train("steps=1", "name=smoke")
    capsys.readouterr()
    run_eval("run=smoke", "ctx=128", "scaling=ntk", "documents=3")
    out = capsys.readouterr().out
    assert re.search(r"no verdict: the lowest loss is 6\.2\d nats/token, and that of a random guess 6\.24", out)
    assert "better than" not in out and "no different from" not in out
    assert "note: other targets than those of the training's validation" in out
    assert math.log(512) == pytest.approx(6.24, abs=0.01)
    run_train("steps=1", "name=mine")
    config = here / "runs/mine/config.json"
    config.write_text(config.read_text().replace('"exp": "smoke"', '"exp": ""'))
    run_train("steps=1", "name=newest")
    assert newest_run("runs", 64, (), None)[0] == "mine"
    assert newest_run("runs", 64, (), exp="smoke")[0] == "newest"


@pytest.mark.parametrize("steps, right", [(10, "100 %"), (200, "2,000 %"), (1, "10 %"), (0.0123, "0.12 %")])
def test_shares_are_written_without_exponents(steps, right):
    cfg = train_settings("exp=smoke")
    cfg.steps, cfg.batch_tokens, cfg.pretrained = steps * 1000, 1, {"tokens": 10_000}
    assert f", {right} of the pre-training's 10,000" in finetune.describe_cost(cfg)
