"""The text of --help, made from the yaml files and their comments, and suggestions for names that do not exist."""

import ast
import difflib
import re
import sys

from conf.command_line import groups_of_parent
from conf.registry import ROOT, choices, yaml_values

SCRIPTS = {"train": "train.py", "eval": "eval.py", "sample": "sample.py"}


def help_text(config: str) -> str:
    """All settings of a command with their defaults and the comments of the yaml files, and the choices of groups."""
    script = SCRIPTS[config]
    summary = (ast.get_docstring(ast.parse((ROOT / script).read_text())) or "").splitlines()[0]
    text = (ROOT / "conf" / f"{config}.yaml").read_text()
    lines = [summary, "", f"usage: python {script} SETTING=VALUE ...", "", "Groups, GROUP=NAME:"]
    for group, name in chosen(config).items():
        comment = re.search(rf"^  - {group}: \S+(?: # (?:conf/\w+: )?(.*))?", text, flags=re.M)
        names = ", ".join(f"[{x}]" if x == name else x for x in choices(group))
        lines += wrap(f"  {group:<12} ", f"{names}   # {comment[1]}" if comment and comment[1] else names)
    lines += ["", "Settings and their defaults:"]
    body = text.split("\n\n", 1)[1].split("hydra:")[0]
    lines += [f"  {line}" for line in body.splitlines() if line.strip()]
    lines += ["", "Settings of the groups, as GROUP.SETTING=VALUE; those of other choices are in conf/GROUP/NAME.yaml:"]
    for group, name in chosen(config).items():
        text = (ROOT / "conf" / group / f"{name}.yaml").read_text() if name and "exp" not in group else ""
        own = [line for line in text.splitlines() if re.match(r"[a-z]\w*:", line) and not line.startswith("kind:")]
        schema = typed_settings(group) if name else {}
        own += [line for key, line in schema.items() if not any(x.startswith(f"{key}:") for x in own)]
        lines += [f"  {group}.{line}" for line in own]
    lines += ["", "Several values with commas and -m are a sweep: python " + script + " -m seed=0,1,2"]
    return "\n".join(lines)


def wrap(first: str, text: str, width: int = 118) -> list[str]:
    """text after `first`, in lines of this width whose continuation is indented."""
    lines, rest = [], text
    while len(first) + len(rest) > width and " " in rest[: width - len(first)]:
        at = rest.rindex(" ", 0, width - len(first))
        lines.append(first + rest[:at])
        first, rest = " " * len(first), rest[at + 1 :]
    return [*lines, first + rest]


def chosen(config: str) -> dict[str, str | None]:
    """Group -> its choice on the command line, else the default; None for no choice."""
    entries = [entry for entry in yaml_values("", config)["defaults"] if isinstance(entry, dict)]
    groups = {group: name for e in entries for group, name in e.items() if not group.startswith("override")}
    given = (argument.lstrip("+").partition("=") for argument in sys.argv[1:])
    return groups | {group: name for group, _, name in given if group in groups and name in choices(group)}


def wrong_setting(config: str) -> str | None:
    """One line about the first argument whose setting or choice does not exist. What Hydra must parse is left to it."""
    groups, names = chosen(config), setting_names(config)
    known = {name.partition(".")[0] for name in names} | {"exp", "eval_exp", "hydra"}
    matches = (re.fullmatch(r"([+~]*)(\w+)([\w./]*)=(.*)", argument, flags=re.S) for argument in sys.argv[1:])
    given = [match.groups() for match in matches if match]
    # A group of several choices, or one that exp= or the run of init= may choose, has settings that are not known here
    unknown = {name for _, name, rest, value in given if name == "exp" or (not rest and value not in choices(name))}
    if config == "train":
        unknown |= groups_of_parent()
    for sign, name, rest, value in given:
        wrong = name not in known
        if name in groups and not rest and value.startswith("["):
            return f"{name}={value}: must be one name, not a list"  # Hydra would merge their files silently
        if name in groups and not rest and re.fullmatch(r"[\w,]+", value):
            wrong = not {*value.split(",")} <= {*choices(name), "null"}
        elif name in groups and rest and not sign and not {name, "exp"} & unknown:
            wrong = name + rest not in names
        if wrong:
            return explain(config, name + rest, value)
    return None


def explain(config: str, name: str, value: str = "") -> str:
    """One line about a setting or a choice of a group that does not exist, with the most similar names.

    name: of the setting, such as `lr`, or of the group, such as `pos`, if its choice `value` does not exist.
    """
    config = config if config in SCRIPTS else "train"  # in a test or a notebook
    groups = chosen(config)
    if name in groups:
        wrong = next((v for v in value.split(",") if v not in choices(name)), value)
        similar = difflib.get_close_matches(wrong, choices(name), n=1)
        did_you_mean = f"; did you mean {similar[0]}?" if similar else ""
        return f"{name}={value}: must be one of {', '.join(choices(name))}{did_you_mean}"
    script = SCRIPTS[config]
    if (group := name.split(".")[0]) not in groups and group in chosen("train") | yaml_values("", "train"):
        return f"{name}: no such setting of {script}: it belongs to the training, and a trained run keeps its own"
    names = setting_names(config)
    leaf = name.rpartition(".")[2]
    similar = [n for n in names if n.rpartition(".")[2] == leaf]
    similar = similar or difflib.get_close_matches(name, names, n=1)
    similar = similar or [n for n in names if difflib.get_close_matches(leaf, [n.rpartition(".")[2]])][:2]
    did_you_mean = f": did you mean {' or '.join(similar)}?" if similar else ";"
    return f"{name}: no such setting of {script}{did_you_mean} python {script} --help lists all"


def setting_names(config: str) -> list[str]:
    """The names of all settings of a command, those of the default choices of its groups included."""
    names = [name for name in yaml_values("", config) if name not in ("defaults", "hydra")]
    for group, choice in chosen(config).items():
        values = yaml_values(group, choice) if choice else {}
        nested = [f"{key}.{inner}" for key, value in values.items() if isinstance(value, dict) for inner in value]
        keys = dict.fromkeys([*values, *nested, *typed_settings(group)])
        names += [group, *(f"{group}.{key}" for key in keys)]
    return names


def typed_settings(group: str) -> dict[str, str]:
    """Name -> `name: default # choices and comment` of the settings that conf/schema.py has for model and optim."""
    source = (ROOT / "conf" / "schema.py").read_text()
    body = re.search(rf"class {group.capitalize()}Config:(.*?)\n\n(?:    @|\n)", source, flags=re.S)
    lines: dict[str, str] = {}
    for name, hint, default, comment in re.findall(
        r"^    (\w+): (.*?) = (.*?)(?:  # (.*))?$", body[1] if body else "", flags=re.M
    ):
        names = re.search(r"one_of\((.*?)\)", hint)
        notes = [names[1].replace('"', "") if names else "", comment.replace("None", "null")]
        value = {"None": "null", "True": "true", "False": "false"}.get(default, default.strip('"'))
        lines[name] = f"{name}: {value}" + (f" # {'; '.join(filter(None, notes))}" if any(notes) else "")
    return lines
