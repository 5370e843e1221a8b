"""Maps of positions: regions of query-key pairs that are rotated as if the tokens were at other positions.

Scaling methods such as ReRoPE, SelfExtend and Dual Chunk Attention keep all relative positions within the trained
context in this way. ContextChange.position_map holds one; model/region_attention.py computes the attention. A map is a
frozen dataclass of numbers, so that two maps are equal if they change the same. Imported only by methods that need it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conf.errors import check


def unchanged(positions: Tensor) -> Tensor:
    return positions


@dataclass(frozen=True)
class Region:
    """The pairs of a query and the keys before `end`, as far as no later region of the map has them.

    The query is rotated as if at position q(m), the key as if at k(n), for int64 positions m and n. slow divides the
    frequencies, and the query's angle is that of start (1 - 1 / slow) positions larger: this is how fractions of
    positions are written, since the angles of whole positions are exact.
    """

    end: Callable[[Any], Any]  # the query's index, an int or a tensor of them -> the index after the last key
    q: Callable[[Tensor], Tensor] = unchanged
    k: Callable[[Tensor], Tensor] = unchanged
    slow: float = 1.0
    start: int = 0


class PositionMap:
    """The base class of maps."""

    @property
    def unchanged_up_to(self) -> int:
        """The longest text, in tokens, that has no pair in any region."""
        raise NotImplementedError

    def regions(self) -> list[Region]:
        """From near to far. Pairs that are in none of them, the nearest ones, keep their positions."""
        raise NotImplementedError


@dataclass(frozen=True)
class Clipped(PositionMap):
    """A key at distance r >= size is rotated as if at distance size + (r - size) / leak. leak inf: as if at size."""

    size: int
    leak: float = math.inf

    @property
    def unchanged_up_to(self) -> int:
        return self.size

    def regions(self) -> list[Region]:
        # q - k = size + (m - size) / leak - n / leak
        return [Region(lambda m: m - self.size + 1, slow=self.leak, start=self.size)]


def checked_size(size: int | None, default: int, L: int) -> int:
    """A method's knob `size` in tokens, or `default` for None. UserError unless it is between 1 and L."""
    check(size is None or 1 <= size <= L, "scaling.size", size, f"between 1 and the trained context, {L}")
    return max(1, default) if size is None else size
