"""Where a model computes: the device, the precision, and the rotation's implementation."""

import os
from contextlib import AbstractContextManager

import torch

import kernels
from conf.errors import UserError
from engine import distributed


def start(device: str, kernel: str) -> torch.device:
    """The device to compute on, with the rotation's implementation chosen and the ranks of a torchrun job joined."""
    chosen = pick_device(device)
    try:
        kernels.choose(kernel, chosen)
    except kernels.KernelUnavailable as e:
        raise UserError(str(e)) from None
    distributed.join(chosen)
    return chosen


def pick_device(name: str) -> torch.device:
    """name, or for auto a GPU if there is one. Under torchrun each process of a machine takes a different GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and distributed.world() > 1:
        local, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= n:
            raise UserError(f"device=cuda: process {local} finds {n} GPUs on its machine: --nproc_per_node={n} at most")
        name = f"cuda:{local}"
        torch.cuda.set_device(local)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device={name}: cannot be used here ({str(e).splitlines()[0]})") from None
    return device


def uses_bfloat16(device: torch.device, dtype: str) -> bool:
    """Whether to compute in bfloat16: as dtype says, or, with dtype=auto, where the hardware supports it."""
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def autocast(device: torch.device, dtype: str) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(device, dtype))
