"""Decoding token by token: the cache of what the attention layers keep, and the logits after a growing text."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from model.scaling import ContextChange


def same_change(a: ContextChange, b: ContextChange) -> bool:
    """Whether the model computes the same under both (the factor is only for logs)."""
    x, y = ({k: v for k, v in change.overrides().items() if k != "factor"} for change in (a, b))
    if x.keys() != y.keys():
        return False
    return all(torch.equal(v, y[k]) if isinstance(v, Tensor) else v == y[k] for k, v in x.items())


class Cache:
    """What decoding keeps of the tokens so far: each layer's projection, not rotated yet.

    Rotated keys would keep the frequencies of the length at which they were computed, which under dynamic NTK are not
    those of the query that meets them (transformers#25104). Rotating all of them at each step is cheap.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.layers: dict[nn.Module, Tensor] = {}

    def extend(self, layer: nn.Module, qkv: Tensor) -> Tensor:
        """qkv [B, S, H + 2 G, D] of new tokens -> that of all tokens, [B, T, H + 2 G, D]."""
        self.layers[layer] = torch.cat((self.layers[layer], qkv), dim=1) if layer in self.layers else qkv
        return self.layers[layer]


class LastLogits(Protocol):
    """The part of model.gpt.GPT that decoding calls; gpt.py imports this file, so the class itself is not imported."""

    def last_logits(self, tokens: Tensor, last: int, change: ContextChange, cache: Cache | None) -> Tensor: ...


class Decoder:
    """The logits after a text that grows; each token is processed only one time where that is exact.

    A method whose frequencies change with the length changes what every layer but the first computed from all earlier
    tokens. decode=exact then processes the whole text again, so that each step equals a full forward pass.
    decode=rebased keeps the cached projections and only rotates the earlier keys by the new frequencies: exact for one
    layer, close for more, and as fast as a static method. (Hugging Face caches rotated keys, which is neither:
    transformers#25104.)
    """

    def __init__(self, model: LastLogits, change_at: Callable[[int], ContextChange], decode: str = "exact"):
        """change_at: the context change at a length."""
        self.model, self.change_at, self.decode = model, change_at, decode
        self.cache, self.change = Cache(), None

    @torch.inference_mode()
    def logits(self, text: Tensor) -> Tensor:
        """Of the token after text [B, n], [B, V]. text: that of the last call, and at least one token more."""
        change = self.change_at(text.shape[1])
        stale = self.change is not None and not same_change(change, self.change)
        if stale and self.decode == "exact":
            self.cache = Cache()
        self.change = change
        return self.model.last_logits(text[:, self.cache.tokens :], 1, change, self.cache)[:, 0]
