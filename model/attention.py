"""Causal attention: the layer with its projections, and four ways to attend, chosen by `attend`.

Letters as in model/gpt.py: B batch, T number of keys (all tokens so far), S number of queries (the last S of the T
tokens; S < T only while decoding with a cache), H query heads, G key-value heads, D head width. An index is a token's
place in the sequence, 0 .. T - 1; `positions` are the numbers that the encoding uses, which may be others
(positions=random).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from model.pos import Encoding
from model.scaling import ContextChange

if TYPE_CHECKING:  # only decoding needs the one, and encodings that see content the other
    from model.content_bias import ContentBias
    from model.decode import Cache

QUERY_BLOCK = 512  # queries that are processed together where a mask is needed, so that no mask has T x T numbers


@dataclass
class Heads:
    """Rotated heads: q [B, H, S, D] for the last S tokens, k and v [B, H, T, D] for all T.

    k and v may have G heads, except in training on a CPU: SDPA shares them between query heads without a copy.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    # q and k as rotated in each region of ContextChange.position_map
    far: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sinks: int = 0  # keys before those of the text (model/pos/sink_logits.py)


class Attention(nn.Module):
    """A causal self-attention layer: projections, QK-norm, rotation, attention, output projection."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        """linear: linear attention (model/linear_attention.py) in place of softmax.

        content: of an encoding that sees content, the module that attends in this layer (Encoding.layer_module).
        """
        super().__init__()
        self.H, self.G, self.D, self.linear_attention = cfg.n_heads, cfg.kv_heads, cfg.head_width, None
        if linear:
            from model.linear_attention import linear_attention

            self.linear_attention = linear_attention
        self.qk_norms = None
        if cfg.qk_norm:
            from model.qk_norm import QKNorms

            self.qk_norms = QKNorms(cfg)
        self.qkv = nn.Linear(cfg.width, (self.H + 2 * self.G) * self.D, bias=cfg.qkv_bias)
        self.out = nn.Linear(self.H * self.D, cfg.width, bias=cfg.out_bias)
        self.content = content

    def forward(
        self, x: Tensor, pos: Encoding, positions: Tensor, prepared: Any, change: ContextChange,
        cache: "Cache | None" = None, last: int | None = None,
    ) -> Tensor:  # fmt: skip
        """x [B, S, C] -> [B, S, C], or only the output of the last `last` tokens.

        positions: int64 [T] or [B, T], of all tokens including those in the cache. prepared: the result of pos.prepare.
        cache: the projections of earlier tokens, to which those of x are added; None if x contains all tokens (S = T).
        """
        S = last or x.shape[1]
        qkv = self.qkv(x).unflatten(-1, (-1, self.D))  # [B, S, H + 2 G, D]
        if cache is not None:
            qkv = cache.extend(self, qkv)  # [B, T, H + 2 G, D]
        if self.qk_norms:
            qkv = self.qk_norms(*self.split(qkv))
        if self.linear_attention:
            y = self.linear_attention(*self.split(qkv), lambda q, k: pos.rotate(q, k, prepared), change.window)
            return self.out(y[:, -S:].flatten(2))
        heads = self.rotated_heads(qkv, S, pos, positions, prepared, change)
        if self.content is None:
            y = attend(heads, pos, positions, change)  # [B, H, S, D]
        else:
            y = self.content(x, heads, pos, positions, change, cache)
        return self.out(y.transpose(1, 2).flatten(2))

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[B, T, H + 2 G, D] -> q [B, T, H, D], k and v [B, T, G, D]"""
        return qkv.split((self.H, self.G, self.G), dim=2)

    def rotated_heads(
        self, qkv: Tensor, S: int, pos: Encoding, positions: Tensor, prepared: Any, change: ContextChange
    ) -> Heads:
        """Rotate the projections qkv [B, T, H + 2 G, D] of all T tokens -> Heads, with queries of the last S tokens."""
        q, k, v = pos.rotate_qkv(qkv, (self.H, self.G, self.G), prepared)
        q = sharpened(q, positions, change)  # a factor of each query, so it may follow the rotation
        heads = Heads(self.by_head(q)[:, :, -S:], self.by_head(k), self.by_head(v))
        if change.position_map is None:
            return heads
        from model.region_attention import add_regions

        return add_regions(heads, self, qkv, pos, positions, prepared, change)

    def by_head(self, x: Tensor) -> Tensor:
        """[B, T, H or G, D] -> [B, H, T, D], where each key-value head serves H / G query heads, or [B, G, T, D]."""
        shared = x.device.type != "cpu" or not torch.is_grad_enabled()
        return x.transpose(1, 2) if shared else repeat_heads(x.transpose(1, 2), self.H)


def repeat_heads(x: Tensor, H: int) -> Tensor:
    """Key-value heads [B, G, T, D] -> one for each query head, [B, H, T, D]. Not a copy if G = H."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def sharpened(q: Tensor, positions: Tensor, change: ContextChange) -> Tensor:
    """Under log-n scaling (change.logn = L) the queries [B, T, H, D] at positions m times max(1, ln(m + 1) / ln L)."""
    if change.logn is None:
        return q
    sharpness = ((positions + 1).clamp(min=1).log() / math.log(change.logn)).clamp(min=1)[..., None, None]
    return q * sharpness.to(q.dtype)


def attend(heads: Heads, pos: "Encoding | ContentBias", positions: Tensor, change: ContextChange) -> Tensor:
    """Causal attention of the last S tokens to all T -> [B, H, S, D], with memory linear in T.

    Chooses the implementation. Causal mask, window and regions compare indices in the sequence; the encoding's bias is
    computed from positions.
    """
    S, T = heads.q.shape[2], heads.k.shape[2]
    window = change.window if change.window is not None and change.window < T else None
    if heads.far:
        from model.region_attention import attend_regions

        return attend_regions(heads, pos, positions, change, window)
    # On a CPU, the backward pass of SDPA is slower than plain matrix products, as long as T x T is small. Forward and
    # backward at B=16, H=4, D=64 in bfloat16 on two cores: 24 ms instead of 31 ms at T=256, 11 instead of 38 at T=128.
    if heads.q.device.type == "cpu" and torch.is_grad_enabled() and S == T <= QUERY_BLOCK:
        return attend_unfused(heads, pos, positions, change, window)
    if window is None and S in (1, T):
        if not pos.has_bias:  # one fused kernel and no mask; a single query sees all keys
            return attend_causal(heads.q, heads.k, heads.v)
        if S == T and (key_bias := pos.key_bias(positions)) is not None:
            from model.key_bias_attention import attend_key_bias

            return attend_key_bias(heads, key_bias)
    return attend_blocks(heads, pos, positions, change, window)


def attend_unfused(
    heads: Heads, pos: "Encoding | ContentBias", positions: Tensor, change: ContextChange, window: int | None
) -> Tensor:
    """Attention as plain matrix products and a softmax, for at most QUERY_BLOCK tokens -> [B, H, T, D].

    It slices no tensor: for slices, Inductor of torch 2.13 compiles a backward pass on a CPU that returns NaN. With a
    bias, whose mask is float32, scores and softmax are float32 too.
    """
    (block,) = query_blocks(heads, pos, positions, change, window)
    scores = heads.q @ heads.k.transpose(-1, -2) * heads.q.shape[-1] ** -0.5 + block.mask  # [B, H, T, T]
    return scores.softmax(-1).to(heads.v.dtype) @ heads.v


def attend_blocks(
    heads: Heads, pos: "Encoding | ContentBias", positions: Tensor, change: ContextChange, window: int | None
) -> Tensor:
    """Attention with a mask (window, bias, or fewer queries than keys), a block of queries at a time.

    Never compiled (engine/compile.py), for the reason that attend_unfused gives.
    """
    outputs, start = [], 0
    if window is not None and not pos.has_bias and heads.q.shape[2] == heads.k.shape[2]:
        start = window  # the first queries see all earlier keys
        outputs.append(attend_causal(*(x[:, :, :window] for x in (heads.q, heads.k, heads.v))))
    for block in query_blocks(heads, pos, positions, change, window, start):
        k, v = block.visible(heads.k), block.visible(heads.v)  # [B, H, keys, D]
        outputs.append(attend_masked(heads.q[:, :, block.rows], k, v, block.mask))
    return torch.cat(outputs, dim=2)


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA without a mask: of T queries or of the last one, q [B, H, T or 1, D], to k and v [B, H or G, T, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=k.shape[1] < q.shape[1])


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """SDPA of q [B, H, queries, D] to k and v [B, H or G, keys, D] -> [B, H, queries, D], mask in its own precision.

    Without autocast, which would round a float32 mask to bfloat16. The CPU's kernels add it to the float32 scores of
    bfloat16 heads; CUDA's need one dtype for all four, and with a mask none of its fused kernels shares keys.
    """
    dtype = q.dtype if q.device.type == "cpu" else mask.dtype
    k, v = (x if q.device.type == "cpu" else repeat_heads(x, q.shape[1]) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        y = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), mask, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
        )
        return y.to(q.dtype)


@dataclass
class QueryBlock:
    """Some queries, and the keys that any of them can see: the first `sinks`, and those in `local`."""

    rows: slice  # of the S queries
    sinks: int
    local: slice
    index: slice  # of the queries in the sequence
    mask: Tensor  # the encoding's bias, and -inf in the future and outside the window, [1 or B, H, queries, keys]

    def visible(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, H, keys, D]"""
        return select_keys(x, 2, self.sinks, self.local)


def select_keys(x: Tensor, dim: int, sinks: int, local: slice) -> Tensor:
    """The entries of x along dim that belong to visible keys: the first `sinks`, and those in the slice `local`."""
    near = x.narrow(dim, local.start, local.stop - local.start)
    return torch.cat((x.narrow(dim, 0, sinks), near), dim) if sinks else near


def query_blocks(
    heads: Heads, pos: "Encoding | ContentBias", positions: Tensor, change: ContextChange, window: int | None,
    first: int = 0,
) -> Iterator[QueryBlock]:  # fmt: skip
    """The S queries from number `first` on, in blocks of at most QUERY_BLOCK, each with the keys it can see and a mask.

    window: the number of keys that each query sees, itself included; None: all earlier ones.
    """
    q, S, T = heads.q, heads.q.shape[2], heads.k.shape[2]
    for start in range(first, S, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, S)
        queries = slice(T - S + start, T - S + stop)  # as indices in the sequence
        local = slice(0 if window is None else max(0, queries.start - window + 1), queries.stop)
        sinks = 0 if window is None else min(change.sinks, local.start)
        # Only the last keys can be in the future of a query, and only the first ones outside its window. Comparing all
        # distances instead takes longer than the attention itself. Comparing int32 indices compiles to code for a
        # CPU that is twice as fast as triu, int64 indices or differences.
        count = stop - start
        key = torch.arange(count, device=q.device, dtype=torch.int32)
        query = key.unsqueeze(1)
        mask = q.new_zeros(count, sinks + local.stop - local.start)  # [queries, keys]
        mask[:, -count:].masked_fill_(query < key, -math.inf)
        if window is not None:
            oldest = max(local.start, change.sinks)  # the first key that the window can hide; sinks are always seen
            edge = mask[:, change.sinks : change.sinks + count]
            edge.masked_fill_(query >= key[: edge.shape[1]] + (oldest + window - queries.start), -math.inf)
        bias = pos.bias(positions[..., queries], select_keys(positions, -1, sinks, local))
        if bias is not None:  # bfloat16 could not hold ALiBi's slope x distance from distance 257 on
            mask = bias.to(torch.promote_types(q.dtype, torch.float32)) + mask
        mask = mask if mask.dim() == 4 else mask.expand(1, q.shape[1], -1, -1)
        yield QueryBlock(slice(start, stop), sinks, local, queries, mask)
