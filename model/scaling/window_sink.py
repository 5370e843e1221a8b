"""The window control and attention sinks: the first few keys stay in sight of every query.

StreamingLLM (Xiao et al. 2023, arXiv 2309.17453) and LM-Infinite (Han et al. 2023, arXiv 2308.16137): models put
attention on their first tokens, and a plain window takes those away. A rotary encoding sees the sinks at a distance of
L, as LM-Infinite has it; distances that were never trained stay out. Other encodings see them where they are.
"""

from model.scaling import Scaled, Trained


def scale(trained: Trained, n: int, size: int | None = None, sinks: int = 4) -> Scaled:
    """size: keys that each query sees, itself and the sinks included; None takes the trained context."""
    size = trained.reach if size is None else size
    if not 0 <= sinks < size:
        raise ValueError(f"scaling.sinks={sinks}: must be at least 0 and less than the window, {size}")
    if n <= size:
        return Scaled(window=size)
    clip = None if trained.frequencies is None else size
    return Scaled(window=size - sinks, sinks=sinks, clip=clip)
