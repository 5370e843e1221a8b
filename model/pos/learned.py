"""A learned vector for each position (GPT-2). It is a table, so the context has a maximum."""

import torch
from torch import Tensor, nn

from conf.errors import UserError, check
from model.pos import Encoding, Shape


class Learned(Encoding):
    """Knob: max_positions, the number of rows of the table; at least the training context."""

    relative = False

    def __init__(self, shape: Shape, max_positions: int):
        super().__init__(shape)
        check(max_positions >= shape.train_ctx, "pos.max_positions", max_positions, f"at least ctx={shape.train_ctx}")
        self.max_positions = max_positions
        self.table = nn.Embedding(max_positions, shape.width)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        T = positions.shape[-1]
        # A clamp or a modulo would hide the error: the loss of repeated or untrained rows looks like extrapolation.
        if self.table.num_embeddings < T and not torch.compiler.is_compiling():
            right = f"train with pos.max_positions={T} (rows past the trained context stay untrained)"
            raise UserError(f"pos=learned has {self.max_positions} positions and cannot process {T} tokens: {right}")
        return x + self.table(positions)


build = Learned
