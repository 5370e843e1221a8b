"""A small GPT. It uses a positional encoding through its hooks only (model/pos/__init__.py).

Letters: B batch, T time, S scored positions, H query heads, G key-value heads, D head width, C width, V vocabulary.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.errors import UserError
from conf.registry import describe, yaml_name
from conf.schema import ModelConfig, TrainConfig
from model import pos as encodings
from model.attention import Attention
from model.pos import Encoding, Shape
from model.scaling import NO_CHANGE, ContextChange, TrainedContext, resolve

if TYPE_CHECKING:
    from model.decode import Cache


class MLP(nn.Module):
    """The feed-forward layer, [B, T, C] -> [B, T, C].

    GELU, SwiGLU or GEGLU (Shazeer 2020, arXiv 2002.05202), or squared ReLU (So et al. 2021, arXiv 2109.08668).
    """

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.gated, self.silu = cfg.mlp in ("swiglu", "geglu"), cfg.mlp == "swiglu"
        self.squared_relu = cfg.mlp == "relu2"
        self.gelu = "none" if cfg.mlp == "gelu_exact" else "tanh"
        # A gate is a third matrix, so 2/3 of the hidden width keeps the number of parameters, rounded up to 64.
        hidden = cfg.mlp_ratio * cfg.width
        hidden = cfg.mlp_width or (64 * math.ceil(2 * hidden / 3 / 64) if self.gated else hidden)
        self.up = nn.Linear(cfg.width, hidden * (2 if self.gated else 1), bias=cfg.mlp_bias)
        self.down = nn.Linear(hidden, cfg.width, bias=cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.squared_relu:
            return self.down(F.relu(self.up(x)).square())
        if not self.gated and fuses_gelu(x):
            return self.down(linear_gelu(x, self.up, self.gelu))
        x = self.up(x)
        if self.gated:
            gate, x = x.chunk(2, dim=-1)
            return self.down((F.silu(gate) if self.silu else gelu(gate, self.gelu)) * x)
        return self.down(gelu(x, self.gelu))


def gelu(x: Tensor, approximate: str) -> Tensor:
    """F.gelu. In code compiled for a CPU its tanh approximation is written as a sigmoid, since 1 + tanh u is
    2 sigmoid(2 u): torch's tanh takes 5 ms forward and backward for 2048 x 1024 numbers, its sigmoid 2 ms.
    """
    if approximate == "none" or x.device.type != "cpu" or not torch.compiler.is_compiling():
        return F.gelu(x, approximate=approximate)
    wide, scale = x.float(), math.sqrt(8 / math.pi)
    return (wide * torch.sigmoid(scale * wide * (1 + 0.044715 * wide * wide))).to(x.dtype)


def fuses_gelu(x: Tensor) -> bool:
    """Whether to compute a linear layer and its GELU in one operation: in bfloat16 on a CPU, in inference.

    There torch's own GELU (tanh) takes three times as long as the matrix product. (Compiled code has a faster one.)
    """
    on_cpu = x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    on_cpu = on_cpu and torch.backends.mkldnn.is_available() and torch.is_autocast_enabled("cpu")
    return on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def linear_gelu(x: Tensor, linear: nn.Linear, approximate: str) -> Tensor:
    """gelu(linear(x)) in bfloat16 by oneDNN, as torch.compile would call it; GELU of the float32 sums."""
    x, weight, bias = (None if t is None else t.bfloat16() for t in (x, linear.weight, linear.bias))
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], approximate)


def loss_block(device: torch.device) -> int:
    """How many logits `losses` computes at a time.

    On a CPU 2^25, which take 128 MB in float32. On a GPU as many as a quarter of its memory holds at 16 bytes each (in
    bfloat16 and float32, with the gradients): every further block would cast the head and add up its gradient again.
    """
    return torch.cuda.get_device_properties(device).total_memory // 64 if device.type == "cuda" else 2**25


def make_norm(cfg: ModelConfig) -> nn.Module:
    if cfg.norm == "rms":
        return nn.RMSNorm(cfg.width, eps=cfg.norm_eps)
    return nn.LayerNorm(cfg.width, eps=cfg.norm_eps, bias=cfg.norm_bias)


class Block(nn.Module):
    """A transformer block with norms before attention and MLP. Other arrangements are in model/other_blocks.py."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        super().__init__()
        self.norm1, self.norm2 = make_norm(cfg), make_norm(cfg)
        self.attention, self.mlp = Attention(cfg, linear, content), MLP(cfg)

    def forward(self, x: Tensor, *where: Any) -> Tensor:
        """x [B, T, C] -> [B, T, C], or the output of the last tokens only.

        *where: (pos, positions, prepared, change, cache, last), passed to Attention.forward.
        """
        attended = self.attention(self.norm1(x), *where)
        x = x[:, -attended.shape[1] :] + attended
        return x + self.mlp(self.norm2(x))


def make_block(cfg: ModelConfig, linear: bool, content: nn.Module | None) -> nn.Module:
    if cfg.residual == "serial":
        return Block(cfg, linear, content)
    from model import other_blocks

    return other_blocks.build(cfg, linear, content)


def of_encoding(name: str) -> bool:
    """Whether a module or parameter belongs to the positional encoding, also to its part in a layer."""
    return name.startswith("pos.") or ".content." in name


class GPT(nn.Module):
    """A decoder-only transformer: embeddings, blocks, a final norm and an output head.

    `losses` and `last_logits` compute logits only where they are needed; `forward` computes all of them.
    """

    def __init__(self, cfg: ModelConfig, pos: Encoding, vocab_size: int, linear: bool = False):
        """linear: use linear attention (model/linear_attention.py) instead of softmax attention."""
        super().__init__()
        self.pos, self.linear = pos, linear
        self.tokens = nn.Embedding(vocab_size, cfg.width)
        self.blocks = nn.ModuleList(make_block(cfg, linear, pos.layer_module(i)) for i in range(cfg.n_layers))
        self.norm = make_norm(cfg)
        self.head = nn.Linear(cfg.width, vocab_size, bias=cfg.head_bias)
        if cfg.tied_head:
            self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if of_encoding(name):  # it initialises its own parameters
                continue
            if p.dim() == 2:
                # Standard deviation 1 / sqrt(fan in), not GPT-2's 0.02: with 0.02 and these widths, attention is almost
                # uniform at first, and one seed in three learned late to copy (1.335 instead of 1.203 bits/byte). As in
                # GPT-2, the matrices that write into the residual stream, of which there are 2 per layer, are divided
                # by sqrt(2 n_layers).
                std = 0.02 if name.startswith(("tokens", "head")) else p.shape[1] ** -0.5
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * cfg.n_layers) if writes else std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, change: ContextChange = NO_CHANGE,
        cache: "Cache | None" = None, last: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The output of the last block, [B, T, C], for tokens int64 [B, T] at integer positions [T] or [B, T].

        positions None: 0 .. T - 1. With a cache, `tokens` continue the cached ones, positions start at the first cached
        one, and the output is that of the new tokens only. last: the output of so many last tokens is enough, so the
        last block computes no other, and under a window tokens that cannot reach them through the layers are left out.
        """
        past = 0 if cache is None else cache.tokens
        if positions is None:
            positions = torch.arange(past + tokens.shape[1], device=tokens.device)
        if last and cache is None:
            reach = change.reach(tokens.shape[1], last, len(self.blocks))
            tokens, positions = tokens[:, -reach:], positions[..., -reach:]
        if self.linear:  # no attention scores, hence no temperature
            change = replace(change, attention_factor=1.0)
        # Embeddings that are stored in bfloat16 are the only bfloat16 in the sum of all layers
        x = self.pos.embed(self.tokens(tokens).to(self.norm.weight.dtype), positions[..., past:])
        layers = self.pos.prepare_layers(len(self.blocks), positions, change)
        for i, (block, (pos, prepared, its_change)) in enumerate(zip(self.blocks, layers, strict=True), 1):
            x = block(x, pos, positions, prepared, its_change, cache, last if i == len(self.blocks) else None)
        if cache is not None:
            cache.tokens += tokens.shape[1]
        return x

    def forward(self, tokens: Tensor, positions: Tensor | None = None, change: ContextChange = NO_CHANGE) -> Tensor:
        """Logits at every position, [B, T, V]."""
        return self.head(self.norm(self.hidden(tokens, positions, change)))

    def last_logits(self, tokens: Tensor, last: int, change: ContextChange, cache: "Cache | None" = None) -> Tensor:
        """Logits at the last `last` positions only, [B, last, V]."""
        return self.head(self.norm(self.hidden(tokens, change=change, cache=cache, last=last)))

    def losses(
        self, tokens: Tensor, targets: Tensor, positions: Tensor | None = None, change: ContextChange = NO_CHANGE
    ) -> Tensor:
        """Negative log-likelihood of the targets in nats, float32 [B, S].

        tokens: int64 [B, T]. targets: int64 [B, S] with S <= T, the tokens that follow the last S of `tokens`. Logits
        are computed for these S positions only, in blocks: all logits of 8192 positions and a vocabulary of 50,000
        would take 1.6 GB.
        """
        S = targets.shape[1]
        x = self.hidden(tokens, positions, change, last=S if tokens.shape[1] > S else None).flatten(0, 1)
        rows = max(1, loss_block(x.device) // self.head.out_features)
        blocks = zip(x.split(rows), targets.flatten().split(rows), strict=True)
        # In training, recompute the logits in the backward pass instead of keeping them
        if torch.is_grad_enabled() and len(x) > rows:
            losses = [checkpoint(self._block_losses, *block, use_reentrant=False) for block in blocks]
        else:
            losses = [self._block_losses(*block) for block in blocks]
        return torch.cat(losses).view_as(targets)

    def _block_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """Losses float32 [N] of targets [N] from the output x [N, C] of the last block. Compiled in training."""
        return F.cross_entropy(self.head(self.norm(x)).float(), targets, reduction="none")

    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


# ---- from a run's settings ----


def build_encoding(cfg: TrainConfig) -> Encoding:
    """The positional encoding of a run with these settings. UserError if it does not fit the other settings."""
    m = cfg.model
    encoding = encodings.build(cfg.pos, shape := Shape(m.width, m.n_heads, m.head_width, cfg.ctx))
    if cfg.layers:
        from model.layers import LayerSchedule

        encoding = LayerSchedule(shape, encoding, cfg)
    if cfg.attention == "linear" and m.qk_norm:
        raise UserError("model.qk_norm=True: attention=linear has no use for it")
    if cfg.attention == "linear" and (encoding.has_bias or encoding.sees_content):
        raise UserError(f"attention=linear: has no scores that pos={yaml_name('pos', cfg.pos)} could change")
    return encoding


def build(cfg: TrainConfig, vocab_size: int) -> GPT:
    """A freshly initialised model: the same weights for the same settings and seed."""
    torch.manual_seed(cfg.seed)
    return GPT(cfg.model, build_encoding(cfg), vocab_size, cfg.attention == "linear")


def from_weights(cfg: TrainConfig, vocab_size: int, weights: dict[str, Tensor]) -> GPT:
    """Build the model on the meta device and load `weights` without a copy or a random initialisation."""
    with torch.device("meta"):
        model = GPT(cfg.model, build_encoding(cfg), vocab_size, cfg.attention == "linear")
    model.load_state_dict(weights, assign=True)
    if cfg.model.tied_head:
        model.head.weight = model.tokens.weight
    return model


def trained_context(cfg: TrainConfig, encoding: Encoding) -> TrainedContext:
    """The facts about a run that scaling methods use: its encoding, frequencies and training contexts.

    For a fine-tuned run, L is the context of the pre-training, and extended_ctx that of the fine-tuning.
    """
    L = cfg.pretrained.get("ctx", cfg.ctx)
    name, extended = yaml_name("pos", cfg.pos), cfg.ctx if cfg.init else 0
    context = TrainedContext(name, L, encoding.inv_freq, cfg.attention, extended_ctx=extended)
    if cfg.layers:
        from model.layers import with_kinds

        return with_kinds(context, encoding, cfg)
    return context


def describe_encoding(cfg: TrainConfig) -> str:
    """`pos=rope base=500.0`, and the layer schedule if the run has one."""
    text = f"pos={describe('pos', cfg.pos)}"
    if cfg.layers:
        from conf.layer_schedule import describe_layers

        text += f", layers={describe_layers(cfg)}"
    return text


def trained_scaling(cfg: TrainConfig, context: TrainedContext, n: int | None = None) -> ContextChange:
    """The change by the scaling that a run is trained with.

    n: the length in tokens at which it applies, for Hugging Face models, whose trained scaling can depend on the
    length. None: that of the training context, which our runs use at every length.
    """
    return resolve(cfg.scaling, context, n or cfg.ctx, n or cfg.ctx, cfg.scalings[1:])
