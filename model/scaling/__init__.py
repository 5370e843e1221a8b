"""Context extension: one file each, with one pure function `scale`. conf/scaling/NAME.yaml says `kind: FILE`.

A new method is a file here and one yaml; nothing else changes. A method knows no module, no device and no cache, so
the order in which lengths are evaluated cannot matter.
"""

from dataclasses import dataclass

from torch import Tensor

from conf.schema import call, load


class Unfit(ValueError):
    """The method cannot be applied to this run."""


@dataclass(frozen=True)
class Trained:
    """What a scaling method may know of the run it is applied to."""

    pos: str  # the encoding's name
    train_ctx: int  # L, tokens
    frequencies: Tensor | None  # float64 [rotary_dim / 2], or None if the encoding does not rotate

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


UNSCALED = Scaled()


def resolve(knobs: dict, trained: Trained, n: int, ctx: int) -> Scaled:
    """What the method that a yaml of conf/scaling names does at length n, when ctx is the longest length in view.

    factor auto is n / L (1 inside L), fixed is ctx / L at every n (what a deployed model pays), a number is itself.
    """
    knobs = dict(knobs)
    if "factor" in knobs:
        knobs["factor"] = _factor(knobs["factor"], trained.train_ctx, n, ctx)
    try:
        return call(load("model.scaling", knobs["kind"], "scale"), knobs, "scaling", trained, n)
    except Unfit as e:
        raise Unfit(f"scaling={knobs['kind']} does not fit: {e}") from None


def _factor(given: object, train_ctx: int, n: int, ctx: int) -> float:
    if given == "auto":
        return max(1.0, n / train_ctx)
    if given == "fixed":
        return max(1.0, ctx / train_ctx)
    if isinstance(given, int | float) and not isinstance(given, bool) and given >= 1:
        return float(given)
    raise ValueError(f"scaling.factor={given}: must be auto, fixed or a number of at least 1")
