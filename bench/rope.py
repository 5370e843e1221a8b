"""The speed of the rotary op beside its peers on a CUDA GPU: python -m bench.rope [--shapes 0 1]

Microseconds, and speed relative to a device copy, by replays of CUDA graphs over buffers that outgrow the L2 cache.
Medians, one process. The rows are appended to results/rope_kernel.jsonl as they come.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from bench.peers import peers
from bench.rows import append, parser
from kernels import phase
from kernels.rope import rope_packed
from model.spectrum import frequencies

# (B, T, H, G, D, R): batch, tokens, query heads, key heads, head width, rotary dimensions. The first is a common
# training shape; the others have a longer context, small heads, and grouped queries
SHAPES = [(8, 2048, 16, 16, 128, 128), (1, 8192, 16, 16, 128, 128), (16, 512, 6, 6, 64, 64), (8, 2048, 16, 4, 128, 128)]
Calls = list[Callable[[], object]]


def microseconds(calls: Calls) -> float:
    """The median time of one call, by replays of CUDA graphs of all calls, each on its own buffers."""
    results = []

    def run() -> None:  # the results stay alive until all calls have run, so that no two share memory
        results[:] = [call() for call in calls]

    return 1e3 * do_bench_cudagraph(run, return_mode="median") / len(calls)


def step(rotate: Callable[..., Any], inputs: tuple[Tensor, ...], backward: bool) -> Callable[[], object]:
    """A call of rotate(*inputs), with its backward pass or without it."""

    def call() -> object:
        leaves = [x.detach().requires_grad_(backward) for x in inputs]
        outputs = rotate(*leaves)
        return torch.autograd.grad(outputs, leaves, [y.detach() for y in outputs]) if backward else outputs

    return call


def measure_shape(shape: tuple[int, ...], device: str, out: Path) -> None:
    """Time every peer at this shape, in every input layout, forward and with backward."""
    B, T, H, G, D, R = shape
    size = 2 * B * T * (H + G) * D  # bytes of q and k in bfloat16
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    buffers = range(max(2, min(64, -(-3 * cache // size))))
    packed = [torch.randn(B, T, H + 2 * G, D, device=device, dtype=torch.bfloat16) for _ in buffers]
    views = [x.split((H, G, G), dim=2)[:2] for x in packed]
    layouts = {
        "contiguous": [tuple(t.contiguous() for t in pair) for pair in views],
        "packed views": views,
        "heads first": [tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in pair) for pair in views],
    }
    joined = [(x, torch.empty_like(x)) for x in (torch.cat(pair, dim=2) for pair in views)]
    copies: Calls = [lambda x=x, y=y: y.copy_(x) for x, y in joined]  # q and k by one kernel
    copy_us = microseconds(copies)

    def measure(name: str, layout: str, passes: float, calls: Calls) -> None:
        """Time calls, which read and write q and k `passes` times, and append the row."""
        us = microseconds(calls)
        what = {"shape": shape, "what": name, "layout": layout, "backward": passes > 1}
        speed = {"us": us, "gb_s": 2e-3 * size * passes / us, "of_copy": passes * copy_us / us}
        append(out, {**what, **speed})

    measure("device copy", "contiguous", 1, copies)
    for name, rotate in peers(R, T, device).items():
        torch._dynamo.reset()  # a function is compiled a limited number of times, over all shapes
        try:
            for layout, pairs in layouts.items():
                for passes in (1, 2):
                    measure(name, layout, passes, [step(rotate, pair, passes == 2) for pair in pairs])
        except Exception as e:  # the others are measured without it
            print(f"{name}: failed ({type(e).__name__}: {e})", flush=True)
    f = phase(frequencies(R, 10000.0)).to(device)
    # The packed gradient holds v's as well: H + 2 G heads are written, and read, beside the H + G of the rotation.
    for passes in (1, 1 + (H + 2 * G) / (H + G)):
        calls = [step(lambda x: rope_packed(x, H, G, f), (x,), passes > 1) for x in packed]
        measure("ours, rope_packed", "packed", passes, calls)


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # instead of running uncompiled
def main() -> None:
    command = parser(__doc__, "rope_kernel.jsonl")
    command.add_argument("--shapes", nargs="*", type=int, default=range(len(SHAPES)), help=f"which of {SHAPES}")
    args = command.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: bench.rope needs a CUDA GPU")
    for i in args.shapes:
        measure_shape(SHAPES[i], "cuda", args.out)


if __name__ == "__main__":
    main()
