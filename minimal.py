"""The whole idea of this repository in one file: python minimal.py

A small GPT with rotary position embedding (RoPE) is trained on windows of L = 256 tokens. On longer texts it breaks,
because its slow rotations then reach new angles. Position interpolation, NTK and YaRN change only their frequencies,
without further training. Does that extend the context? The answer is a curve: the loss of the same held-out tokens
after n = 64 .. 2048 tokens. In the control each token sees the last L and nothing breaks; a method has to beat it.

train.py and eval.py do this for many encodings and tasks; tests/test_minimal.py compares the numbers.
Letters: B batch, T tokens, H heads, D width of a head, C width of the model, L trained context, n evaluated context.
"""

import argparse
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.registry import yaml_values
from data.batches import batch
from data.corpus import Corpus, prepare
from data.held_out import long_documents
from engine.device import uses_bfloat16
from engine.optimizer import Muon


@dataclass
class Config:
    n_layers: int = 4
    n_heads: int = 4
    width: int = 256
    ctx: int = 256  # L
    rows: int = 8  # windows of L tokens in a step
    steps: int = 2600
    matrix_lr: float = 8e-3  # of the matrices of the blocks
    lr: float = 1.6e-2  # of everything else
    warmup: int = 100  # steps


SCORED, DOCUMENTS = 64, 32  # tokens at the end of each text; held-out documents
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BFLOAT16 = uses_bfloat16(torch.device(DEVICE), "auto")


# ---- 1. Positions: each pair of dimensions of a query or key is rotated by the angle position x frequency ----
def rope(D: int, base: float = 10000.0) -> Tensor:
    """Frequencies, float64 [D/2]: from 1 radian per token, a turn in 6 tokens, down to almost 1 / base."""
    return base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)


# A method is a function: (frequencies, L, s) -> (frequencies, attention_factor), where s = n / L is how much longer
# the text is than the trained context. Queries and keys are multiplied by the factor. At s = 1 nothing changes.
def pi(frequencies: Tensor, L: int, s: float) -> tuple[Tensor, float]:
    """Position interpolation: position m becomes m / s. No angle is new, but fast pairs tell neighbours apart less."""
    return frequencies / s, 1.0


def ntk(frequencies: Tensor, L: int, s: float) -> tuple[Tensor, float]:
    """A larger base: the fastest pair keeps its frequency, the slowest is divided by s, those between by less."""
    return frequencies * s ** -torch.linspace(0, 1, len(frequencies), dtype=torch.float64), 1.0


def yarn(frequencies: Tensor, L: int, s: float) -> tuple[Tensor, float]:
    """Pairs that turn more than 32 times within L stay: they know all angles. Those that turn less than once are
    divided by s, with a ramp between them. The factor sharpens attention, which more tokens have to share."""
    P = len(frequencies)
    slope = -math.log(frequencies[-1]) / (P - 1)  # of the logarithm of the frequencies over the pair's index
    low, high = (math.log(L / (2 * math.pi * turns)) / slope for turns in (32, 1))  # pairs that turn so many times
    low, high = max(math.floor(low), 0), math.ceil(high)
    divided = ((torch.arange(P, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - divided * (1 - 1 / s)), 0.1 * math.log(s) + 1


METHODS = {"pi": pi, "ntk": ntk, "yarn": yarn}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D], where dimensions i and i + D/2 are a pair, by angles [T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


# ---- 2. The model ----
class Block(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        C, self.heads = cfg.width, cfg.n_heads
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-6), nn.RMSNorm(C, eps=1e-6)
        self.qkv, self.out = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor) -> Tensor:
        """x [B, T, C] -> [B, T, C]. visible: bool [T, T], the keys that each query attends to."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=visible)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, cfg: Config, vocab_size: int):
        super().__init__()
        torch.manual_seed(0)
        self.frequencies, self.L = rope(cfg.width // cfg.n_heads), cfg.ctx
        self.tokens = nn.Embedding(vocab_size, cfg.width)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm, self.head = nn.RMSNorm(cfg.width, eps=1e-6), nn.Linear(cfg.width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                std = 0.02 if name == "tokens.weight" else p.shape[1] ** -0.5
                writes = name.endswith(("out.weight", "down.weight"))  # into the residual stream
                nn.init.normal_(p, std=std / (2 * cfg.n_layers) ** 0.5 if writes else std)

    def losses(self, windows: Tensor, scored: int, method: str = "none") -> Tensor:
        """Nats of the last tokens of windows int64 [B, n + 1] -> [B, scored]. method: none, window or of METHODS."""
        n, windows = windows.shape[1] - 1, windows.to(DEVICE)
        frequencies, attention_factor = self.frequencies, 1.0
        if method in METHODS:
            frequencies, attention_factor = METHODS[method](frequencies, self.L, max(1.0, n / self.L))
        angles = torch.arange(n, dtype=torch.float64)[:, None] * frequencies  # float32 would blur far positions
        cos, sin = ((attention_factor * x).float().to(DEVICE) for x in (angles.cos(), angles.sin()))
        query, key = torch.arange(n, device=DEVICE)[:, None], torch.arange(n, device=DEVICE)
        visible = (key <= query) & (query - key < (self.L if method == "window" else n))
        with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
            x = self.tokens(windows[:, :-1])
            for block in self.blocks:
                x = block(x, cos, sin, visible)
            logits = self.head(self.norm(x[:, -scored:]))
        return F.cross_entropy(logits.float().transpose(1, 2), windows[:, -scored:], reduction="none")


# ---- 3. Training ----
def train(cfg: Config, corpus: Corpus) -> GPT:
    model = GPT(cfg, corpus.vocab_size).to(DEVICE)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1] + [model.tokens.weight]
    muon = Muon(matrices, torch.bfloat16 if BFLOAT16 else torch.float32, lr=cfg.matrix_lr, weight_decay=0.1, ns_steps=3)
    adamw = torch.optim.AdamW(others, cfg.lr, betas=(0.9, 0.95), weight_decay=0, fused=True)
    for step in range(cfg.steps):
        share = min((step + 1) / cfg.warmup, (cfg.steps - step) / max(1, cfg.steps - cfg.warmup))  # up, then down
        muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"] = share * cfg.matrix_lr, share * cfg.lr
        loss = model.losses(batch(corpus.train, step, seed=0, size=cfg.rows, ctx=cfg.ctx), scored=cfg.ctx).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == cfg.steps:
            print(f"step {step + 1} of {cfg.steps}: loss {loss.item():.3f} nats per token", flush=True)
    return model


# ---- 4. The curve ----
def scored_texts(corpus: Corpus, ctx: int) -> Tensor:
    """Eight texts from all over each held-out document, int64 [documents, 8, ctx + 1]; the last tokens are scored. One
    that ends in a near-copy of training text is moved, as its loss would tell what the model remembers."""
    texts = []
    for document in long_documents(corpus, ctx, DOCUMENTS):
        assert document.copied is not None  # the training text is known
        for previous, end in itertools.pairwise(np.linspace(2048, len(document.tokens), 9).round().astype(int)):
            while end >= previous + 2 * SCORED and document.copied[end - SCORED : end].mean() > 0.5:
                end -= SCORED
            texts.append(document.tokens[end - ctx - 1 : end].astype(np.int64))
    return torch.from_numpy(np.stack(texts)).unflatten(0, (-1, 8))


@torch.no_grad()
def measure(model: GPT, texts: Tensor, n: int, method: str) -> np.ndarray:
    """Nats per token of each document, float64 [documents]. The scored tokens are the same at every n."""
    windows = texts[..., -n - 1 :].flatten(0, 1).split(max(1, 2048 // n))
    losses = torch.cat([model.losses(w, SCORED, method) for w in windows])
    return losses.view(len(texts), -1).double().mean(1).cpu().numpy()


def interval(gains: np.ndarray) -> str:
    """The mean of values [documents] and its 95 % interval, by resampling the documents."""
    low, high = np.percentile(np.random.default_rng(0).choice(gains, (4000, len(gains))).mean(1), [2.5, 97.5])
    return f"{gains.mean():+.3f} [{low:+.3f}, {high:+.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Config.steps)
    cfg, corpus = Config(steps=parser.parse_args().steps), prepare(yaml_values("data", "sympy"), cache=".cache")
    model, texts = train(cfg, corpus), scored_texts(corpus, ctx=2048)
    names = ("none", "window", *METHODS)
    print("\nperplexity with n tokens of context; gain over the window control, nats per token, 95 % interval")
    print(f"{'n':>5}", *(f"{name:>8}" for name in names), *(f"{'gain of ' + name:>23}" for name in METHODS))
    for n in (64, 128, 256, 512, 1024, 2048):
        loss = {name: measure(model, texts, n, name) for name in names}
        gains = (interval(loss["window"] - loss[name]) for name in METHODS)
        print(f"{n:>5}", *(f"{math.exp(x.mean()):>8.2f}" for x in loss.values()), *gains, flush=True)


if __name__ == "__main__":
    main()
