"""Layer schedules: models whose layers differ in encoding, base or window.

A yaml of conf/layers has a pattern of letters, which is repeated, and what each letter is: a type of layer. `resolve`
makes a LayerSchedule of it, with a letter for each layer and every default filled in. That is what a run saves, so that
later changes of a yaml do not change the run.
"""

import typing
from dataclasses import asdict, dataclass, field
from typing import Any

from omegaconf import OmegaConf

from conf.errors import check
from conf.registry import build_from_knobs, choices, describe as describe_knobs, yaml_name, yaml_values


@dataclass(frozen=True)
class TypeSettings:
    """A type of layer as a yaml has it."""

    pos: str | None = None  # the name of an encoding; None: that of the run's pos=
    base: float | None = None  # in place of the encoding's own
    rotary_fraction: float | None = None  # likewise
    window: float | None = None  # in tokens if it is a whole number, else a fraction of ctx
    sinks: int = 0
    scaled: bool = True


@dataclass(frozen=True)
class LayerType:
    """What the layers of one letter have in common."""

    pos: dict[str, Any] | None = None  # the knobs of the encoding; None: those of the run's pos=
    window: int | None = None  # each query sees this many keys, itself included; None: all
    sinks: int = 0  # the first keys, which every query sees in addition to the window
    scaled: bool = True  # whether read-time scaling applies


@dataclass(frozen=True)
class LayerSchedule:
    """A resolved schedule."""

    pattern: str  # a letter for each layer
    types: dict[str, LayerType]  # of each letter
    name: str = field(default="", compare=False)  # of the yaml, or of the family of a model from elsewhere


def resolve(given: dict[str, Any], n_layers: int, ctx: int, pos: dict[str, Any]) -> LayerSchedule:
    """The schedule of a yaml of conf/layers in a run with these layers, context (tokens) and knobs of pos=."""
    pattern, last = str(given.get("pattern", "")), given.get("last")
    letters = {key: value for key, value in given.items() if key not in ("name", "pattern", "last")}
    ok = bool(pattern) and set(pattern) <= letters.keys()
    check(ok, "layers.pattern", pattern, f"made of the letters of layers=NAME: {', '.join(letters)}")
    check(last is None or last in letters, "layers.last", last, f"null or one of {', '.join(letters)}")
    of_layers = repeat_pattern(pattern, n_layers)
    of_layers = of_layers[:-1] + (last or of_layers[-1])
    types = {letter: resolve_type(letter, letters[letter], ctx, pos) for letter in dict.fromkeys(of_layers)}
    return LayerSchedule(of_layers, types, str(given.get("name")))


def from_saved(plain: dict[str, Any]) -> LayerSchedule:
    """The schedule that a run saved with `asdict`."""
    types = {x: build_from_knobs(LayerType, values, f"layers.{x}") for x, values in plain["types"].items()}
    return LayerSchedule(plain["pattern"], types, plain["name"])


def repeat_pattern(pattern: str, n_layers: int) -> str:
    """One letter for each layer: the pattern is repeated, and its last repetition may be incomplete.

    A model with fewer layers than the pattern takes its beginning, or its end if letters are missing at the beginning:
    four layers of LLLLLG are LLLG.
    """
    if n_layers < len(pattern) and set(pattern[:n_layers]) < set(pattern):
        return pattern[-n_layers:]
    return (pattern * n_layers)[:n_layers]


def resolve_type(letter: str, given: Any, ctx: int, pos: dict[str, Any]) -> LayerType:
    """A type of layer from its settings in a yaml."""
    setting = f"layers.{letter}"
    values = build_from_knobs(TypeSettings, given, setting)
    window = values.window
    ok = window is None or (window >= 1 if isinstance(window, int) else 0 < window <= 1)
    check(ok, f"{setting}.window", window, "null, a number of tokens, or a fraction of ctx above 0.0 and at most 1.0")
    if isinstance(window, float):
        window = max(1, round(window * ctx))
    ok = values.sinks == 0 or (values.sinks > 0 and window is not None)
    check(ok, f"{setting}.sinks", values.sinks, "at least 0, and 0 without a window: every query sees all tokens")
    return LayerType(encoding_knobs(setting, values, ctx, pos), window, values.sinks, values.scaled)


def encoding_knobs(setting: str, values: TypeSettings, ctx: int, pos: dict[str, Any]) -> dict[str, Any] | None:
    """The knobs of a type's encoding; None for those of the run."""
    name, own = values.pos, {"base": values.base, "rotary_fraction": values.rotary_fraction}
    own = {knob: value for knob, value in own.items() if value is not None}
    if name is not None:
        check(name in choices("pos"), f"{setting}.pos", name, f"null or one of {', '.join(choices('pos'))}")
        knobs = OmegaConf.create({"ctx": ctx, "knobs": yaml_values("pos", name)})  # may refer to ${ctx}
        pos = typing.cast(dict[str, Any], OmegaConf.to_container(knobs.knobs, resolve=True))
    for knob, value in own.items():
        check(knob in pos, f"{setting}.{knob}", value, f"null: pos={yaml_name('pos', pos)} has no {knob}")
    check(own.get("base", 1) >= 1, f"{setting}.base", values.base, "at least 1")
    ok = 0 < own.get("rotary_fraction", 1) <= 1
    check(ok, f"{setting}.rotary_fraction", values.rotary_fraction, "above 0 and at most 1")
    return {**pos, **own} if name or own else None


def describe(schedule: LayerSchedule) -> str:
    """The schedule's name, its pattern, and what the types of layer have: `swan (GLLL) G.pos=none, L.window=32`."""
    usual, shown = asdict(LayerType()), []
    for letter, layer_type in schedule.types.items():
        values = asdict(layer_type) | {"pos": layer_type.pos and describe_knobs("pos", layer_type.pos)}
        shown += [f"{letter}.{key}={value}" for key, value in values.items() if value != usual[key]]
    return " ".join([f"{schedule.name} ({schedule.pattern})", ", ".join(shown)]).rstrip()
