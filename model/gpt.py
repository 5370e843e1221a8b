"""A small GPT. It uses a positional encoding through its hooks only (model/pos/__init__.py).

Letters: B batch, T time, S scored positions, H query heads, G key-value heads, D head width, C width, V vocabulary.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conf.errors import UserError, check
from conf.layer_schedule import describe as describe_layers
from conf.registry import describe, yaml_name
from conf.schema import ModelConfig, TrainConfig
from kernels.gelu import after_linear, gelu
from model import pos as encodings
from model.attention import Attention, Cache, Where, softcapped
from model.layer_schedule import ScheduledEncodings
from model.pos import Encoding, Shape
from model.scaling import NO_CHANGE, ContextChange, TrainedContext, resolve

# swiglu and geglu: of the gate (Shazeer 2020, arXiv 2002.05202)
ACTIVATIONS = {"gelu": gelu, "gelu_exact": F.gelu, "geglu": gelu, "swiglu": F.silu}
ACTIVATIONS |= {"relu2": lambda x: F.relu(x).square()}  # So et al. 2021, arXiv 2109.08668


class MLP(nn.Module):
    """The feed-forward layer, [B, T, C] -> [B, T, C]."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.act, self.gated = ACTIVATIONS[cfg.mlp], cfg.mlp in ("swiglu", "geglu")
        # A gate is a third matrix, so 2/3 of the hidden width keeps the number of parameters, rounded up to 64.
        hidden = cfg.mlp_ratio * cfg.width
        hidden = cfg.mlp_width or (64 * math.ceil(2 * hidden / 3 / 64) if self.gated else hidden)
        self.up = nn.Linear(cfg.width, hidden * (2 if self.gated else 1), bias=cfg.mlp_bias)
        self.down = nn.Linear(hidden, cfg.width, bias=cfg.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            gate, x = self.up(x).chunk(2, dim=-1)
            return self.down(self.act(gate) * x)
        return self.down(after_linear(self.act, self.up, x))  # act(up(x))


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


# ---- a block, with the orders of its residual sums: model.residual ----


class Block(nn.Module):
    """serial: norms before attention and MLP."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        super().__init__()
        self.norm1, self.norm2 = make_norm(cfg), make_norm(cfg)
        self.attention, self.mlp = Attention(cfg, linear, content), MLP(cfg)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """x [B, T, C] -> [B, T, C], or the output of the last `where.last` tokens only."""
        attended = self.attention(self.norm1(x), where)
        x = x[:, -attended.shape[1] :] + attended
        return x + self.mlp(self.norm2(x))


class ParallelBlock(Block):
    """parallel: attention and MLP read the same x (GPT-NeoX)."""

    def forward(self, x: Tensor, where: Where) -> Tensor:
        attended = self.attention(self.norm1(x), where)
        x = x[:, -attended.shape[1] :]
        return x + attended + self.mlp(self.norm2(x))


class SharedNormBlock(Block):
    """parallel_shared: they read it through one norm (GPT-J)."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        super().__init__(cfg, linear, content)
        del self.norm2

    def forward(self, x: Tensor, where: Where) -> Tensor:
        normed = self.norm1(x)
        attended = self.attention(normed, where)
        last = attended.shape[1]
        return x[:, -last:] + attended + self.mlp(normed[:, -last:])


class PostNormBlock(Block):
    """serial_post: norms after attention and MLP instead of before them (OLMo 2)."""

    def forward(self, x: Tensor, where: Where) -> Tensor:
        attended = self.norm1(self.attention(x, where).to(x.dtype))  # under autocast bfloat16
        x = x[:, -attended.shape[1] :] + attended
        return x + self.norm2(self.mlp(x).to(x.dtype))


class PrePostNormBlock(Block):
    """serial_both: norms before and after them (Gemma 2 and 3)."""

    def __init__(self, cfg: ModelConfig, linear: bool, content: nn.Module | None = None):
        super().__init__(cfg, linear, content)
        self.post_norm1, self.post_norm2 = make_norm(cfg), make_norm(cfg)

    def forward(self, x: Tensor, where: Where) -> Tensor:
        attended = self.post_norm1(self.attention(self.norm1(x), where).to(x.dtype))  # under autocast bfloat16
        x = x[:, -attended.shape[1] :] + attended
        return x + self.post_norm2(self.mlp(self.norm2(x)).to(x.dtype))


BLOCKS = {
    "serial": Block,
    "parallel": ParallelBlock,
    "parallel_shared": SharedNormBlock,
    "serial_post": PostNormBlock,
    "serial_both": PrePostNormBlock,
}


# ---- the network ----


def of_encoding(name: str) -> bool:
    """Whether a module or parameter belongs to the positional encoding, also to its part in a layer."""
    return name.startswith("pos.") or ".content." in name


def linear_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers whose weights autocast casts: all but those of the encoding, which computes in float32."""
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and not of_encoding(name)]


class GPT(nn.Module):
    """A decoder-only transformer: embeddings, blocks, a final norm and an output head.

    `losses` and `last_logits` compute logits only where they are needed; `forward` computes all of them.
    """

    def __init__(self, cfg: ModelConfig, pos: Encoding, vocab_size: int, linear: bool = False):
        """linear: use linear attention (model/linear_attention.py) instead of softmax attention."""
        super().__init__()
        self.pos, self.linear, self.tied_head = pos, linear, cfg.tied_head
        self.softcap = cfg.logit_softcap
        self.tokens = nn.Embedding(vocab_size, cfg.width)
        self.blocks = nn.ModuleList(BLOCKS[cfg.residual](cfg, linear, pos.layer_module(i)) for i in range(cfg.n_layers))
        self.norm = make_norm(cfg)
        self.head = nn.Linear(cfg.width, vocab_size, bias=cfg.head_bias)
        if cfg.tied_head:
            self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if of_encoding(name):  # it initialises its own parameters
                continue
            if p.dim() == 2:
                # Embeddings and head have GPT-2's standard deviation of 0.02, the other matrices 1 / sqrt(fan in): with
                # 0.02 attention is almost uniform at first at these widths, and some seeds learn late to copy. As in
                # GPT-2, the matrices that write into the residual stream, 2 per layer, are divided by sqrt(2 n_layers).
                std = 0.02 if name.startswith(("tokens", "head")) else p.shape[1] ** -0.5
                if name.endswith(("out.weight", "down.weight")):
                    std = 0.0 if cfg.zero_init else std / math.sqrt(2 * cfg.n_layers)
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        change: ContextChange = NO_CHANGE,
        cache: Cache | None = None,
        last: int | None = None,
    ) -> Tensor:
        """The output of the last block for tokens int64 [B, T] at integer positions [T] or [B, T].

        [B, T, C], or [B, last, C] if `last` is given: the output of so many tokens at the end is enough, so the last
        block computes no other, and under a window tokens that cannot reach them through the layers are left out.
        positions None: 0 .. T - 1. With a cache, `tokens` continue the cached ones, positions start at the first cached
        one, and the output is that of the new tokens only.
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
        for i, (block, (encoding, prepared, its_change)) in enumerate(zip(self.blocks, layers, strict=True), 1):
            its_last = last if i == len(self.blocks) else None
            x = block(x, Where(encoding, positions, prepared, its_change, cache, its_last))
        if cache is not None:
            cache.tokens += tokens.shape[1]
        return x

    def logits(self, x: Tensor) -> Tensor:
        """The output x [.., C] of the last block -> [.., V]."""
        return softcapped(self.head(self.norm(x)), self.softcap)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, change: ContextChange = NO_CHANGE) -> Tensor:
        """Logits at every position, [B, T, V]."""
        return self.logits(self.hidden(tokens, positions, change))

    def last_logits(self, tokens: Tensor, last: int, change: ContextChange, cache: Cache | None = None) -> Tensor:
        """Logits at the last `last` positions only, [B, last, V]."""
        return self.logits(self.hidden(tokens, change=change, cache=cache, last=last))

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
        return F.cross_entropy(self.logits(x).float(), targets, reduction="none")

    def n_parameters(self) -> int:
        """A tied head counts once, also where it is stored apart in bfloat16 (engine/device.py)."""
        return sum(p.numel() for name, p in self.named_parameters() if name != "head.weight" or not self.tied_head)


# ---- from a run's settings ----


def build_encoding(cfg: TrainConfig) -> Encoding:
    """The positional encoding of a run with these settings."""
    m = cfg.model
    shape = Shape(m.width, m.n_heads, m.head_width, cfg.ctx)
    encoding = encodings.build(cfg.pos, shape)
    if cfg.layers:
        check(cfg.attention == "softmax", "attention", cfg.attention, f"softmax with layers={cfg.layers.name}")
        encoding = ScheduledEncodings(shape, encoding, cfg.pos, cfg.layers)
    if cfg.attention == "linear":
        check(not m.qk_norm, "model.qk_norm", m.qk_norm, "false with attention=linear")
        check(m.attention_softcap is None, "model.attention_softcap", m.attention_softcap, "null with attention=linear")
        check(m.attention_gate == "none", "model.attention_gate", m.attention_gate, "none with attention=linear")
        if encoding.has_bias or encoding.sees_content or encoding.tempers:
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
    """The facts about a run that scaling methods use. For a fine-tuned run, L is the context of the pre-training."""
    L, longest = (cfg.pretrained.get(key, cfg.ctx) for key in ("ctx", "longest"))
    context = TrainedContext(yaml_name("pos", cfg.pos), L, encoding.inv_freq, cfg.attention, max(L, longest, cfg.ctx))
    return encoding.with_types(context) if isinstance(encoding, ScheduledEncodings) else context


def describe_encoding(cfg: TrainConfig) -> str:
    """`pos=rope base=500.0`, and the layer schedule if the run has one."""
    layers = f", layers={describe_layers(cfg.layers)}" if cfg.layers else ""
    return f"pos={describe('pos', cfg.pos)}{layers}"


def trained_scaling(cfg: TrainConfig, context: TrainedContext, n: int | None = None) -> ContextChange:
    """The change by the scaling that a run is trained with.

    n: the length in tokens at which it applies, for Hugging Face models, whose trained scaling can depend on the
    length. None: that of the training context, which our runs use at every length.
    """
    return resolve(cfg.scaling, context, n or cfg.ctx, n or cfg.ctx, cfg.scalings[1:])
