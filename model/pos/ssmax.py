"""Scalable-Softmax (SSMax; Nakanishi 2025, arXiv 2501.19399): scores are multiplied by s_h ln n, for n visible keys.

s_h is learned for each head of each layer. A softmax over more keys is flatter; the factor keeps it as sharp, as log-n
scaling does at evaluation (scaling=logn), but with a learned strength and from the start of the training.
"""

import math

import torch
from torch import Tensor, nn

from model import attention
from model.attention import Heads, Where
from model.pos import Shape
from model.pos.rope import in_layers


class LogLengthFactors(nn.Module):
    """The factors s_h of one layer, initialised so that s_h ln n has the mean 1 over n = 1 .. L."""

    def __init__(self, shape: Shape):
        super().__init__()
        mean = math.lgamma(shape.train_ctx + 1) / shape.train_ctx  # of ln n, since lgamma(L + 1) = ln L!
        self.s = nn.Parameter(torch.full((shape.n_heads,), 1 / max(mean, 0.1)))  # at L = 1 the mean is 0

    def forward(self, x: Tensor, heads: Heads, where: Where) -> Tensor:
        S, T = heads.q.shape[2], heads.k.shape[2]
        n = torch.arange(T - S + 1, T + 1, device=x.device)
        if where.change.window is not None:
            n = n.clamp(max=where.change.window + where.change.always_visible)
        factor = (self.s.unsqueeze(-1) * n.log()).unsqueeze(-1)  # [H, S, 1]
        scaled = heads.map_queries(lambda q: (q * factor).to(q.dtype))
        return attention.attend(scaled, where.encoding, where.positions, where.change)


build = in_layers(LogLengthFactors)  # the paper rotates, too
