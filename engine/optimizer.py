"""AdamW and Muon, and their learning-rate schedule."""

import torch
from torch.optim import Optimizer

from conf.schema import OptimConfig
from model.gpt import GPT, of_encoding


def schedule(step: int, steps: int, o: OptimConfig) -> float:
    """The learning rates of step 0 .. steps - 1 as a share of their peaks: linear warm-up, then linear decay.

    1 at the end of the warm-up of o.warmup steps; it would be o.final_lr at step `steps`.
    """
    if step < o.warmup:
        return (step + 1) / o.warmup
    return o.final_lr + (1 - o.final_lr) * (steps - step) / max(1, steps - o.warmup)


def make_optimizers(model: GPT, o: OptimConfig) -> list[Optimizer]:
    """AdamW, and with o.matrix_lr Muon for the matrices of the blocks (Jordan et al. 2024, kellerjordan.github.io).

    Only these matrices decay. Muon moves a matrix along its orthogonalised momentum, at the same root mean square as
    AdamW would (Liu et al. 2025, arXiv 2502.16982). The parameters of an encoding are AdamW's, at lr_factor times its
    learning rate. Each group's `peak` is its largest learning rate, with the encoding's lr_scale: train.py sets `lr`
    before every step.
    """
    scale = model.pos.lr_scale
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.startswith("blocks.") and p.dim() == 2 and not of_encoding(name)]
    own = list(model.pos.parameters())
    others = [p for _, p in named if p not in {*matrices, *own}]
    decaying = {"params": matrices, "peak": scale * (o.matrix_lr or o.lr), "weight_decay": o.weight_decay}
    groups = [{"params": others, "peak": scale * o.lr}]
    groups += [{"params": own, "peak": scale * o.lr * model.pos.lr_factor}] if own else []
    groups += [] if o.matrix_lr else [decaying]
    optimizers: list[Optimizer] = [torch.optim.AdamW(groups, o.lr, (o.beta1, o.beta2), weight_decay=0.0, fused=True)]
    if o.matrix_lr:
        muon = torch.optim.Muon([decaying], momentum=o.momentum, ns_steps=o.ns_steps, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers
