"""KERPLE with the logarithmic kernel (Chi et al. 2022, arXiv 2205.09921): the bias is -p ln(1 + a d) at distance d.

p and a are positive and learned for each head; all layers share them, as in the paper.
"""

import torch
from torch import Tensor, nn

from model.pos import Encoding, Shape

SMALLEST = 0.01  # of p and a at initialisation, the limit in the authors' code


class Kerple(Encoding):
    """No knobs. The parameters are ln p and ln a, so that no step of the optimizer makes p or a negative.

    Initialised as in the authors' code: p uniform in (0, 2), a uniform in (0, 1).
    """

    def __init__(self, shape: Shape):
        super().__init__(shape)
        self.log_p = nn.Parameter((2 * torch.rand(shape.n_heads)).clamp(min=SMALLEST).log())
        self.log_a = nn.Parameter(torch.rand(shape.n_heads).clamp(min=SMALLEST).log())

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)  # [..., Tq, Tk]
        p, a = (x.exp().view(-1, 1, 1) for x in (self.log_p, self.log_a))  # [H, 1, 1]
        # Keys after the query have negative distances. They are masked, so any number will do.
        return -p * (a * distance.clamp(min=0).unsqueeze(-3)).log1p()


build = Kerple
