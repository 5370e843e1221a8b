"""Layer schedules, the yamls of conf/layers: checked, and with every default filled in. Imported only for such runs.

The resolved form is what a run saves, so that later changes of a yaml do not change the run:

    {"pattern": "LLLG", "L": {"pos": {...}, "window": 64, "sinks": 0, "scaled": False}, "G": {...}}

`pattern` has one letter for each layer. `pos` has the knobs of the encoding, or is None for the run's own; `window` is
in tokens, or None.
"""

import typing
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from conf.errors import UserError, check
from conf.registry import choices, describe as describe_knobs, has_type, yaml_name, yaml_values
from conf.schema import TrainConfig

TYPES: dict[str, Any] = {"pos": str | None, "base": float | None, "window": float | None, "sinks": int, "scaled": bool}
DEFAULTS: dict[str, Any] = {"pos": None, "base": None, "window": None, "sinks": 0, "scaled": True}


def resolve_layers(cfg: TrainConfig) -> dict[str, Any]:
    """The resolved form of cfg.layers, a yaml of conf/layers, for the other settings of cfg.

    UserError names the first wrong setting.
    """
    pattern, last, n_layers = cfg.layers.get("pattern") or "", cfg.layers.get("last"), cfg.model.n_layers
    letters = {key: value for key, value in cfg.layers.items() if key not in ("pattern", "last")}
    ok = isinstance(pattern, str) and bool(pattern) and set(pattern) <= letters.keys()
    check(ok, "layers.pattern", pattern, f"made of the letters {', '.join(letters)}, each of which has settings")
    check(last is None or last in letters, "layers.last", last, f"null or one of {', '.join(letters)}")
    of_layers = repeat_pattern(pattern, n_layers)
    of_layers = of_layers[:-1] + (last or of_layers[-1])
    if lacking := sorted(set(pattern) - set(of_layers)):
        reason = f"with model.n_layers={n_layers} no layer is {lacking[0]}"
        raise UserError(f"layers.pattern={pattern}: {reason}: choose another pattern or more layers")
    return {"pattern": of_layers, **{x: resolve_letter(x, letters[x], cfg) for x in dict.fromkeys(of_layers)}}


def change_schedule(layers: dict[str, Any], changes: dict[str, Any], cfg: TrainConfig) -> dict[str, Any]:
    """A resolved schedule with other settings of some of its letters, such as changes={"L": {"window": 32}}."""
    result, letters = dict(layers), [key for key in layers if key != "pattern"]
    for letter, given in changes.items():
        right = f"left out: the layers are {' and '.join(letters)}, and another pattern needs layers=NAME"
        check(letter in letters, f"layers.{letter}", given, right)
        check(isinstance(given, dict), f"layers.{letter}", given, f"settings: {', '.join(TYPES)}")
        was = layers[letter]
        encoding = cfg.pos if "pos" in given else was["pos"] or cfg.pos  # to which a base applies
        values = {key: was[key] for key in ("window", "sinks", "scaled")} | given
        result[letter] = resolve_letter(letter, values, replace(cfg, pos=encoding))
        if "pos" not in given and given.get("base") is None:
            result[letter]["pos"] = was["pos"]
    return result


def check_resolved(cfg: TrainConfig) -> None:
    """UserError if cfg.layers, read from a run, has not the resolved form."""
    types = {"pos": dict | None, "window": int | None, "sinks": int, "scaled": bool}
    pattern, kinds = cfg.layers.get("pattern"), {key: value for key, value in cfg.layers.items() if key != "pattern"}
    ok = isinstance(pattern, str) and len(pattern) == cfg.model.n_layers and set(pattern) == kinds.keys()
    for kind in kinds.values():
        ok = ok and isinstance(kind, dict) and kind.keys() == types.keys()
        ok = ok and all(has_type(kind[key], hint) for key, hint in types.items())
    check(ok, "layers", cfg.layers, "as train.py saves it: a pattern, and pos, window, sinks and scaled of each letter")


def repeat_pattern(pattern: str, n_layers: int) -> str:
    """One letter for each layer: the pattern is repeated, and its last repetition may be incomplete.

    A model with fewer layers than the pattern takes its beginning, or its end if letters are missing at the beginning:
    four layers of LLLLLG are LLLG.
    """
    if n_layers < len(pattern) and set(pattern[:n_layers]) < set(pattern):
        return pattern[-n_layers:]
    return (pattern * n_layers)[:n_layers]


def resolve_letter(letter: str, given: Any, cfg: TrainConfig) -> dict[str, Any]:
    """The resolved settings of one kind of layer."""
    setting = f"layers.{letter}"
    check(isinstance(given, dict), setting, given, f"settings: {', '.join(TYPES)}")
    for key, value in given.items():
        check(key in TYPES, f"{setting}.{key}", value, f"left out: a kind of layer has {', '.join(TYPES)}")
        expected = TYPES[key].__name__ if isinstance(TYPES[key], type) else str(TYPES[key]).replace("None", "null")
        check(has_type(value, TYPES[key]), f"{setting}.{key}", value, f"of type {expected}")
    values = DEFAULTS | given
    return {
        "pos": encoding_knobs(setting, values["pos"], values["base"], cfg),
        "window": window_in_tokens(setting, values["window"], values["sinks"], cfg.ctx),
        "sinks": values["sinks"],
        "scaled": values["scaled"],
    }


def encoding_knobs(setting: str, name: str | None, base: float | None, cfg: TrainConfig) -> dict[str, Any] | None:
    """The knobs of the encoding of a kind of layer, with this base if it is given; None for those of the run."""
    if name is not None:
        check(name in choices("pos"), f"{setting}.pos", name, f"null or one of {', '.join(choices('pos'))}")
        settings = OmegaConf.create({"ctx": cfg.ctx, "knobs": yaml_values("pos", name)})  # may refer to ${ctx}
        knobs = typing.cast(dict[str, Any], OmegaConf.to_container(settings.knobs, resolve=True))
    elif base is None:
        return None
    else:
        knobs = cfg.pos
    if base is None:
        return knobs
    check(base >= 1, f"{setting}.base", base, "at least 1")
    check("base" in knobs, f"{setting}.base", base, f"null: pos={yaml_name('pos', knobs)} has no base")
    return {**knobs, "base": base}


def window_in_tokens(setting: str, window: float | None, sinks: int, ctx: int) -> int | None:
    """The window of a kind of layer in tokens. In a yaml a whole number is in tokens, another is a fraction of ctx."""
    if window is None:
        check(sinks == 0, f"{setting}.sinks", sinks, "0 without a window: every query sees all tokens")
        return None
    ok = window >= 1 if isinstance(window, int) else 0 < window <= 1
    check(ok, f"{setting}.window", window, "null, a number of tokens, or a fraction of ctx above 0.0 and at most 1.0")
    check(sinks >= 0, f"{setting}.sinks", sinks, "at least 0")
    return window if isinstance(window, int) else max(1, round(window * ctx))


def describe_layers(cfg: TrainConfig) -> str:
    """The schedule's name, its pattern, and what differs from the yaml: `swan (GLLL) L.window=32, L.sinks=4`."""
    name = closest_yaml(cfg)
    flat = flatten(cfg.layers, cfg)
    usual = flatten(resolved_yaml(name, cfg), cfg)
    changed = [f"{key}={value}" for key, value in flat.items() if key != "pattern" and usual.get(key, value) != value]
    return " ".join([f"{name} ({cfg.layers['pattern']})", ", ".join(changed)]).rstrip()


def closest_yaml(cfg: TrainConfig) -> str:
    """The name of the yaml of conf/layers from which the run's schedule differs least: the one that the user typed.

    Windows are compared only between yamls that are otherwise equally close, because they are what users change most.
    """
    settings = flatten(cfg.layers, cfg).items()

    def differences(name: str) -> tuple[int, int]:
        unequal = settings ^ flatten(resolved_yaml(name, cfg), cfg).items()
        return len([key for key, _ in unequal if not key.endswith(".window")]), len(unequal)

    return min((name for name in choices("layers") if name != "uniform"), key=differences)


def resolved_yaml(name: str, cfg: TrainConfig) -> dict[str, Any]:
    """The resolved form of conf/layers/NAME.yaml for the other settings of cfg; {} if it does not fit them."""
    try:
        return resolve_layers(replace(cfg, layers=yaml_values("layers", name)))
    except UserError:
        return {}


def flatten(layers: dict[str, Any], cfg: TrainConfig) -> dict[str, str]:
    """The settings of all kinds of layer in one dict: {"L": {"window": 8}} becomes {"L.window": "8"}.

    A kind of layer that sets no encoding has the one of pos=.
    """
    flat = {}
    for letter, values in layers.items():
        items = values.items() if isinstance(values, dict) else [(None, values)]
        for key, value in items:
            text = describe_knobs("pos", value or cfg.pos) if key == "pos" else str(value)
            flat[letter if key is None else f"{letter}.{key}"] = text
    return flat
