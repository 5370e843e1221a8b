"""YaRN as in the paper (Peng et al. 2023, arXiv 2309.00071, section 3.4): NTK-by-parts with a temperature.

The authors' code and Hugging Face compute something else: their ramp is over the pair index (yarn.py), and the
frequencies differ from these by up to 50 %.
"""

import math
from dataclasses import replace

from model.scaling import ContextChange, TrainedContext, ntk_by_parts


def scale(trained: TrainedContext, n: int, factor: float, alpha: float = 1.0, beta: float = 32.0) -> ContextChange:
    by_parts = ntk_by_parts.scale(trained, n, factor, alpha, beta)
    return replace(by_parts, attention_factor=0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
