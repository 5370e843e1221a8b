"""The error of each implementation's arithmetic at positions 0 to a million: python -m bench.accuracy

A peer whose code needs a GPU is emulated by the steps of its source. Hugging Face's row needs transformers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import phase, rope_torch

Rotation = Callable[[Tensor, Tensor], Tensor]  # x [T, D] at positions p [T] -> rotated x, in x's dtype


def frequencies(R: int) -> Tensor:
    """float64 [R / 2], radians per position."""
    return 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)


def tables(positions: Tensor, R: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] as the peers compute them: float32 frequencies times float32 positions, then cast."""
    angle = positions.float()[:, None] * frequencies(R).float()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def halves(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    """The rotation of split pairs, in the dtype of its arguments: x [..., R], c and s [..., R / 2]."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)


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


def float32_angles(x: Tensor, p: Tensor, table: torch.dtype = torch.float32) -> Tensor:
    """As complex multiplication: in float32, rounded once. table: the precision of cosines and sines."""
    c, s = (t.float() for t in tables(p, x.shape[-1], table))
    return halves(x.float(), c, s).to(x.dtype)


ARITHMETIC: dict[str, Rotation] = {
    "ours": ours,
    "Hugging Face": hugging_face,
    "Liger (emulated)": liger,
    # Its module keeps the tables in the model's dtype
    "FlashAttention (emulated)": lambda x, p: float32_angles(x, p, x.dtype),
    "float32 angles": float32_angles,
}


def errors(rotate: Rotation, start: int, dtype: torch.dtype, D: int = 128) -> dict[str, float]:
    """Of 512 tokens from position `start` on, of variance 1, against float64 with exact angles.

    error and rms: absolute. wrong: the share of results that are not the nearest number of this dtype.
    """
    x = torch.randn(512, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    p = torch.arange(512) + start
    angle = p.double()[:, None] * frequencies(D)
    got, want = rotate(x, p), halves(x.double(), angle.cos(), angle.sin())
    error, wrong = got.double() - want, (got != want.to(dtype)).double()
    return {"error": error.abs().max().item(), "rms": error.square().mean().sqrt().item(), "wrong": wrong.mean().item()}


def main() -> None:
    print("float32: largest error and rms; bfloat16: share of results that are not correctly rounded")
    for name, rotate in ARITHMETIC.items():
        for start in (0, 8192, 131_072, 1_000_000):
            exact, wrong = errors(rotate, start, torch.float32), errors(rotate, start, torch.bfloat16)["wrong"]
            print(f"{name:<28}{start:>10}{exact['error']:>12.1e}{exact['rms']:>12.1e}{100 * wrong:>12.3f} %")


if __name__ == "__main__":
    main()
