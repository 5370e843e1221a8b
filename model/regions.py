"""Maps of positions: regions of query-key pairs that are rotated as if the tokens were at other positions.

ReRoPE, SelfExtend and Dual Chunk Attention keep all relative positions within the trained context in this way.
ContextChange.position_map holds a map. It is a frozen dataclass of numbers, so that two maps are equal if they change
the same. `widen` makes one attention of all regions (model/attention.py).

An example: Clipped(near=3) with leak inf, which keeps the distances 0, 1 and 2 and rotates all larger ones by 3. It has
one region, whose `end` is m - 2: query m = 5 has the keys 0, 1, 2 in it, and keys 3, 4, 5 keep their positions.

    key n                  0  1  2  3  4  5
    distance 5 - n         5  4  3  2  1  0
    rotated by             3  3  3  2  1  0
                          region | near
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """The pairs of query m and the keys n < end(m), as far as no later region of the map has them.

    The query is rotated as if at position q(m), the key as if at k(n), for int64 positions m and n, so the pair has the
    angle theta (start + (q(m) - start - k(n)) / slow). slow divides the frequencies; this is how fractions of positions
    are written, since the angles of whole positions are exact.
    """

    end: Callable[[Any], Any]  # of an int or a tensor of them
    q: Callable[[Tensor], Tensor] = lambda m: m
    k: Callable[[Tensor], Tensor] = lambda n: n
    slow: float = 1.0
    start: int = 0


@dataclass(frozen=True)
class PositionMap:
    """The base class of maps. near: the longest text, in tokens, that has no pair in any region."""

    near: int

    def regions(self) -> list[Region]:
        """From near to far. Pairs that are in none of them, the nearest ones, keep their positions."""
        raise NotImplementedError


@dataclass(frozen=True)
class Clipped(PositionMap):
    """A key at distance r >= near is rotated as if at distance near + (r - near) / leak. leak inf: as if at near."""

    leak: float = math.inf

    def regions(self) -> list[Region]:
        # q - k = near + (m - near) / leak - n / leak
        return [Region(lambda m: m - self.near + 1, slow=self.leak, start=self.near)]


def widen(
    rotated: Sequence[tuple[Tensor, Tensor]],
    v: Tensor,
    mask: Tensor,
    regions: Sequence[Region],
    queries: range,
    keys: tuple[range, range],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The q, k, v and mask of one attention of wider heads, which gives the scores of all regions.

    rotated: (q [B, H, Tq, D], k [B, G, Tk, D]) of the pairs that keep their positions and of each region, from near to
    far, in number R: rotation 0 keeps positions, rotation r is that of regions[r - 1]. v: [B, G, Tk, D]. mask: [1 or B,
    1 or H, Tq, Tk]. queries, keys: their indices; those of the keys are two ranges. Returns q [B, H, Tq, R D], k, v [B,
    G, keys, R D], mask [.., Tq, keys].

    With one region:

        wide q:  [ q | q_far ]
        wide k:  [ 0 | k_far ]  for keys that are far for some query
                 [ k |   0   ]  for keys that are near for some query

    A key that is near for some queries and far for others is in both groups, and the mask hides each of its two copies
    from the queries for which it has the wrong rotation. In the example above queries 5 and 6 have the ends 3 and 4:
    the far keys are 0 .. 3, the near ones 3 .. 6, and the mask hides the far copy of key 3 from query 5, the near one
    from query 6.
    """
    R, D = len(rotated), v.shape[-1]
    q_index = torch.arange(queries.start, queries.stop, device=v.device).unsqueeze(1)
    k_index = torch.cat([torch.arange(part.start, part.stop, device=v.device) for part in keys])

    def count_before(end: int) -> int:
        """How many keys have an index below end. (To sum a mask on a GPU, one would have to wait for it.)"""
        return sum(len(range(part.start, min(part.stop, end))) for part in keys)

    ks, vs, masks = [], [], []
    for r in reversed(range(R)):  # from far to near; rotation r has the keys from regions[r].end to regions[r - 1].end
        first, stop = 0, len(k_index)  # keys that it has for some query
        outside = torch.zeros_like(mask[0, 0], dtype=torch.bool)
        if r < R - 1:
            first = count_before(regions[r].end(queries[0]))  # earlier ones are further away for all queries
            outside = outside | (k_index < regions[r].end(q_index))
        if r > 0:
            stop = count_before(regions[r - 1].end(queries[-1]))  # later ones are nearer for all
            outside = outside | (k_index >= regions[r - 1].end(q_index))
        part = slice(first, max(first, stop))
        ks.append(F.pad(rotated[r][1][:, :, part], (r * D, (R - 1 - r) * D)))
        vs.append(v[:, :, part])
        masks.append(mask[..., part].masked_fill(outside[:, part], -math.inf))
    wide_q = torch.cat([q for q, _ in rotated], dim=-1)
    wide_v = F.pad(torch.cat(vs, dim=2), (0, (R - 1) * D))
    return wide_q, torch.cat(ks, dim=2), wide_v, torch.cat(masks, dim=-1)
