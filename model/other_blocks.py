"""Transformer blocks of other models, with the letters of model/gpt.py: model.residual=parallel, serial_post ..."""

from typing import Any

from torch import Tensor, nn

from conf.schema import ModelConfig
from model.gpt import Block, make_norm


class ParallelBlock(Block):
    """Attention and MLP read the same x (GPT-NeoX)."""

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        attended = self.attention(self.norm1(x), *where)
        x = x[:, -attended.shape[1] :]
        return x + attended + self.mlp(self.norm2(x))


class SharedNormBlock(Block):
    """Attention and MLP read the same x through one norm (GPT-J)."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        super().__init__(cfg, linear, content)
        del self.norm2

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed, *where)
        last = attended.shape[1]
        return x[:, -last:] + attended + self.mlp(normed[:, -last:])


class PostNormBlock(Block):
    """The norms are after attention and MLP instead of before them (OLMo 2)."""

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        attended = self.norm1(self.attention(x, *where).to(x.dtype))  # under autocast bfloat16
        x = x[:, -attended.shape[1] :] + attended
        return x + self.norm2(self.mlp(x).to(x.dtype))


class PrePostNormBlock(Block):
    """Norms before and after attention and MLP (Gemma 2 and 3)."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        super().__init__(cfg, linear, content)
        self.post_norm1, self.post_norm2 = make_norm(cfg), make_norm(cfg)

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        attended = self.post_norm1(self.attention(self.norm1(x), *where).to(x.dtype))  # under autocast bfloat16
        x = x[:, -attended.shape[1] :] + attended
        return x + self.post_norm2(self.mlp(self.norm2(x)).to(x.dtype))


BLOCKS = {
    "parallel": ParallelBlock,
    "parallel_shared": SharedNormBlock,
    "serial_post": PostNormBlock,
    "serial_both": PrePostNormBlock,
}


def build(cfg: ModelConfig, linear: bool, content: nn.Module | None) -> nn.Module:
    return BLOCKS[cfg.residual](cfg, linear, content)
