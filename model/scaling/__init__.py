"""Context extension: one file per method, with one pure function `scale`. conf/scaling/NAME.yaml has `kind: FILE`.

A new method is one .py here and one .yaml; nothing else changes:

    def scale(trained: TrainedContext, n: int, <knobs of the yaml>) -> ContextChange

It returns the change of the model when a run that was trained at L tokens processes n tokens. It is a pure function and
has no access to the model, the device or a cache, so the order in which lengths are evaluated does not matter. If the
logits of earlier positions depend on the length of the input (dynamic NTK), the module sets PREFIX_CONSISTENT = False.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from conf.errors import UserError, check
from conf.layer_schedule import LayerType
from conf.registry import build_from_knobs, load_kind, yaml_name
from model.regions import PositionMap


class NotApplicable(UserError):
    """The method cannot be applied to this run."""


@dataclass(frozen=True)
class TrainedContext:
    """The facts about a run that scaling methods may use."""

    pos: str  # the encoding's name
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    frequencies: Tensor | None  # inv_freq, float64 [rotary_dim / 2], or None if the encoding does not rotate
    attention: str = "softmax"
    longest_trained_ctx: int = 0  # the longest context that this run was trained on in any way; at least L
    by_type: tuple["TrainedContext", ...] = ()  # of a layer schedule: the facts about each type of layer
    layer_type: LayerType = field(default_factory=LayerType)  # in by_type: of these layers

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_trained_ctx", max(self.train_ctx, self.longest_trained_ctx))

    def require_rotation(self) -> Tensor:
        """The frequencies, float64 [rotary_dim / 2]. NotApplicable for an encoding that does not rotate."""
        if self.frequencies is None:
            raise NotApplicable(f"it needs rotary frequencies, and pos={self.pos} has none")
        return self.frequencies

    inv_freq = property(require_rotation)  # trained.inv_freq, as methods write it

    def checked_size(self, size: int | None, default: int) -> int:
        """The knob `size` of a map of positions, tokens, or `default` for None: between 1 and the trained context.

        NotApplicable for an encoding that does not rotate.
        """
        self.require_rotation()
        L = self.longest_trained_ctx
        check(size is None or 1 <= size <= L, "scaling.size", size, f"between 1 and the trained context, {L}")
        return max(1, default) if size is None else size


@dataclass(frozen=True)
class ContextChange:
    """What a scaling method changes in the model. A field that equals its default is left as it was trained."""

    inv_freq: Tensor | None = None  # float64 [rotary_dim / 2]; None: the trained ones
    factor: float = 1.0  # s, as resolved: for logs and tables only
    attention_factor: float = 1.0  # multiplies cos and sin, so scores grow by its square
    window: int | None = None  # each query sees this many keys, itself included; None: all
    always_visible: int = 0  # the first keys, which every query sees in addition to the window
    logn: int | None = None  # L: a query at position m is multiplied by max(1, ln(m + 1) / ln L)
    position_map: PositionMap | None = None  # regions of pairs that are rotated as if at other positions
    # Of a layer schedule: the change of each type of layer. The other fields then describe the model as a whole, for
    # logs; no layer sees more than `window` and `always_visible`.
    by_type: tuple["ContextChange", ...] = ()

    def overrides(self) -> dict:
        """The fields that this changes. A value that equals the default counts as unchanged, a tensor as changed."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {k: v for k, (v, default) in values.items() if isinstance(v, Tensor) or v != default}

    def effect(self, n: int, trained: TrainedContext) -> tuple:
        """What this changes for n tokens: equal for two changes with equal results. trained: the run's."""
        if self.by_type:
            return tuple(change.effect(n, own) for change, own in zip(self.by_type, trained.by_type, strict=True))
        inv_freq = trained.frequencies if self.inv_freq is None else self.inv_freq
        frequencies = None if inv_freq is None else tuple(inv_freq.tolist())
        window = (self.window, self.always_visible) if self.window is not None and self.window < n else None
        logn = self.logn if self.logn is not None and self.logn < n else None
        position_map = self.position_map if self.position_map and self.position_map.near < n else None
        return frequencies, self.attention_factor, window, logn, position_map

    def reach(self, n: int, last: int, n_layers: int) -> int:
        """How many of n tokens the outputs of the last ones can depend on: each layer sees window - 1 further back."""
        # Some maps of positions count from the first token, so none can be left out
        if self.window is None or self.always_visible or self.position_map:
            return n
        return min(n, last + n_layers * (self.window - 1))


NO_CHANGE = ContextChange()


def override(of_run: ContextChange, requested: ContextChange) -> ContextChange:
    """Combine the scaling requested at evaluation with that of the run, which it was trained with.

    A request that changes inv_freq replaces inv_freq and attention_factor together, and of two windows the narrower
    counts; every other field that the request does not change keeps its trained value.
    """
    if requested.inv_freq is not None:
        of_run = replace(of_run, inv_freq=None, attention_factor=1.0, factor=1.0)
    by_type = tuple(map(override, of_run.by_type, requested.by_type))
    seen = min(requested, of_run, key=lambda x: math.inf if x.window is None else x.window + x.always_visible)
    windows = {"window": seen.window, "always_visible": seen.always_visible}
    return replace(of_run, **{**requested.overrides(), **windows, "by_type": by_type})


def resolve(knobs: dict, trained: TrainedContext, n: int, ctx: int, plus: Sequence[dict] = ()) -> ContextChange:
    """The change by the method in `knobs` (a yaml of conf/scaling) when the run processes n tokens.

    A knob called `factor` becomes a number here: auto is n / L (1 for n <= L), fixed is ctx / L at every n (as in a
    deployed model, whose factor cannot follow the length), and a number is used as it is. ctx: the longest length of
    the evaluation, tokens. plus: the knobs of methods to combine with. NotApplicable if a method does not fit the run.
    """
    if trained.by_type:
        return resolve_types((knobs, *plus), trained, n, ctx)
    if plus:
        return combine([resolve(k, trained, n, ctx) for k in (knobs, *plus)])
    values = dict(knobs)
    if "factor" in values:
        values["factor"] = resolve_factor(values["factor"], trained, n, ctx)
    try:
        scale = load_kind("model.scaling", knobs["kind"], "scale", "scaling")
        change = build_from_knobs(scale, values, "scaling", trained, n)
        if trained.attention == "linear" and (change.logn or change.position_map or change.always_visible):
            raise NotApplicable("it changes single scores, and attention=linear has none")
        return change
    except NotApplicable as e:
        raise NotApplicable(f"scaling={yaml_name('scaling', knobs)} is not applicable: {e}") from None


def resolve_factor(factor: object, trained: TrainedContext, n: int, ctx: int) -> float:
    """The extension factor s >= 1, from auto, fixed or a number."""
    if factor == "auto":  # a fine-tuned run has at least the factor of its extended context
        return max(1.0, max(n, trained.longest_trained_ctx) / trained.train_ctx)
    if factor == "fixed":
        return max(1.0, max(ctx, trained.longest_trained_ctx) / trained.train_ctx)
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor < math.inf:
        return float(factor)
    raise UserError(f"scaling.factor={factor}: must be auto, fixed or a number of at least 1")


# ---- several methods together: scaling=ntk plus=logn ----


def combine(changes: Sequence[ContextChange]) -> ContextChange:
    """All these changes, as the literature joins NTK or ReRoPE with log-n.

    NotApplicable if two of them change the same field.
    """
    result = NO_CHANGE
    for change in changes:
        if both := (result.overrides().keys() & change.overrides().keys()) - {"factor"}:
            names = ", ".join(sorted(both))
            raise NotApplicable(f"plus: two methods change the same thing ({names}), so they do not compose")
        result = replace(result, **change.overrides())
    return result


# ---- of each type of layer ----


def sees_less(layer_type: LayerType, change: ContextChange) -> bool:
    """Whether the layers' own window is narrower than what a change lets them see."""
    window = layer_type.window
    return window is not None and (change.window is None or window < change.window + change.always_visible)


def with_own_window(layer_type: LayerType, change: ContextChange) -> ContextChange:
    """The change, but with the layers' own window if that is narrower."""
    if not sees_less(layer_type, change):
        return change
    return replace(change, window=layer_type.window, always_visible=layer_type.sinks)


def resolve_types(scalings: Sequence[dict], trained: TrainedContext, n: int, ctx: int) -> ContextChange:
    """The change by these methods, of each type of layer (ContextChange.by_type). See `resolve`.

    A method that limits what queries see (window, window_sink) applies to all types, and a type whose own window is
    narrower keeps it. Any other method applies to the types with scaled=true. Types that it does not fit, such as
    layers without frequencies under NTK, stay as they are; NotApplicable if it fits none.
    """
    by_method = [resolve_method(knobs, trained, n, ctx) for knobs in scalings]
    changes = [combine(of_type) for of_type in zip(*by_method, strict=True)]
    seen = [with_own_window(own.layer_type, change) for own, change in zip(trained.by_type, changes, strict=True)]
    limited = all(change.window is not None for change in seen)
    return ContextChange(
        inv_freq=next((change.inv_freq for change in changes if change.inv_freq is not None), None),
        factor=max(change.factor for change in changes),
        attention_factor=max(change.attention_factor for change in changes),
        window=max(change.window or 0 for change in seen) if limited else None,
        always_visible=max(change.always_visible for change in seen) if limited else 0,
        position_map=next((change.position_map for change in changes if change.position_map is not None), None),
        by_type=tuple(changes),
    )


def resolve_method(knobs: dict, trained: TrainedContext, n: int, ctx: int) -> list[ContextChange]:
    """The change of each type of layer by one method."""
    changes, refused, applies = [], None, False
    for context in trained.by_type:
        try:
            change = resolve(knobs, context, n, ctx)
        except UserError as e:  # divisors of each pair, say, need not fit layers that are not scaled
            if context.layer_type.scaled and not isinstance(e, NotApplicable):
                raise
            refused, change = e, None
        if change is None or not (context.layer_type.scaled or change.window is not None):
            changes.append(NO_CHANGE)
            continue
        applies = True
        kept = change.window is not None and sees_less(context.layer_type, change)
        changes.append(NO_CHANGE if kept else change)
    if applies or knobs["kind"] == "none":
        return changes
    if refused:
        raise refused
    raise NotApplicable(f"scaling={yaml_name('scaling', knobs)} is not applicable: no layer of {trained.pos} is scaled")
