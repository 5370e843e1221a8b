"""The positions of a model: what config.json says as our encoding, scaling and layer schedule, and back.

`ROPE_TYPES` maps each rope type to one of our scaling methods. The knobs of the method have the same names as the
parameters of the rope type, except for those in `RENAMED`.

transformers has two types of layer, full_attention and sliding_attention. All sliding layers have the same window. Some
families have rope_parameters of each type. conf/layer_schedule.py documents the form of our schedules.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from conf.errors import UserError, check
from conf.layer_schedule import LayerSchedule, LayerType
from conf.schema import TrainConfig
from hf.checkpoint import LARGEST, RIGHT, Config
from model import gpt
from model.scaling import ContextChange

COMPUTED = dict.fromkeys(("factor", "attention_factor"), float | None)  # from other parameters where they are absent
# Rope type -> our scaling method, and its parameters with the values of absent ones, as hf/checkpoint.py describes them
ROPE_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("none", {}),
    "proportional": ("none", {}),  # an encoding: rope_proportional
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
TEMPER = {"llama_4_scaling_beta": float, "max_position_embeddings": int | None}  # of Ministral 3
NONE = {"kind": "none"}  # no scaling, or no positions
FULL, SLIDING = "full_attention", "sliding_attention"
LETTERS = {(True, True): "L", (True, False): "M", (False, True): "G", (False, False): "N"}  # (has a window, rotates)

# ---- from config.json ----


class PositionSettings(NamedTuple):
    """The positions that a config.json describes, and the contexts of the model."""

    pos: dict  # kind and knobs, as in a yaml of conf/pos
    scaling: dict  # kind and knobs, as in a yaml of conf/scaling
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    longest_ctx: int  # the longest context that the model was trained for
    layers: LayerSchedule | None = None  # of a model with layers of several types


class PositionRule(NamedTuple):
    """The positions of a family, and which of its layers have a window."""

    pos: Mapping[str, Any] = {"kind": "rope"}  # of another encoding all knobs, but the longest context of learned
    interleaved: bool = False
    types: Mapping[str, str] = {name: name for name in ROPE_TYPES}  # in config.json -> of ROPE_TYPES
    longrope_ctx: int | None = None  # L of rope type longrope where config.json does not contain it
    # Of families with rope_parameters of each type of layer: the base of the sliding layers where they have none, or
    # the key that has it
    sliding_base: str | float | None = None
    # (settings, layer) -> whether it has the window, where the key layer_types is absent
    slides: Callable[[dict[str, Any], int], bool] = lambda s, i: False
    fixed: bool = False  # transformers does not read layer_types
    tempered: bool = False  # queries grow with their position
    rotates: Callable[[dict[str, Any], bool], bool] = lambda s, slides: True  # (settings, whether the layer slides)


def read_positions(c: Config, rule: PositionRule, D: int, ctx: int, train_ctx: int | None) -> PositionSettings:
    """The positions of a model with heads of width D.

    ctx: the longest length to evaluate. train_ctx: L, where the config does not contain it.
    """
    key, stated = "max_position_embeddings", c.settings["max_position_embeddings"]
    longest = known_ctx(stated, train_ctx, f"{c.path}: does not contain the context it was trained at")
    c.settings[key] = longest
    if rule.pos["kind"] == "rope":
        found = read_rotation(c, rule, D, train_ctx)
        # transformers computes a scaling from its default in place of an absent key
        c.check(stated or found.scaling == NONE, key, stated, "must be there with a scaling")
        return found
    knobs = {**rule.pos, "max_positions": longest} if rule.pos["kind"] == "learned" else dict(rule.pos)
    if "max_positions" in knobs and longest < ctx:
        raise c.refuse(key, longest, f"not supported past itself, and ctx={ctx}: try ctx={longest}")
    return PositionSettings(knobs, NONE, longest, longest)


def read_rotation(c: Config, rule: PositionRule, D: int, train_ctx: int | None) -> PositionSettings:
    """The positions of a model that rotates; the arguments are those of `read_positions`.

    pos= becomes that of the full layers. A scaling in config.json applies to the types of layer that have it, and so do
    scaling methods at reading. Without one they apply to the layers that see all tokens or have a window above the
    trained context: others reach no further than in training.
    """
    of_layers = read_layers(c, rule)
    full, sliding = read_ropes(c, rule, D, train_ctx)
    kinds, window = sorted(set(of_layers)), c.settings.get("sliding_window") or 0
    used = [sliding if slides else full for slides, rotates in kinds if rotates]
    scaled = [rope for rope in used if rope.scaling != NONE]
    same = all(rope.scaling == scaled[0].scaling for rope in scaled)
    c.check(same, "rope_parameters", "...", f"{FULL} and {SLIDING} have different scalings, which is not supported")
    own = used[0] if used else full._replace(pos=NONE, scaling=NONE)
    if len(kinds) == 1 and not kinds[0][0]:
        return own
    context = (scaled or [own])[0]
    types = {}
    for slides, rotates in kinds:
        rope = sliding if slides else full
        pos = rope.pos if rotates else NONE
        types[LETTERS[slides, rotates]] = LayerType(
            pos=None if pos == own.pos else pos,
            window=window if slides else None,
            scaled=rope in scaled if scaled and rotates else not slides or window > context.train_ctx,
        )
    schedule = LayerSchedule("".join(LETTERS[kind] for kind in of_layers), types, c.values["model_type"])
    return context._replace(pos=own.pos, layers=schedule)


def read_layers(c: Config, rule: PositionRule) -> list[tuple[bool, bool]]:
    """(has a window, rotates) of each layer. UserError for types that we do not have."""
    s, n_layers = c.settings, c.settings["num_hidden_layers"]
    if s.get("no_rope_layers", ()) is None:
        s["no_rope_layers"] = [int((i + 1) % s["no_rope_layer_interval"] > 0) for i in range(n_layers)]
    rotated = s.get("no_rope_layers", [1] * n_layers)  # SmolLM3: 0 is a layer without positions
    ok = len(rotated) >= n_layers and all(x in (0, 1) for x in rotated)
    c.check(ok, "no_rope_layers", rotated, f"must be a list of 0 and 1, one for each of {n_layers} layers")
    if not s.get("use_sliding_window", True):
        s["sliding_window"] = None
    usual = [SLIDING if rule.slides(s, i) else FULL for i in range(n_layers)]
    types = usual if s.get("layer_types") is None else s["layer_types"]
    accepted = [FULL, SLIDING] if s.get("sliding_window") else [FULL]
    if len(types) != n_layers or any(x not in accepted for x in types):
        right = f"must be a list of {n_layers} of {' and '.join(accepted)}"
        raise c.refuse("layer_types", types, right if SLIDING in accepted else f"{right}: there is no sliding window")
    c.check(not rule.fixed or types == usual, "layer_types", types, f"not supported: all layers must be {usual[0]}")
    slides = [x == SLIDING for x in types]
    return [(x, bool(keeps) and rule.rotates(s, x)) for x, keeps in zip(slides, rotated, strict=False)]


def read_ropes(c: Config, rule: PositionRule, D: int, train_ctx: int | None) -> list[PositionSettings]:
    """The rotation of the full layers and that of the sliding ones, which most families have in common."""
    parameters, legacy = c.settings.get("rope_parameters", {}), c.settings.get("rope_scaling")  # before transformers 5
    agree = not legacy or not parameters or parameters == legacy
    c.check(agree, "rope_scaling", legacy, "rope_parameters has other values")
    given = c.object("rope_scaling", legacy) if legacy else c.object("rope_parameters", parameters)
    base, sliding = c.settings.get("rope_theta", 10_000.0), rule.sliding_base
    if sliding is None:
        return [read_rope(c, rule, D, train_ctx, given, base)] * 2
    if isinstance(sliding, str):
        sliding = c.settings[sliding]
    elif not parameters and base != sliding:  # OLMo 3
        ok = str(c.values.get("transformers_version")).startswith("4.")
        c.check(ok, "rope_theta", base, "transformers gives it to the full layers only: must be in rope_parameters")
        sliding = base
    if legacy:  # of the full layers
        objects = [given, Config(c.path, {})]
    else:
        objects = [given.object(name, x) for name, x in given.read({FULL: {}, SLIDING: {}}).items()]
        given.finish(off=())
    # transformers reads these for all layers together, or not at all
    c.require({"original_max_position_embeddings": c.settings["max_position_embeddings"]})
    for of_type in objects:
        of_type.require({"truncate": True})
    return [read_rope(c, rule, D, train_ctx, p, x) for p, x in zip(objects, (base, sliding), strict=True)]


def read_rope(
    c: Config, rule: PositionRule, D: int, train_ctx: int | None, parameters: Config, base: float
) -> PositionSettings:
    """The rotation that config.json describes, of heads of width D.

    parameters: the `rope_parameters`, or those of one type of layer. base: where they have none. UserError for a
    rope type or parameter that we do not have, and for an L that is unknown.
    """
    nested = parameters.read({"rope_type": str | None, "type": str | None, "rope_theta": float | None})
    name = nested["rope_type"] or nested["type"] or "default"
    parameters.check(name in rule.types, "rope_type", name, f"not supported: must be one of {', '.join(rule.types)}")
    rope_type, longest = rule.types[name], c.settings["max_position_embeddings"]
    dim = rotary_dim(c, parameters, D, rope_type)
    L = pretrained_ctx(c, parameters, rope_type, rule, train_ctx)
    knobs = scaling_knobs(parameters, rope_type, longest, L)
    temper = parameters.read(TEMPER if rule.tempered else {})
    parameters.finish(off=(None,))
    theta = nested["rope_theta"] or base
    pos = {"kind": "rope", "base": float(theta), "interleaved": rule.interleaved, "rotary_fraction": dim / D}
    pos |= {"proportional": True} if rope_type == "proportional" else {}
    if temper:
        tempered = {"amount": temper["llama_4_scaling_beta"], "every": L}
        pos = {"kind": "rope_tempered", "base": float(theta), "interleaved": rule.interleaved, **tempered}
    return PositionSettings(pos, knobs, L, max(L, round(L * knobs["factor"]) if rope_type == "linear" else longest))


def rotary_dim(c: Config, parameters: Config, D: int, rope_type: str) -> int:
    """How many dimensions of a head of width D are rotated. UserError if it is no even number of them."""
    key = "partial_rotary_factor"
    if key not in c.settings and rope_type != "proportional":
        return D
    nested = parameters.read({key: float | None})[key]  # where transformers 5 has it
    place, value = (c, c.settings.get(key, 1.0)) if nested is None else (parameters, nested)
    dim = int(D * min(value, LARGEST))
    dim -= dim % 2 if rope_type == "proportional" else 0  # which rounds the pairs down
    ok = dim and dim % 2 == 0 and dim <= D
    place.check(ok, key, value, f"rotates {dim} of {D} dimensions: must be even, and at most all of them")
    return dim


def pretrained_ctx(c: Config, parameters: Config, rope_type: str, rule: PositionRule, train_ctx: int | None) -> int:
    """L, the context of the pre-training; the arguments are those of `read_rope`."""
    key, longest = "original_max_position_embeddings", c.settings["max_position_embeddings"]
    of_file = c.settings.get(key) if rule.sliding_base is None else None
    nested = parameters.read({key: int | None})[key]
    place, original = (parameters, nested) if of_file is None else (c, of_file)  # transformers prefers that of the file
    if original is None and rope_type == "longrope":
        original = rule.longrope_ctx
    # With the other rope types max_position_embeddings is the extended context
    L = longest if rope_type in ("default", "proportional", "dynamic") else original
    either = f"max_position_embeddings={longest} may be the context it was trained at or the one it was extended to"
    L = known_ctx(L, train_ctx, str(c.refuse(parameters.prefix.rstrip("."), rope_type, either)))
    place.check(original in (None, L), key, original, f"must be {L}")
    return L


def known_ctx(L: int | None, train_ctx: int | None, unknown: str) -> int:
    """L: in config.json; train_ctx: of the command. UserError if there is neither."""
    if L is None and train_ctx is None:
        raise UserError(f"{unknown}: give the context of its training, train_ctx=; with init= that is not possible")
    return L or train_ctx or 0


def scaling_knobs(parameters: Config, rope_type: str, longest: int, L: int) -> dict[str, Any]:
    """Kind and knobs of our scaling method."""
    kind, defaults = ROPE_TYPES[rope_type]
    read = parameters.read(defaults)
    if "factor" in read and read["factor"] is None:
        read["factor"] = max(1.0, longest / L) if rope_type == "longrope" else longest / L
        parameters.check(read["factor"] >= 1, "factor", read["factor"], f"must be {RIGHT[float].format(least=1)}")
    if rope_type == "yarn":
        read["truncate"] = bool(read["truncate"])  # null is false in transformers
        read |= {name: read[name] or defaults[name] for name in ("beta_fast", "beta_slow")}
        mscale = parameters.read(dict.fromkeys(("mscale", "mscale_all_dim"), float | None))
        if read["attention_factor"] is None and all(mscale.values()):  # transformers uses them only if both are there
            growth = 0.1 * float(np.log(read["factor"]))
            read["attention_factor"] = (growth * mscale["mscale"] + 1) / (growth * mscale["mscale_all_dim"] + 1)
    return {"kind": kind} | {RENAMED.get(kind, {}).get(name, name): value for name, value in read.items()}


# ---- to config.json ----

# Our method -> the rope type that it is written as. ntk_by_parts is the formula of llama3.
WRITTEN_AS = {"none": "default", "pi": "linear", "yarn": "yarn", "llama3": "llama3", "ntk_by_parts": "llama3"}
OTHER_BASE = ("ntk", "dynamic_ntk", "dynamic_hf")  # a run keeps the scaling of its trained length: another base
# Setting -> the values that can be written
EXPRESSIBLE: dict[str, tuple] = {"attention": ("softmax",), "scaling": (*WRITTEN_AS, *OTHER_BASE), "plus": ([],)}
EXPRESSIBLE |= {"pos.kind": ("rope", "none"), "pos.rotary_fraction": (1.0,)}


class Layer(NamedTuple):
    """A layer as transformers can express it."""

    rope: dict | None  # its rope_parameters; None: no positions
    window: int | None


def layers_of(cfg: TrainConfig, expressible: Mapping[str, tuple] = EXPRESSIBLE) -> list[Layer]:
    """The layers of a run. UserError for an encoding or a scaling that no family has."""
    context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
    change = gpt.trained_scaling(cfg, context, cfg.ctx)
    schedule, layers = cfg.layers or LayerSchedule("A" * cfg.model.n_layers, {"A": LayerType()}), {}
    for (letter, layer_type), of_type in zip(schedule.types.items(), change.by_type or [change], strict=True):
        pos, scaling = layer_type.pos or cfg.pos, cfg.scaling if layer_type.scaled else NONE
        settings = {"attention": cfg.attention, "plus": cfg.plus, "scaling": scaling["kind"]}
        settings |= {f"pos.{key}": value for key, value in pos.items()}
        if pos.get("proportional"):  # is a rope type, and a config has one: no scaling beside it
            share, D = settings.pop("pos.rotary_fraction", 1.0), cfg.model.head_width
            ok = share * D % 2 == 0
            check(ok, "pos.rotary_fraction", share, f"a whole number of pairs of head_dim={D} to be exported")
            check(scaling == NONE, "scaling", scaling["kind"], "none with a proportional rotation to be exported")
        for setting, right in expressible.items():
            value = settings.get(setting, right[0])
            check(value in right, setting, value, f"{', '.join(map(str, right))} to be exported")
        check(layer_type.sinks == 0, f"layers.{letter}.sinks", layer_type.sinks, "0 to be exported")
        rope = rope_parameters(pos, scaling, of_type, context.train_ctx) if pos != NONE else None
        layers[letter] = Layer(rope, layer_type.window)
    return [layers[letter] for letter in schedule.pattern]


def rope_parameters(pos: dict, scaling: dict, change: ContextChange, L: int) -> dict[str, Any]:
    """rope_parameters of config.json for layers with this encoding and this scaling in training.

    change: the scaling with its factors resolved. L: the pre-trained context, tokens.
    """
    kind, share = scaling["kind"], pos.get("rotary_fraction", 1.0)
    partial = {"partial_rotary_factor": share} if share != 1 else {}
    if kind in OTHER_BASE:
        assert change.inv_freq is not None
        D = 2 * len(change.inv_freq)
        return {"rope_theta": pos["base"] * change.factor ** (D / (D - 2)), "rope_type": "default"} | partial
    rope_type = "proportional" if pos.get("proportional") else WRITTEN_AS[kind]
    knobs = {**scaling, "factor": change.factor, "attention_factor": change.attention_factor}
    written = {"rope_theta": float(pos["base"]), "rope_type": rope_type, **partial}
    for name in ROPE_TYPES[rope_type][1]:
        written[name] = knobs[RENAMED.get(kind, {}).get(name, name)]
        if name == "factor" and rope_type != "linear":
            written["original_max_position_embeddings"] = L
    return written


def layer_keys(layers: list[Layer], ctx: int, by_type: bool) -> dict[str, Any]:
    """The keys of config.json that say these layers, as far as it can: hf/write.py reads them back.

    by_type: of a family with rope_parameters of each type of layer.
    """
    types = [SLIDING if layer.window else FULL for layer in layers]
    windows = [layer.window for layer in layers if layer.window]
    ropes = {layer_type: layer.rope for layer_type, layer in zip(types, layers, strict=True) if layer.rope}
    return {
        "rope_parameters": ropes if by_type else next(iter(ropes.values()), None),
        "layer_types": types,
        "use_sliding_window": bool(windows),
        # Where no layer has a window, transformers asks these families for one nevertheless
        "sliding_window": next(iter(windows), ctx if by_type else None),
        "no_rope_layers": [int(layer.rope is not None) for layer in layers],
    }
