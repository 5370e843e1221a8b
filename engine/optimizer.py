"""AdamW and its learning-rate schedule; a file of its own: many readers want to change the optimizer."""

import torch

from conf.schema import OptimConfig
from model.gpt import GPT


def learning_rate(step: int, steps: int, o: OptimConfig) -> float:
    """The learning rate of step 0 .. steps - 1: linear warm-up over o.warmup steps, then linear decay.

    It reaches o.lr at the end of the warm-up and would be o.final_lr * o.lr at step `steps`.
    """
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    left = (steps - step) / max(1, steps - o.warmup)
    return o.lr * (o.final_lr + (1 - o.final_lr) * left)


def make_optimizer(model: GPT, o: OptimConfig) -> torch.optim.AdamW:
    """AdamW; weights of two or more dimensions decay, norms and biases do not.

    If the encoding has an lr_factor other than 1, its parameters are a third group, without decay. Before every step
    the learning rate of that group becomes lr_factor times that of the first one.
    """
    factor = model.pos.lr_factor
    own = list(model.pos.parameters()) if factor != 1 else []
    params = [p for p in model.parameters() if p not in set(own)]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups += [{"params": own, "weight_decay": 0.0}] if own else []
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)
    if own:
        optimizer.register_step_pre_hook(lambda a, *_: a.param_groups[-1].update(lr=factor * a.param_groups[0]["lr"]))
    return optimizer
