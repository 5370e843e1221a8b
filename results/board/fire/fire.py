"""FIRE (Li et al. 2023, arXiv 2310.04418): a learned function of the distance relative to the query's position.

bias = f(ln(1 + c d) / ln(1 + c max(i, L'))) for query i at distance d, where f is an MLP with one hidden layer from one
number to one for each head, and c and the threshold L' are learned. f's argument is between 0 and 1 at any length. All
layers share f, c and L' (FIRE-S in the paper).
"""

import torch
from torch import Tensor, nn

from conf.errors import check
from model.pos import Encoding, Shape

# The hidden layer is computed for some queries at a time. On a CPU for so many pairs of a query and a key: 8 MB, which
# stay in its cache
PAIRS, ROWS = 65_536, 64


class Fire(Encoding):
    """Knobs: hidden, the width of the MLP; context, in tokens, of which the initial L' is a quarter, as in
    the paper (512 of 2048). A fine-tuned run keeps its parent's. c is initialised to 0.1, as in the paper.
    """

    relative = False

    def __init__(self, shape: Shape, hidden: int, context: float):
        super().__init__(shape)
        check(hidden >= 1, "pos.hidden", hidden, "at least 1")
        check(context > 0, "pos.context", context, "above 0")
        self.threshold = context / 4
        self.mlp = nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, shape.n_heads))
        self.c = nn.Parameter(torch.tensor([0.1]))
        self.multiplier = nn.Parameter(torch.ones(1))  # of the threshold: Adam's steps suit parameters of size 1

    def bias(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        rows = max(1, PAIRS // k_positions.numel()) if k_positions.device.type == "cpu" else ROWS
        blocks = q_positions.split(rows, dim=-1)
        return torch.cat([self.bias_of_rows(block, k_positions) for block in blocks], dim=-2)

    def bias_of_rows(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        # Keys after the query have negative distances. They are masked, so any number will do.
        distance = (q_positions.unsqueeze(-1) - k_positions.unsqueeze(-2)).clamp(min=0)  # [..., Tq, Tk]
        c, threshold = self.c.abs(), (self.multiplier * self.threshold).abs()
        longest = torch.maximum(q_positions.to(c.dtype), threshold).unsqueeze(-1)
        share = (c * distance).log1p() / ((c * longest).log1p() + 1e-6)
        with torch.autocast(share.device.type, enabled=False):
            return self.mlp(share.unsqueeze(-1)).movedim(-1, -3)  # [..., Tq, Tk, H] -> [..., H, Tq, Tk]


build = Fire
