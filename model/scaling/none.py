"""No scaling: positions continue past the trained context with unchanged frequencies."""

from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int) -> ContextChange:
    return ContextChange()
