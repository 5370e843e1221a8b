"""Position interpolation (Chen et al. 2023, arXiv 2306.15595; kaiokendev): every position is divided by s."""

from model.scaling import Scaled, Trained


def scale(trained: Trained, n: int, factor: float) -> Scaled:
    return Scaled(inv_freq=trained.inv_freq / factor, factor=factor)
