"""Translates between the kinds of layer in config.json (windows, no positions, two bases) and our layer schedules.

transformers has two types of layer, full_attention and sliding_attention. All sliding layers have the same window. Some
families have separate rope_parameters for each type. conf/layer_schedule.py documents the form of our schedules.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from conf.errors import UserError
from conf.layer_schedule import LayerSchedule, LayerType
from conf.schema import TrainConfig
from hf.config import Config
from hf.rope import PositionSettings, Rotation, read_rope, rope_object, rope_parameters
from model import gpt

FULL, SLIDING = "full_attention", "sliding_attention"

# ---- from config.json ----


class LayerRule(NamedTuple):
    """Which layers of a family have the window, and which rotate: all, but of SmolLM3 those of no_rope_layers."""

    # (settings, layer) -> whether it has the window, where the key layer_types is absent
    slides: Callable[[dict[str, Any], int], bool] = lambda s, i: False
    fixed: bool = False  # transformers does not read layer_types
    only_windows_rotate: bool = False


def read_layers(c: Config, rule: LayerRule) -> list[tuple[int | None, bool]]:
    """(window in tokens or None, whether it rotates) of each layer. UserError for types that we do not have."""
    s, n_layers = c.settings, c.settings["num_hidden_layers"]
    rotated = read_rotated(c) if "no_rope_layers" in s else [True] * n_layers
    if not s.get("use_sliding_window", True):
        s["sliding_window"] = None
    window, types = s.get("sliding_window"), s.get("layer_types")
    usual = [SLIDING if rule.slides(s, i) else FULL for i in range(n_layers)]
    types, accepted = usual if types is None else types, [FULL, SLIDING] if window else [FULL]
    for wrong in [x for x in types if x not in accepted][:1]:
        without = "" if window else " without a sliding window"
        raise c.refuse("layer_types", wrong, f"not supported{without}: must be {' or '.join(accepted)}")
    if len(types) != n_layers:
        raise c.refuse("layer_types", len(types), f"must be a list of {n_layers}, one for each layer")
    if rule.fixed and types != usual:
        raise c.refuse("layer_types", types, f"not supported: all layers of {c.values['model_type']} are {usual[0]}")
    slides = [x == SLIDING for x in types]
    rotated = slides if rule.only_windows_rotate else rotated
    return [(window if x else None, rotates) for x, rotates in zip(slides, rotated, strict=True)]


def read_rotated(c: Config) -> list[bool]:
    """SmolLM3's no_rope_layers, in which 0 is a layer without positions and 1 one that rotates."""
    s, n_layers = c.settings, c.settings["num_hidden_layers"]
    if s["no_rope_layers"] is None:
        s["no_rope_layers"] = [int((i + 1) % s["no_rope_layer_interval"] > 0) for i in range(n_layers)]
    rotated = s["no_rope_layers"]
    if len(rotated) < n_layers or any(x not in (0, 1) for x in rotated):
        raise c.refuse("no_rope_layers", rotated, f"must be a list of 0 and 1, one for each of {n_layers} layers")
    return [bool(x) for x in rotated[:n_layers]]


def read_rope_of_types(c: Config, rotation: Rotation, D: int, train_ctx: int | None) -> dict[str, PositionSettings]:
    """The rotation of each type of layer; the arguments are those of `read_rope`.

    rope_scaling, the older form, is that of the full layers.
    """
    given, base, sliding = rope_object(c), c.settings["rope_theta"], rotation.sliding_base or 0.0
    if isinstance(sliding, str):
        sliding = c.settings[sliding]
    elif not c.settings["rope_parameters"] and base != sliding:  # OLMo 3
        if not str(c.values.get("transformers_version")).startswith("4."):
            reason = "transformers gives it to the full layers only: rope_parameters must have it for each type"
            raise c.refuse("rope_theta", base, reason)
        sliding = base
    objects = {FULL: given, SLIDING: Config(c.path, {})}
    if not given.prefix.startswith("rope_scaling"):
        for name in (name for name in given.values if name not in objects):
            reason = f"not supported: there are {FULL} and {SLIDING}, which are objects"
            raise given.refuse(name, given.values[name], reason)
        objects = {name: given.object(name, given.values.get(name) or {}) for name in objects}
    for parameters in objects.values():
        if (truncate := parameters.values.get("truncate", True)) is not True:
            reason = "transformers reads it for all layers together only: must be true"
            raise parameters.refuse("truncate", truncate, reason)
    key, longest = "original_max_position_embeddings", c.settings["max_position_embeddings"]
    if c.settings[key] not in (None, longest) and not any(p.values.get(key) for p in objects.values()):
        raise c.refuse(key, c.settings[key], "transformers reads it only in rope_parameters of a type of layer")
    types = {x: p.values.get("rope_type") or p.values.get("type") or "default" for x, p in objects.items()}
    scaled = [x for x, rope_type in types.items() if rope_type != "default"]  # a context of train_ctx= is theirs
    return {
        name: read_rope(c, rotation, D, train_ctx if name in scaled or not scaled else None, p, theta, of_type=True)
        for (name, p), theta in zip(objects.items(), (base, sliding), strict=True)
    }


def read_positions(c: Config, rule: LayerRule, rotation: Rotation, D: int, train_ctx: int | None) -> PositionSettings:
    """The positions of a model that rotates; the arguments are those of `read_rope`.

    pos= becomes that of the full layers. A scaling in config.json applies to the types of layer that have it, and so do
    scaling methods at reading. Without one they apply to the layers that see all tokens or have a window above the
    trained context: others reach no further than in training.
    """
    of_layers = read_layers(c, rule)
    if rotation.sliding_base is None:
        both = read_rope(c, rotation, D, train_ctx, rope_object(c), c.settings.get("rope_theta", 0.0))
        full = sliding = both
    else:
        full, sliding = read_rope_of_types(c, rotation, D, train_ctx).values()
    kinds = sorted({(window is not None, rotates) for window, rotates in of_layers})
    used = [sliding if windowed else full for windowed, rotates in kinds if rotates]
    if not used:
        raise c.refuse("num_hidden_layers", len(of_layers), "not supported: no layer has positions")
    scaled = [rope for rope in used if rope.scaling["kind"] != "none"]
    if any(rope.scaling != scaled[0].scaling for rope in scaled):
        reason = f"{FULL} and {SLIDING} have different scalings, which is not supported"
        raise UserError(f"{c.path}: rope_parameters: {reason}")
    own = used[0]
    if kinds == [(False, True)]:
        return own
    context = (scaled or [own])[0]
    letters = dict(zip(kinds, letters_of(kinds), strict=True))
    pattern = "".join(letters[w is not None, rotates] for w, rotates in of_layers)
    window, types = next((w for w, _ in of_layers if w is not None), None), {}
    for (windowed, rotates), letter in letters.items():
        rope = sliding if windowed else full
        types[letter] = LayerType(
            pos={"kind": "none"} if not rotates else None if rope.pos == own.pos else rope.pos,
            window=window if windowed else None,
            sinks=0,
            scaled=rope in scaled if scaled and rotates else not windowed or (window or 0) > context.train_ctx,
        )
    return context._replace(pos=own.pos, layers=LayerSchedule(pattern, types, c.values["model_type"]))


def letters_of(kinds: list[tuple[bool, bool]]) -> list[str]:
    """A letter for each kind of layer (has a window, rotates), where possible that of the yamls in conf/layers."""
    windows = any(windowed for windowed, _ in kinds)
    names = {(True, True): "L", (True, False): "M", (False, True): "G" if windows else "R", (False, False): "N"}
    if windows and (False, True) not in kinds:
        names[False, False] = "G"
    return [names[kind] for kind in kinds]


# ---- to config.json ----


class Layer(NamedTuple):
    """A layer as transformers can express it."""

    rope: dict | None  # its rope_parameters; None: no positions
    window: int | None


def layers_of(cfg: TrainConfig) -> list[Layer]:
    """The layers of a run. UserError for an encoding or a scaling that no family has."""
    context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
    change = gpt.trained_scaling(cfg, context, cfg.ctx)
    if not cfg.layers:
        return [Layer(rope_parameters(cfg, change, context.train_ctx), None)] * cfg.model.n_layers
    types: dict[str, Layer] = {}
    for (letter, layer_type), of_type in zip(cfg.layers.types.items(), change.by_type, strict=True):
        if layer_type.sinks:
            raise UserError(f"layers.{letter}.sinks={layer_type.sinks}: cannot be exported: must be 0")
        pos, scaling = layer_type.pos or cfg.pos, cfg.scaling if layer_type.scaled else {"kind": "none"}
        own = replace(cfg, pos=pos, scaling=scaling)
        rope = None if pos["kind"] == "none" else rope_parameters(own, of_type, context.train_ctx)
        types[letter] = Layer(rope, layer_type.window)
    return [types[letter] for letter in cfg.layers.pattern]


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
