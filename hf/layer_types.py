"""Translates between the kinds of layer in config.json (windows, no positions, two bases) and our layer schedules.

transformers has two types of layer, full_attention and sliding_attention. All sliding layers have the same window. Some
families have separate rope_parameters for each type. conf/layer_schedule.py documents the form of our schedules.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from conf.errors import UserError
from conf.layer_schedule import describe_layers
from conf.schema import TrainConfig
from hf.config import Config
from hf.rope_types import PositionSettings, read_rope, rope_object, rope_parameters
from model.scaling import ContextChange

FULL, SLIDING = "full_attention", "sliding_attention"

# ---- from config.json: windows ----


def read_windows(
    c: Config, n_layers: int, window: int | None, slides: Callable[[int], bool], fixed: bool = False
) -> list[int | None]:
    """The window of each layer in tokens, None: all earlier tokens.

    window: that of the sliding layers. slides: whether layer i slides where the key layer_types is absent. fixed:
    transformers does not read layer_types in this family. UserError for types that we do not have, or that are not one
    for each layer.
    """
    usual = [SLIDING if slides(i) else FULL for i in range(n_layers)]
    types = c.get("layer_types", default=usual)
    accepted = [FULL, SLIDING] if window else [FULL]
    for wrong in [x for x in types if x not in accepted][:1] if isinstance(types, list) else [types]:
        without = "" if window else " without a sliding window"
        raise c.refuse("layer_types", wrong, f"not supported{without}: must be {' or '.join(accepted)}")
    if len(types) != n_layers:
        raise c.refuse("layer_types", len(types), f"must be a list of {n_layers}, one for each layer")
    if fixed and types != usual:
        raise c.refuse("layer_types", types, f"not supported: all layers of {c.get('model_type')} are {usual[0]}")
    return [window if x == SLIDING else None for x in types]


def sliding_window(c: Config, default: int | None) -> int | None:
    """The key sliding_window. default: where it is absent; null is no window."""
    return c.optional_count("sliding_window", default=None if "sliding_window" in c.values else default)


def windows_of_family(c: Config, kind: str, rotated: list[bool]) -> list[int | None]:
    """Like `read_windows`, for the families that hf/families.py reads as Llama. rotated: whether each layer rotates."""
    n_layers, window = len(rotated), None
    if kind in ("mistral", "phi3"):
        window = sliding_window(c, 4096 if kind == "mistral" else None)
        return read_windows(c, n_layers, window, lambda i: window is not None, fixed=True)
    if kind == "olmo3":
        return read_windows(c, n_layers, sliding_window(c, 4096), lambda i: (i + 1) % 4 > 0)
    if kind in ("qwen2", "qwen3", "smollm3"):
        if c.flag("use_sliding_window"):
            window = sliding_window(c, None if kind == "smollm3" else 4096)
        c.ignore("sliding_window")
    first = c.number("max_window_layers", default=28) if window and kind != "smollm3" else 0
    slides = (lambda i: not rotated[i]) if kind == "smollm3" else (lambda i: i >= first)
    return read_windows(c, n_layers, window, lambda i: window is not None and slides(i))


# ---- from config.json: positions ----


def read_rotated(c: Config, n_layers: int) -> list[bool]:
    """Whether each layer rotates: SmolLM3's no_rope_layers, in which 0 is a layer without positions."""
    interval = c.count("no_rope_layer_interval", default=4)
    usual = [int((i + 1) % interval > 0) for i in range(n_layers)]
    rotated = c.get("no_rope_layers", default=usual)
    ok = isinstance(rotated, list) and len(rotated) >= n_layers and all(x in (0, 1) for x in rotated)
    if not ok:
        raise c.refuse("no_rope_layers", rotated, f"must be a list of 0 and 1, one for each of {n_layers} layers")
    return [bool(x) for x in rotated[:n_layers]]


def read_rope_of_types(
    c: Config, bases: dict[str, float], longest: int, train_ctx: int | None
) -> dict[str, PositionSettings]:
    """The rotation of each type of layer, from rope_parameters of each type.

    bases: rope_theta of each type where rope_parameters lacks it. The older rope_scaling is that of the full layers.
    The other arguments are those of `read_rope`.
    """
    key, given = rope_object(c)
    objects = {FULL: given} if key == "rope_scaling" else given
    for name, value in objects.items():
        if name not in bases or not isinstance(value, dict | None):
            raise c.refuse(f"{key}.{name}", value, f"not supported: there are {FULL} and {SLIDING}, which are objects")
    for name, value in objects.items():
        if value and "truncate" in value and value["truncate"] is not True:
            reason = "transformers reads it for all layers together only: must be true"
            raise c.refuse(f"{key}.{name}.truncate", value["truncate"], reason)
    parameters: dict[str, dict] = {layer_type: objects.get(layer_type) or {} for layer_type in bases}
    scaled = [x for x, p in parameters.items() if (p.get("rope_type") or p.get("type") or "default") != "default"]
    return {
        layer_type: read_rope(
            c, key if key == "rope_scaling" else f"{key}.{layer_type}", parameters[layer_type], base, longest,
            train_ctx if layer_type in scaled or not scaled else None,  # the other layers have no context of their own
        )
        for layer_type, base in bases.items()
    }  # fmt: skip


def with_layers(
    c: Config, windows: list[int | None], rotated: list[bool], full: PositionSettings, sliding: PositionSettings
) -> PositionSettings:
    """The positions of a model whose layers have these windows, and are rotated or not.

    full, sliding: the rotation of the layers without and with a window. pos= becomes that of the full layers. A scaling
    in config.json applies to the types of layer that have it, and so do scaling methods at reading. Without one they
    apply to the layers that see all tokens or have a window above the trained context: others reach no further than in
    training.
    """
    kinds = sorted({(window is not None, rotates) for window, rotates in zip(windows, rotated, strict=True)})
    used = [sliding if windowed else full for windowed, rotates in kinds if rotates]
    if not used:
        raise c.refuse("num_hidden_layers", len(windows), "not supported: no layer has positions")
    scaled = [rope for rope in used if rope.scaling["kind"] != "none"]
    if any(rope.scaling != scaled[0].scaling for rope in scaled):
        reason = f"{FULL} and {SLIDING} have different scalings, which is not supported"
        raise UserError(f"{c.path}: rope_parameters: {reason}")
    own = used[0]
    if kinds == [(False, True)]:
        return own
    context = (scaled or [own])[0]
    letters = dict(zip(kinds, letters_of(kinds), strict=True))
    layers: dict[str, Any] = {
        "pattern": "".join(letters[w is not None, r] for w, r in zip(windows, rotated, strict=True))
    }
    window = next((w for w in windows if w is not None), None)
    for (windowed, rotates), letter in letters.items():
        rope = sliding if windowed else full
        layers[letter] = {
            "pos": {"kind": "none"} if not rotates else None if rope.pos == own.pos else rope.pos,
            "window": window if windowed else None,
            "sinks": 0,
            "scaled": rope in scaled if scaled and rotates else not windowed or (window or 0) > context.train_ctx,
        }
    return context._replace(pos=own.pos, layers=layers)


def letters_of(kinds: list[tuple[bool, bool]]) -> list[str]:
    """A letter for each kind of layer (has a window, rotates), where possible that of the yamls in conf/layers."""
    windows = any(windowed for windowed, _ in kinds)
    names = {(True, True): "L", (True, False): "M", (False, True): "G" if windows else "R", (False, False): "N"}
    if windows and (False, True) not in kinds:
        names[False, False] = "G"
    return [names[kind] for kind in kinds]


# ---- to config.json ----

# The model_type that is written for a run with a layer schedule, by the one without
WITH_LAYERS = {"llama": "smollm3", "qwen3": "qwen3", "olmo2": "olmo3", "gemma3_text": "gemma3_text",
               "cohere2": "cohere2"}  # fmt: skip
BY_TYPE = ("olmo3", "gemma3_text")  # with rope_parameters of each type of layer


class Layer(NamedTuple):
    """A layer as transformers can express it."""

    rope: dict | None  # its rope_parameters; None: no positions
    window: int | None


def layers_of(cfg: TrainConfig, change: ContextChange, L: int) -> list[Layer]:
    """The layers of a run; the arguments are those of `rope_parameters`. UserError for what no family has."""
    if not cfg.layers:
        return [Layer(rope_parameters(cfg, change, L), None)] * cfg.model.n_layers
    kinds: dict[str, Layer] = {}
    letters = [letter for letter in cfg.layers if letter != "pattern"]
    for letter, its_change in zip(letters, change.kinds, strict=True):
        kind, window = cfg.layers[letter], cfg.layers[letter]["window"]
        if kind["sinks"]:
            raise UserError(f"layers.{letter}.sinks={kind['sinks']}: cannot be exported: must be 0")
        if other := [x.window for x in kinds.values() if None not in (x.window, window) and x.window != window]:
            raise UserError(f"layers.{letter}.window={window}: cannot be exported beside a window of {other[0]}")
        pos, scaling = kind["pos"] or cfg.pos, cfg.scaling if kind["scaled"] else {"kind": "none"}
        rotates = pos["kind"] != "none"
        rope = rope_parameters(replace(cfg, pos=pos, scaling=scaling), its_change, L) if rotates else None
        kinds[letter] = Layer(rope, window)
    return [kinds[letter] for letter in cfg.layers["pattern"]]


def layer_keys(cfg: TrainConfig, model_type: str, layers: list[Layer]) -> dict[str, Any]:
    """The keys of config.json for these layers. UserError if the layers of model_type cannot be such."""

    def only(wanted: str | None = None) -> dict | None:
        """The rope_parameters that all layers of a type have, or of both types."""
        ropes = [layer.rope for layer, x in zip(layers, types, strict=True) if wanted in (None, x)]
        ropes = [rope for rope in ropes if rope is not None or model_type not in ("smollm3", "cohere2")]
        if any(rope is None or rope != ropes[0] for rope in ropes):
            what = "rope_parameters of each layer_types" if model_type in BY_TYPE else "the same base and scaling"
            raise UserError(
                f"layers={describe_layers(cfg)}: cannot be exported: the layers of {model_type} have {what}"
            )
        return ropes[0] if ropes else None

    windows = [layer.window for layer in layers]
    types = [FULL if window is None else SLIDING for window in windows]
    window = next((w for w in windows if w is not None), None)
    if model_type in BY_TYPE:
        ropes = {layer_type: only(layer_type) for layer_type in types}
        if cut := [rope for rope in ropes.values() if rope and not rope.get("truncate", True)]:
            raise UserError(f"scaling.truncate={cut[0]['truncate']}: cannot be exported as {model_type}: must be true")
        # Without a window transformers asks for one nevertheless, which no layer has
        return {"rope_parameters": ropes, "layer_types": types, "sliding_window": window or cfg.ctx}
    keys: dict[str, Any] = {"rope_parameters": only()}
    if model_type == "cohere2":
        if any((layer.rope is None) != (layer.window is None) for layer in layers):
            what = "positions if they have a window, and else none"
            raise UserError(f"layers={describe_layers(cfg)}: cannot be exported: the layers of cohere2 have {what}")
        return keys | {"layer_types": types, "sliding_window": window}
    if model_type == "smollm3":
        keys["no_rope_layers"] = [int(layer.rope is not None) for layer in layers]
    if cfg.layers:
        keys |= {"layer_types": types, "sliding_window": window, "use_sliding_window": window is not None}
    return keys
