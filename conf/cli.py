"""The command lines: Hydra's own for the commands with settings, and user errors in one line for all commands."""

import functools
import hashlib
import io
import json
import os
import re
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from conf.errors import UserError, report, user_errors
from conf.registry import ROOT, choices
from conf.schema import RUN_CONTROL, SCHEMAS, TrainConfig, from_hydra

warnings.filterwarnings("ignore", "The version_base parameter is deprecated")  # by hydra-core 1.4; 1.3 needs it

# ---- main functions ----


def command(config: str, main: Callable[[Any], None]) -> Callable[[], None]:
    """The main function of CONFIG.py from a function of checked settings, as hydra.main makes it.

    config: train, eval, recommend or sample. A UserError becomes one line, and the exit code is 1; in a sweep (-m) the
    jobs after it still run. Other exceptions are left to Hydra.
    """
    failed: list[str] = []  # messages: an exception would keep the tensors of its job
    process = os.getpid()

    @hydra.main(version_base="1.3", config_path=str(folder(config)), config_name=config)
    def job(cfg: DictConfig) -> None:
        parallel = os.getpid() != process  # hydra/launcher=joblib, which counts the jobs that raise
        try:
            settings = checked(config, cfg)
            name = settings.name if config == "train" else f"{settings.run} {settings.scaling['kind']}"
            out, err = (Prefixed(file, name) if parallel else file for file in (sys.stdout, sys.stderr))
            with redirect_stdout(out), redirect_stderr(err):
                main(settings)
        except UserError as e:
            if parallel:
                raise
            sweep = f"{' '.join(overrides())}: " if HydraConfig.get().mode == RunMode.MULTIRUN else ""
            failed.append(f"{sweep}{e}")
            report(failed[-1])

    @user_errors
    @functools.wraps(main)
    def run() -> None:
        failed.clear()
        check_command_line(config, sys.argv[1:])
        job()
        if failed:
            sys.exit(1)

    return run


def check_command_line(config: str, words: list[str]) -> None:
    """UserError for frequent mistakes that Hydra answers with its usage or in several lines."""
    sweep, names = {"-m", "--multirun"} & {*words}, {f.name for f in fields(SCHEMAS[config])}
    for word in words:
        key, _, value = word.partition("=")
        if key.startswith("--") and key[2:].partition(".")[0] in names:
            raise UserError(f"{key}: settings have no dashes: {key[2:]}=VALUE")
        if not sweep and re.match(r"[^\[({'\"-][^\[({'\"]*,", word):
            raise UserError(f"{word}: several values are a sweep: python {config}.py -m {word}")
        plugin = f"hydra_plugins/hydra_{value.partition('_')[0]}_launcher"
        if key == "hydra/launcher" and value != "basic" and not any(Path(p, plugin).is_dir() for p in sys.path):
            raise UserError(f"{word}: is not installed: pip install -e '.[sweep]'")


class Prefixed(io.TextIOBase):
    """A text file to which complete lines are written, with the name of a job: parallel ones share a terminal."""

    def __init__(self, file: typing.TextIO, name: str):
        self.file, self.name, self.rest = file, name, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        self.file.write("".join(f"{self.name}: {line}\n" for line in lines))
        self.file.flush()
        return len(text)


# ---- settings ----


def folder(config: str) -> Path:
    """The folder of CONFIG.yaml; that of train.yaml has the experiments, too."""
    return ROOT / "conf" / ("train" if config == "train" else "")


def checked(config: str, cfg: DictConfig) -> Any:
    """The checked settings of CONFIG.py from Hydra's configuration, with a name for the run of a training."""
    settings = from_hydra(cfg, SCHEMAS[config])
    if config == "train":
        settings.name = settings.name or default_name(settings)
        settings.typed = OmegaConf.to_container(HydraConfig.get().overrides.task)
    return settings


def compose(config: str, *overrides: str) -> DictConfig:
    """The unchecked configuration that `python CONFIG.py OVERRIDES` would run with.

    For tests, benchmarks and notebooks. Replaces Hydra's global state, so it must not be called inside a Hydra main
    function.
    """
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(folder(config)), version_base="1.3"):
        cfg = hydra.compose(config, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def train_settings(*overrides: str) -> TrainConfig:
    """The checked settings of `python train.py OVERRIDES`."""
    return checked("train", compose("train", *overrides))


def overrides() -> list[str]:
    """The settings on the command line, without the signs + and ~, and with ${...} as it was typed."""
    return [o.lstrip("+~") for o in typing.cast(list, OmegaConf.to_container(HydraConfig.get().overrides.task))]


# ---- the name of a run ----


def default_name(c: TrainConfig) -> str:
    """The run's name from the command line: `rope`, `alibi-seed1`, `rope-tiny-lr0.001`.

    First the encoding (or the parent run), then the chosen groups and the other settings, each sorted by key, so that
    the order of the arguments does not matter.
    """
    groups, settings = [], []
    for override in sorted(overrides()):
        key, _, value = override.partition("=")
        if key in ("model", "data", "optim", "exp", "scaling", "attention", "positions", "layers"):
            groups.append(value)
        elif key == "pos" and c.init:  # the parent's name comes first
            groups.append(f"to-{value}")
        elif key not in ("pos", "init", *RUN_CONTROL):
            # Two types of layers have settings of one name: layers.L.base
            settings.append((key[7:] if key.startswith("layers.") else key.rpartition(".")[2]) + value)
    name = "-".join([c.init or HydraConfig.get().runtime.choices["pos"], *groups, *settings])
    return short(re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_"))


def short(name: str) -> str:
    """A name for a file: at most 120 characters, the last 9 of them a hash of all if it was cut."""
    return name if len(name) <= 120 else f"{name[:111]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


# ---- help ----


def help_text(config: str, *, _root_: DictConfig) -> str:
    """The text of --help: the groups with their choices, and every setting with its value, meaning and range.

    _root_: Hydra's composed configuration, of which the help template is a part (`hydra.help.template`).
    """
    cfg: Any = OmegaConf.to_container(_root_)
    text, chosen = cfg["hydra"]["help"], cfg["hydra"]["runtime"]["choices"]
    groups, settings, knobs = [], [], []
    for f in (f for f in fields(SCHEMAS[config]) if f.metadata):
        name = chosen.get(f.name)
        if f.name not in chosen:
            settings.append(described(f, cfg[f.name]))
            continue
        names = [f"[{x}]" if x == name else x for x in choices("train/exp" if f.name == "exp" else f.name)]
        groups.append(f"  {f.name:<8} {', '.join(names)}   # {f.metadata['help']}")
        if is_dataclass(f.type):
            knobs += [described(g, cfg[f.name][g.name], f"{f.name}.") for g in fields(f.type)]
        elif name and f.name != "exp":
            yaml = (ROOT / "conf" / f.name / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            knobs += [f"  {f.name}.{line}" for line in yaml if re.match(r"(?!kind)\w+:", line)]
    lines = [text["header"], "", f"usage: python {config}.py SETTING=VALUE ...", "", "Groups, GROUP=NAME:", *groups]
    lines += ["", "Settings and their values:", *settings]
    if knobs:
        lines += ["", "Settings of the chosen names; conf/GROUP/NAME.yaml has those of others", *knobs]
    lines += ["", text["footer"]]
    wrap = textwrap.TextWrapper(118, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrap.fill, lines)).replace("$", "$$")  # Hydra reads it as a string.Template


def described(f: Field, value: Any, prefix: str = "") -> str:
    """For --help: `SETTING: VALUE # MEANING (RANGE)`."""
    text = value if isinstance(value, str) and value else json.dumps(value)
    rule = f.metadata["rule"]
    return f"  {prefix}{f.name}: {text} # {f.metadata['help']}" + (f" ({rule.text})" if rule else "")


OmegaConf.register_new_resolver("settings_of", help_text)
