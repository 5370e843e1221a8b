"""Decoding token by token: a cache of each attention layer's projections, and the logits after a growing text.

Letters: B batch, S new tokens, T all tokens, H query heads, G key-value heads, D head width, V vocabulary.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from model.scaling import ContextChange


def same_change(a: ContextChange, b: ContextChange) -> bool:
    """Whether the model computes the same under both (the factor is only for logs)."""
    if len(a.kinds) != len(b.kinds) or not all(map(same_change, a.kinds, b.kinds)):
        return False
    x, y = ({k: v for k, v in change.overrides().items() if k not in ("factor", "kinds")} for change in (a, b))
    if x.keys() != y.keys():
        return False
    return all(torch.equal(v, y[k]) if isinstance(v, Tensor) else v == y[k] for k, v in x.items())


class Cache:
    """The qkv projections of all tokens so far, for each layer, before their rotation.

    Under dynamic NTK the frequencies change with the length. Rotated keys in the cache would have the frequencies of an
    earlier length, and a new query those of the current one (transformers#25104). So all keys are rotated at each step,
    which is cheap.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.layers: dict[nn.Module, Tensor] = {}

    def extend(self, layer: nn.Module, qkv: Tensor) -> Tensor:
        """Append the projections qkv [B, S, H + 2 G, D] of new tokens; returns those of all, [B, T, H + 2 G, D]."""
        self.layers[layer] = torch.cat((self.layers[layer], qkv), dim=1) if layer in self.layers else qkv
        return self.layers[layer]


class LastLogits(Protocol):
    """The part of model.gpt.GPT that decoding calls; gpt.py imports this file, so the class itself is not imported."""

    def last_logits(self, tokens: Tensor, last: int, change: ContextChange, cache: Cache | None) -> Tensor: ...


class Decoder:
    """The logits of the next token of a growing text. Each token is processed only once, if the result is then exact.

    If the frequencies change with the length, the inputs of all layers but the first change for earlier tokens as well.
    decode=exact then processes the complete text again, so that each step equals a full forward pass. decode=rebased
    keeps the cached projections and only rotates the earlier keys by the new frequencies: this is exact for one layer,
    an approximation for more, and as fast as with constant frequencies. (Hugging Face caches rotated keys, which is not
    exact even for one layer: transformers#25104.)
    """

    def __init__(self, model: LastLogits, change_at: Callable[[int], ContextChange], decode: str = "exact"):
        """change_at: length n in tokens -> the change at this length. decode: exact or rebased."""
        self.model, self.change_at, self.decode = model, change_at, decode
        self.cache, self.change = Cache(), None

    @torch.inference_mode()
    def logits(self, text: Tensor) -> Tensor:
        """Logits of the token after text int64 [B, n] -> [B, V].

        text must begin with the text of the previous call, and be longer by at least one token.
        """
        change = self.change_at(text.shape[1])
        stale = self.change is not None and not same_change(change, self.change)
        if stale and self.decode == "exact":
            self.cache = Cache()
        self.change = change
        return self.model.last_logits(text[:, self.cache.tokens :], 1, change, self.cache)[:, 0]
