"""YaRN (yarn.py) with thresholds in proportion to the trained context L.

YaRN's thresholds, 32 and 1 rotations within L, were chosen for Llama 2, where L = 4096. Here they are 32 L / 4096 and
L / 4096 rotations, which is 2 and 1/16 at L = 256. With Llama 2's base of 10000 they divide the pairs as they do there
at any L: 21/64 of them are above the ramp and 18/64 below it. The thresholds of 32 and 1 at L = 256 leave one pair of
32 above the ramp and 19 below it. Not a published method: a control for how much YaRN's gain depends on its thresholds.
Pairs between L / 4096 rotations and 1 are interpolated only in part, so past L they meet angles that were not trained;
`scaling=yarn scaling.beta_fast=2` moves the fast end of the ramp alone.
"""

from conf.errors import check
from model.scaling import ContextChange, TrainedContext, yarn


def scale(trained: TrainedContext, n: int, factor: float, reference_ctx: int = 4096) -> ContextChange:
    """reference_ctx: tokens, the trained context that the thresholds of 32 and 1 rotations suit."""
    check(reference_ctx >= 1, "scaling.reference_ctx", reference_ctx, "at least 1")
    ratio = trained.train_ctx / reference_ctx
    return yarn.scale(trained, n, factor, beta_fast=32 * ratio, beta_slow=ratio)
