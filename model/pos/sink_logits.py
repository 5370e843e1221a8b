"""Learned sink logits (gpt-oss, arXiv 2508.10925): each head's softmax has one more logit, which has no value.

A head that finds nothing to attend to can give its weight to the sink instead of the first tokens, where StreamingLLM
(arXiv 2309.17453) found it. That paper's "zero sink" is this with a logit of 0. A window does not remove the sink.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import attention
from model.attention import Heads, Where
from model.masks import ScoreBias
from model.pos import Shape
from model.pos.rope import in_layers


@dataclass
class SinkBias(ScoreBias):
    """The sink is key 0, of zeros, so its score is the bias alone."""

    logit: Tensor  # [H]

    def bias(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        return (self.logit[:, None] * (k_index == 0)).unsqueeze(1).expand(-1, len(q_index), -1)

    def key_bias(self, k_index: Tensor) -> Tensor:
        return self.logit.float()[:, None] * (k_index == 0)


class SinkLogits(nn.Module):
    """One logit for each head of a layer, initialised as gpt-oss in transformers: normal, standard deviation 0.02."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.logit = nn.Parameter(torch.randn(shape.n_heads) * 0.02)

    def forward(self, x: Tensor, heads: Heads, where: Where) -> Tensor:
        S, T = heads.q.shape[2], heads.k.shape[2]

        def with_sink(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 1, 0))  # along the tokens

        # As many queries as keys remain as many, so that attention needs no mask: the first query is dropped again
        heads = heads.map_queries(with_sink) if S == T else heads
        heads = replace(heads.map_keys(with_sink), prepended=1)
        return attention.attend(heads, SinkBias(self.logit), heads.indices(), where.change)[:, :, -S:]


build = in_layers(SinkLogits)  # gpt-oss rotates, too
