"""Where and how a model computes: the device, the precision, and what a GPU can do."""

import ctypes
import functools
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import nn

import kernels
from conf.errors import UserError
from engine import distributed
from model.gpt import linear_layers

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h

# Dense bfloat16 matrix FLOP/s with float32 accumulation, from NVIDIA's data sheets. The first name that matches counts,
# so "H100 PCIe" stands before "H100". The sheets of Hopper and later print twice these numbers, which are with
# sparsity.
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def start(device: str, kernel: str, many_lengths: bool = False) -> torch.device:
    """Prepare a command: pick the device, select the implementation of the rotation, and join the torchrun job.

    device: auto, cpu, cuda or cuda:1. kernel: auto, triton or torch. many_lengths: the sequences will have many
    lengths, for each of which cuDNN's attention would first search a plan, so it is switched off. UserError if the
    device or the kernel cannot be used here.
    """
    # On a CPU an operation with numbers below 1e-38 takes ten times as long: FoX's probabilities double a step's time.
    # Threads inherit this from the one that starts them, so it comes before the first large operation.
    torch.set_flush_denormal(True)
    chosen = pick_device(device)
    torch.backends.cuda.enable_cudnn_sdp(not many_lengths)
    try:
        kernels.choose(kernel, chosen)
    except ValueError as e:
        raise UserError(str(e)) from None
    distributed.join(chosen)
    return chosen


def pick_device(name: str) -> torch.device:
    """The torch device of this name; auto is cuda if there is a GPU, else cpu.

    Under torchrun each process of a machine uses the GPU with the number of its LOCAL_RANK. UserError if the device
    does not exist or cannot allocate memory.
    """
    name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    try:
        device = torch.device(name)
        if name == "cuda" and distributed.world() > 1:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.zeros(1, device=device).item()  # the meta device cannot
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"device={name}: cannot be used here ({str(e).splitlines()[0]})") from None
    return device


def keep_freed_memory() -> None:
    """Have glibc's malloc keep freed memory for the next training step, where there is a glibc.

    By default it returns memory to the kernel in most steps of a small model and gets it again as new pages. A process
    whose allocations are of many sizes, as in evaluation, gains nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Bytes. Before glibc 2.35 the second one is at most 2^25. The first one alone would make other tensors slower
    if mallopt and (mallopt(M_MMAP_THRESHOLD, 2**30) or mallopt(M_MMAP_THRESHOLD, 2**25)):
        mallopt(M_TRIM_THRESHOLD, 2**30)


# ---- precision ----


@functools.cache
def cpu_gains_by_bfloat16() -> bool:
    """With AMX, or on AMD with AVX512-BF16. Products in Intel's took twice the time of float32 (results/log.md)."""
    if torch.cpu._is_amx_tile_supported():
        return True
    cpuinfo = Path("/proc/cpuinfo")  # of Linux; elsewhere the maker is not known
    amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")
    return amd and torch.cpu._is_avx512_bf16_supported()


def uses_bfloat16(device: torch.device, dtype: str) -> bool:
    """Whether to compute in bfloat16. dtype: float32, bfloat16, or auto, where the hardware decides.

    auto means yes only where it is faster: on a GPU without emulation, on a CPU where `cpu_gains_by_bfloat16`.
    """
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return cpu_gains_by_bfloat16()


def store_in_bfloat16(model: nn.Module) -> None:
    """Keep the weights of linear layers in bfloat16, in place: the values that autocast would compute in each pass."""
    for m in linear_layers(model):
        m.weight = nn.Parameter(m.weight.to(torch.bfloat16), requires_grad=False)


def autocast(device: torch.device, dtype: str) -> AbstractContextManager:
    """torch.autocast to bfloat16, disabled where `uses_bfloat16` is false. float32 weights are cast in each pass."""
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(device, dtype))


# ---- what a GPU can do ----


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of one GPU; None where it is not known: another GPU, a slice of one (MIG), a CPU, float32."""
    if device.type != "cuda" or not uses_bfloat16(device, dtype):
        return None
    words = f" {torch.cuda.get_device_name(device).replace('-', ' ')} "
    return None if " MIG " in words else next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def tokens_per_pass(device: torch.device, model: nn.Module) -> int:
    """How many tokens to evaluate in one forward pass, in several windows where they are short.

    On a GPU as many as fit in a quarter of the free memory, on a CPU so few that activations stay in its cache.
    """
    if device.type != "cuda":
        return 2048
    widest = max(m.out_features for m in model.modules() if isinstance(m, nn.Linear))
    # At most 8 float32 activations of that width at a time; a power of two, since the free memory varies a little
    tokens = torch.cuda.mem_get_info(device)[0] // (4 * 32 * widest)
    return max(2048, min(2**18, 1 << (tokens.bit_length() - 1)))
