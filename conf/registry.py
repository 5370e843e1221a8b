"""Encodings, scaling methods and corpora by name: conf/GROUP/NAME.yaml says `kind: FILE`, and FILE.py is the code.

The knobs of each are typed by its own function's signature: see `call`.
"""

import importlib
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent


def choices(group: str) -> list[str]:
    """The names that GROUP=... takes: the files of conf/GROUP."""
    return sorted(p.stem for p in (ROOT / "conf" / group).glob("*.yaml"))


def usual(group: str, name: str) -> dict:
    """The settings that conf/GROUP/NAME.yaml gives."""
    return typing.cast(dict, OmegaConf.to_object(OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml")))


def load(package: str, kind: Any, attribute: str) -> Any:
    """The attribute that PACKAGE/KIND.py must define: a file name is the whole registry."""
    group = package.rpartition(".")[2]
    if isinstance(kind, str) and kind.isidentifier():
        name = f"{package}.{kind}"
        try:
            return getattr(importlib.import_module(name), attribute)
        except ModuleNotFoundError as e:
            if e.name != name:
                raise
        except AttributeError:
            pass
    raise ValueError(f"{group}.kind={kind}: no {package.replace('.', '/')}/{kind}.py that defines `{attribute}`")


def call(function: Callable, knobs: dict[str, Any], group: str, *args: Any) -> Any:
    """function(*args, **knobs without `kind`), each knob checked against the parameter's type."""
    signature = inspect.signature(function)
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    own = list(signature.parameters)[len(args) :]
    given = {k: v for k, v in knobs.items() if k != "kind"}
    for key, value in given.items():
        if key not in own:
            raise ValueError(
                f"{group}.{key}={value}: no such setting of {group}={knobs.get('kind')}, "
                f"which has {', '.join(own) or 'none'}"
            )
        if not _is(value, hints.get(key, Any)):
            expected = str(getattr(hints[key], "__name__", hints[key]))
            raise ValueError(f"{group}.{key}={value}: must be of type {expected}")
    for key in own:
        if key not in given and signature.parameters[key].default is inspect.Parameter.empty:
            raise ValueError(f"{group}.{key}: must be given a value")
    return function(*args, **given)


def _is(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if isinstance(hint, types.UnionType):
        return any(_is(value, h) for h in hint.__args__)
    if hint is float:  # 10000 is a fine float, True is not
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, typing.get_origin(hint) or hint)
