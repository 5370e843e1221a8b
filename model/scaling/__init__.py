"""Context extension: one file each, with one pure function `scale`. conf/scaling/NAME.yaml says `kind: FILE`.

A new method is a file here and one yaml; nothing else changes. A method knows no module, no device and no cache, so
the order in which lengths are evaluated cannot matter.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from conf.registry import call, load


class Unfit(ValueError):
    """The method cannot be applied to this run."""


@dataclass(frozen=True)
class Trained:
    """What a scaling method may know of the run it is applied to."""

    pos: str  # the encoding's name
    train_ctx: int  # L, tokens: the context that the frequencies were pre-trained at
    frequencies: Tensor | None  # float64 [rotary_dim / 2], or None if the encoding does not rotate
    attention: str = "softmax"
    extended_ctx: int = 0  # the context after fine-tuning to a longer one; 0: not fine-tuned

    @property
    def reach(self) -> int:
        """The longest context that this run was trained on in any way, tokens."""
        return max(self.train_ctx, self.extended_ctx)

    @property
    def inv_freq(self) -> Tensor:
        if self.frequencies is None:
            raise Unfit(f"it changes rotary frequencies, and pos={self.pos} has none")
        return self.frequencies

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class Scaled:
    """What a scaling method may change. The defaults change nothing."""

    inv_freq: Tensor | None = None  # float64 [rotary_dim / 2]; None keeps the trained ones
    factor: float = 1.0  # s, as resolved: for the log and the table
    attention_factor: float = 1.0  # multiplies cos and sin
    window: int | None = None  # each query sees this many keys, itself included; None sees all
    sinks: int = 0  # first keys that stay in sight of every query, beside the window
    logn: int | None = None  # L: a query at position m is multiplied by max(1, ln(m + 1) / ln L)
    clip: int | None = None  # w: a key at distance r >= w is turned as if at w + (r - w) / leak
    leak: float = math.inf


UNSCALED = Scaled()


def _changes(s: Scaled) -> dict:
    values = {f.name: (getattr(s, f.name), f.default) for f in fields(s)}
    return {k: v for k, (v, default) in values.items() if isinstance(v, Tensor) or v != default}


def same(a: Scaled, b: Scaled) -> bool:
    """Whether the two change the same things alike (the factor is only for the log)."""
    x, y = ({k: v for k, v in _changes(s).items() if k != "factor"} for s in (a, b))
    return x.keys() == y.keys() and all(
        torch.equal(v, y[k]) if isinstance(v, Tensor) else v == y[k] for k, v in x.items()
    )


def compose(a: Scaled, b: Scaled) -> Scaled:
    """Both, where they change different things, as the literature joins NTK or ReRoPE with log-n."""
    if both := (_changes(a).keys() & _changes(b).keys()) - {"factor"}:
        raise Unfit(f"plus: two methods change the same thing ({', '.join(sorted(both))}), so they do not compose")
    return replace(a, **_changes(b))


def resolve(knobs: dict, trained: Trained, n: int, ctx: int, plus: Sequence[dict] = ()) -> Scaled:
    """What the method that a yaml of conf/scaling names does at length n, when ctx is the longest length in view.

    factor auto is n / L (1 inside L), fixed is ctx / L at every n (what a deployed model pays), a number is itself.
    plus: methods on top of it.
    """
    if plus:
        return functools.reduce(compose, (resolve(k, trained, n, ctx) for k in (knobs, *plus)))
    knobs = dict(knobs)
    if "factor" in knobs:
        knobs["factor"] = _factor(knobs["factor"], trained, n, ctx)
    try:
        scaled = call(load("model.scaling", knobs["kind"], "scale"), knobs, "scaling", trained, n)
        if trained.attention == "linear" and (scaled.logn or scaled.clip or scaled.sinks):
            raise Unfit("it changes single scores, and attention=linear has none")
        return scaled
    except Unfit as e:
        raise Unfit(f"scaling={knobs['kind']} does not fit: {e}") from None


def on_top(own: Scaled, asked: Scaled) -> Scaled:
    """A method asked for when a run is read that was itself trained with one: frequencies and their temperature are
    replaced together; what it leaves alone stays as trained."""
    if asked.inv_freq is not None:
        own = replace(own, inv_freq=None, attention_factor=1.0, factor=1.0)
    return replace(own, **_changes(asked))


def _factor(given: object, trained: Trained, n: int, ctx: int) -> float:
    if given == "auto":  # never below what the run was fine-tuned to
        return max(1.0, max(n, trained.extended_ctx) / trained.train_ctx)
    if given == "fixed":
        return max(1.0, max(ctx, trained.extended_ctx) / trained.train_ctx)
    if isinstance(given, int | float) and not isinstance(given, bool) and given >= 1:
        return float(given)
    raise ValueError(f"scaling.factor={given}: must be auto, fixed or a number of at least 1")
