"""Position interpolation (Chen et al. 2023, arXiv 2306.15595; kaiokendev): every position is divided by s."""

from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, factor: float) -> ContextChange:
    return ContextChange(inv_freq=trained.inv_freq / factor, factor=factor)
