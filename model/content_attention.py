"""Attention of encodings that see content: what the modules of Encoding.layer_module have in common.

Such a module is called in place of model.attention.attend and returns the same, [B, H, S, D]:

    module(x, heads, pos, positions, change, cache)

x [B, new, C] is the layer's input for the new tokens: all T without a cache, else those that the cache did not have.
What the module computes from x must be cached for later calls with `cache.extend(self, ...)`. The other arguments are
those of `attend`, which the module calls in the end, with other heads, or with a ContentBias in place of the encoding.

Letters as in model/attention.py. Imported only by the encodings that need it.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Heads


def indices(heads: Heads) -> Tensor:
    """0 .. T - 1, int64 [T]."""
    return torch.arange(heads.k.shape[2], device=heads.k.device)


def map_queries(heads: Heads, f: Callable[[Tensor], Tensor]) -> Heads:
    """The heads with f(q) for q, and for the queries of other rotations."""
    return replace(heads, q=f(heads.q), far=[(f(q), k) for q, k in heads.far])


def map_keys(heads: Heads, f: Callable[[Tensor], Tensor]) -> Heads:
    """The heads with f(k) for k, and for the keys of other rotations, and f(v) for v."""
    return replace(heads, k=f(heads.k), v=f(heads.v), far=[(q, f(k)) for q, k in heads.far])


def wide_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """linear(x) in float32 at least, also under autocast: sums over thousands of tokens lose bfloat16's 8 bits."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), linear.weight.to(wide), linear.bias.to(wide))
