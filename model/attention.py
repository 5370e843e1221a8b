"""Causal attention: the layer with its projections, and four ways to compute softmax attention.

Letters: B batch, T all tokens so far (in Heads with the prepended keys), N new tokens (N < T only while decoding with a
cache), S queries (the last S of the tokens), H query heads, G key-value heads, D head width, C model width. An index is
a token's place in the sequence, 0 .. T - 1; `positions` are the numbers that the encoding uses, which may be others
(positions=random).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.schema import ModelConfig
from model import masks
from model.linear_attention import linear_attention
from model.masks import QueryBlock, ScoreBias, query_blocks
from model.pos import Encoding
from model.regions import widen
from model.scaling import ContextChange


class Cache:
    """The projections of all tokens so far, for each layer, before their rotation.

    Under dynamic NTK the frequencies change with the length. Rotated keys in the cache would have the frequencies of an
    earlier length, and a new query those of the current one (transformers#25104). So all keys are rotated at each step,
    which is cheap.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.layers: dict[nn.Module, Tensor] = {}

    def extend(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Append what a layer computed of N new tokens, x [B, N, ...]; returns that of all, [B, T, ...]."""
        self.layers[layer] = torch.cat((self.layers[layer], x), dim=1) if layer in self.layers else x
        return self.layers[layer]


@dataclass(frozen=True)
class Where:
    """Where the tokens of a forward pass are, for one layer: GPT.hidden makes one for each."""

    encoding: Encoding  # of this layer
    positions: Tensor  # int64 [T] or [B, T], of all tokens including those in the cache
    prepared: Any  # the result of encoding.prepare
    change: ContextChange  # what a scaling method changes in this layer
    cache: Cache | None = None  # of the tokens before the new ones; None: the input has all tokens
    last: int | None = None  # the output of so many last tokens is enough


@dataclass
class Heads:
    """Rotated heads: q [B, H, S, D] for the last S tokens, k and v [B, G, T, D] for all T.

    k and v have G heads, which SDPA shares without a copy; in training on a CPU H, because attend_unfused multiplies
    them directly.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    # q and k as rotated in each region of ContextChange.position_map
    far: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    softcap: float | None = None  # model.attention_softcap
    # Keys before those of the text, which every query sees (model/pos/sink_logits.py). For a bias the first of them has
    # index 0; for regions, which count from the text on, negative indices
    prepended: int = 0

    def indices(self) -> Tensor:
        """0 .. T - 1, int64 [T]."""
        return torch.arange(self.k.shape[2], device=self.k.device)

    def wide(self, q_index: Tensor, k_index: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, H, Tq, D] and k [B, H, Tk, D] of these tokens, in float32 at least, for a bias that sees content."""
        q = self.q[:, :, q_index - (self.k.shape[2] - self.q.shape[2])]
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.to(dtype), repeat_heads(self.k[:, :, k_index].to(dtype), q.shape[1])

    def map_queries(self, f: Callable[[Tensor], Tensor]) -> "Heads":
        """With f(q) for q, in every rotation."""
        return replace(self, q=f(self.q), far=[(f(q), k) for q, k in self.far])

    def map_keys(self, f: Callable[[Tensor], Tensor]) -> "Heads":
        """With f(k) for k, in every rotation, and f(v) for v."""
        return replace(self, k=f(self.k), v=f(self.v), far=[(q, f(k)) for q, k in self.far])


class Attention(nn.Module):
    """A causal self-attention layer: projections, QK-norm, rotation, attention, gate, output projection."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        """linear: linear attention (model/linear_attention.py) in place of softmax.

        content: of an encoding that sees content, the module that attends in this layer (Encoding.layer_module).
        """
        super().__init__()
        self.H, self.G, self.D, self.linear = cfg.n_heads, cfg.kv_heads, cfg.head_width, linear
        self.softcap = cfg.attention_softcap
        widths = (self.H * self.D, self.G * self.D) if cfg.qk_norm_all_heads else (self.D, self.D)
        norms = [nn.RMSNorm(w, cfg.norm_eps, elementwise_affine=cfg.qk_norm_weight) for w in widths if cfg.qk_norm]
        self.qk_norms = nn.ModuleList(norms)  # of q and of k (Henry et al. 2020, arXiv 2010.04245)
        self.qkv = nn.Linear(cfg.width, (self.H + 2 * self.G) * self.D, bias=cfg.qkv_bias)
        self.out = nn.Linear(self.H * self.D, cfg.width, bias=cfg.out_bias)
        # Of each head, or of each of its elements (Qiu et al. 2025, arXiv 2505.06708)
        gates = {"none": 0, "head": self.H, "element": self.H * self.D}[cfg.attention_gate]
        self.gate = nn.Linear(cfg.width, gates, bias=False) if gates else None
        self.content = content

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """x [B, N, C] -> [B, S, C], where S is N or `where.last`."""
        S = where.last or x.shape[1]
        qkv = self.qkv(x).unflatten(-1, (-1, self.D))  # [B, N, H + 2 G, D]
        if where.cache is not None:
            qkv = where.cache.extend(self, qkv)  # [B, T, H + 2 G, D]
        if self.qk_norms:
            *qk, v = self.split(qkv)
            qkv = torch.cat([*(normalised(part, norm) for part, norm in zip(qk, self.qk_norms, strict=True)), v], dim=2)
        if self.linear:
            rotate = partial(where.encoding.rotate, prepared=where.prepared)
            y = linear_attention(*self.split(qkv), rotate, where.change.window)  # [B, T, H, D]
            return self.out(y[:, -S:].flatten(2))
        heads = self.rotated_heads(qkv, S, where)
        if self.content is None:
            y = attend(heads, where.encoding, where.positions, where.change)  # [B, H, S, D]
        else:
            y = self.content(x, heads, where)
        y = y.transpose(1, 2)  # [B, S, H, D]
        if self.gate is not None:
            y = y * self.gate(x[:, -S:]).sigmoid().unflatten(-1, (self.H, -1))  # [B, S, H, 1 or D]
        return self.out(y.flatten(2))

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[B, T, H + 2 G, D] -> q [B, T, H, D], k and v [B, T, G, D]"""
        return qkv.split((self.H, self.G, self.G), dim=2)

    def rotated_heads(self, qkv: Tensor, S: int, where: Where) -> Heads:
        """Rotate the projections qkv [B, T, H + 2 G, D] of all T tokens -> Heads, with queries of the last S tokens."""
        q, k, v = where.encoding.rotate_qkv(qkv, (self.H, self.G, self.G), where.prepared)
        rotations = [(q, k)]
        if where.change.position_map is not None:
            q, k, _ = self.split(qkv)
            rotations += [where.encoding.rotate(q, k, tables) for tables in where.prepared.far]
        # A factor of each query, so it may follow the rotation
        sharp = [(sharpened(q, where.positions, where.change), k) for q, k in rotations]
        (q, k), *far = [(self.by_head(q)[:, :, -S:], self.by_head(k)) for q, k in sharp]
        return Heads(q, k, self.by_head(v), far, self.softcap)

    def by_head(self, x: Tensor) -> Tensor:
        """[B, T, H or G, D] -> [B, H or G, T, D], in training on a CPU [B, H, T, D], as Heads says."""
        return repeat_heads(x.transpose(1, 2), self.H) if trains_on_cpu(x) else x.transpose(1, 2)


def trains_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and torch.is_grad_enabled()


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """Each head of x [B, T, H, D], or all heads together if the norm is as wide, in float32 at least."""
    assert isinstance(norm, nn.RMSNorm)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares in bfloat16 would lose too many bits
    return norm(wide.flatten(2).unflatten(2, (-1, *norm.normalized_shape))).view(x.shape).to(x.dtype)


def repeat_heads(x: Tensor, H: int) -> Tensor:
    """Key-value heads [B, G, T, D] -> one for each query head, [B, H, T, D]. Not a copy if G = H."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def softcapped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), in float32 at least (Gemma Team 2024, arXiv 2408.00118); x for None."""
    if cap is None:
        return x
    return cap * (x.to(torch.promote_types(x.dtype, torch.float32)) / cap).tanh()


def sharpened(q: Tensor, positions: Tensor, change: ContextChange) -> Tensor:
    """Under log-n scaling (change.logn = L) the queries [B, T, H, D] at positions m times max(1, ln(m + 1) / ln L)."""
    if change.logn is None:
        return q
    sharpness = ((positions + 1).clamp(min=1).log() / math.log(change.logn)).clamp(min=1)[..., None, None]
    return q * sharpness.to(q.dtype)


# ---- four ways to compute softmax attention ----


def attend(heads: Heads, score_bias: ScoreBias, places: Tensor, change: ContextChange) -> Tensor:
    """Causal attention of the last S tokens to all T -> [B, H, S, D], with memory linear in T.

    The first of four ways that fits, from the fastest to the one that can do everything:

        attend_unfused    short texts in training on a CPU, without regions
        attend_causal     no mask: no bias, softcap, region or window below T, and all T queries or the last one
        attend_key_bias   no mask: the same with all T queries and a bias of the key alone, as a column of the heads
        attend_blocks     a mask, for a block of queries at a time

    Causal mask, window and regions compare indices in the sequence; the bias is computed from places.
    """
    S, T = heads.q.shape[2], heads.k.shape[2]
    # On a CPU, the backward pass of SDPA is slower than plain matrix products, as long as T x T is small
    if trains_on_cpu(heads.q) and S == T <= masks.QUERY_BLOCK and not heads.far:
        return attend_unfused(heads, score_bias, places, change)
    sees_all = change.window is None or change.window >= T - heads.prepended
    plain = not heads.far and heads.softcap is None
    if plain and sees_all and S in (1, T):  # SDPA's causal mask is right for T queries, a single one needs none
        if not score_bias.has_bias:
            return attend_causal(heads.q, heads.k, heads.v)
        if S == T and (key_bias := score_bias.key_bias(places)) is not None:
            return attend_key_bias(heads, key_bias)
    return attend_blocks(heads, score_bias, places, change)


def attend_unfused(heads: Heads, score_bias: ScoreBias, places: Tensor, change: ContextChange) -> Tensor:
    """Attention as plain matrix products and a softmax, for at most QUERY_BLOCK tokens -> [B, H, T, D].

    It slices neither q, k nor v: for slices, Inductor of torch 2.13 compiles a backward pass on a CPU that returns NaN.
    With a bias, whose mask is float32, scores and softmax are float32 too.
    """
    (block,) = query_blocks(heads.q, heads.k, change, heads.prepended)
    mask = block.mask(heads.q, score_bias, places, change, heads.prepended)
    return attend_scores(heads.q, heads.k, heads.v, mask, heads.q.shape[-1] ** -0.5, heads.softcap)


def attend_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Attention with all scores in memory: q [B, H, queries, D], k and v [B, H, keys, D] -> [B, H, queries, D]."""
    scores = softcapped(q @ k.transpose(-1, -2) * scale, softcap) + mask  # [B, H, queries, keys]
    return scores.softmax(-1).to(v.dtype) @ v


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA without a mask: of T queries or of the last one, q [B, H, T or 1, D], to k and v [B, H or G, T, D]."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=k.shape[1] < q.shape[1])


def attend_key_bias(heads: Heads, key_bias: Tensor) -> Tensor:
    """Causal attention with a bias that depends on the key alone, float32 [H, T] or [B, H, T], and no mask.

    The score q . k + b is one product of wider heads: [q | 1] . [k | b]. In bfloat16 b is split into three columns of 8
    bits each, whose sum has float32's 24 bits. D + 8 columns, because fused kernels need a multiple of 8.
    """
    B, H, T, D = heads.q.shape
    columns, rest = [], key_bias.expand(B, H, T)
    for _ in range(3):
        columns.append(rest.to(heads.q.dtype))
        rest = rest - columns[-1].to(rest.dtype)
    ones, pad = heads.q.new_ones(B, H, T, 3), heads.q.new_zeros(B, H, T, 5)
    q = torch.cat((heads.q * D**-0.5, ones, pad), dim=-1)  # [B, H, T, D + 8]
    k, v = repeat_heads(heads.k, H), repeat_heads(heads.v, H)  # query heads that share a key have different biases
    k = torch.cat((k, torch.stack(columns, dim=-1), pad), dim=-1)  # [B, H, T, D + 8]
    v = torch.cat((v, heads.q.new_zeros(B, H, T, 8)), dim=-1)  # the fused kernel wants one width for all
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[..., :D]


def attend_blocks(heads: Heads, score_bias: ScoreBias, places: Tensor, change: ContextChange) -> Tensor:
    """Attention with a mask (window, bias, regions, or fewer queries than keys), a block of queries at a time.

    In training, a block with a bias is computed again in the backward pass, so that no T x T numbers are kept. Never
    compiled (engine/compile.py), for the reason that attend_unfused gives.
    """
    window, outputs, start = change.window, [], 0
    regions = change.position_map.regions() if change.position_map is not None else []
    plain = not score_bias.has_bias and not regions and heads.softcap is None
    if window is not None and plain and heads.q.shape[2] == heads.k.shape[2]:
        start = window  # the first queries see all earlier keys, so they need no mask
        outputs.append(attend_causal(*(x[:, :, :window] for x in (heads.q, heads.k, heads.v))))

    def attend(block: QueryBlock) -> Tensor:
        rotations = [(q[:, :, block.rows], block.keys_of(k)) for q, k in [(heads.q, heads.k), *heads.far]]
        (q, k), v, D = rotations[0], block.keys_of(heads.v), heads.q.shape[-1]
        mask = block.mask(heads.q, score_bias, places, change, heads.prepended)
        if regions:
            q, k, v, mask = widen(rotations, v, mask, regions, *block.in_text(heads.prepended))
        return attend_masked(q, k, v, mask, D**-0.5, heads.softcap)[..., :D]

    again = score_bias.has_bias and torch.is_grad_enabled() and heads.q.shape[2] > masks.QUERY_BLOCK
    for block in query_blocks(heads.q, heads.k, change, heads.prepended, start):
        outputs.append(checkpoint(attend, block, use_reentrant=False) if again else attend(block))
    return torch.cat(outputs, dim=2)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """SDPA of q [B, H, queries, D] to k and v [B, H or G, keys, D] -> [B, H, queries, D], mask in its own precision.

    Without autocast, which would round a float32 mask to bfloat16. The CPU's kernels add it to the float32 scores of
    bfloat16 heads; CUDA's need one dtype for all four, and with a mask none of its fused kernels shares keys. SDPA has
    no softcap: with one, all scores of the block are computed.
    """
    if softcap is not None:
        wide = [repeat_heads(x.to(torch.promote_types(x.dtype, torch.float32)), q.shape[1]) for x in (q, k, v)]
        with torch.autocast(q.device.type, enabled=False):
            return attend_scores(*wide, mask, scale, softcap).to(q.dtype)
    mask = mask.expand(-1, q.shape[1], -1, -1)
    dtype = q.dtype if q.device.type == "cpu" else mask.dtype
    k, v = (x if q.device.type == "cpu" else repeat_heads(x, q.shape[1]) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        y = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), mask, scale=scale, enable_gqa=k.shape[1] < q.shape[1]
        )
        return y.to(q.dtype)
