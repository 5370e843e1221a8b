"""No change: the trained positions, simply continued."""

from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int) -> ContextChange:
    return ContextChange()
