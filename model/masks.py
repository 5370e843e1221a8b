"""Which keys a query sees, and the mask of a block of queries: causal, window, always visible keys, and a bias.

Letters and indices are those of model/attention.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.scaling import ContextChange

QUERY_BLOCK = 512  # queries that are processed together where a mask is needed, so that no mask has T x T numbers


class ScoreBias(Protocol):
    """What attention adds to the scores: an Encoding is one, and the biases of encodings that see content are others.

    `places`, int64 [T] or [B, T]: what the bias is computed from, positions for an Encoding, indices for the others.
    """

    has_bias: bool = True

    def bias(self, q_places: Tensor, k_places: Tensor, /) -> Tensor | None:
        """The bias of these queries and keys, [H or 1, Tq, Tk] or [B, H, Tq, Tk]; None adds nothing."""

    def key_bias(self, k_places: Tensor, /) -> Tensor | None:
        """Of all T keys, float32 [H, T] or [B, H, T], if bias(q, k) = key_bias(k) + a function of q, which softmax
        ignores. Then attention needs no mask.
        """
        return None


def sees(q: Tensor, k: Tensor, window: int | None, always_visible: int) -> Tensor:
    """Whether query q sees key k, bool [Tq, Tk], for their indices [Tq, 1] and [Tk]."""
    if window is None:
        return k <= q
    return (k <= q) & ((k > q - min(window, 2**30)) | (k < always_visible))


@dataclass
class QueryBlock:
    """Some queries, and the keys that any of them can see: the `first` ones, and those that are `near`."""

    rows: slice  # of the S queries
    queries: range  # their indices
    first: int
    near: range  # indices

    def mask(self, q: Tensor, score_bias: ScoreBias, places: Tensor, change: ContextChange, prepended: int) -> Tensor:
        """The bias, and -inf where a query does not see a key, [1 or B, 1 or H, queries, keys].

        q: for its dtype and device; the other arguments are those of `query_blocks` and attention.
        """
        # A CPU compares int64 more slowly
        index = torch.arange(self.queries.stop, device=q.device, dtype=torch.int32)
        q_index, k_index = index[self.queries.start :, None], select_keys(index, 0, self.first, self.near)
        seen = sees(q_index, k_index, change.window, change.always_visible + prepended)
        mask = torch.where(seen, q.new_zeros(()), -math.inf)
        q_places = places[..., self.queries.start : self.queries.stop]
        bias = score_bias.bias(q_places, select_keys(places, -1, self.first, self.near))
        if bias is not None:  # bfloat16 could not hold ALiBi's slope x distance from distance 257 on
            mask = bias.to(torch.promote_types(q.dtype, torch.float32)) + mask
        return mask if mask.dim() == 4 else mask.expand(1, 1 if mask.dim() == 2 else -1, -1, -1)

    def keys_of(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, H, keys, D]"""
        return select_keys(x, 2, self.first, self.near)

    def in_text(self, prepended: int) -> tuple[range, tuple[range, range]]:
        """The indices of queries and keys in the text, where prepended keys have negative ones."""
        near, queries = (range(x.start - prepended, x.stop - prepended) for x in (self.near, self.queries))
        return queries, (range(-prepended, self.first - prepended), near)


def select_keys(x: Tensor, dim: int, first: int, near: range) -> Tensor:
    """The entries of x along dim of the first keys, and of those in `near`."""
    selected = x.narrow(dim, near.start, len(near))
    return torch.cat((x.narrow(dim, 0, first), selected), dim) if first else selected


def query_blocks(q: Tensor, k: Tensor, change: ContextChange, prepended: int, start: int = 0) -> Iterator[QueryBlock]:
    """The queries q [B, H, S, D] from number `start` on, in blocks of at most QUERY_BLOCK, each with the keys it sees.

    They are those of the last S of the T keys k [B, G, T, D], of which the first are `prepended` to the text.
    """
    S, T = q.shape[2], k.shape[2]
    window, always_visible = change.window, change.always_visible + prepended
    for row in range(start, S, QUERY_BLOCK):
        rows = slice(row, min(row + QUERY_BLOCK, S))
        queries = range(T - S + rows.start, T - S + rows.stop)
        near = range(0 if window is None else max(0, queries.start - window + 1), queries.stop)
        first = 0 if window is None else min(always_visible, near.start)
        yield QueryBlock(rows, queries, first, near)
