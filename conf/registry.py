"""Encodings, scaling methods, corpora and tasks by name: conf/GROUP/NAME.yaml has `kind: FILE`; FILE.py is the code.

The other keys of the yaml are knobs: the parameters of the function or class that FILE.py defines, checked against its
type hints (`build_from_knobs`). So a new entry is one .py and one .yaml, and no list of names has to be edited.
"""

import functools
import importlib.util
import inspect
import math
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from conf.errors import UserError, check

ROOT = Path(__file__).parent.parent


# ---- names: the yaml files of a group ----


def choices(group: str) -> list[str]:
    """The names that GROUP=NAME accepts on the command line, sorted: the yaml files of conf/GROUP without suffix."""
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


def yaml_values(group: str, name: str) -> dict:
    """The settings in conf/GROUP/NAME.yaml, with interpolations such as ${ctx} left as they are."""
    file = OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml")
    return typing.cast(dict, OmegaConf.to_container(file))


@functools.cache
def _group(group: str) -> dict[str, dict]:
    """Name -> settings of every yaml of conf/GROUP. Cached for the process, so callers must not modify the result."""
    return {name: yaml_values(group, name) for name in choices(group)}


def yaml_name(group: str, knobs: dict[str, Any]) -> str:
    """The name of the yaml with the fewest differences from knobs, among those of their kind (rope, rope_partial).

    A knob that only one of both has is a difference. That is the name the user typed, unless other settings made it
    equal to another yaml of the same kind. Of several the one with the name of the kind, else the one with most knobs:
    rope_proportional before rope_partial.
    """
    order = {
        name: (len(_differences(knobs, values)) + len(values.keys() - knobs), name != knobs["kind"], -len(values))
        for name, values in _group(group).items()
        if values["kind"] == knobs["kind"]
    }
    return min(order, key=lambda name: order[name], default=knobs["kind"])


def describe(group: str, knobs: dict[str, Any]) -> str:
    """The yaml's name and every knob that differs from it: `yarn beta_fast=4.0`."""
    name = yaml_name(group, knobs)
    differences = _differences(knobs, _group(group).get(name, knobs))
    return " ".join([name, *(f"{key}={value}" for key, value in differences.items())])


def _differences(knobs: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The knobs that differ from a yaml's values; interpolated values fit any knob."""
    return {k: v for k, v in knobs.items() if values.get(k) != v and not str(values.get(k)).startswith("${")}


# ---- code: the file that `kind` names ----


def load_kind(package: str, kind: Any, attribute: str, group: str) -> Any:
    """The attribute of this name (`scale`, `build`, `documents` ...) in the module PACKAGE.KIND.

    group: the config group that a message names. UserError if the module does not exist or has no such attribute; an
    ImportError inside the module is a bug and is raised as it is.
    """
    name = f"{package}.{kind}"
    if str(kind).isidentifier() and importlib.util.find_spec(name):
        module = importlib.import_module(name)
        if hasattr(module, attribute):
            return getattr(module, attribute)
    raise UserError(f"{group}.kind={kind}: no {package.replace('.', '/')}/{kind}.py that defines `{attribute}`")


def build_from_knobs(function: Callable, knobs: dict[str, Any], group: str, *args: Any) -> Any:
    """function(*args, **knobs) without the key `kind`. UserError if a knob is unknown, missing or of a wrong type.

    build_from_knobs(scale, {"kind": "pi", "factor": 2.0}, "scaling", trained, n) is scale(trained, n, factor=2.0).
    """
    check_type(group, knobs, dict)
    values, signature = {k: v for k, v in knobs.items() if k != "kind"}, inspect.signature(function)
    try:
        signature.bind(*args, **values)
    except TypeError as e:
        names = ", ".join(list(signature.parameters)[len(args) :]) or "none"
        raise UserError(f"{group or 'settings'}: {e}; there are {names}") from None
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    for key, value in values.items():
        check_type(f"{group}.{key}".lstrip("."), value, hints.get(key, Any))
    return function(*args, **values)


def check_type(setting: str, value: Any, hint: Any) -> None:
    """UserError unless a value from YAML or JSON fits a type hint."""
    name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    limit = ", and finite" if "float" in name else ", and below 2^63" if "int" in name else ""
    check(has_type(value, hint), setting, value, f"of type {name}{limit}")


def has_type(value: Any, hint: Any) -> bool:
    """Whether a value from YAML or JSON fits a type hint. A float must be finite; so must those in lists."""
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(has_type(value, h) for h in hint.__args__)
    if hint is float:  # YAML reads 10000 as an int, which is a valid float here; bool is a subclass of int and is not
        return has_type(value, int) or (isinstance(value, float) and math.isfinite(value))
    if origin := typing.get_origin(hint):  # list[int], tuple[int, ...], dict[str, float]
        of_item = [h for h in typing.get_args(hint) if h is not ...][-1]
        items = value.values() if isinstance(value, dict) else value
        return isinstance(value, origin) and all(has_type(item, of_item) for item in items)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, hint)
