"""The rotary op beside its peers: python -m bench.rope [accuracy | cpu | gpu | sweep]

accuracy, on any machine: the error of each implementation's arithmetic at positions 0 to a million (bench/accuracy.py).
cpu: a training step with our tables against one with cosines that are computed once.
gpu (the default; needs a CUDA GPU): microseconds, and speed relative to a device copy, by replays of a CUDA graph over
buffers that outgrow the L2 cache (and over one buffer that stays in it); peak memory; errors. Medians, one process. The
rows are appended to results/rope_kernel.csv as they come.
sweep: the kernel with other tiles than its own.

gpu and sweep leave out rows that their file has of this machine and commit, so that one that was killed can continue.
"""

import argparse
import functools
import inspect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.accuracy import frequencies, print_accuracy
from bench.peers import errors, peers
from bench.rows import Rows
from kernels import phase
from kernels.rope import rope_packed

# (B, T, H, G, D, R): batch, tokens, query heads, key heads, head width, rotary dimensions. The first is a common
# training shape; the others have grouped queries, longer contexts, small heads, partial rotation and a width that is no
# power of two
Shape = tuple[int, int, int, int, int, int]
SHAPES: list[Shape] = [
    (8, 2048, 16, 16, 128, 128), (8, 2048, 16, 4, 128, 128), (1, 8192, 16, 16, 128, 128), (1, 32768, 16, 16, 128, 128),
    (16, 512, 6, 6, 64, 64), (8, 2048, 16, 16, 128, 64), (8, 2048, 16, 16, 96, 96),
]  # fmt: skip
TOY: Shape = (1, 16, 2, 2, 16, 16)  # for a rehearsal on a CPU


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
    """The median time of one call in microseconds, by replays of a CUDA graph of all calls, each on its own buffers.

    Without a GPU the calls are timed one after another.
    """
    if not torch.cuda.is_available():
        calls[0]()
        began = time.perf_counter()
        for call in calls:
            call()
        return 1e6 * (time.perf_counter() - began) / len(calls)
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


def peak_megabytes(call: Callable[[], object]) -> float:
    """The peak of the memory that call allocates, in MB; nan without a GPU."""
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


class Inputs:
    """Random bfloat16 heads of one shape, in as many buffers as outgrow the L2 cache, in every layout that is timed."""

    def __init__(self, shape: Shape, device: str):
        B, T, H, G, D, _ = shape
        self.bytes = 2 * B * T * (H + G) * D  # of q and k
        cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
        buffers = range(max(2, min(64, -(-3 * cache // self.bytes))))
        self.packed = [torch.randn(B, T, H + 2 * G, D, device=device, dtype=torch.bfloat16) for _ in buffers]
        views = [x.split((H, G, G), dim=2)[:2] for x in self.packed]
        headed = [tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in pair) for pair in views]
        loose = [tuple(t.contiguous() for t in pair) for pair in views]
        self.joined = [torch.cat(pair, dim=2) for pair in views]  # q and k in one tensor, for a copy by one kernel
        self.layouts = {"contiguous": loose, "packed views": views, "heads first": headed}


def copy_calls(inputs: Inputs) -> list[Callable[[], object]]:
    """One copy kernel over the bytes of q and k in each buffer: the ceiling that speeds are relative to."""

    def copying(x: Tensor, y: Tensor) -> Callable[[], object]:
        return lambda: y.copy_(x)

    return [copying(x, torch.empty_like(x)) for x in inputs.joined]


def measure_shape(shape: Shape, device: str, wanted: str, rows: Rows) -> None:
    """Time every peer whose name contains `wanted` at this shape, in every input layout and direction."""
    _, T, H, G, D, R = shape
    inputs = Inputs(shape, device)
    copy_us = microseconds(copy_calls(inputs))

    unknown = (None, None, None)

    def measure(name: str, layout: str, direction: str, passes: float, calls: list, error=lambda: unknown) -> None:
        """Time calls, which read and write q and k `passes` times, and append the row. A failure is a line instead."""
        columns = {"shape": json.dumps(shape), "what": name, "layout": layout, "direction": direction}
        if rows.has(**columns):
            return
        wrong, at_0, at_1m = error()
        try:
            us, warm = microseconds(calls), microseconds(calls[:1] * len(calls))
            peak = peak_megabytes(calls[0])
        except Exception as e:
            reason = (str(e).splitlines() or [""])[0][:80]
            print(f"{name}, {layout}, {direction}: failed ({type(e).__name__}: {reason})", flush=True)
            return
        gb_s, of_copy = 2e-3 * inputs.bytes * passes / us, passes * copy_us / us
        rows.append({
            **columns, "us": us, "gb_s": gb_s, "of_copy": of_copy, "us_warm_l2": warm, "peak_mb": peak,
            "wrongly_rounded": wrong, "error_at_0": at_0, "error_at_1m": at_1m,
        })  # fmt: skip
        print(f"{json.dumps(shape):<30}{name:<38}{layout:<14}{direction:<18}{us:>9.1f} us{gb_s:>8.0f} GB/s"
              f"{100 * of_copy:>7.1f} % of copy{warm:>9.1f} us warm{peak:>8.0f} MB", flush=True)  # fmt: skip

    measure("device copy", "contiguous", "forward", 1, copy_calls(inputs))
    if device == "cuda":
        from bench.tile_copy import tile_copy

        copies = [lambda x=x: tile_copy(x) for x in inputs.joined]
        measure("Triton copy, our tile", "contiguous", "forward", 1, copies)
    for peer, rotate in peers(R, torch.arange(T), device).items():
        if wanted not in peer or (D != R and not peer.startswith(("ours", "torch.compile(ours"))):
            continue
        start_compiler_anew()

        @functools.cache
        def error(peer: str = peer) -> tuple:
            try:
                return errors(peer, H, G, D, R, device)
            except Exception as e:
                print(f"{peer}: its errors could not be measured ({type(e).__name__})", flush=True)
                return unknown

        for layout, pairs in inputs.layouts.items():
            for direction, passes in (("forward", 1), ("forward+backward", 2)):
                measure(peer, layout, direction, passes, [step(rotate, q, k, direction) for q, k in pairs], error)
    # The packed gradient holds v's as well: H + 2 G heads are written, and read, beside the H + G of the rotation.
    f, wide = phase(frequencies(R)).to(device), 1 + (H + 2 * G) / (H + G)
    for direction, passes in (("forward", 1), ("forward+backward", wide)):
        calls = [step_packed(x, H, G, f, direction) for x in inputs.packed]
        measure("ours, rope_packed", "packed", direction, passes, calls)


def start_compiler_anew() -> None:
    """Forget all compiled code, and fail instead of running eagerly where torch.compile gives up.

    A function is compiled at most recompile_limit times, over all shapes: without this, the rows of later shapes would
    be eager ones with the name of compiled ones.
    """
    torch._dynamo.reset()
    config: Any = torch._dynamo.config
    config.recompile_limit, config.fail_on_recompile_limit_hit = 64, True


def gpu(shapes: str = "", peer: str = "", device: str = "cuda", out: str = "results/rope_kernel.csv") -> None:
    """Measure at these numbers of SHAPES (0,1,2; none: all) every peer whose name contains `peer`.

    The rows are printed, and appended to `out` as they come. device: cpu rehearses at a toy size.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench.rope gpu: needs a CUDA GPU; `accuracy` and `cpu` run without one")
    rows = Rows(Path(out))
    chosen = [SHAPES[int(i)] for i in shapes.split(",") if i] or SHAPES
    for shape in chosen if device == "cuda" else [TOY]:
        measure_shape(shape, device, peer, rows)
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"{rows.count} rows appended to {out}")


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


def sweep(shapes: str = "0", warps: str = "2,4,8", heads: str = "4,8,16", out: str = "results/rope_tiles.csv") -> None:
    """Compile the kernel with other tiles than its own and time them, forward, at these numbers of SHAPES.

    warps, heads: the numbers of them that a program may have. Without a GPU: only registers and instructions.
    """
    from bench.sass import machine_code, recorded_launches
    from kernels import rope_triton

    rows, choices = Rows(Path(out)), [[int(n) for n in numbers.split(",")] for numbers in (warps, heads)]
    for shape in (SHAPES[int(i)] for i in shapes.split(",")):
        _, _, H, G, D, R = shape
        inputs = Inputs(shape, "cuda") if torch.cuda.is_available() else None
        f, own = phase(frequencies(R)), rope_triton.tile(R // 2, 2)

        def launch(q: Tensor, k: Tensor, block: dict, f: Tensor = f) -> list[Tensor]:
            y = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
            rope_triton.launch(q, k, *y, f.to(q.device), None, 0, False, 1.0, False, block)
            return y

        for n_warps, n_heads, vectors in itertools.product(*choices, (1, 2)):
            tokens = rope_triton.tile(R // 2, 2, n_warps)["BLOCK_T"] * vectors
            block = {**own, "BLOCK_T": tokens, "HEADS": n_heads, "num_warps": n_warps}
            columns = {"shape": json.dumps(shape), "warps": n_warps, "tokens": tokens, "heads": n_heads}
            if rows.has(**columns):
                continue
            with recorded_launches() as launches:
                q, k = (torch.zeros(1, 1, N, D, dtype=torch.bfloat16) for N in (H, G))
                launch(q, k, block)
            code = machine_code(launches[0])
            us, of_copy = None, None
            if inputs:
                us = microseconds(
                    [lambda q=q, k=k, b=block: launch(q, k, b) for q, k in inputs.layouts["packed views"]]
                )
                of_copy = microseconds(copy_calls(inputs)) / us
            row = {**columns, "own": block == own, "registers": code["registers"],
                   "instructions": code["instructions"], "us": us, "of_copy": of_copy}  # fmt: skip
            rows.append(row)
            print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    print(f"{rows.count} rows appended to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    for function in (print_accuracy, cpu, gpu, sweep):
        name = function.__name__.removeprefix("print_")
        command = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        command.set_defaults(function=function)
        for option, parameter in inspect.signature(function).parameters.items():
            command.add_argument(f"--{option}", default=parameter.default)
    settings = vars(parser.parse_args(sys.argv[1:] or ["gpu"]))
    del settings["command"]
    function = settings.pop("function")
    try:
        function(**settings)
    except ValueError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
