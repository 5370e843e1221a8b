"""Which implementation of the rotary op runs: the Triton kernel or plain torch."""

import importlib.util
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None  # triton has no wheel for some platforms
kernel = "auto"  # or triton or torch, for the whole process; choose() sets it


def choose(name: str, device: torch.device) -> None:
    """Set the implementation for the rest of this process: auto, triton or torch.

    ValueError if triton is chosen and cannot run on this device.
    """
    global kernel
    if name == "triton" and not (TRITON_INSTALLED and (device.type == "cuda" or INTERPRETED)):
        reason = f"device={device.type} is not a CUDA device" if TRITON_INSTALLED else "triton is not installed"
        raise ValueError(f"kernel=triton: {reason}: use kernel=auto")
    kernel = name
    uses_triton(device)  # loads the kernel


def uses_triton(device: torch.device) -> bool:
    """Whether rope runs the kernel on this device (for float32, float16 and bfloat16). Imports it if so."""
    runs_here = device.type == "cuda" or (kernel == "triton" and INTERPRETED)
    if kernel == "torch" or not (TRITON_INSTALLED and runs_here):
        return False
    from kernels import rope_triton  # noqa: F401 (loads triton, and registers the ops before anything is compiled)

    return True
