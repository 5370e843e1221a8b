"""Context extension: one file per method, with one pure function `scale`. conf/scaling/NAME.yaml has `kind: FILE`.

A new method is one .py here and one .yaml; nothing else changes:

    def scale(trained: TrainedContext, n: int, <knobs of the yaml>) -> ContextChange

It returns the change of the model when a run that was trained at L tokens processes n tokens. It is a pure function and
has no access to the model, the device or a cache, so the order in which lengths are evaluated does not matter. If the
logits of earlier positions depend on the length of the input (dynamic NTK), the module sets PREFIX_CONSISTENT = False.
A module may also have a function `warning(knobs, trained) -> str`, for knobs that are unusual for a run.
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from torch import Tensor

from conf.errors import UserError
from conf.registry import build_from_knobs, load_kind, yaml_name

if TYPE_CHECKING:
    from model.position_maps import PositionMap


class NotApplicable(UserError):
    """The method cannot be applied to this run."""


@dataclass(frozen=True)
class TrainedContext:
    """The facts about a run that scaling methods may use."""

    pos: str  # the encoding's name
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    frequencies: Tensor | None  # float64 [rotary_dim / 2], or None if the encoding does not rotate
    attention: str = "softmax"
    extended_ctx: int = 0  # the context after fine-tuning to a longer one; 0: not fine-tuned
    # Of a layer schedule: a KindContext (model/layers.py) of each kind of layer
    kinds: tuple["TrainedContext", ...] = ()

    @property
    def longest_trained_ctx(self) -> int:
        """The longest context that this run was trained on in any way, tokens."""
        return max(self.train_ctx, self.extended_ctx)

    @property
    def inv_freq(self) -> Tensor:
        """float64 [rotary_dim / 2]. NotApplicable for an encoding that does not rotate."""
        if self.frequencies is None:
            raise NotApplicable(f"it needs rotary frequencies, and pos={self.pos} has none")
        return self.frequencies


@dataclass(frozen=True)
class ContextChange:
    """What a scaling method changes in the model. A field that equals its default is left as it was trained."""

    inv_freq: Tensor | None = None  # float64 [rotary_dim / 2]; None: the trained ones
    factor: float = 1.0  # s, as resolved: for logs and tables only
    attention_factor: float = 1.0  # multiplies cos and sin, so scores grow by its square
    window: int | None = None  # each query sees this many keys, itself included; None: all
    sinks: int = 0  # the first keys, which every query sees in addition to the window
    logn: int | None = None  # L: a query at position m is multiplied by max(1, ln(m + 1) / ln L)
    position_map: "PositionMap | None" = None  # regions of pairs that are rotated as if at other positions
    # Of a layer schedule: the change of each kind of layer. The other fields then describe the model as a whole, for
    # logs; no layer sees more than `window` and `sinks`.
    kinds: tuple["ContextChange", ...] = ()

    def overrides(self) -> dict:
        """The fields that this changes. A value that equals the default counts as unchanged, a tensor as changed."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {k: v for k, (v, default) in values.items() if isinstance(v, Tensor) or v != default}

    def effect(self, n: int, trained: TrainedContext) -> tuple:
        """What this changes for n tokens: equal for two changes with equal results. trained: the run's."""
        if self.kinds:
            return tuple(change.effect(n, kind) for change, kind in zip(self.kinds, trained.kinds, strict=True))
        window, logn = (x if x is not None and x < n else None for x in (self.window, self.logn))
        changed = self.position_map is not None and self.position_map.unchanged_up_to < n
        inv_freq = trained.frequencies if self.inv_freq is None else self.inv_freq
        frequencies = None if inv_freq is None else tuple(inv_freq.tolist())
        return frequencies, self.attention_factor, window, window and self.sinks, logn, changed and self.position_map

    def reach(self, n: int, last: int, n_layers: int) -> int:
        """How many of n tokens the outputs of the last ones can depend on: each layer sees window - 1 further back."""
        # Some maps of positions count from the first token, so none can be left out
        if self.window is None or self.sinks or self.position_map:
            return n
        return min(n, last + n_layers * (self.window - 1))


NO_CHANGE = ContextChange()


def override(trained: ContextChange, requested: ContextChange) -> ContextChange:
    """Combine the scaling requested at evaluation with the one the run was trained with.

    A request that changes inv_freq replaces inv_freq and attention_factor together; every other field that the request
    does not change keeps its trained value.
    """
    if requested.inv_freq is not None:
        trained = replace(trained, inv_freq=None, attention_factor=1.0, factor=1.0)
    kinds = tuple(map(override, trained.kinds, requested.kinds))
    return replace(trained, **{**requested.overrides(), "kinds": kinds})


def resolve(knobs: dict, trained: TrainedContext, n: int, ctx: int, plus: Sequence[dict] = ()) -> ContextChange:
    """The change by the method in `knobs` (a yaml of conf/scaling) when the run processes n tokens.

    A knob called `factor` becomes a number here: auto is n / L (1 for n <= L), fixed is ctx / L at every n (as in a
    deployed model, whose factor cannot follow the length), and a number is used as it is. ctx: the longest length of
    the evaluation, tokens. plus: the knobs of methods to combine with. NotApplicable if a method does not fit the run.
    """
    if trained.kinds:
        from model.layers import resolve_kinds

        return resolve_kinds((knobs, *plus), trained, n, ctx)
    if plus:
        from model.combination import combine

        return combine([resolve(k, trained, n, ctx) for k in (knobs, *plus)])
    values = dict(knobs)
    if "factor" in values:
        values["factor"] = _resolve_factor(values["factor"], trained, n, ctx)
    try:
        scale = load_kind("model.scaling", knobs["kind"], "scale")
        change = build_from_knobs(scale, values, "scaling", trained, n)
        if trained.attention == "linear" and (change.logn or change.position_map or change.sinks):
            raise NotApplicable("it changes single scores, and attention=linear has none")
        return change
    except NotApplicable as e:
        raise NotApplicable(f"scaling={yaml_name('scaling', knobs)} is not applicable: {e}") from None


def warning(knobs: dict, trained: TrainedContext) -> str:
    """One line about knobs that do not suit the run, if the method's module has a function `warning`; else empty."""
    find = getattr(importlib.import_module(f"model.scaling.{knobs['kind']}"), "warning", None)
    return find(knobs, trained) if find else ""


def _resolve_factor(factor: object, trained: TrainedContext, n: int, ctx: int) -> float:
    """The extension factor s >= 1, from auto, fixed or a number. UserError for anything else."""
    if factor == "auto":  # a fine-tuned run has at least the factor of its extended context
        return max(1.0, max(n, trained.extended_ctx) / trained.train_ctx)
    if factor == "fixed":
        return max(1.0, max(ctx, trained.extended_ctx) / trained.train_ctx)
    if isinstance(factor, int | float) and not isinstance(factor, bool) and 1 <= factor < math.inf:
        return float(factor)
    raise UserError(f"scaling.factor={factor}: must be auto, fixed or a number of at least 1")
