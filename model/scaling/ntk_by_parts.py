"""NTK-by-parts as in the paper (bloc97 2023; YaRN, arXiv 2309.00071, section 3.2).

For a pair that rotates r times within the trained context, let g = clip((r - alpha) / (beta - alpha), 0, 1). Its
frequency theta becomes g theta + (1 - g) theta / s. (In YaRN's code the ramp is over the pair index instead: yarn.py.)
"""

import math

from conf.errors import check
from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, factor: float, alpha: float = 1.0, beta: float = 32.0) -> ContextChange:
    check(beta > alpha >= 0, "scaling.beta", beta, f"greater than alpha={alpha}, and that at least 0")
    rotations = trained.train_ctx * trained.inv_freq / (2 * math.pi)
    share = ((rotations - alpha) / (beta - alpha)).clamp(0, 1)
    # Written so that factor 1 changes no bit.
    return ContextChange(inv_freq=trained.inv_freq * (1 - (1 - share) * (1 - 1 / factor)), factor=factor)
