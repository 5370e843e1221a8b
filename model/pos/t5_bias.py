"""T5's relative bias (Raffel et al. 2019, arXiv 1910.10683): a learned number for each head and bucket of distances.

The first half of the buckets are the distances 0, 1, 2, ..., the others grow in geometric progression up to
max_distance, and everything past it is in the last one.
"""

import math

import torch
from torch import Tensor, nn

from model.pos import Encoding, Shape


class T5Bias(Encoding):
    def __init__(self, shape: Shape, buckets: int, max_distance: int):
        super().__init__(shape)
        if buckets < 2:
            raise ValueError(f"pos.buckets={buckets}: must be at least 2")
        if max_distance <= buckets // 2:
            raise ValueError(f"pos.max_distance={max_distance}: must be greater than half of pos.buckets={buckets}")
        self.buckets, self.max_distance = buckets, max_distance
        self.table = nn.Embedding(buckets, shape.n_heads)
        nn.init.zeros_(self.table.weight)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance >= 0, int64."""
        exact = self.buckets // 2
        grown = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        grown = exact + (grown * (self.buckets - exact)).long()
        return torch.where(distance < exact, distance, grown.clamp(max=self.buckets - 1))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)
        return self.table(self.bucket(distance.clamp(min=0))).movedim(-1, -3)


build = T5Bias
