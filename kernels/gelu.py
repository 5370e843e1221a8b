"""GELU on a CPU, where torch's tanh is slow."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def gelu(x: Tensor) -> Tensor:
    """F.gelu with the tanh approximation. In code compiled for a CPU it is written as a sigmoid, which is faster there:
    1 + tanh u is 2 sigmoid(2 u).
    """
    if x.device.type != "cpu" or not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide, scale = x.float(), math.sqrt(8 / math.pi)
    return (wide * torch.sigmoid(scale * wide * (1 + 0.044715 * wide * wide))).to(x.dtype)


def after_linear(act: Callable[[Tensor], Tensor], linear: nn.Linear, x: Tensor) -> Tensor:
    """act(linear(x)). Where `fuses_gelu`: one operation of oneDNN, which applies GELU before it rounds to bfloat16."""
    if act not in (gelu, F.gelu) or not fuses_gelu(x):
        return act(linear(x))
    x, weight, bias = (None if t is None else t.bfloat16() for t in (x, linear.weight, linear.bias))
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "gelu", [], "tanh" if act is gelu else "none")


def fuses_gelu(x: Tensor) -> bool:
    """In bfloat16 on a CPU, in inference; torch.compile does the same. (In training the compiled sigmoid is faster.)"""
    on_cpu = x.device.type == "cpu" and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
    on_cpu = on_cpu and torch.backends.mkldnn.is_available() and torch.is_autocast_enabled("cpu")
    return on_cpu and torch.ops.mkldnn._is_mkldnn_bf16_supported()
