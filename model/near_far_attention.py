"""Attention with clipped distances (ReRoPE, sinks at a fixed distance). The letters are those of attention.py."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Heads, QueryBlock, attend_masked, query_blocks, select_keys
from model.content_bias import ContentBias
from model.pos import Encoding
from model.scaling import ContextChange


def attend_clipped(
    heads: Heads, pos: Encoding | ContentBias, positions: Tensor, change: ContextChange, window: int | None
) -> Tensor:
    """Attention whose pairs at a distance of change.clip or more use the far rotation (ReRoPE).

    Within a block of queries a key can be near for all of them, far for all, or near for some and far for others. One
    SDPA over heads of twice the width gives either score:

        wide q:  [ q | q_far ]
        wide k:  [ 0 | k_far ]  for keys that are far for some query
                 [ k |   0   ]  for keys that are near for some query

    A key that is near for some queries and far for others is in both groups, and the mask hides each of its two copies
    from the queries for which it has the wrong rotation.
    """
    assert change.clip is not None and heads.q_far is not None and heads.k_far is not None
    D, clip, outputs = heads.q.shape[-1], change.clip, []
    for block in query_blocks(heads, pos, positions, change, window):
        k, v, k_far = (block.visible(x) for x in (heads.k, heads.v, heads.k_far))  # [B, H, keys, D]
        index = torch.arange(block.local.stop, device=heads.q.device)
        distance = index[block.index, None] - select_keys(index, 0, block.sinks, block.local)
        far = distance >= clip  # [queries, keys]; keys are in order, so those that are far come first
        first_near, far_count = (keys_before(block, q + 1 - clip) for q in (block.index.start, block.index.stop - 1))
        wide_q = torch.cat((heads.q[:, :, block.rows], heads.q_far[:, :, block.rows]), dim=-1)  # [B, H, queries, 2 D]
        wide_k = torch.cat((F.pad(k_far[:, :, :far_count], (D, 0)), F.pad(k[:, :, first_near:], (0, D))), dim=2)
        wide_v = F.pad(torch.cat((v[:, :, :far_count], v[:, :, first_near:]), dim=2), (0, D))
        one = block.mask if pos.has_bias else block.mask[:, :1]  # without a bias all heads have the same mask
        far_mask = one[..., :far_count].masked_fill(~far[:, :far_count], -math.inf)
        near_mask = one[..., first_near:].masked_fill(far[:, first_near:], -math.inf)
        mask = torch.cat((far_mask, near_mask), dim=-1).expand(-1, wide_q.shape[1], -1, -1)
        outputs.append(attend_masked(wide_q, wide_k, wide_v, mask, scale=D**-0.5)[..., :D])
    return torch.cat(outputs, dim=2)


def keys_before(block: QueryBlock, index: int) -> int:
    """How many of the block's visible keys have an index in the sequence below this one.

    Counted here, since a sum over a mask on a GPU would have to be waited for.
    """
    return max(0, min(index, block.sinks)) + max(0, min(index, block.local.stop) - block.local.start)
