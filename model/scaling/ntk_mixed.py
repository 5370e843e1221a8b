"""Su's NTK-RoPE-mixed (kexue.fm/archives/9706): pair i (from 1) is slowed by exp(a * i^b), and the last one by s.

b = 0.75 lies between NTK-aware scaling (b = 1, close to it) and all pairs alike (b = 0, which is PI).
"""

import math

import torch

from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, factor: float, b: float = 0.75) -> ContextChange:
    P = trained.rotary_dim // 2
    i = torch.arange(1, P + 1, dtype=torch.float64)
    return ContextChange(inv_freq=trained.inv_freq * torch.exp(-math.log(factor) * (i / P) ** b), factor=factor)
