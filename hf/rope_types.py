"""Rope types: Hugging Face's rope_parameters as our base and scaling method, and back.

`ROPE_TYPES` maps each rope type to one of our scaling methods. The knobs of the method have the same names as the
parameters of the rope type, except for those in `RENAMED`. `read_rope` converts config.json to our settings,
`rope_parameters` back.
"""

from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from conf.schema import TrainConfig
from hf.config import LARGEST, Config
from model.scaling import ContextChange


class RopeType(NamedTuple):
    kind: str  # of our scaling method
    parameters: tuple[str, ...]  # in the order in which they are written


ROPE_TYPES = {
    "default": RopeType("none", ()),
    "linear": RopeType("pi", ("factor",)),
    "dynamic": RopeType("dynamic_hf", ("factor",)),
    "yarn": RopeType("yarn", ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")),
    "llama3": RopeType("llama3", ("factor", "low_freq_factor", "high_freq_factor")),
    "longrope": RopeType("longrope", ("factor", "long_factor", "short_factor", "attention_factor")),
}
# (our method, parameter in config.json) -> our knob, where the two names differ
RENAMED = {
    ("dynamic_hf", "factor"): "hf_factor",  # it is not the extension factor: model/scaling/dynamic_hf.py
    ("longrope", "long_factor"): "long",
    ("longrope", "short_factor"): "short",
    ("ntk_by_parts", "low_freq_factor"): "alpha",
    ("ntk_by_parts", "high_freq_factor"): "beta",
}
NOT_NUMBERS = ("truncate", "long_factor", "short_factor")
# Values of parameters that are absent or null; without a default a number is required. attention_factor: computed.
DEFAULTS: dict[str, Any] = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True} | dict.fromkeys(
    ("attention_factor", "mscale", "mscale_all_dim")
)
# Our method -> the rope type that it is written as. ntk_by_parts is the formula of llama3.
WRITTEN_AS = {ROPE_TYPES[name].kind: name for name in ("default", "linear", "yarn", "llama3")} | {
    "ntk_by_parts": "llama3"
}


# ---- from config.json ----


class UnknownContext(UserError):
    """config.json does not contain the context of the pre-training, and train_ctx= was not given."""


class PositionSettings(NamedTuple):
    """The positions that a config.json describes, and the contexts of the model."""

    pos: dict  # kind and knobs, as in a yaml of conf/pos
    scaling: dict  # kind and knobs, as in a yaml of conf/scaling
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    longest_ctx: int  # the longest context that the model was trained for
    layers: dict | None = None  # the resolved schedule of a model with layers of several kinds, as TrainConfig.layers


def without_rotation(c: Config, pos: dict, L: int | None, train_ctx: int | None) -> PositionSettings:
    """Positions of an encoding without frequencies. L: the context in config.json; train_ctx: that of the command."""
    if L is None and train_ctx is None:
        raise UnknownContext(
            f"train_ctx: must be given a value: {c.path} does not contain the context it was trained at"
        )
    if None not in (L, train_ctx) and train_ctx != L:
        raise UserError(f"train_ctx={train_ctx}: {c.path} says {L}")
    context = L or train_ctx or 0
    return PositionSettings(pos, {"kind": "none"}, context, context)


def rope_object(c: Config) -> tuple[str, dict]:
    """(key, a copy of its value): rope_parameters, or rope_scaling, its name before transformers 5.

    The value is empty if there is no such key. UserError if both are there with different values.
    """
    parameters, legacy = c.object("rope_parameters"), c.object("rope_scaling")
    if legacy and parameters and parameters != legacy:
        raise c.refuse("rope_scaling", legacy, "rope_parameters has other values")
    return ("rope_scaling", legacy) if legacy else ("rope_parameters", parameters)


def rotary_part(c: Config, D: int, key: str, parameters: dict, default: float) -> float:
    """The share of a head of width D that is rotated. UserError if it is no even number of dimensions.

    Takes partial_rotary_factor out of parameters, where transformers 5 has it; `key` is its name at the top level.
    """
    fraction = c.number(key, default=default)
    if (partial := parameters.pop("partial_rotary_factor", None)) is not None:
        key, fraction = "partial_rotary_factor", c.check_number("partial_rotary_factor", partial)
    rotary_dim = int(D * min(fraction, LARGEST))
    if rotary_dim < 2 or rotary_dim % 2 or fraction > 1:
        raise c.refuse(key, fraction, f"rotates {rotary_dim} of {D} dimensions: must be even")
    return rotary_dim / D


def read_rope(
    c: Config,
    key: str,
    parameters: dict,
    base: float,
    longest: int,
    train_ctx: int | None,
    *,
    rotary_fraction: float = 1.0,
    interleaved: bool = False,
    can_scale: bool = True,
    longrope_ctx: int | None = None,
) -> PositionSettings:
    """The rotation that config.json describes; key and parameters are those of `rope_object`.

    base, longest: rope_theta and max_position_embeddings at the top level, by whatever names the family has for them.
    train_ctx: L, where the config does not contain it. can_scale: whether transformers has rope types for this family.
    longrope_ctx: the L of rope type longrope where the config does not contain it. UserError for a rope type or
    parameter that we do not have, and for an L that is unknown or contradicts train_ctx.
    """
    rest = dict(parameters)  # what has not been read yet
    types = [rest.pop(name, None) for name in ("rope_type", "type")]
    rope_type = types[0] or types[1] or "default"
    if rope_type not in list(ROPE_TYPES):  # a list, since it may be unhashable
        raise c.refuse(f"{key}.rope_type", rope_type, f"not supported: must be one of {', '.join(ROPE_TYPES)}")
    if not can_scale and rope_type != "default":
        raise c.refuse(f"{key}.rope_type", rope_type, f"transformers does not scale positions of {c.get('model_type')}")
    if (theta := rest.pop("rope_theta", None)) is not None:
        base = c.check_number(f"{key}.rope_theta", theta, 1)
    if rest.get("partial_rotary_factor") == 1 and not isinstance(rest["partial_rotary_factor"], bool):
        del rest["partial_rotary_factor"]
    rest.pop("finetuned", None)  # a note in the YaRN authors' files

    L = pretrained_ctx(c, key, rest, rope_type, longest, train_ctx, longrope_ctx)
    knobs = scaling_knobs(c, key, rest, rope_type, longest, L)
    if rope_type == "linear":
        longest = round(L * knobs["factor"])
    if unread := [name for name, value in rest.items() if value is not None]:
        raise c.refuse(f"{key}.{unread[0]}", rest[unread[0]], f"not a parameter of rope type {rope_type} that we have")
    pos = {"kind": "rope", "base": float(base), "interleaved": interleaved, "rotary_fraction": rotary_fraction}
    return PositionSettings(pos, knobs, L, max(L, longest))


def pretrained_ctx(
    c: Config, key: str, rest: dict, rope_type: str, longest: int, train_ctx: int | None, longrope_ctx: int | None
) -> int:
    """L, the context of the pre-training. Takes its key out of `rest`; the other arguments are those of `read_rope`."""
    original = c.optional_count("original_max_position_embeddings")  # transformers prefers this one to the nested one
    if (nested := rest.pop("original_max_position_embeddings", None)) is not None:
        nested = c.check_count(f"{key}.original_max_position_embeddings", nested)
        original = original or nested
    if original is None and rope_type == "longrope":
        original = longrope_ctx
    # With the other rope types max_position_embeddings is the extended context
    L = longest if rope_type in ("default", "dynamic") else original
    if L is None and train_ctx is None:
        either = "may be the context it was trained at or the one it was extended to: give the former as train_ctx="
        raise UnknownContext(str(c.refuse(key, rope_type, f"max_position_embeddings={longest} {either}")))
    if None not in (L, train_ctx) and train_ctx != L:
        raise UserError(f"train_ctx={train_ctx}: {c.path} says {L}")
    L = L or train_ctx
    assert L is not None
    if (original or L) != L:
        raise c.refuse(f"{key}.original_max_position_embeddings", original, f"must be {L}")
    return L


def scaling_knobs(c: Config, key: str, rest: dict, rope_type: str, longest: int, L: int) -> dict[str, Any]:
    """Kind and knobs of our scaling method. Takes the parameters of the rope type out of `rest`."""
    defaults = DEFAULTS | ({"factor": longest / L} if rope_type in ("longrope", "yarn") else {})

    def read(name: str) -> Any:
        value = rest.pop(name, defaults.get(name)) if name == "truncate" else rest.pop(name, None)
        value = defaults.get(name) if value is None and name != "truncate" else value
        if name in NOT_NUMBERS or (value is None and name in defaults):
            return value
        return c.check_number(f"{key}.{name}", value, 1 if name == "factor" and rope_type != "longrope" else 0)

    kind, names = ROPE_TYPES[rope_type]
    knobs: dict[str, Any] = {"kind": kind} | {RENAMED.get((kind, name), name): read(name) for name in names}
    if rope_type == "longrope":
        knobs["factor"] = max(1.0, knobs["factor"])
    if rope_type == "yarn":
        if not isinstance(knobs["truncate"], bool | None):
            raise c.refuse(f"{key}.truncate", knobs["truncate"], "must be true or false")
        knobs["truncate"] = bool(knobs["truncate"])  # null is false in transformers, a missing key is true
        knobs |= {name: knobs[name] or DEFAULTS[name] for name in ("beta_fast", "beta_slow")}
        mscale, all_dim = read("mscale"), read("mscale_all_dim")
        if knobs["attention_factor"] is None and mscale and all_dim:  # transformers uses them only if both are there
            growth = 0.1 * float(np.log(knobs["factor"]))
            knobs["attention_factor"] = (growth * mscale + 1) / (growth * all_dim + 1)
    if knobs.get("attention_factor", 0) is None:
        del knobs["attention_factor"]  # the method computes it from the factor
    return knobs


# ---- to config.json ----


def rope_parameters(cfg: TrainConfig, change: ContextChange, L: int) -> dict:
    """rope_parameters of config.json for a run with these settings. UserError if transformers cannot express them.

    change: the scaling that the run was trained with, with its factors resolved. L: its pre-trained context, tokens.
    """
    pos, kind = cfg.pos, cfg.scaling["kind"]
    if pos["kind"] != "rope":
        raise UserError(f"pos={pos['kind']}: cannot be exported: only pos=rope and rope_interleaved can")
    for key, right in (("rotary_fraction", 1.0), ("proportional", False)):
        if pos.get(key, right) != right:
            raise UserError(f"pos.{key}={pos[key]}: cannot be exported: must be {right}")
    if cfg.attention != "softmax":
        raise UserError(f"attention={cfg.attention}: cannot be exported: must be softmax")
    if cfg.plus:
        raise UserError(f"plus={cfg.plus[0]}: was trained with, and cannot be exported")

    knobs = {**cfg.scaling, "factor": change.factor, "attention_factor": change.attention_factor}
    if kind in ("ntk", "dynamic_ntk", "dynamic_hf"):  # a run keeps the scaling of its trained length: another base
        assert change.inv_freq is not None
        D = 2 * len(change.inv_freq)
        return {"rope_theta": pos["base"] * change.factor ** (D / (D - 2)), "rope_type": "default"}
    rope_type = WRITTEN_AS.get(kind)
    if rope_type is None:
        raise UserError(
            f"scaling={kind}: was trained with, and cannot be exported: "
            "none, pi, ntk, dynamic_ntk, dynamic_hf, yarn, llama3 and ntk_by_parts can"
        )
    written = {"rope_theta": float(pos["base"]), "rope_type": rope_type}
    for name in ROPE_TYPES[rope_type].parameters:
        written[name] = knobs[RENAMED.get((kind, name), name)]
        if name == "factor" and rope_type != "linear":
            written["original_max_position_embeddings"] = L
    return written
