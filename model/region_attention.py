"""Attention under a map of positions (model/position_maps.py). The letters are those of attention.py."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cos_sin
from model.attention import Attention, Heads, QueryBlock, attend_masked, query_blocks, select_keys, sharpened
from model.content_bias import ContentBias
from model.pos import Encoding
from model.pos.rope import Table, Tables
from model.scaling import ContextChange


def far_tables(
    change: ContextChange, inv_freq: Tensor, positions: Tensor, phase: Callable[[Tensor], Tensor]
) -> list[Tables]:
    """The angles of each region of change.position_map, for positions int64 [T] or [B, T].

    inv_freq: float64 [pairs]. phase: frequencies -> phases on the positions' device, as Rope.phase.
    """
    assert change.position_map is not None

    def table(frequencies: Tensor, at: Tensor, start: Tensor | int = 0) -> Table:
        cos, sin = cos_sin(phase(frequencies), at, start)
        return cos * change.attention_factor, sin * change.attention_factor

    result = []
    for region in change.position_map.regions():
        slow = inv_freq / region.slow
        start = region.start * phase(inv_freq - slow)
        result.append(Tables(table(slow, region.q(positions), start), table(slow, region.k(positions))))
    return result


def add_regions(
    heads: Heads, layer: Attention, qkv: Tensor, pos: Encoding, positions: Tensor, prepared: Any, change: ContextChange
) -> Heads:
    """The heads with the queries and keys of each region. qkv: [B, T, H + 2 G, D], before the rotation."""
    q, k, _ = layer.split(qkv)
    S, far = heads.q.shape[2], []
    for tables in prepared.far:
        far_q, far_k = pos.rotate(q, k, tables)
        far_q = sharpened(far_q, positions, change)
        far.append((layer.by_head(far_q)[:, :, -S:], layer.by_head(far_k)))
    return replace(heads, far=far)


def attend_regions(
    heads: Heads, pos: Encoding | ContentBias, positions: Tensor, change: ContextChange, window: int | None
) -> Tensor:
    """Attention whose pairs have the rotation of their region -> [B, H, S, D].

    Within a block of queries a key can be in one region for some of them and in another for others. One SDPA over wider
    heads gives all scores; with one region besides the near pairs:

        wide q:  [ q | q_far ]
        wide k:  [ 0 | k_far ]  for keys that are far for some query
                 [ k |   0   ]  for keys that are near for some query

    A key that is near for some queries and far for others is in both groups, and the mask hides each of its two copies
    from the queries for which it has the wrong rotation.
    """
    assert change.position_map is not None
    rotations = [(heads.q, heads.k), *heads.far]  # from near to far
    ends = [region.end for region in change.position_map.regions()]  # rotation r + 1 is that of keys before ends[r]
    D, last, sink, outputs = heads.q.shape[-1], len(ends), heads.sinks, []
    for block in query_blocks(heads, pos, positions, change, window):
        # Indices in the text: a sink before it has the index -1
        index = torch.arange(block.local.stop, device=heads.q.device) - sink
        q_index, k_index = index[block.index, None], select_keys(index, 0, block.sinks, block.local)
        oldest, latest = block.index.start - sink, block.index.stop - 1 - sink  # queries
        v = block.visible(heads.v)  # [B, H, keys, D]
        mask = block.mask if pos.has_bias else block.mask[:, :1]  # without a bias all heads have the same mask
        ks, vs, masks = [], [], []
        for r in reversed(range(last + 1)):
            # Keys are in order, so those that are in this region for any of the queries are consecutive
            first = keys_before(block, ends[r](oldest) + sink) if r < last else 0
            stop = keys_before(block, ends[r - 1](latest) + sink) if r > 0 else len(k_index)
            keys = slice(first, max(first, stop))
            outside = k_index >= ends[r - 1](q_index) if r > 0 else torch.zeros_like(q_index, dtype=torch.bool)
            if r < last:
                outside = outside | (k_index < ends[r](q_index))
            ks.append(F.pad(block.visible(rotations[r][1])[:, :, keys], (r * D, (last - r) * D)))
            vs.append(v[:, :, keys])
            masks.append(mask[..., keys].masked_fill(outside.expand(-1, len(k_index))[:, keys], -math.inf))
        wide_q = torch.cat([q[:, :, block.rows] for q, _ in rotations], dim=-1)  # [B, H, queries, rotations * D]
        wide_v = F.pad(torch.cat(vs, dim=2), (0, last * D))
        wide_mask = torch.cat(masks, dim=-1).expand(-1, wide_q.shape[1], -1, -1)
        outputs.append(attend_masked(wide_q, torch.cat(ks, dim=2), wide_v, wide_mask, scale=D**-0.5)[..., :D])
    return torch.cat(outputs, dim=2)


def keys_before(block: QueryBlock, index: int) -> int:
    """How many of the block's visible keys have an index in the sequence below this one.

    Counted here, since a sum over a mask on a GPU would have to be waited for.
    """
    return max(0, min(index, block.sinks)) + max(0, min(index, block.local.stop) - block.local.start)
