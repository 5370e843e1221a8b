"""A small GPT that knows a positional encoding by its four hooks only (model/pos/__init__.py).

Letters: B batch, T time, S scored positions, H query heads, G key-value heads, D head width, C width, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.schema import ModelConfig, TrainConfig
from model import pos as encodings
from model.pos import Encoding, Shape
from model.scaling import UNSCALED, Scaled, Trained

QUERY_BLOCK = 512  # queries at a time where a mask is needed, so that it never holds T x T numbers
LOSS_BLOCK = 2**25  # logits at a time: 128 MB in float32


def attend(q: Tensor, k: Tensor, v: Tensor, pos: Encoding, positions: Tensor, window: int | None) -> Tensor:
    """Causal attention of q, k, v [B, H, T, D] -> [B, H, T, D], in memory linear in T.

    Causality and the window go by place in the sequence; the encoding's bias goes by position.
    """
    T = q.shape[2]
    if window is not None and window >= T:
        window = None
    # SDPA's backward on a CPU costs more than writing the products out, while T x T is small: over forward and
    # backward, 24 ms against 31 at 16 x 4 heads, T=256, D=64 in bfloat16 on two cores, and 11 against 38 at T=128.
    written_out = q.device.type == "cpu" and torch.is_grad_enabled() and T <= QUERY_BLOCK
    outputs = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        first = 0 if window is None else max(0, start - window + 1)
        bias = pos.bias(positions[..., start:stop], positions[..., first:stop])
        if bias is None and window is None and not written_out:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        distance = torch.arange(start, stop, device=q.device)[:, None] - torch.arange(first, stop, device=q.device)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        mask = q.new_zeros(hidden.shape) if bias is None else bias.to(q.dtype)
        mask = mask.masked_fill(hidden, -math.inf)
        mask = mask if mask.dim() == 4 else mask.expand(1, q.shape[1], -1, -1)
        if written_out:
            return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v
        keys, values = k[:, :, first:stop], v[:, :, first:stop]
        outputs.append(F.scaled_dot_product_attention(q[:, :, start:stop], keys, values, attn_mask=mask))
    return torch.cat(outputs, dim=2)


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.H, self.G, self.D = cfg.n_heads, cfg.kv_heads, cfg.head_dim
        self.qkv = nn.Linear(cfg.width, (self.H + 2 * self.G) * self.D, bias=False)
        self.out = nn.Linear(self.H * self.D, cfg.width, bias=False)

    def forward(self, x: Tensor, pos: Encoding, positions: Tensor, prepared, window: int | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.D)).split((self.H, self.G, self.G), dim=2)  # [B, T, ., D]
        q, k = pos.rotate(q, k, prepared)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if self.G != self.H:  # each key-value head serves H / G query heads
            k, v = (t.repeat_interleave(self.H // self.G, dim=1) for t in (k, v))
        y = attend(q, k, v, pos, positions, window)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gated = cfg.mlp == "swiglu"
        # A gate is a third matrix: 2/3 of the width keeps the parameters equal (Shazeer, arXiv 2002.05202).
        hidden = cfg.mlp_ratio * cfg.width
        hidden = 64 * math.ceil(2 * hidden / 3 / 64) if self.gated else hidden
        self.up = nn.Linear(cfg.width, hidden * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(hidden, cfg.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * x)
        return self.down(F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(cfg.width, eps=cfg.norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(cfg), MLP(cfg)

    def forward(self, x: Tensor, pos: Encoding, positions: Tensor, prepared, window: int | None) -> Tensor:
        x = x + self.attention(self.norm1(x), pos, positions, prepared, window)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, cfg: ModelConfig, pos: Encoding, vocab_size: int):
        super().__init__()
        self.pos = pos
        self.tokens = nn.Embedding(vocab_size, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = nn.RMSNorm(cfg.width, eps=cfg.norm_eps)
        self.head = nn.Linear(cfg.width, vocab_size, bias=False)
        if cfg.tied_head:
            self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2 and not name.startswith("pos."):
                # GPT-2's rule: what writes into the residual stream starts smaller by sqrt(its number of writers).
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * cfg.n_layers) if writes else 0.02)

    def hidden(self, tokens: Tensor, positions: Tensor | None = None, scaled: Scaled = UNSCALED) -> Tensor:
        """Tokens [B, T] at integer positions [T] or [B, T] (None: 0..T-1) -> what the head reads, [B, T, C]."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.pos.embed(self.tokens(tokens), positions)
        prepared = self.pos.prepare(positions, scaled)
        for block in self.blocks:
            x = block(x, self.pos, positions, prepared, scaled.window)
        return x

    def forward(self, tokens: Tensor, positions: Tensor | None = None, scaled: Scaled = UNSCALED) -> Tensor:
        """Logits at every position, [B, T, V]."""
        return self.head(self.norm(self.hidden(tokens, positions, scaled)))

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
    return encodings.build(cfg.pos, Shape(m.width, m.n_heads, m.head_dim, cfg.ctx))


def build(cfg: TrainConfig, vocab_size: int) -> GPT:
    """A freshly initialised model: the same weights for the same settings and seed."""
    torch.manual_seed(cfg.seed)
    return GPT(cfg.model, build_encoding(cfg), vocab_size)


def trained(cfg: TrainConfig, encoding: Encoding) -> Trained:
    """What a scaling method may know of this run."""
    return Trained(cfg.pos["kind"], cfg.ctx, encoding.inv_freq)
