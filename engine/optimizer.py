"""AdamW and Muon, and their learning-rate schedule; a file of its own: many readers want to change the optimizer."""

import torch
from torch.optim import Optimizer

from conf.schema import OptimConfig
from model.gpt import GPT, of_encoding


def schedule(step: int, steps: int, o: OptimConfig) -> float:
    """The learning rates of step 0 .. steps - 1 as a share of their peaks: linear warm-up, constant, linear decay.

    1 at the end of the warm-up of o.warmup steps, and for o.stable of the steps after it; it would be o.final_lr at
    step `steps`.
    """
    if step < o.warmup:
        return (step + 1) / o.warmup
    left = (steps - step) / max(1, steps - o.warmup) / (1 - o.stable)
    return o.final_lr + (1 - o.final_lr) * min(1.0, left)


def make_optimizers(model: GPT, o: OptimConfig) -> list[Optimizer]:
    """AdamW, and with o.matrix_lr Muon for the matrices of the blocks (Jordan et al. 2024, kellerjordan.github.io).

    Weights of two or more dimensions decay, norms and biases do not. Muon moves a matrix along its orthogonalised
    momentum, at the same root mean square as AdamW would (Liu et al. 2025, arXiv 2502.16982). The parameters of an
    encoding are AdamW's, and if it has an lr_factor other than 1, a group of their own without decay. Each group's
    `peak` is its largest learning rate: train.py sets `lr` before every step.
    """
    named = list(model.named_parameters())
    muon = [p for name, p in named if o.matrix_lr and in_matrix_of_block(name, p)]
    own = list(model.pos.parameters()) if model.pos.lr_factor != 1 else []
    others = [p for _, p in named if p not in {*muon, *own}]
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "peak": o.lr},
        {"params": [p for p in others if p.dim() < 2], "peak": o.lr, "weight_decay": 0.0},
    ]
    groups += [{"params": own, "peak": o.lr * model.pos.lr_factor, "weight_decay": 0.0}] if own else []
    betas, decay = (o.beta1, o.beta2), o.weight_decay
    optimizers: list[Optimizer] = [torch.optim.AdamW(groups, o.lr, betas, weight_decay=decay, fused=True)]
    if o.matrix_lr:
        group = {"params": muon, "peak": o.matrix_lr}
        optimizers.append(torch.optim.Muon([group], o.matrix_lr, decay, o.momentum, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def in_matrix_of_block(name: str, p: torch.Tensor) -> bool:
    return name.startswith("blocks.") and p.dim() == 2 and not of_encoding(name)
