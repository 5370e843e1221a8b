"""The error of each implementation's arithmetic, ours and its peers', in one table of positions 0 to a million.

A peer whose code needs a GPU is emulated by the steps of its source. Print the table: python -m bench.rope accuracy
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import phase, rope_torch

BASE = 10000.0


def frequencies(R: int) -> Tensor:
    """float64 [R / 2], radians per position."""
    return BASE ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)


def tables(positions: Tensor, R: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] as the peers compute them: float32 frequencies times float32 positions, then cast."""
    angle = positions.float()[:, None] * frequencies(R).float()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The rotation of split pairs, in the dtype of its arguments: x [..., R], c and s [..., R / 2]."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)


# ---- the implementations: x [T, D] at positions p [T] -> rotated x, in x's dtype ----


def ours(x: Tensor, p: Tensor) -> Tensor:
    """The rotation of this project, in plain torch; the Triton kernel computes the same."""
    x = x[None, :, None]
    return rope_torch.rope(x, x, phase(frequencies(x.shape[-1])), p, 0, False, 1.0)[0][0, :, 0]


def hugging_face(x: Tensor, p: Tensor) -> Tensor:
    """transformers' own code: LlamaRotaryEmbedding and apply_rotary_pos_emb, in x's dtype."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama as llama

    D = x.shape[-1]
    embedding = llama.LlamaRotaryEmbedding(LlamaConfig(hidden_size=D, num_attention_heads=1, head_dim=D))
    cos, sin = embedding(x, p[None])
    return llama.apply_rotary_pos_emb(x[None, None], x[None, None], cos, sin)[0][0, 0]


def liger(x: Tensor, p: Tensor) -> Tensor:
    """Liger's kernel multiplies in the tables' dtype, which is the model's: one product is rounded, the other fused."""
    c, s = tables(p, x.shape[-1], x.dtype)
    x1, x2 = x.chunk(2, dim=-1)
    a = ((x1 * c).double() - x2.double() * s.double(), (x2 * c).double() + x1.double() * s.double())
    return torch.cat(a, dim=-1).to(x.dtype)


def flash_attention(x: Tensor, p: Tensor) -> Tensor:
    """FlashAttention's module keeps the tables in the model's dtype; its kernel computes in float32, rounds once."""
    c, s = (t.float() for t in tables(p, x.shape[-1], x.dtype))
    return halves(x.float(), c, s).to(x.dtype)


def complex_float32(x: Tensor, p: Tensor) -> Tensor:
    """Complex multiplication with float32 angles (on split pairs), in float32, rounded once."""
    c, s = tables(p, x.shape[-1], torch.float32)
    return halves(x.float(), c, s).to(x.dtype)


ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": ours,
    "Hugging Face": hugging_face,
    "Liger (emulated)": liger,
    "FlashAttention (emulated)": flash_attention,
    "float32 angles": complex_float32,
}


def accuracy() -> list[dict]:
    """Rows of {arithmetic, position, error, rms, wrong}, against float64 with exact angles; D = 128, 512 tokens.

    error, rms: of float32 results. wrong: the share of bfloat16 results that are not the nearest bfloat16 number.
    """
    D, T, rows = 128, 512, []
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(0))
    for name, rotate in ARITHMETIC.items():
        for start in (0, 8192, 131_072, 1_000_000):
            p = torch.arange(T) + start
            angle = p.double()[:, None] * frequencies(D)
            try:
                in_float32 = rotate(x, p).double() - halves(x.double(), angle.cos(), angle.sin())
                rounded = halves(x.bfloat16().double(), angle.cos(), angle.sin()).bfloat16()
                wrong = (rotate(x.bfloat16(), p) != rounded).double().mean().item()
            except ImportError as e:
                print(f"{name}: skipped ({e})")
                break
            rows.append({"arithmetic": name, "position": start, "error": in_float32.abs().max().item(),
                         "rms": in_float32.square().mean().sqrt().item(), "wrong": wrong})  # fmt: skip
    return rows


def print_accuracy() -> None:
    """Print the table of `accuracy`; a peer that is not installed is skipped with a message."""
    print(
        "float32: largest error of the result (inputs of variance 1); bfloat16: share of results not correctly rounded"
    )
    print(f"{'':28}{'position':>10}{'largest':>12}{'rms':>12}{'wrongly rounded':>18}")
    for r in accuracy():
        print(
            f"{r['arithmetic']:<28}{r['position']:>10}{r['error']:>12.1e}{r['rms']:>12.1e}{100 * r['wrong']:>17.3f} %"
        )
