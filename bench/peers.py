"""The rotary ops that bench/rope.py compares: ours, and those of Hugging Face, Liger, FlashAttention and fla."""

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from bench.accuracy import frequencies, halves, tables
from kernels import phase, rope_torch
from kernels.rope import rope


def compiled(function: Callable) -> Callable:
    """The function as one compiled graph; an error where it cannot be compiled as one."""
    return torch.compile(function, dynamic=False, fullgraph=True)


skipped: set[str] = set()  # peers that are not installed, each of which is said one time


def peers(R: int, positions: Tensor, device: str) -> dict[str, Callable[[Tensor, Tensor], tuple]]:
    """name -> function of q, k [B, T, heads, D] at positions [T]. What is not installed is skipped, with a message."""
    f, T, first = phase(frequencies(R)).to(device), len(positions), int(positions[0])
    cos, sin = (t.to(device) for t in tables(positions, R, torch.bfloat16))
    full = torch.cat((cos, cos), -1)[None], torch.cat((sin, sin), -1)[None]
    rotations = torch.polar(torch.ones(T, R // 2), positions.float()[:, None] * frequencies(R).float()).to(device)[
        :, None
    ]

    def by_complex(q: Tensor, k: Tensor) -> list[Tensor]:
        return [
            torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * rotations)
            .flatten(-2)
            .to(x.dtype)
            for x in (q, k)
        ]

    functions: dict[str, Callable] = {
        "ours": lambda q, k: rope(q, k, f, offset=first),
        "ours, interleaved": lambda q, k: rope(q, k, f, offset=first, interleaved=True),
        "torch.compile(ours in torch)": compiled(lambda q, k: rope_torch.rope(q, k, f, None, first, False, 1.0)),
        "torch.compile(complex), interleaved": compiled(by_complex),
    }

    def add(name: str, make: Callable[[], Callable]) -> None:
        try:
            functions[name] = make()
        except Exception as e:
            if name not in skipped:
                print(f"{name}: skipped ({type(e).__name__}: {e})")
            skipped.add(name)

    def hf() -> Callable:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply

        return lambda q, k: apply(q.transpose(1, 2), k.transpose(1, 2), *full)

    def by_liger() -> Callable:
        from liger_kernel.ops.rope import LigerRopeFunction

        # Liger rotates its input in place if that is contiguous in its layout, and a copy of it otherwise.
        return lambda q, k: LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), *full)

    def by_flash() -> Callable:
        # FLASH_ROTARY=PATH loads flash_attn/ops/triton/rotary.py from an unpacked sdist: building it takes hours.
        if path := os.environ.get("FLASH_ROTARY"):
            spec = importlib.util.spec_from_file_location("flash_rotary", path)
            assert spec is not None and spec.loader is not None, path
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            apply_rotary = module.apply_rotary
        else:
            from flash_attn.ops.triton.rotary import apply_rotary

        return lambda q, k: (apply_rotary(q, cos, sin), apply_rotary(k, cos, sin))

    def by_fla() -> Callable:
        from fla.modules.rotary import rotary_embedding

        return lambda q, k: (rotary_embedding(q, cos, sin), rotary_embedding(k, cos, sin))

    add("Hugging Face, eager", hf)
    add("torch.compile(Hugging Face)", lambda: compiled(hf()))
    add("liger-kernel", by_liger)
    add("flash-attn, Triton", by_flash)
    add("fla-core", by_fla)
    return functions


def errors(
    name: str, H: int, G: int, D: int, R: int, device: str, places: tuple[int, ...] = (0, 1_000_000)
) -> tuple[float, ...]:
    """Errors of a peer's bfloat16 results against float64, in 512 tokens from each place (a position) on.

    Returns the share that is not correctly rounded at the first place, then the largest error at every place.
    """
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 512, N, D, generator=g).bfloat16() for N in (H, G))
    order = torch.arange(R).view(R // 2, 2).T.reshape(-1) if "interleaved" in name else torch.arange(R)
    wrong, largest = [], []
    for place in places:
        positions = torch.arange(512) + place
        y = peers(R, positions, device)[name](q.to(device), k.to(device))[0].cpu()
        y = y if y.shape == q.shape else y.transpose(1, 2)  # some return heads before tokens
        angle = (positions.double()[:, None] * frequencies(R))[:, None]
        want, got = halves(q[..., order].double(), angle.cos(), angle.sin()), y[..., order]
        largest.append((got.double() - want).abs().max().item())
        wrong.append((got != want.bfloat16()).double().mean().item())
    return wrong[0], *largest
