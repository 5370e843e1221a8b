"""Contextual position encoding (CoPE; Golovneva et al. 2024, arXiv 2405.18719): positions that count what matters.

A gate g_ij = sigmoid(q_i . k_j / sqrt(D)) says whether key j counts for query i, and the position p_ij of key j is the
sum of the gates from j to i, at most `positions` - 1. Its embedding e[p], interpolated between whole positions, adds
q_i . e[p] to the score. The scale of the gates is that of the authors' code; the paper leaves it out.

The positions need all scores, so attention has a mask, of a block of queries at a time: memory is linear in T, but
several times that of other biases.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import check
from model import attention
from model.attention import Heads, Where
from model.masks import ScoreBias, sees
from model.pos import Encoding, Shape
from model.scaling import ContextChange


@dataclass
class ContextualBias(ScoreBias):
    """q_i . e[p_ij], computed in float32 at least."""

    heads: Heads
    table: Tensor  # e, [D, positions]
    change: ContextChange

    def bias(self, q_index: Tensor, k_index: Tensor) -> Tensor:
        q, k = self.heads.wide(q_index, k_index)
        with torch.autocast(q.device.type, enabled=False):
            seen = sees(q_index[:, None], k_index, self.change.window, self.change.always_visible)
            gates = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).sigmoid() * seen
            positions = gates.flip(-1).cumsum(dim=-1).flip(-1).clamp(max=self.table.shape[1] - 1)  # [B, H, Tq, Tk]
            lower, upper = positions.floor(), positions.ceil()
            logits = q @ self.table.to(q.dtype)  # of whole positions, [B, H, Tq, positions]
            share = positions - lower
            return logits.gather(-1, lower.long()) * (1 - share) + logits.gather(-1, upper.long()) * share


class PositionTable(nn.Module):
    """The embeddings e of one layer, which its heads share; initialised to 0 as in the paper."""

    def __init__(self, shape: Shape, positions: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(shape.head_dim, positions))

    def forward(self, x: Tensor, heads: Heads, where: Where) -> Tensor:
        score_bias = ContextualBias(heads, self.table, where.change)
        return attention.attend(heads, score_bias, heads.indices(), where.change)


class Cope(Encoding):
    """Knob: positions, the number of embeddings; keys further away in count share the last one."""

    def __init__(self, shape: Shape, positions: int):
        super().__init__(shape)
        check(positions >= 2, "pos.positions", positions, "at least 2")
        self.positions = positions

    def layer_module(self, layer: int) -> nn.Module:
        return PositionTable(self.shape, self.positions)


build = Cope
