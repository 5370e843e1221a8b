"""NTK-aware scaling (bloc97 2023; YaRN, arXiv 2309.00071, appendix A.1): raise the base to b * s^(D/(D-2)).

The frequency of the fastest pair is unchanged and that of the slowest is divided by s; the divisors of the pairs
between them form a geometric progression. D is the rotary width, b the trained base.
"""

import torch

from model.scaling import ContextChange, NotApplicable, TrainedContext


def scale(trained: TrainedContext, n: int, factor: float) -> ContextChange:
    D = 2 * len(trained.inv_freq)
    if D < 4:
        raise NotApplicable(f"its exponent D/(D-2) needs a rotary width D of at least 4, and this run has {D}")
    i = torch.arange(D // 2, dtype=torch.float64)
    return ContextChange(inv_freq=trained.inv_freq * factor ** (-2 * i / (D - 2)), factor=factor)
