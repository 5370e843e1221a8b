"""A small GPT that knows a positional encoding by its hooks only (model/pos/__init__.py).

Letters: B batch, T time, S scored positions, H query heads, G key-value heads, D head width, C width, V vocabulary.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.registry import usual
from conf.schema import ModelConfig, TrainConfig
from kernels import normed
from model import pos as encodings
from model.linear_attention import linear_attention
from model.pos import Encoding, Shape
from model.scaling import UNSCALED, Scaled, Trained, resolve

QUERY_BLOCK = 512  # queries at a time where a mask is needed, so that it never holds T x T numbers
LOSS_BLOCK = 2**25  # logits at a time: 128 MB in float32


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


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gated, self.gelu = cfg.mlp == "swiglu", "tanh" if cfg.mlp == "gelu" else "none"
        # A gate is a third matrix: 2/3 of the width keeps the parameters equal (Shazeer, arXiv 2002.05202).
        hidden = cfg.mlp_ratio * cfg.width
        hidden = cfg.mlp_width or (64 * math.ceil(2 * hidden / 3 / 64) if self.gated else hidden)
        self.up = nn.Linear(cfg.width, hidden * (2 if self.gated else 1), bias=cfg.mlp_bias)
        self.down = nn.Linear(hidden, cfg.width, bias=cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x, approximate=self.gelu))


def make_norm(cfg: ModelConfig) -> nn.Module:
    return (nn.RMSNorm if cfg.norm == "rms" else nn.LayerNorm)(cfg.width, eps=cfg.norm_eps)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig, linear: bool):
        super().__init__()
        self.residual = cfg.residual
        self.norm1 = make_norm(cfg)
        if cfg.residual != "parallel_shared":
            self.norm2 = make_norm(cfg)
        self.attention, self.mlp = Attention(cfg, linear), MLP(cfg)

    def forward(
        self,
        x: Tensor,
        pos: Encoding,
        positions: Tensor,
        prepared: Any,
        scaled: Scaled,
        cache: Cache | None = None,
    ) -> Tensor:
        normed1 = self.norm1(x)
        attended = self.attention(normed1, pos, positions, prepared, scaled, cache)
        if self.residual != "serial":
            return x + attended + self.mlp(normed1 if self.residual == "parallel_shared" else self.norm2(x))
        x = x + attended
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, cfg: ModelConfig, pos: Encoding, vocab_size: int, linear: bool = False):
        """linear: linear attention (model/linear_attention.py) in place of softmax."""
        super().__init__()
        self.pos, self.linear = pos, linear
        self.tokens = nn.Embedding(vocab_size, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg, linear) for _ in range(cfg.n_layers))
        self.norm = make_norm(cfg)
        self.head = nn.Linear(cfg.width, vocab_size, bias=cfg.head_bias)
        if cfg.tied_head:
            self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2 and not name.startswith("pos."):
                # Not GPT-2's 0.02, which at these widths makes attention flat at first: one seed in three then learned
                # to copy late (1.335 bits/byte, where 1 / sqrt(fan in) has 1.203). Its other rule stays: what writes
                # into the residual stream starts smaller by sqrt(its number of writers).
                std = 0.02 if name.startswith(("tokens", "head")) else p.shape[1] ** -0.5
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * cfg.n_layers) if writes else std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        scaled: Scaled = UNSCALED,
        cache: Cache | None = None,
    ) -> Tensor:
        """Tokens [B, T] at integer positions [T] or [B, T] (None: 0..T-1) -> what the head reads, [B, T, C].

        With a cache, tokens are those that follow the ones it holds.
        """
        past = 0 if cache is None else cache.tokens
        if positions is None:
            positions = torch.arange(past + tokens.shape[1], device=tokens.device)
        if self.linear:  # it has no scores, hence no temperature
            scaled = replace(scaled, attention_factor=1.0)
        x = self.pos.embed(self.tokens(tokens), positions[..., past:])
        prepared = self.pos.prepare(positions, scaled)
        for block in self.blocks:
            x = block(x, self.pos, positions, prepared, scaled, cache)
        if cache is not None:
            cache.tokens += tokens.shape[1]
        return x

    def forward(self, tokens: Tensor, positions: Tensor | None = None, scaled: Scaled = UNSCALED) -> Tensor:
        """Logits at every position, [B, T, V]."""
        return self.head(self.norm(self.hidden(tokens, positions, scaled)))

    def scores(self, tokens: Tensor, last: int, scaled: Scaled = UNSCALED, cache: Cache | None = None) -> Tensor:
        """Logits at the last positions only, [B, last, V]."""
        return self.head(self.norm(self.hidden(tokens, scaled=scaled, cache=cache)[:, -last:]))

    def losses(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None = None,
        scaled: Scaled = UNSCALED,
    ) -> Tensor:
        """Negative log-likelihood in nats, float32 [B, S], of targets [B, S]: what follows the last S of tokens [B, T].

        Logits are made for scored positions only, and a block at a time: all of them at 8192 positions and 50k words
        are 1.6 GB.
        """
        S = targets.shape[1]
        x = self.hidden(tokens, positions, scaled)[:, -S:].flatten(0, 1)
        rows = max(1, LOSS_BLOCK // self.head.out_features)
        blocks = zip(x.split(rows), targets.flatten().split(rows), strict=True)
        if torch.is_grad_enabled() and len(x) > rows:  # make the logits again in backward rather than keep them
            losses = [checkpoint(self._block_losses, *block, use_reentrant=False) for block in blocks]
        else:
            losses = [self._block_losses(*block) for block in blocks]
        return torch.cat(losses).view_as(targets)

    def _block_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).float(), targets, reduction="none")

    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def build_encoding(cfg: TrainConfig) -> Encoding:
    m = cfg.model
    encoding = encodings.build(cfg.pos, Shape(m.width, m.n_heads, m.head_width, cfg.ctx))
    if cfg.attention == "linear" and m.qk_norm:
        raise ValueError("model.qk_norm=True: attention=linear has no use for it")
    if cfg.attention == "linear" and type(encoding).bias is not Encoding.bias:
        raise ValueError(f"attention=linear: has no scores that pos={cfg.pos['kind']} could add its bias to")
    return encoding


def build(cfg: TrainConfig, vocab_size: int) -> GPT:
    """A freshly initialised model: the same weights for the same settings and seed."""
    torch.manual_seed(cfg.seed)
    return GPT(cfg.model, build_encoding(cfg), vocab_size, cfg.attention == "linear")


def load(cfg: TrainConfig, vocab_size: int, weights: dict[str, Tensor]) -> GPT:
    """A model that takes these weights as they are: none are drawn for it first, and none are copied."""
    with torch.device("meta"):
        model = GPT(cfg.model, build_encoding(cfg), vocab_size, cfg.attention == "linear")
    model.load_state_dict(weights, assign=True)
    if cfg.model.tied_head:
        model.head.weight = model.tokens.weight
    return model


def trained(cfg: TrainConfig, encoding: Encoding) -> Trained:
    """What a scaling method may know of this run."""
    L = cfg.pretrained.get("ctx", cfg.ctx)
    return Trained(cfg.pos["kind"], L, encoding.inv_freq, cfg.attention, extended_ctx=cfg.ctx if cfg.init else 0)


def own_scaling(cfg: TrainConfig, encoding: Encoding, n: int | None = None) -> Scaled:
    """The scaling that a run is trained with: that of its ctx, at every length.

    n: that of this length instead, as Hugging Face's models have it where it depends on the length."""
    knobs = [usual("scaling", name) for name in cfg.plus or []]
    return resolve(cfg.scaling, trained(cfg, encoding), n or cfg.ctx, n or cfg.ctx, knobs)
