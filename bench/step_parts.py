"""The time of one compiled training step on a CPU by part, beside the machine's ceilings: python -m bench.step_parts

The parts are those of the kernels that torch.profiler sees: matrix products, attention (its two products and softmax),
GELU, the loss, the optimizer (with clipping), the other compiled kernels (norms, rotation, residual sums, casts), and
the rest of the step's time (Python, autograd, allocation). They sum to the time of a step under the profiler, which is
longer than that of a step without it. The ceilings are the speed of one large product in the
precision of training, and that of a copy of float32 numbers. The row is appended to results/step_parts.jsonl.
Arguments are settings as train.py accepts them.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from bench.rows import append_json
from bench.step import origin, our_step
from conf.compose import train_settings
from conf.registry import ROOT
from engine.device import uses_bfloat16
from model import gpt

STEPS = 40
VOCAB = 2048
# The first pattern that is in the name of a kernel decides. graph_1 is the compiled loss, graph_0 the block.
PARTS = {
    "loss": "graph_1|nll_loss|log_softmax",
    "attention": "aten::bmm|softmax",
    "gelu": "gelu|sigmoid",
    "matrix products": r"^aten::(mm|addmm)$|mkldnn",
    "optimizer": "adamw|AdamW|vector_norm|foreach|^aten::mul_$|^aten::zero_$",
    "other kernels": "cpp_fused|embedding|index_select",
}


def part_of(kernel: str) -> str | None:
    """The part that a kernel belongs to, by its name; None: the rest."""
    return next((part for part, pattern in PARTS.items() if re.search(pattern, kernel)), None)


def seconds(f: Callable[[], object], count: int) -> list[float]:
    """The time of each of `count` calls, after three more."""
    times = []
    for i in range(count + 3):
        began = time.perf_counter()
        f()
        times += [time.perf_counter() - began] * (i >= 3)
    return times


def ceilings(dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of a product of two matrices of 2048 x 2048, and GB/s read and written by a copy of 256 MB."""
    a, b = torch.randn(2, 2048, 2048, dtype=dtype)
    x = torch.randn(2**26)
    y = torch.empty_like(x)
    return {
        "tflop_per_s": 2 * 2048**3 / min(seconds(lambda: a @ b, 20)) / 1e12,
        "copy_gb_per_s": 2 * 4 * x.numel() / min(seconds(lambda: y.copy_(x), 10)) / 1e9,
    }


def main() -> None:
    if {"--help", "-h"} & set(sys.argv[1:]):
        return print(__doc__)
    cfg = train_settings(*sys.argv[1:])
    import torch._inductor.config

    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):  # kernels appear by name
        step = our_step(cfg, compiled=True)
        whole = 1e3 * median(seconds(step, STEPS))
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            profiled_ms = 1e3 * (time.perf_counter() - began) / STEPS
    ms = dict.fromkeys(PARTS, 0.0)
    for kernel in profiled.key_averages():
        if part := part_of(kernel.key):
            ms[part] += kernel.self_cpu_time_total / 1e3 / STEPS
    ms["the rest"] = profiled_ms - sum(ms.values())
    dtype = torch.bfloat16 if uses_bfloat16(torch.device("cpu"), cfg.dtype) else torch.float32
    top = ceilings(dtype)
    matrices = sum(p.numel() for p in gpt.build(cfg, VOCAB).parameters() if p.dim() == 2)
    flops = 6 * matrices * cfg.batch_tokens  # forward, and two products backward
    speed = flops / ms["matrix products"] / 1e9
    print(f"{whole:.1f} ms a step of {cfg.batch_tokens} tokens, {1e3 * cfg.batch_tokens / whole:,.0f} tokens/s")
    print(f"with the profiler {profiled_ms:.1f} ms, by part:")
    for part, value in ms.items():
        print(f"{part:<18}{value:>8.1f} ms{100 * value / sum(ms.values()):>6.0f} %")
    print(f"products: {speed:.2f} TFLOP/s, ceiling {top['tflop_per_s']:.2f}; copies: {top['copy_gb_per_s']:.1f} GB/s")
    row = {"command": " ".join(["python -m bench.step_parts", *sys.argv[1:]]), **origin(cfg), "ms_per_step": whole,
           "ms_profiled": profiled_ms, "ms": ms, "products_tflop_per_s": speed, "ceilings": top}  # fmt: skip
    row = json.loads(json.dumps(row), parse_float=lambda x: round(float(x), 3))
    append_json(ROOT / "results/step_parts.jsonl", row)


if __name__ == "__main__":
    main()
