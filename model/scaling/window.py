"""The control: sliding-window attention as wide as the trained context, positions unchanged.

A method that does not beat this one has not extended the context (Su's "super baseline", kexue.fm/archives/9431).
"""

from model.scaling import Scaled, Trained


def scale(trained: Trained, n: int, size: int | None = None) -> Scaled:
    """size: keys that each query sees, itself included; None takes the trained context."""
    if size is not None and size < 1:
        raise ValueError(f"scaling.size={size}: must be at least 1")
    return Scaled(window=size or trained.reach)
