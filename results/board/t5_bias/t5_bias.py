"""T5's relative bias (Raffel et al. 2019, arXiv 1910.10683): a learned number for each head and bucket of distances.

The first half of the buckets are the distances 0, 1, 2, ...; the others grow geometrically up to max_distance; all
longer distances share the last bucket.
"""

import math

import torch
from torch import Tensor, nn

from conf.errors import check
from model.pos import Encoding, Shape


class T5Bias(Encoding):
    """Knobs: buckets, the number of buckets; max_distance, tokens, from which on all distances share the last bucket;
    lr_factor, the learning rate of the biases as a multiple of optim.lr.

    The bias of each bucket and head is a parameter, initialised to 0.
    """

    def __init__(self, shape: Shape, buckets: int, max_distance: int, lr_factor: float):
        super().__init__(shape)
        check(buckets >= 2, "pos.buckets", buckets, "at least 2")
        right = f"greater than half of pos.buckets={buckets}"
        check(max_distance > buckets // 2, "pos.max_distance", max_distance, right)
        check(lr_factor > 0, "pos.lr_factor", lr_factor, "above 0")
        self.buckets, self.max_distance, self.lr_factor = buckets, max_distance, lr_factor
        self.table = nn.Embedding(buckets, shape.n_heads)
        nn.init.zeros_(self.table.weight)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance >= 0, int64 of the same shape."""
        exact = self.buckets // 2
        grown = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        grown = exact + (grown * (self.buckets - exact)).long()
        return torch.where(distance < exact, distance, grown.clamp(max=self.buckets - 1))

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        distance = q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)  # [..., Tq, Tk]
        # Keys after the query have negative distances. They are masked, so any bucket will do.
        return self.table(self.bucket(distance.clamp(min=0))).movedim(-1, -3)  # [..., Tq, Tk, H] -> [..., H, Tq, Tk]


build = T5Bias
