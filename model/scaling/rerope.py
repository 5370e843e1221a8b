"""ReRoPE and its leaky form (Su 2023, kexue.fm/archives/9708 and 9728): relative positions past w are clipped.

A key at distance r < w is rotated by r, one at r >= w by w + (r - w) / leak. leak=null clips completely (ReRoPE); a
number of at least 1 gives Leaky ReRoPE, whose factor s needs leak = (n - w) / (L - w) to stay inside L.
Evaluation only: used in training it destroys extrapolation (kexue.fm/archives/9948).
"""

import math

from conf.errors import UserError
from model.regions import Clipped
from model.scaling import ContextChange, NotApplicable, TrainedContext

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


def scale(trained: TrainedContext, n: int, size: int | None, leak: float | str | None, always: bool) -> ContextChange:
    """L here is the longest trained context. size: w in tokens, None: L / 2. leak: None clips, a number of at least 1,
    or "auto" for (n - w) / (L - w), with which no distance exceeds L. always: clip also at n <= L; distances from w to
    L are trained, so this raises the loss there (what it costs: docs/measuring.md).
    """
    L = trained.longest_trained_ctx
    w = trained.checked_size(size, default=L // 2)
    if leak == "auto":
        if w == L:
            raise NotApplicable(f"leak=auto needs size below the trained context, {L}")
        leak = max(1.0, (n - w) / (L - w))
    elif leak is not None and (isinstance(leak, str) or leak < 1):
        raise UserError(f"scaling.leak={leak}: must be null, auto or a number of at least 1")
    if n <= L and not always:
        return ContextChange()
    return ContextChange(position_map=Clipped(w, math.inf if leak is None else leak))
