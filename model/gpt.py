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
from model import pos as encodings
from model.attention import Attention, Cache
from model.pos import Encoding, Shape
from model.scaling import UNSCALED, Scaled, Trained, resolve

LOSS_BLOCK = 2**25  # logits at a time: 128 MB in float32


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

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        """where: what Attention.forward takes after x."""
        normed1 = self.norm1(x)
        attended = self.attention(normed1, *where)
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
