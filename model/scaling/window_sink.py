"""The window control with attention sinks: every query also attends to the first few keys.

StreamingLLM (Xiao et al. 2023, arXiv 2309.17453) and LM-Infinite (Han et al. 2023, arXiv 2308.16137): models attend
strongly to the first tokens of a text, and a plain window removes them. With a rotary encoding the sinks are rotated as
if at distance L, as in LM-Infinite, so that no untrained distance occurs. Other encodings use the real distance.
"""

from conf.errors import check
from model.regions import Clipped
from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, size: int | None = None, sinks: int = 4) -> ContextChange:
    """size: keys that each query sees, itself and the sinks included; None takes the trained context."""
    size = trained.longest_trained_ctx if size is None else size
    check(0 <= sinks < size, "scaling.sinks", sinks, f"at least 0 and less than the window, {size}")
    if n <= size:
        return ContextChange(window=size)
    position_map = None if trained.frequencies is None else Clipped(size)
    return ContextChange(window=size - sinks, always_visible=sinks, position_map=position_map)
