"""The rotary ops that bench/rope.py compares: ours, and those of Hugging Face and Liger."""

import importlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import phase, rope_torch
from kernels.rope import rope
from model.spectrum import frequencies

PEERS = {
    "Hugging Face": ("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"),
    "Liger": ("liger_kernel.ops.rope", "LigerRopeFunction"),
}


def compiled(function: Callable) -> Callable:
    """The function as one compiled graph; an error where it cannot be compiled as one."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def peers(R: int, T: int, device: str) -> dict[str, Callable[[Tensor, Tensor], tuple]]:
    """name -> function of q, k [B, T, heads, D] of T tokens. What is not installed is skipped, with a warning."""
    f = phase(frequencies(R, 10000.0)).to(device)
    angle = torch.arange(T).float()[:, None] * frequencies(R, 10000.0).float()  # the peers' angles are float32
    tables = [torch.cat((t, t), -1)[None].to(device, torch.bfloat16) for t in (angle.cos(), angle.sin())]

    functions: dict[str, Callable] = {
        "ours": lambda q, k: rope(q, k, f),
        "ours, interleaved": lambda q, k: rope(q, k, f, interleaved=True),
        "torch.compile(ours in torch)": compiled(lambda q, k: rope_torch.rope(q, k, f, None, 0, False, 1.0)),
    }
    for name, (module, op) in PEERS.items():
        try:
            op = getattr(importlib.import_module(module), op)
        except ImportError as e:
            warnings.warn(f"{name}: skipped ({e})", stacklevel=2)
            continue
        # Liger rotates its input in place if that is contiguous with heads before tokens, and a copy otherwise
        apply = getattr(op, "apply", op)
        functions[name] = lambda q, k, op=apply: op(q.transpose(1, 2), k.transpose(1, 2), *tables)
    if "Hugging Face" in functions:
        functions["torch.compile(Hugging Face)"] = compiled(functions["Hugging Face"])
    return functions
