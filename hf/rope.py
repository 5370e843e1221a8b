"""Rope types: Hugging Face's rope_parameters as our base and scaling method, and back.

`ROPE_TYPES` maps each rope type to one of our scaling methods. The knobs of the method have the same names as the
parameters of the rope type, except for those in `RENAMED`. `read_rope` converts config.json to our settings,
`rope_parameters` back.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from conf.layer_schedule import LayerSchedule
from conf.schema import TrainConfig
from hf.config import LARGEST, RIGHT, Config
from model.scaling import ContextChange

COMPUTED = dict.fromkeys(("factor", "attention_factor"), float | None)  # from other parameters where they are absent
# Rope type -> our scaling method, and its parameters with the values of absent ones, as hf/config.py describes them
ROPE_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("none", {}),
    "linear": ("pi", {"factor": float}),
    "dynamic": ("dynamic_hf", {"factor": float}),
    "yarn": ("yarn", COMPUTED | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}),
    "llama3": ("llama3", dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), float)),
    "longrope": ("longrope", COMPUTED | {"long_factor": list, "short_factor": list}),
}
# Our method -> its knobs with other names than the parameters of config.json
RENAMED = {
    "dynamic_hf": {"factor": "hf_factor"},  # it is not the extension factor: model/scaling/dynamic_hf.py
    "longrope": {"long_factor": "long", "short_factor": "short"},
    "ntk_by_parts": {"low_freq_factor": "alpha", "high_freq_factor": "beta"},
}
# Our method -> the rope type that it is written as. ntk_by_parts is the formula of llama3.
WRITTEN_AS = {"none": "default", "pi": "linear", "yarn": "yarn", "llama3": "llama3", "ntk_by_parts": "llama3"}
EXPRESSIBLE: dict[str, Any] = {"attention": "softmax", "plus": [], "pos.kind": "rope"}
EXPRESSIBLE |= {"pos.rotary_fraction": 1.0, "pos.proportional": False}
OTHER_BASE = ("ntk", "dynamic_ntk", "dynamic_hf")  # a run keeps the scaling of its trained length: another base


# ---- from config.json ----


class PositionSettings(NamedTuple):
    """The positions that a config.json describes, and the contexts of the model."""

    pos: dict  # kind and knobs, as in a yaml of conf/pos
    scaling: dict  # kind and knobs, as in a yaml of conf/scaling
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    longest_ctx: int  # the longest context that the model was trained for
    layers: LayerSchedule | None = None  # of a model with layers of several types


class Rotation(NamedTuple):
    """How a family rotates."""

    interleaved: bool = False
    types: Mapping[str, str] = {name: name for name in ROPE_TYPES}  # in config.json -> of ROPE_TYPES
    longrope_ctx: int | None = None  # L of rope type longrope where config.json does not contain it
    base: float | None = None  # whatever rope_theta is
    # Of families with rope_parameters of each type of layer: the base of the sliding layers where they have none, or
    # the key that has it
    sliding_base: str | float | None = None


def agreed_ctx(c: Config, L: int | None, train_ctx: int | None, unknown: str) -> int:
    """L: in config.json; train_ctx: of the command. UserError if they differ; `unknown` if there is neither."""
    if L is None and train_ctx is None:
        raise UserError(f"{unknown}: eval.py takes the context of its training as train_ctx=; init= cannot use it")
    if None not in (L, train_ctx) and train_ctx != L:
        raise UserError(f"train_ctx={train_ctx}: {c.path} says {L}")
    return L or train_ctx or 0


def rope_object(c: Config) -> Config:
    """rope_parameters, or rope_scaling, its name before transformers 5. UserError if both are there and differ."""
    parameters, legacy = c.settings["rope_parameters"], c.settings["rope_scaling"]
    if legacy and parameters and parameters != legacy:
        raise c.refuse("rope_scaling", legacy, "rope_parameters has other values")
    return c.object("rope_scaling", legacy) if legacy else c.object("rope_parameters", parameters)


def rotary_dim(c: Config, parameters: Config, D: int) -> int:
    """How many dimensions of a head of width D are rotated. UserError if it is no even number of them."""
    place, key, value = c, "rotary_dim", c.settings.get("rotary_dim", D)
    dim = value
    if "partial_rotary_factor" in c.settings:  # transformers 5 has it in rope_parameters
        key = "partial_rotary_factor"
        nested = parameters.read({key: float | None})[key]
        place, value = (c, c.settings[key]) if nested is None else (parameters, nested)
        dim = int(D * min(value, LARGEST))
    if not dim or dim % 2 or dim > D:
        raise place.refuse(key, value, f"rotates {dim} of {D} dimensions: must be even, and at most all of them")
    return dim


def read_rope(
    c: Config, rule: Rotation, D: int, train_ctx: int | None, parameters: Config, base: float, of_type: bool = False
) -> PositionSettings:
    """The rotation that config.json describes, of heads of width D.

    train_ctx: L, where the config does not contain it. parameters: `rope_object`, or the object of one type of layer
    in it (of_type). base: where they have none. UserError for a rope type or parameter that we do not have, and for an
    L that is unknown or contradicts train_ctx.
    """
    nested = parameters.read({"rope_type": str | None, "type": str | None, "rope_theta": float | None})
    name = nested["rope_type"] or nested["type"] or "default"
    if name not in rule.types:
        raise parameters.refuse("rope_type", name, f"not supported: must be one of {', '.join(rule.types)}")
    rope_type, longest = rule.types[name], c.settings["max_position_embeddings"]
    dim = rotary_dim(c, parameters, D)
    L = pretrained_ctx(c, parameters, rope_type, rule.longrope_ctx, train_ctx, of_type)
    knobs = scaling_knobs(parameters, rope_type, longest, L)
    parameters.finish(off=(None,))
    theta = rule.base or nested["rope_theta"] or base
    pos = {"kind": "rope", "base": float(theta), "interleaved": rule.interleaved, "rotary_fraction": dim / D}
    return PositionSettings(pos, knobs, L, max(L, round(L * knobs["factor"]) if rope_type == "linear" else longest))


def pretrained_ctx(
    c: Config, parameters: Config, rope_type: str, longrope_ctx: int | None, train_ctx: int | None, of_type: bool
) -> int:
    """L, the context of the pre-training; the arguments are those of `read_rope`."""
    key, longest = "original_max_position_embeddings", c.settings["max_position_embeddings"]
    of_file, nested = None if of_type else c.settings[key], parameters.read({key: int | None})[key]
    place, original = (parameters, nested) if of_file is None else (c, of_file)  # transformers prefers that of the file
    if original is None and rope_type == "longrope":
        original = longrope_ctx
    # With the other rope types max_position_embeddings is the extended context
    L = longest if rope_type in ("default", "dynamic") else original
    either = f"max_position_embeddings={longest} may be the context it was trained at or the one it was extended to"
    unknown = c.refuse(parameters.prefix.rstrip("."), rope_type, either)
    L = agreed_ctx(c, L, train_ctx, str(unknown))
    if (original or L) != L:
        raise place.refuse(key, original, f"must be {L}")
    return L


def scaling_knobs(parameters: Config, rope_type: str, longest: int, L: int) -> dict[str, Any]:
    """Kind and knobs of our scaling method."""
    kind, defaults = ROPE_TYPES[rope_type]
    read = parameters.read(defaults)
    if "factor" in read and read["factor"] is None:
        read["factor"] = max(1.0, longest / L) if rope_type == "longrope" else longest / L
        if read["factor"] < 1:
            raise parameters.refuse("factor", read["factor"], f"must be {RIGHT[float].format(least=1)}")
    if rope_type == "yarn":
        read["truncate"] &= parameters.values.get("truncate", True) is not None  # null is false in transformers
        read |= {name: read[name] or defaults[name] for name in ("beta_fast", "beta_slow")}
        mscale = parameters.read(dict.fromkeys(("mscale", "mscale_all_dim"), float | None))
        if read["attention_factor"] is None and all(mscale.values()):  # transformers uses them only if both are there
            growth = 0.1 * float(np.log(read["factor"]))
            read["attention_factor"] = (growth * mscale["mscale"] + 1) / (growth * mscale["mscale_all_dim"] + 1)
    if read.get("attention_factor", 0) is None:
        del read["attention_factor"]  # the method computes it from the factor
    return {"kind": kind} | {RENAMED.get(kind, {}).get(name, name): value for name, value in read.items()}


# ---- to config.json ----


def rope_parameters(cfg: TrainConfig, change: ContextChange, L: int) -> dict:
    """rope_parameters of config.json for a run with these settings. UserError if transformers cannot express them.

    change: the scaling that the run was trained with, with its factors resolved. L: its pre-trained context, tokens.
    """
    pos, kind = cfg.pos, cfg.scaling["kind"]
    settings = {"attention": cfg.attention, "plus": cfg.plus, **{f"pos.{key}": value for key, value in pos.items()}}
    for setting, right in EXPRESSIBLE.items():
        if settings.get(setting, right) != right:
            raise UserError(f"{setting}={settings[setting]}: cannot be exported: must be {right}")
    if kind in OTHER_BASE:
        assert change.inv_freq is not None
        D = 2 * len(change.inv_freq)
        return {"rope_theta": pos["base"] * change.factor ** (D / (D - 2)), "rope_type": "default"}
    if kind not in WRITTEN_AS:
        right = f"must be {', '.join([*WRITTEN_AS, *OTHER_BASE])}"
        raise UserError(f"scaling={kind}: was trained with, and cannot be exported: {right}")
    rope_type, knobs = (
        WRITTEN_AS[kind],
        {**cfg.scaling, "factor": change.factor, "attention_factor": change.attention_factor},
    )
    written = {"rope_theta": float(pos["base"]), "rope_type": rope_type}
    for name in ROPE_TYPES[rope_type][1]:
        written[name] = knobs[RENAMED.get(kind, {}).get(name, name)]
        if name == "factor" and rope_type != "linear":
            written["original_max_position_embeddings"] = L
    return written
