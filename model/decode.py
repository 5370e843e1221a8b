"""Decoding token by token: the logits after a growing text."""

from collections.abc import Callable

import torch
from torch import Tensor

from model.attention import Cache
from model.gpt import GPT
from model.scaling import ContextChange


def computed(change: ContextChange) -> dict:
    """What the model computes by: equal for two changes under which it computes the same."""
    values = {**change.overrides(), "factor": None, "by_type": tuple(map(computed, change.by_type))}
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in values.items()}


class Decoder:
    """The logits of the next token of a growing text. Each token is processed only once, where that is exact.

    If the frequencies change with the length, the inputs of all layers but the first change for earlier tokens as well.
    Then the complete text is processed again, so that each step equals a full forward pass. (Hugging Face caches
    rotated keys, which is not exact even for one layer: transformers#25104.)
    """

    def __init__(self, model: GPT, change_at: Callable[[int], ContextChange]):
        """change_at: length n in tokens -> the change at this length."""
        self.model, self.change_at = model, change_at
        self.cache, self.change = Cache(), None

    @torch.inference_mode()
    def logits(self, text: Tensor) -> Tensor:
        """Logits of the token after text int64 [B, n] -> [B, vocabulary].

        text must begin with the text of the previous call, and be longer by at least one token.
        """
        change = self.change_at(text.shape[1])
        if self.change is not None and computed(change) != computed(self.change):
            self.cache = Cache()
        self.change = change
        return self.model.last_logits(text[:, self.cache.tokens :], 1, change, self.cache)[:, 0]
