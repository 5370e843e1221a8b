"""The rotary op beside its peers: python -m bench.rope [accuracy | cpu | gpu]

accuracy, on any machine: the error of each implementation's arithmetic at positions 0 to a million (bench/accuracy.py).
cpu: a training step with our tables against one with cosines that are computed once.
gpu (the default; needs a CUDA GPU): microseconds, and speed relative to a device copy, by replays of a CUDA graph over
buffers that outgrow the L2 cache (and over one buffer that stays in it); peak memory; errors. Medians, one process. The
rows are appended to results/rope_kernel.csv.
"""

import csv
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.accuracy import frequencies, halves, print_accuracy, tables
from kernels import phase, rope_torch
from kernels.rope import rope, rope_packed

# (B, T, H, G, D, R): batch, tokens, query heads, key heads, head width, rotary dimensions. The first is a common
# training shape; the others have grouped queries, longer contexts, small heads, partial rotation and a width that is no
# power of two
SHAPES = [
    (8, 2048, 16, 16, 128, 128), (8, 2048, 16, 4, 128, 128), (1, 8192, 16, 16, 128, 128), (1, 32768, 16, 16, 128, 128),
    (16, 512, 6, 6, 64, 64), (8, 2048, 16, 16, 128, 64), (8, 2048, 16, 16, 96, 96),
]  # fmt: skip


# ---- a CPU's training step ----


def cpu() -> None:
    """The default training step: tables from integer phases in every step, against float32 cosines computed once."""
    from bench.step import our_step
    from conf.compose import train_settings
    from model.pos.rope import Rope, Tables
    from model.rope_kernel import KernelInputs
    from model.scaling import ContextChange

    train_step = our_step(train_settings("pos=rope"), compiled=False)
    prepare = Rope.prepare
    tables: list[Tables | KernelInputs] = []

    def prepare_once(self: Rope, positions: Tensor, change: ContextChange) -> Tables | KernelInputs:
        if not tables:
            tables.append(prepare(self, positions, change))
        return tables[0]

    times: dict[str, list[float]] = {"exact phases": [], "cached cosines": []}
    for round_ in range(12):
        for name, hook in (("exact phases", prepare), ("cached cosines", prepare_once)):
            Rope.prepare = hook
            for _ in range(5):
                began = time.perf_counter()
                train_step()
                if round_ >= 2:  # the first rounds warm up
                    times[name].append(time.perf_counter() - began)
    Rope.prepare = prepare
    medians = {k: 1e3 * statistics.median(v) for k, v in times.items()}
    for name, ms in medians.items():
        print(f"{name:<16}{ms:8.2f} ms a step")
    print(f"ratio {medians['exact phases'] / medians['cached cosines']:.3f}")


# ---- a GPU ----


def microseconds(calls: list[Callable[[], object]], replays: int = 30) -> float:
    """The median time of one call in microseconds, by replays of a CUDA graph of all calls, each on its own buffers."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2] * 2:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]  # alive until the replays end, so that no two share memory
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    del results
    return statistics.median(times)


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
        "torch.compile(ours in torch)": torch.compile(
            lambda q, k: rope_torch.rope(q, k, f, None, first, False, 1.0), dynamic=False
        ),
        "torch.compile(complex), interleaved": torch.compile(by_complex, dynamic=False),
    }

    def add(name: str, make: Callable[[], Callable]) -> None:
        try:
            functions[name] = make()
        except Exception as e:
            print(f"{name}: skipped ({type(e).__name__}: {e})")

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
    add("torch.compile(Hugging Face)", lambda: torch.compile(hf(), dynamic=False))
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


def peak_megabytes(call: Callable[[], object]) -> float:
    """The peak of the memory that call allocates, in MB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def gpu() -> None:
    """Measure every peer at every shape, input layout and direction; print the rows and append them to the table."""
    if not torch.cuda.is_available():
        raise ValueError("bench.rope gpu: needs a CUDA GPU; `accuracy` and `cpu` run without one")
    device, name = "cuda", torch.cuda.get_device_name()
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    import triton

    from bench.tile_copy import tile_copy

    machine = {"gpu": name, "driver": driver, "torch": torch.__version__, "triton": triton.__version__,
               "python": platform.python_version(), "commit": git}  # fmt: skip
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    rows: list[dict] = []
    for shape in SHAPES:
        B, T, H, G, D, R = shape
        size = 2 * B * T * (H + G) * D  # bytes of q and k
        buffers = max(2, min(64, -(-3 * l2 // size)))
        packed = [torch.randn(B, T, H + 2 * G, D, device=device, dtype=torch.bfloat16) for _ in range(buffers)]
        views = [x.split((H, G, G), dim=2)[:2] for x in packed]
        loose = [tuple(t.contiguous() for t in pair) for pair in views]
        headed = [tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in pair) for pair in views]
        outs = [tuple(torch.empty_like(t) for t in pair) for pair in loose]

        def copying(a: tuple, b: tuple) -> Callable[[], object]:
            return lambda: [y.copy_(x) for x, y in zip(a, b, strict=True)]

        copy_us = microseconds([copying(a, b) for a, b in zip(loose, outs, strict=True)])

        def measure(name: str, layout: str, direction: str, passes: float, calls: list, error=(None, None, None),
                    shape=shape, size=size, copy_us=copy_us) -> None:  # fmt: skip
            """Time calls, which read and write q and k `passes` times; store and print the row."""
            try:
                us, warm = microseconds(calls), microseconds(calls[:1] * len(calls))
                peak = peak_megabytes(calls[0])
            except Exception as e:
                print(f"{name}, {layout}, {direction}: failed ({type(e).__name__}: {str(e).splitlines()[0][:80]})")
                return
            row = {"shape": json.dumps(shape), "what": name, "layout": layout, "direction": direction, "us": us,
                   "gb_s": 2e-3 * size * passes / us, "of_copy": passes * copy_us / us, "us_warm_l2": warm,
                   "peak_mb": peak, "wrongly_rounded": error[0], "error_at_0": error[1],
                   "error_at_1m": error[2]}  # fmt: skip
            rows.append({**machine, **row})
            print(f"{row['shape']:<30}{name:<38}{layout:<14}{direction:<18}{us:>9.1f} us{row['gb_s']:>8.0f} GB/s"
                  f"{100 * row['of_copy']:>7.1f} % of copy{warm:>9.1f} us warm{peak:>8.0f} MB", flush=True)  # fmt: skip

        measure("device copy", "contiguous", "forward", 1, [copying(a, b) for a, b in zip(loose, outs, strict=True)])
        by_tile = [step(lambda q, k: (tile_copy(q), tile_copy(k)), q, k, "forward") for q, k in loose]
        measure("Triton copy, our tile", "contiguous", "forward", 1, by_tile)
        f = phase(frequencies(R)).to(device)
        for peer, rotate in peers(R, torch.arange(T), device).items():
            if D != R and not peer.startswith(("ours", "torch.compile(ours")):
                continue
            try:
                error = errors(peer, H, G, D, R, device)
            except Exception as e:
                print(f"{peer}: its errors could not be measured ({type(e).__name__})")
                error = (None, None, None)
            for layout, inputs in (("contiguous", loose), ("packed views", views), ("heads first", headed)):
                for direction, passes in (("forward", 1), ("forward+backward", 2)):
                    measure(peer, layout, direction, passes, [step(rotate, q, k, direction) for q, k in inputs], error)
        # The packed gradient holds v's as well: H + 2 G heads are written, and read, beside the H + G of the rotation.
        wide = 1 + (H + 2 * G) / (H + G)
        for direction, passes in (("forward", 1), ("forward+backward", wide)):
            measure(
                "ours, rope_packed", "packed", direction, passes, [step_packed(x, H, G, f, direction) for x in packed]
            )
        del packed, views, loose, headed, outs
        torch.cuda.empty_cache()
    path = Path("results/rope_kernel.csv")
    new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        if new:
            table.writeheader()
        table.writerows(rows)
    print(f"{len(rows)} rows appended to {path}")


def step(rotate: Callable, q: Tensor, k: Tensor, direction: str) -> Callable[[], object]:
    """A call of rotate(q, k), with its backward pass unless direction is `forward`."""
    if direction == "forward":
        return lambda: rotate(q.detach(), k.detach())

    def both() -> object:
        a, b = q.detach().requires_grad_(), k.detach().requires_grad_()
        y = rotate(a, b)
        return torch.autograd.grad(y, (a, b), [t.detach() for t in y])

    return both


def step_packed(x: Tensor, H: int, G: int, f: Tensor, direction: str) -> Callable[[], object]:
    """The same for rope_packed on x [B, T, H + 2 G, D]."""
    if direction == "forward":
        return lambda: rope_packed(x.detach(), H, G, f)

    def both() -> object:
        a = x.detach().requires_grad_()
        y = rope_packed(a, H, G, f)
        return torch.autograd.grad(y, a, [t.detach() for t in y])

    return both


if __name__ == "__main__":
    try:
        benchmarks = {"accuracy": print_accuracy, "cpu": cpu, "gpu": gpu}
        name = sys.argv[1] if len(sys.argv) > 1 else "gpu"
        if name not in benchmarks:
            raise ValueError(f"bench.rope {name}: must be accuracy, cpu or gpu")
        benchmarks[name]()
    except ValueError as e:
        sys.exit(f"error: {e}")
