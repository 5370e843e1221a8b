"""Rope types: Hugging Face's rope_parameters as our base and scaling method, and back.

`ROPE_TYPES` maps each rope type to one of our scaling methods. The knobs of the method have the same names as the
parameters of the rope type, except for those in `RENAMED`. `read_rope` converts config.json to our settings,
`rope_parameters` back.
"""

from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError
from conf.schema import TrainConfig
from hf.config import Config
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
# Values of parameters that are absent or null; without a default a number is required. attention_factor 0: computed.
DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True} | dict.fromkeys(
    ("attention_factor", "mscale", "mscale_all_dim"), 0.0
)
# Our method -> the rope type that it is written as. ntk_by_parts is the formula of llama3.
WRITTEN_AS = {ROPE_TYPES[name].kind: name for name in ("default", "linear", "yarn", "llama3")} | {
    "ntk_by_parts": "llama3"
}


# ---- from config.json ----


class RopeSettings(NamedTuple):
    """The rotation that a config.json describes, and the contexts of the model."""

    base: float
    scaling: dict  # kind and knobs, as in a yaml of conf/scaling
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    longest_ctx: int  # the longest context that the model was trained for


def rope_object(c: Config) -> tuple[str, dict]:
    """(key, a copy of its value): rope_parameters, or rope_scaling, its name before transformers 5.

    The value is empty if there is no such key. UserError if both are there with different values.
    """
    parameters, legacy = c.get("rope_parameters") or {}, c.get("rope_scaling")
    if legacy and parameters and parameters != legacy:
        raise c.refuse("rope_scaling", legacy, "rope_parameters has other values")
    parameters = legacy or parameters
    if not isinstance(parameters, dict):
        raise c.refuse("rope_parameters", parameters, "must be an object")
    return "rope_scaling" if legacy else "rope_parameters", dict(parameters)


def read_rope(
    c: Config, key: str, parameters: dict, base: float, longest: int, train_ctx: int | None, can_scale: bool = True
) -> RopeSettings:
    """The rotation that config.json describes; key and parameters are those of `rope_object`.

    base, longest: rope_theta and max_position_embeddings at the top level, by whatever names the family has for them.
    train_ctx: L, where the config does not contain it. can_scale: whether transformers has rope types for this family.
    UserError for a rope type or parameter that we do not have, and for an L that is unknown or contradicts train_ctx.
    """
    rest = dict(parameters)  # what has not been read yet
    types = [rest.pop(name, None) for name in ("rope_type", "type")]
    rope_type = types[0] or types[1] or "default"
    base = rest.pop("rope_theta", None) or base
    original = c.get("original_max_position_embeddings")
    original = rest.pop("original_max_position_embeddings", None) or original
    if rope_type not in list(ROPE_TYPES):  # a list, since it may be unhashable
        raise c.refuse(f"{key}.rope_type", rope_type, f"not supported: must be one of {', '.join(ROPE_TYPES)}")
    if not can_scale and rope_type != "default":
        raise c.refuse(f"{key}.rope_type", rope_type, f"transformers does not scale positions of {c.get('model_type')}")

    # L, the pre-trained context. With the other rope types max_position_embeddings is the extended context.
    L = longest if rope_type in ("default", "dynamic") else original
    if L is None and train_ctx is None:
        either = "may be the context it was trained at or the one it was extended to: give the former as train_ctx="
        raise c.refuse(key, rope_type, f"max_position_embeddings={longest} {either}")
    if None not in (L, train_ctx) and train_ctx != L:
        raise UserError(f"train_ctx={train_ctx}: {c.path} says {L}")
    L = L or train_ctx
    if not isinstance(L, int) or L < 1 or (original or L) != L:
        raise c.refuse(f"{key}.original_max_position_embeddings", original, f"must be a whole number, here {L}")

    defaults = DEFAULTS | ({"factor": longest / L} if rope_type == "longrope" else {})

    def read(name: str) -> Any:
        value = rest.pop(name, None)
        value = defaults.get(name) if value is None else value
        if name in NOT_NUMBERS:
            return value
        least = 1 if name == "factor" and rope_type != "longrope" else 0
        if not isinstance(value, int | float) or isinstance(value, bool) or value < least:
            raise c.refuse(f"{key}.{name}", value, f"must be a number of at least {least}")
        return value

    kind, names = ROPE_TYPES[rope_type]
    knobs: dict[str, Any] = {"kind": kind} | {RENAMED.get((kind, name), name): read(name) for name in names}
    if rope_type == "linear":
        longest = round(L * knobs["factor"])
    if rope_type == "longrope":
        knobs["factor"] = max(1.0, knobs["factor"])
    if rope_type == "yarn":
        knobs["truncate"] = bool(knobs["truncate"])
        mscale, all_dim = read("mscale"), read("mscale_all_dim")
        if not knobs["attention_factor"] and mscale and all_dim:  # transformers uses them only if both are there
            growth = 0.1 * float(np.log(knobs["factor"]))
            knobs["attention_factor"] = (growth * mscale + 1) / (growth * all_dim + 1)
    if not knobs.get("attention_factor", True):
        del knobs["attention_factor"]  # the method computes it from the factor
    if unread := [name for name, value in rest.items() if value is not None]:
        raise c.refuse(f"{key}.{unread[0]}", rest[unread[0]], f"not a parameter of rope type {rope_type} that we have")
    return RopeSettings(float(base), knobs, L, max(L, longest))


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
