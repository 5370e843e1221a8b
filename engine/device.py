"""Where a model computes: the device, the precision, the rotation's implementation, and torch.compile."""

import os
import shutil
from contextlib import AbstractContextManager

import torch
from torch import nn

import kernels
from conf.errors import UserError
from engine import distributed

# Below this many FLOPs of training a cold compile (about half a minute on two cores) costs more than it gains.
COMPILE_GAINS_FROM = 4e13


def start(device: str, kernel: str) -> torch.device:
    """The device to compute on, with the rotation's implementation chosen and the ranks of a torchrun job joined."""
    chosen = pick_device(device)
    choose_kernel(kernel, chosen)
    distributed.join(chosen)
    return chosen


def pick_device(name: str) -> torch.device:
    """name, or for auto a GPU if there is one. Under torchrun each process of a machine takes a different GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and distributed.world() > 1:
        local, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= n:
            raise UserError(
                f"device=cuda: process {local} finds {n} GPUs on this machine: --nproc_per_node={n} at most"
            )
        name = f"cuda:{local}"
        torch.cuda.set_device(local)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device={name}: cannot be used here ({str(e).splitlines()[0]})") from None
    return device


def choose_kernel(name: str, device: torch.device) -> None:
    """kernel=auto, triton or torch for the whole process. UserError if triton cannot run on this device."""
    try:
        kernels.choose(name, device)
    except ValueError as e:
        raise UserError(str(e)) from None


def uses_bfloat16(device: torch.device, dtype: str) -> bool:
    """Whether to compute in bfloat16: as dtype says, or, with dtype=auto, where the hardware supports it."""
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def autocast(device: torch.device, dtype: str) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(device, dtype))


def compile_blocks(model: nn.Module) -> None:
    """Compile one block, whose code all blocks share, and the loss; in place, so that state dicts keep their names.

    Not the whole model: that is no faster here and takes longer to compile.
    """
    torch.compiler.reset()  # what an earlier job of a sweep compiled counts against dynamo's limit of recompilations
    torch._dynamo.config.suppress_errors = True  # no compiler, or one that fails: continue uncompiled
    for block in model.blocks:
        block.compile(dynamic=False)
    model._block_losses = torch.compile(model._block_losses, dynamic=False)


def should_compile(setting: str, device: torch.device, flops: float) -> bool:
    """setting: true, false or auto, which compiles on CUDA, and on a CPU if the run is long enough to gain."""
    if setting != "auto":
        return setting == "true"
    if device.type == "cuda":
        return True
    return flops > COMPILE_GAINS_FROM and any(map(shutil.which, ("g++", "clang++")))
