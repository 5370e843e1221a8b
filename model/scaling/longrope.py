"""LongRoPE with factors from the user (Ding et al. 2024, arXiv 2402.13753; Hugging Face's `longrope`).

Each pair has its divisor, found by a search (theirs, or python -m studies.divisors): `short` inside the trained
context, `long` past it. cos and sin are multiplied by sqrt(1 + ln s / ln L) at either length, as Hugging Face does.
"""

import math

import torch

from conf.errors import check
from model.scaling import ContextChange, NotApplicable, TrainedContext

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


def scale(
    trained: TrainedContext,
    n: int,
    factor: float,
    long: list | None = None,
    short: list | None = None,
    attention_factor: float | None = None,
) -> ContextChange:
    """long, short: one divisor for each rotary pair, for n > L and for n <= L, as long_factor and short_factor in
    rope_parameters of a Hugging Face config.json; short None: all 1. attention_factor None: sqrt(1 + ln s / ln L)."""
    P, L = len(trained.inv_freq), trained.train_ctx
    if L < 2:
        raise NotApplicable("ln L needs a trained context of at least 2")
    short = [1.0] * P if short is None else short
    for name, divisors in (("long", long), ("short", short)):
        ok = isinstance(divisors, list) and len(divisors) == P
        ok = ok and all(isinstance(x, int | float) and x > 0 for x in divisors)
        check(ok, f"scaling.{name}", divisors, f"a list of {P} numbers above 0, one for each rotary pair")
    divisors = torch.tensor(long if n > L else short, dtype=torch.float64)
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(L)) if factor > 1 else 1.0
    return ContextChange(inv_freq=trained.inv_freq / divisors, factor=factor, attention_factor=attention_factor)
