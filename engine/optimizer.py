"""AdamW and Muon, and their learning-rate schedule."""

import math
from typing import Any

import torch
from torch import Tensor
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


class Muon(torch.optim.Muon):
    """torch's Muon, whose Newton-Schulz iteration is in `dtype`: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    It moves a matrix along its orthogonalised momentum (Nesterov's), at the same root mean square as AdamW would (Liu
    et al. 2025, arXiv 2502.16982). torch has the iteration in bfloat16, which took eight times as long as all the rest
    of a training step on a CPU without instructions for it (results/log.md).
    """

    def __init__(self, params: list, dtype: torch.dtype, **options: Any):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # closure: of torch's signature, not used
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not (state := self.state[p]):
                    state["momentum_buffer"] = torch.zeros_like(p)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(momentum, group["momentum"]).to(self.dtype), group["ns_steps"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def orthogonal(x: Tensor, steps: int) -> Tensor:
    """Near U V^T of x = U S V^T: its singular values after so many Newton-Schulz steps are about 1."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T, steps).T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x


def make_optimizers(model: GPT, o: OptimConfig, bfloat16: bool = False) -> list[Optimizer]:
    """AdamW, and with o.matrix_lr Muon for the matrices of the blocks, which computes in bfloat16 or in float32.

    Only these matrices decay. The parameters of an encoding are AdamW's, at lr_factor times its learning rate. Each
    group's `peak` is its largest learning rate, with the encoding's lr_scale: train.py sets `lr` before every step.
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
        dtype = torch.bfloat16 if bfloat16 else torch.float32
        optimizers.append(Muon([decaying], dtype, momentum=o.momentum, ns_steps=o.ns_steps))
    return optimizers
