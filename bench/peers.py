"""The rotary ops that bench/rope.py compares: ours, and those of Hugging Face, Liger and FlashAttention."""

import importlib
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import phase, rope_torch
from kernels.rope import rope

PEERS = {
    "Hugging Face": ("transformers.models.llama.modeling_llama", "apply_rotary_pos_emb"),
    "Liger": ("liger_kernel.ops.rope", "LigerRopeFunction"),
    "FlashAttention": ("flash_attn.ops.triton.rotary", "apply_rotary"),
}


def frequencies(R: int) -> Tensor:
    """float64 [R / 2], radians per position."""
    return 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)


def tables(positions: Tensor, R: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] as the peers compute them: float32 frequencies times float32 positions, then cast."""
    angle = positions.float()[:, None] * frequencies(R).float()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def compiled(function: Callable) -> Callable:
    """The function as one compiled graph; an error where it cannot be compiled as one."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def peers(R: int, T: int, device: str) -> dict[str, Callable[[Tensor, Tensor], tuple]]:
    """name -> function of q, k [B, T, heads, D] of T tokens. What is not installed is skipped, with a warning."""
    f, positions = phase(frequencies(R)).to(device), torch.arange(T)
    cos, sin = (t.to(device) for t in tables(positions, R, torch.bfloat16))
    full = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    rotations = torch.complex(*tables(positions, R, torch.float32)).to(device)[:, None]

    def by_complex(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)

    functions: dict[str, Callable] = {
        "ours": lambda q, k: rope(q, k, f),
        "ours, interleaved": lambda q, k: rope(q, k, f, interleaved=True),
        "torch.compile(ours in torch)": compiled(lambda q, k: rope_torch.rope(q, k, f, None, 0, False, 1.0)),
        "torch.compile(complex), interleaved": compiled(lambda q, k: (by_complex(q), by_complex(k))),
    }
    for name, (module, op) in PEERS.items():
        try:
            op = getattr(importlib.import_module(module), op)
        except ImportError as e:
            warnings.warn(f"{name}: skipped ({e})", stacklevel=2)
            continue
        if name == "FlashAttention":
            functions[name] = lambda q, k, op=op: (op(q, cos, sin), op(k, cos, sin))
        else:  # Liger rotates its input in place if that is contiguous with heads before tokens, and a copy otherwise
            apply = getattr(op, "apply", op)
            functions[name] = lambda q, k, op=apply: op(q.transpose(1, 2), k.transpose(1, 2), *full)
    if "Hugging Face" in functions:
        functions["torch.compile(Hugging Face)"] = compiled(functions["Hugging Face"])
    return functions
