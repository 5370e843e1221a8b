"""The learning-rate schedule, and AdamW with weight decay on matrices only."""

import torch
from torch import nn

from conf.schema import OptimConfig


def learning_rate(step: int, steps: int, o: OptimConfig) -> float:
    """The learning rate of step 0 .. steps - 1: linear warm-up over o.warmup steps, then linear decay.

    It reaches o.lr at the end of the warm-up and would be o.final_lr * o.lr at step `steps`.
    """
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    left = (steps - step) / max(1, steps - o.warmup)
    return o.lr * (o.final_lr + (1 - o.final_lr) * left)


def make_optimizer(model: nn.Module, o: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weights of two or more dimensions decay, norms and biases do not."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)
