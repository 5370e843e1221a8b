"""ALiBi (Press et al. 2021, arXiv 2108.12409): subtract slope_h * distance from the scores; no embedding at all."""

import torch
from torch import Tensor

from model.pos import Encoding, constant


def slopes(n_heads: int) -> list[float]:
    """The slope of each head: 2^(-8h/H) for h = 1..H.

    If H is no power of two, as the paper's code does: the slopes of the next lower power of two, then every other slope
    of the next higher one.
    """
    power = 2 ** (n_heads.bit_length() - 1)
    geometric = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return geometric if power == n_heads else geometric + slopes(2 * power)[0::2][: n_heads - power]


class Alibi(Encoding):
    """No knobs and no parameters: the slopes follow from the number of heads."""

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)  # [..., Tq, Tk], exact: integers
        slope = constant(slopes(self.shape.n_heads), torch.float32, distance.device).view(-1, 1, 1)  # [H, 1, 1]
        return -slope * distance.unsqueeze(-3)

    def key_bias(self, k_positions: Tensor) -> Tensor:
        # bias = slope * n - slope * m, and slope * m is one constant for all keys of a query. Relative to the last key,
        # so that the numbers stay small, and float32 exact, at positions far from 0.
        slope = constant(slopes(self.shape.n_heads), torch.float32, k_positions.device).view(-1, 1)  # [H, 1]
        return slope * (k_positions - k_positions.amax()).unsqueeze(-2)


build = Alibi
