"""Causal attention, softmax or linear: its window, sinks and bias, the keys that it caches, and the layer around it.

Letters as in model/gpt.py: B batch, T time, S scored positions, H query heads, G key-value heads, D head width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig
from kernels import normed
from model.linear_attention import linear_attention
from model.pos import Encoding
from model.scaling import Scaled

QUERY_BLOCK = 512  # queries at a time where a mask is needed, so that it never holds T x T numbers


def attend(
    q: Tensor, k: Tensor, v: Tensor, pos: Encoding, positions: Tensor, scaled: Scaled, far: tuple | None = None
) -> Tensor:
    """Causal attention of the last S tokens, q [B, H, S, D], to all, k and v [B, H, T, D] -> [B, H, S, D].

    In memory linear in T. positions: of all T. far: q and k for pairs at a distance of scaled.clip and more. Causality,
    window and clip go by place in the sequence; the encoding's bias goes by position.
    """
    S, T, D = q.shape[2], *k.shape[2:]
    past = T - S
    window = scaled.window if scaled.window is not None and scaled.window < T else None
    # SDPA's backward on a CPU costs more than writing the products out, while T x T is small: over forward and
    # backward, 24 ms against 31 at 16 x 4 heads, T=256, D=64 in bfloat16 on two cores, and 11 against 38 at T=128.
    written_out = q.device.type == "cpu" and torch.is_grad_enabled() and T <= QUERY_BLOCK
    if window is None and far is None and not written_out and not past:
        key_bias = pos.key_bias(positions)
        if key_bias is not None:
            return attend_with_key_bias(q, k, v, key_bias)
    outputs = []
    for start in range(0, S, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, S)
        asking = slice(past + start, past + stop)
        first = 0 if window is None else max(0, past + start - window + 1)
        sinks = min(scaled.sinks, first) if window is not None else 0
        near = slice(first, past + stop)
        bias = pos.bias(positions[..., asking], keys(positions, sinks, near, -1))
        if bias is None and window is None and far is None and not written_out and not past:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        place = torch.arange(T, device=q.device)
        distance = place[asking, None] - keys(place, sinks, near, 0)
        hidden = distance < 0
        if window is not None:
            hidden |= (distance >= window) & (keys(place, sinks, near, 0) >= scaled.sinks)
        mask = q.new_zeros(hidden.shape) if bias is None else bias.to(q.dtype)
        mask = mask.masked_fill(hidden, -math.inf)
        mask = mask if mask.dim() == 4 else mask.expand(1, q.shape[1], -1, -1)
        if written_out and far is None:
            return (q @ k.transpose(-1, -2) * D**-0.5 + mask).softmax(-1) @ v
        rows, k_, v_ = q[:, :, start:stop], keys(k, sinks, near, 2), keys(v, sinks, near, 2)
        if far is None:
            outputs.append(F.scaled_dot_product_attention(rows, k_, v_, attn_mask=mask))
            continue
        # Each key as near, as far, or, where some of these queries have it near and others far, as both: heads twice as
        # wide hold q beside the far q, against near keys beside zeros.
        place, far_k = keys(place, sinks, near, 0), keys(far[1], sinks, near, 2)
        some_near = int((place <= asking.start - scaled.clip).sum())
        some_far = int((place <= asking.stop - 1 - scaled.clip).sum())
        wide_q = torch.cat((rows, far[0][:, :, start:stop]), dim=-1)
        wide_k = torch.cat((F.pad(far_k[:, :, :some_far], (D, 0)), F.pad(k_[:, :, some_near:], (0, D))), dim=2)
        wide_v = F.pad(torch.cat((v_[:, :, :some_far], v_[:, :, some_near:]), dim=2), (0, D))
        clipped = mask[..., :some_far].masked_fill(distance[:, :some_far] < scaled.clip, -math.inf)
        local = mask[..., some_near:].masked_fill(distance[:, some_near:] >= scaled.clip, -math.inf)
        mask = torch.cat((clipped, local), dim=-1)
        outputs.append(F.scaled_dot_product_attention(wide_q, wide_k, wide_v, mask, scale=D**-0.5)[..., :D])
    return torch.cat(outputs, dim=2)


def keys(x: Tensor, sinks: int, near: slice, dim: int) -> Tensor:
    """The first `sinks` and those in `near` along dim."""
    local = x.narrow(dim, near.start, near.stop - near.start)
    return torch.cat((x.narrow(dim, 0, sinks), local), dim) if sinks else local


def attend_with_key_bias(q: Tensor, k: Tensor, v: Tensor, key_bias: Tensor) -> Tensor:
    """Causal attention with a bias that depends on the key alone, float32 [H, T] or [B, H, T], and no mask.

    q k^T + b is one product of wider heads: b goes beside k, against ones beside q. In bfloat16 b takes three columns,
    whose sum holds float32's 24 bits. The width stays a multiple of 8, which fused kernels want.
    """
    B, H, T, D = q.shape
    columns, rest = [], key_bias.expand(B, H, T)
    for _ in range(3):
        columns.append(rest.to(q.dtype))
        rest = rest - columns[-1].to(rest.dtype)
    one, pad = q.new_ones(B, H, T, 3), q.new_zeros(B, H, T, 5)
    q = torch.cat((q * D**-0.5, one, pad), dim=-1)
    k = torch.cat((k, torch.stack(columns, dim=-1), pad), dim=-1)
    v = torch.cat((v, q.new_zeros(B, H, T, 8)), dim=-1)  # one width for all, or the fused kernel does not apply
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)[..., :D]


class Cache:
    """What decoding keeps of the tokens so far: each layer's projection, not turned yet.

    Turned keys would keep the frequencies of the length at which they were read, which under dynamic NTK are not those
    of the query that meets them (transformers#25104). Turning all of them at each step costs less than attending.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.layers: dict[nn.Module, Tensor] = {}

    def extend(self, layer: nn.Module, qkv: Tensor) -> Tensor:
        """qkv [B, S, H + 2 G, D] of new tokens -> that of all, [B, T, H + 2 G, D]."""
        self.layers[layer] = torch.cat((self.layers[layer], qkv), dim=1) if layer in self.layers else qkv
        return self.layers[layer]


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig, linear: bool):
        super().__init__()
        self.H, self.G, self.D, self.linear = cfg.n_heads, cfg.kv_heads, cfg.head_width, linear
        self.qk_eps = cfg.norm_eps if cfg.qk_norm and not cfg.qk_norm_weight else None
        self.qk_norms = nn.ModuleList(nn.RMSNorm(self.D, cfg.norm_eps) for _ in range(2 * cfg.qk_norm_weight))
        self.qkv = nn.Linear(cfg.width, (self.H + 2 * self.G) * self.D, bias=cfg.qkv_bias)
        self.out = nn.Linear(self.H * self.D, cfg.width, bias=cfg.out_bias)

    def forward(
        self,
        x: Tensor,
        pos: Encoding,
        positions: Tensor,
        prepared: Any,
        scaled: Scaled,
        cache: Cache | None = None,
    ) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.D))  # [B, T, H + 2 G, D]
        new = slice(None)
        if cache is not None:
            new = slice(-qkv.shape[1], None)  # the tokens that ask; from here on, qkv is that of all
            qkv = cache.extend(self, qkv)
        heads = (self.H, self.G, self.G)
        if self.qk_norms:
            q, k, v = qkv.split(heads, dim=2)
            q, k = (norm(x.to(norm.weight.dtype)).to(v.dtype) for norm, x in zip(self.qk_norms, (q, k), strict=True))
            qkv = torch.cat((q, k, v), dim=2)
        if self.linear:
            y = linear_attention(*qkv.split(heads, dim=2), lambda q, k: pos.rotate(q, k, prepared), scaled.window)
            return self.out(y[:, new].flatten(2))
        far = None
        if scaled.clip is not None:
            far = pos.rotate_far(*(normed(x, self.qk_eps) for x in qkv.split(heads, dim=2)[:2]), prepared)
        q, k, v = pos.rotate_qkv(qkv, heads, prepared, self.qk_eps)
        if scaled.logn is not None:  # a factor of each query, so it does not matter that q is turned already
            sharper = ((positions + 1).clamp(min=1).log() / math.log(scaled.logn)).clamp(min=1)[..., None, None]
            q = q * sharper.to(q.dtype)
            far = None if far is None else (far[0] * sharper.to(q.dtype), far[1])
        q, k, v = (self.by_head(t) for t in (q, k, v))
        far = None if far is None else tuple(self.by_head(t) for t in far)
        far = far and (far[0][:, :, new], far[1])
        return self.out(attend(q[:, :, new], k, v, pos, positions, scaled, far).transpose(1, 2).flatten(2))

    def by_head(self, t: Tensor) -> Tensor:
        """[B, T, ., D] -> [B, H, T, D]; each key-value head serves H / G query heads."""
        return t.transpose(1, 2).repeat_interleave(self.H // t.shape[2], dim=1)
