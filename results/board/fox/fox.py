"""Forgetting Transformer (FoX; Lin et al. 2025, arXiv 2503.02130): a forget gate in softmax attention.

Each head has a gate f_t = sigmoid(w . x_t + b), and the score of query i and key j is q_i . k_j / sqrt(D) plus the sum
of log f_t over t = j + 1 .. i. That is c_i - c_j with c the cumulative sum of log f, and softmax ignores c_i: the bias
depends on the key alone, so attention needs no mask and its memory is linear in T. Data-dependent ALiBi is another
name.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import attention
from model.attention import Heads, Where
from model.masks import ScoreBias
from model.pos import Shape
from model.pos.rope import in_layers


@dataclass
class ForgetBias(ScoreBias):
    """c_i - c_j, where c is the sum of log f over tokens 0 .. i."""

    c: Tensor  # float32 [B, H, T]

    def bias(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        return self.c[..., q_index].unsqueeze(-1) - self.c[..., k_index].unsqueeze(-2)

    def key_bias(self, k_index: Tensor) -> Tensor:
        return self.c[..., -1:] - self.c  # relative to the last key, so that float32 is finest for the latest keys


def wide_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """linear(x) in float32 at least, also under autocast: sums over thousands of tokens lose bfloat16's 8 bits."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), linear.weight.to(wide), linear.bias.to(wide))


class ForgetGates(nn.Module):
    """The gates of one layer. Initialised as in the authors' code: weights of standard deviation 0.02, b = 0."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.n_heads)
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor, heads: Heads, where: Where) -> Tensor:
        log_f = F.logsigmoid(wide_linear(x, self.gate))  # [B, N, H]
        if where.cache is not None:
            log_f = where.cache.extend(self, log_f)  # [B, T, H]
        c = log_f.cumsum(dim=1).transpose(1, 2)
        return attention.attend(heads, ForgetBias(c), heads.indices(), where.change)


build = in_layers(ForgetGates)  # most of the paper's experiments are without rotation
