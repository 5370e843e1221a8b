"""Any settings, legal or not: a command runs, or ends with exit code 1 and a message. Never a traceback, never NaN.

SETTINGS_EXAMPLES=1000 tries more, and others each time.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings, strategies as st

import eval as evaluation
import recommend
import sample
import train
from conf.registry import choices, yaml_values
from conf.schema import EvalConfig, ModelConfig, OptimConfig, RecommendConfig, SampleConfig, TrainConfig
from engine import checkpoint
from measure.curves import read_curve
from tests.helpers import run_command

# command -> its main function, its settings, the groups to choose from, and what makes it short
SMALL = ["exp=smoke", "ctx=16", "batch_tokens=16", "steps=2", "val_windows=1", "model.width=16", "name=new"]
SHORT = ["run=x", "ctx=64", "documents=2", "task.scored_tokens=8", "task.windows=1", "fresh=true"]
COMMANDS = {
    "train": (train.main, TrainConfig, ("pos", "scaling", "layers", "model", "optim"), SMALL),
    "eval": (evaluation.main, EvalConfig, ("scaling", "task"), SHORT),
    "recommend": (recommend.main, RecommendConfig, ("scaling",), ["run=x", "ctx=64", "documents=2", "minutes=0.001"]),
    "sample": (sample.main, SampleConfig, ("scaling",), ["run=x", "tokens=2"]),
}
NOT_FINITE = ["nan", ".nan", "inf", "-inf", "1e999"]
WRITTEN = "0 1 2 7 -1 0.5 -3.5 1e-300 1e300 '' null true [] [1] [a,b] {} {a:1} abc none rope auto ../x ü ${x} ${ctx}"
VALUES = [*NOT_FINITE, "[1,nan]", "{a:inf}", "1" + "0" * 30, "1" + "0" * 400, "", "'a b'", "a" * 300, *WRITTEN.split()]
VALUES += ["x=y", "%s", "\\", "???", "*"]
ELSEWHERE = ("runs", "cache", "name", "device")  # where they are what others would not find, or not here
TEXTS = ("prompt", "project", "run", "init", "exp")  # of which nan is a fine one


def own_keys(schema: Any, prefix: str = "") -> dict[str, object]:
    """{key: default} of a dataclass; MISSING where it has none."""
    return {prefix + f.name: f.default for f in fields(schema) if f.name not in ELSEWHERE}


def keys(command: str) -> list[str]:
    """All settings of a command, with those of its groups."""
    _, schema, groups, _ = COMMANDS[command]
    of_groups = [f"{group}.{key}" for group in groups for name in choices(group) for key in yaml_values(group, name)]
    parts = {**own_keys(ModelConfig, "model."), **own_keys(OptimConfig, "optim.")} if command == "train" else {}
    return sorted({*own_keys(schema), *parts, *of_groups})


@st.composite
def usual(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A command with one choice of a group, and up to two settings of it or of the command with a likely value."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    _, schema, groups, short = COMMANDS[command]
    group = draw(st.sampled_from([g for g in groups if g not in ("model", "layers")]))
    name = draw(st.sampled_from(choices(group)))
    likely = {f"{group}.{key}": value for key, value in yaml_values(group, name).items() if key != "kind"}
    likely |= {key: value for key, value in own_keys(schema).items() if isinstance(value, bool | int | float)}
    likely = {key: value for key, value in likely.items() if not any(a.startswith(f"{key}=") for a in short)}
    arguments = [f"{group}={name}"]
    for key in draw(st.lists(st.sampled_from(sorted(likely)), unique=True, max_size=2)) if likely else ():
        number = isinstance(value := likely[key], int | float) and not isinstance(value, bool)
        values = [not value] if isinstance(value, bool) else [2 * value, value // 2] if number else ["null"]
        arguments.append(f"{key}={draw(st.sampled_from([value, *values]))}")
    return command, arguments


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A command, choices of some of its groups, and one to three settings: also appended (+) and deleted (~) ones."""
    if draw(st.booleans()):
        return draw(usual())
    command = draw(st.sampled_from(sorted(COMMANDS)))
    groups = draw(st.lists(st.sampled_from(COMMANDS[command][2]), unique=True, max_size=2))
    arguments = [f"{group}={draw(st.sampled_from(choices(group)))}" for group in groups]
    setting = st.tuples(st.sampled_from(["", "", "", "++", "+", "~"]), st.sampled_from(keys(command)))
    for sign, key in draw(st.lists(setting, min_size=1, max_size=3)):
        arguments.append(f"~{key}" if sign == "~" else f"{sign}{key}={draw(st.sampled_from(VALUES))}")
    return command, [a for a in arguments if "compile=true" not in a]  # takes half a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache) -> Iterator[pytest.MonkeyPatch]:
    """The working folder has the run runs/x. Its value changes the command line, until the end of the module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("settings"))
        Path(".cache").symlink_to(cache)
        assert run_command(train.main, [*SMALL, "name=x"], patch)[0] == 0
        yield patch


def refused_by_hydra(err: str) -> bool:
    """Whether this is a message of Hydra or, of a few settings, a traceback that ends there."""
    frames = re.findall(r'^  File "(.*?)"', err, flags=re.M)
    return "HYDRA_FULL_ERROR" in err if not frames else bool(re.search("/(hydra|omegaconf)/", frames[-1]))


@pytest.mark.process
@settings(
    max_examples=int(os.environ.get("SETTINGS_EXAMPLES", 30)),
    derandomize="SETTINGS_EXAMPLES" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(commands())
@example(("train", ["pos=alibi", "layers=swan"]))
@example(("train", ["seed=" + "9" * 20]))  # each of the following was a traceback, or accepted
@example(("train", ["optim.lr=nan"]))
@example(("train", ["~pos"]))
@example(("train", ["~data.holdout"]))
@example(("eval", ["scaling=pi", "scaling.factor=inf"]))
@example(("eval", ["scaling=longrope", "scaling.long=[nan]"]))
@example(("eval", ["+task=[1]"]))
@example(("sample", ["temperature=1e-300"]))
def test_any_settings_run_or_end_with_a_message(folder, command):
    name, arguments = command
    main, _, _, short = COMMANDS[name]
    shutil.rmtree("runs/new", ignore_errors=True)
    shutil.rmtree("runs/x/eval", ignore_errors=True)
    code, _, err = run_command(main, [*short, *arguments], folder)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    event("ran" if code == 0 else "one line of ours" if lines else "Hydra's words")  # --hypothesis-show-statistics
    assert (code, len(lines)) in ((0, 0), (1, 1)) or (code == 1 and refused_by_hydra(err)), err
    numbers = [a for a in arguments if re.search(r"(nan|inf|1e999)\b", a) and not a.lstrip("+").startswith(TEXTS)]
    assert code == 1 or not numbers, "a number that is not finite was accepted"
    if code == 0 and name == "train":
        assert math.isfinite(checkpoint.load(Path("runs/new"))["validation"]["loss"])
    for file in Path("runs/x/eval").glob("*.jsonl"):
        assert all(math.isfinite(row.loss) for row in read_curve(file).rows)
