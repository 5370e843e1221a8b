"""YaRN as its code and Hugging Face compute it (Peng et al. 2023, arXiv 2309.00071; github.com/jquesnelle/yarn).

Pairs that rotate more than beta_fast times within the trained context are unchanged, and the frequencies of those that
rotate less than beta_slow times are divided by s. Between them is a linear ramp over the *pair index*. (The paper's
ramp is over the number of rotations, and its frequencies differ by up to 50 %.) cos and sin are multiplied by 0.1 ln s
+ 1.
"""

import math

import torch

from conf.errors import check
from model.scaling import ContextChange, NotApplicable, TrainedContext


def scale(
    trained: TrainedContext,
    n: int,
    factor: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> ContextChange:
    """truncate: round the ramp's ends to whole pairs; attention_factor: None computes it from the factor."""
    right = f"greater than beta_slow={beta_slow}, and both above 0"
    check(beta_fast > beta_slow > 0, "scaling.beta_fast", beta_fast, right)
    P, inv_freq = len(trained.inv_freq), trained.inv_freq
    # Pair i rotates L * inv_freq_i / 2 pi times in the trained context, solved for i; -ln inv_freq has the slope ln b.
    if P < 2 or inv_freq[0] == inv_freq[-1]:
        raise NotApplicable("its ramp needs at least two pairs of different frequency (rotary width >= 4, base > 1)")
    per_pair = math.log(inv_freq[0] / inv_freq[-1]) / (P - 1)
    fastest = trained.train_ctx * inv_freq[0]
    low, high = (math.log(fastest / (2 * math.pi * rotations)) / per_pair for rotations in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * P - 1)  # D - 1, not P - 1: so do the authors' code and Hugging Face
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(P, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    # Written so that factor 1 changes no bit.
    inv_freq = inv_freq * (1 - interpolated * (1 - 1 / factor))
    return ContextChange(inv_freq=inv_freq, factor=factor, attention_factor=attention_factor)
