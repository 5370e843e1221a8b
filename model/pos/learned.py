"""A learned vector for each position (GPT-2). It has a table, so it has an end."""

import torch
from torch import Tensor, nn

from model.pos import Encoding, Shape


class Learned(Encoding):
    relative = False

    def __init__(self, shape: Shape, max_positions: int):
        super().__init__(shape)
        if max_positions < shape.train_ctx:
            raise ValueError(f"pos.max_positions={max_positions}: must be at least ctx={shape.train_ctx}")
        self.max_positions = max_positions
        self.table = nn.Embedding(max_positions, shape.width)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        T = positions.shape[-1]
        # Never a clamp or a modulo: those hide the error, and untrained rows look like extrapolation.
        if self.max_positions < T and not torch.compiler.is_compiling():
            raise ValueError(
                f"pos=learned has {self.max_positions} positions and cannot read {T}: "
                f"train with pos.max_positions={T} (rows past the trained context stay untrained)"
            )
        return x + self.table(positions)


build = Learned
