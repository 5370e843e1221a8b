"""The control: sliding-window attention as wide as the trained context, positions unchanged.

A method that does not beat this one has not extended the context (Su's "super baseline", kexue.fm/archives/9431).
"""

from conf.errors import check
from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, size: int | None = None) -> ContextChange:
    """size: keys that each query sees, itself included; None takes the trained context."""
    check(size is None or size >= 1, "scaling.size", size, "at least 1")
    return ContextChange(window=size or trained.longest_trained_ctx)
