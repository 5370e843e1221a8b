"""The window control and attention sinks: the first few keys stay in sight of every query.

StreamingLLM (Xiao et al. 2023, arXiv 2309.17453) and LM-Infinite (Han et al. 2023, arXiv 2308.16137): models put
attention on their first tokens, and a plain window takes those away. A rotary encoding sees the sinks at a distance of
L, as LM-Infinite has it; distances that were never trained stay out. Other encodings see them where they are.
"""

from conf.errors import UserError
from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, size: int | None = None, sinks: int = 4) -> ContextChange:
    """size: keys that each query sees, itself and the sinks included; None takes the trained context."""
    size = trained.longest_trained_ctx if size is None else size
    if not 0 <= sinks < size:
        raise UserError(f"scaling.sinks={sinks}: must be at least 0 and less than the window, {size}")
    if n <= size:
        return ContextChange(window=size)
    clip = None if trained.frequencies is None else size
    return ContextChange(window=size - sinks, sinks=sinks, clip=clip)
