"""What a GPU can do: its peak in FLOP/s, to which MFU refers, and the tokens that its memory holds."""

import torch
from torch import nn

from engine.device import uses_bfloat16

# Dense bfloat16 matrix FLOP/s with float32 accumulation, from NVIDIA's data sheets. The first name that matches counts,
# so "H100 PCIe" stands before "H100". The sheets of Hopper and later print twice these numbers, which are with
# sparsity.
PEAKS = {
    "A100": 312e12, "A800": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """FLOP/s of one GPU; None where it is not known: another GPU, a slice of one (MIG), a CPU, float32."""
    if device.type != "cuda" or not uses_bfloat16(device, dtype):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(gpu: str) -> float | None:
    """FLOP/s of the GPU with this name, as torch.cuda.get_device_name returns it; None if it is not in PEAKS."""
    words = f" {gpu.replace('-', ' ')} "
    return None if " MIG " in words else next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def tokens_that_fit(device: torch.device, model: nn.Module) -> int:
    """How many tokens of an evaluation fit in a quarter of the free memory."""
    widest = max(m.out_features for m in model.modules() if isinstance(m, nn.Linear))
    # At most 8 float32 activations of that width at a time; a power of two, since the free memory varies a little
    tokens = torch.cuda.mem_get_info(device)[0] // (4 * 32 * widest)
    return max(2048, min(2**18, 1 << (tokens.bit_length() - 1)))
