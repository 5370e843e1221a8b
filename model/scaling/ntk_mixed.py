"""Su's NTK-RoPE-mixed (kexue.fm/archives/9706): the frequency of pair i = 1 .. P is divided by exp(a * i^b).

a is such that the frequency of the last pair is divided by s. b = 0.75 is between NTK-aware scaling (close to b = 1)
and position interpolation, which divides all pairs alike (b = 0).
"""

import math

import torch

from model.scaling import ContextChange, TrainedContext


def scale(trained: TrainedContext, n: int, factor: float, b: float = 0.75) -> ContextChange:
    P = len(trained.inv_freq)
    i = torch.arange(1, P + 1, dtype=torch.float64)
    return ContextChange(inv_freq=trained.inv_freq * torch.exp(-math.log(factor) * (i / P) ** b), factor=factor)
