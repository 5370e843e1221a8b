"""Tokens/s of our training step against nanoGPT's, side by side in one process: python -m bench.step [OVERRIDES]

nanoGPT's train.py on a CPU computes in float32, uncompiled (its README recommends `--device=cpu --compile=False`), with
LayerNorm, learned positions, exact GELU, SDPA, and an unfused AdamW. Its step is re-implemented here from that
description, at the same layers, width, context, vocabulary and batch as ours. Rounds alternate, medians are compared,
and the row is appended to results/step.jsonl. OVERRIDES are settings as train.py accepts them.
"""

import itertools
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.rows import append_json
from conf.compose import train_settings
from conf.registry import ROOT
from conf.schema import TrainConfig
from data.batches import batch
from engine.code_version import commit
from engine.compile import compile_blocks
from engine.device import autocast, keep_freed_memory, uses_bfloat16
from engine.optimizer import make_optimizer
from model import gpt

ROUNDS, STEPS = 7, 6
VOCAB = 2048


class PeerBlock(nn.Module):
    """nanoGPT's transformer block, [B, T, C] -> [B, T, C]: LayerNorm without bias, SDPA, exact GELU."""

    def __init__(self, C: int, H: int):
        super().__init__()
        self.H = H
        self.ln1, self.ln2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.up, self.down = nn.Linear(C, 4 * C, bias=False), nn.Linear(4 * C, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.H, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Peer(nn.Module):
    """nanoGPT's model. L layers, H heads, C width, T context, V vocabulary. forward returns the mean loss."""

    def __init__(self, L: int, H: int, C: int, T: int, V: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.blocks = nn.ModuleList(PeerBlock(C, H) for _ in range(L))
        self.ln, self.head = nn.LayerNorm(C, bias=False), nn.Linear(C, V, bias=False)
        self.head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln(h))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))


def peer_step(cfg: TrainConfig) -> Callable[[], None]:
    """nanoGPT's training step at the sizes of cfg."""
    m = cfg.model
    model = Peer(m.n_layers, m.n_heads, m.width, cfg.ctx, VOCAB)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    data = np.random.default_rng(0).integers(VOCAB, size=2_000_000).astype(np.uint16)
    T, B = cfg.ctx, cfg.batch_tokens // cfg.ctx

    def step() -> None:
        starts = torch.randint(len(data) - T, (B,))
        x = torch.stack([torch.from_numpy(data[i : i + T].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + T].astype(np.int64)) for i in starts])
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def our_step(cfg: TrainConfig, compiled: bool) -> Callable[[], None]:
    """The training step of train.py with these settings, on one CPU.

    It sets malloc, and that numbers below 1e-38 are 0, for the peers as well.
    """
    torch.set_flush_denormal(True)
    keep_freed_memory()
    model = gpt.build(cfg, VOCAB)
    optimizer = make_optimizer(model, cfg.optim)
    if compiled:
        compile_blocks(model, fallback=False)
    data = np.random.default_rng(0).integers(VOCAB, size=2_000_000).astype(np.uint16)
    device, count = torch.device("cpu"), itertools.count()

    def step() -> None:
        w = batch(data, next(count), seed=0, size=cfg.batch_tokens // cfg.ctx, ctx=cfg.ctx)
        with autocast(device, cfg.dtype):
            loss = model.losses(w[:, :-1], w[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def interleaved(steps: dict[str, Callable[[], None]], rounds: int = ROUNDS, count: int = STEPS) -> dict[str, float]:
    """The median time of each step in seconds. In every round each of them runs `count` times, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # warm up and compile
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(count):
                began = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def origin(cfg: TrainConfig) -> dict[str, Any]:
    """Of a row: the commit, the machine and the sizes of cfg."""
    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "commit": commit(), "torch": torch.__version__,
        "python": platform.python_version(), "cpu": cpu, "threads": torch.get_num_threads(),
        "bfloat16": uses_bfloat16(torch.device("cpu"), cfg.dtype), "ctx": cfg.ctx, "width": cfg.model.width,
        "layers": cfg.model.n_layers, "batch_tokens": cfg.batch_tokens,
    }  # fmt: skip


def main() -> None:
    if {"--help", "-h"} & set(sys.argv[1:]):
        return print(__doc__)
    cfg = train_settings(*sys.argv[1:])
    steps = {
        "nanoGPT's step, float32": peer_step(cfg),
        "ours": our_step(cfg, False),
        "ours, compiled": our_step(cfg, True),
    }
    speed = {name: cfg.batch_tokens / seconds for name, seconds in interleaved(steps).items()}
    base = speed["nanoGPT's step, float32"]
    m = cfg.model
    print(f"{m.n_layers} layers, width {m.width}, ctx {cfg.ctx}, vocabulary {VOCAB}, {cfg.batch_tokens} tokens a step")
    for name, value in speed.items():
        print(f"{name:<28}{value:>10,.0f} tokens/s{value / base:>8.2f}x")
    command = "python -m bench.step " + " ".join(sys.argv[1:])
    row = {"command": command, **origin(cfg), "tokens_per_s": {k: round(v) for k, v in speed.items()}}
    append_json(ROOT / "results/step.jsonl", row)


if __name__ == "__main__":
    main()
