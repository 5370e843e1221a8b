"""Tokens per second and MFU of a training step on a GPU beside nanoGPT's: python -m bench.gpu_step [--device cpu]

Our step of exp=gpt2 with the rotation by Triton and by torch, and nanoGPT's step (its model, re-implemented in
bench/step.py, compiled as a whole, bfloat16 autocast, fused AdamW) with 12 and 32 rows of 1024 tokens. All with a
vocabulary of 50304 and random tokens, in one process, medians of single steps. The rows are appended to a table as they
come, but for those that it has of this machine and commit; --profile FILE writes the operations of five of our steps.
--ceilings FILE measures instead a product of two large matrices and a copy, the ceilings of this GPU. On a CPU it
rehearses at a toy size.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench.rows import Rows
from bench.step import Peer
from conf.compose import train_settings
from conf.schema import TrainConfig
from engine import device as devices
from engine.compile import compile_blocks
from engine.gpu_limits import peak_flops
from engine.optimizer import make_optimizer
from engine.throughput import flops_per_token
from model import gpt

TOY = ("model.n_layers=2", "model.n_heads=2", "model.width=64", "ctx=32", "micro_tokens=64", "batch_tokens=64")


def our_step(cfg: TrainConfig, vocab: int, kernel: str, device: torch.device) -> tuple[Callable[[], object], int, int]:
    """(one step of train.py on cfg.micro_tokens random tokens, those tokens, the number of parameters)."""
    devices.start(device.type, kernel)
    model = gpt.build(cfg, vocab).to(device)
    optimizer = make_optimizer(model, cfg.optim)
    if device.type == "cuda":
        compile_blocks(model, fallback=False)
    x = torch.randint(vocab, (cfg.micro_tokens // cfg.ctx, cfg.ctx + 1), device=device)

    def step() -> None:
        with devices.autocast(device, cfg.dtype):
            loss = model.losses(x[:, :-1], x[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, cfg.micro_tokens, model.n_parameters()


def nanogpt_step(
    cfg: TrainConfig, vocab: int, rows: int, device: torch.device
) -> tuple[Callable[[], object], int, int]:
    """The same for nanoGPT with so many rows."""
    m = cfg.model
    with device:
        plain = Peer(m.n_layers, m.n_heads, m.width, cfg.ctx, vocab)
    # By default the second number of rows would be compiled for any number, which is slower code
    model = torch.compile(plain, dynamic=False) if device.type == "cuda" else plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    x = torch.randint(vocab, (rows, cfg.ctx + 1), device=device)

    def step() -> None:
        with device, torch.autocast(device.type, torch.bfloat16):  # `with device`: the model makes its positions there
            loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, rows * cfg.ctx, sum(p.numel() for p in plain.parameters())


def seconds(step: Callable[[], object], device: torch.device, steps: int = 20) -> float:
    """The median time of a step, after three that warm up and compile."""
    times = []
    for i in range(steps + 3):
        began = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def ceilings(device: torch.device, toy: bool, table: Rows) -> None:
    """TFLOP/s of a product of two bfloat16 matrices of 8192 x 8192, GB/s read and written by a copy of 4 GB."""
    N = 256 if toy else 8192
    a, b = torch.randn(2, N, N, device=device, dtype=torch.bfloat16)
    x = torch.zeros(2**16 if toy else 2**30, device=device)
    y = torch.empty_like(x)
    product, copy = seconds(lambda: a @ b, device), seconds(lambda: y.copy_(x), device)
    table.append({"tflop_per_s": 2 * N**3 / product / 1e12, "copy_gb_per_s": 2 * 4 * x.numel() / copy / 1e9})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", default="results/gpu_step.csv")
    parser.add_argument("--profile")
    parser.add_argument("--ceilings", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    toy = device.type == "cpu"
    if args.ceilings:
        return ceilings(device, toy, Rows(args.ceilings))
    cfg = train_settings("exp=gpt2", *(TOY if toy else ()))
    vocab, peak, table = 128 if toy else 50304, peak_flops(device, cfg.dtype), Rows(Path(args.out))
    steps: dict[str, Callable[[], tuple]] = {
        f"ours, kernel={kernel}": functools.partial(our_step, cfg, vocab, kernel, device)
        for kernel in (("torch",) if toy else ("triton", "torch"))
    }
    for rows in (2,) if toy else (12, 32):
        steps[f"nanoGPT, {rows} rows"] = functools.partial(nanogpt_step, cfg, vocab, rows, device)
    for i, (name, make) in enumerate(steps.items()):
        profile_to = Path(args.profile) if i == 0 and args.profile else None
        if table.has(what=name) and (not profile_to or profile_to.exists()):
            continue
        torch.compiler.reset()  # what was compiled before would count against dynamo's limit of versions
        step, tokens, parameters = make()
        rate = tokens / seconds(step, device, 3 if toy else 20)
        mfu = rate * flops_per_token(parameters, cfg.model, cfg.ctx) / peak if peak else None
        memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
        if profile_to:  # before the row, with which this step is done
            with torch.profiler.profile() as profile:
                for _ in range(5):
                    step()
            sort = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
            profile_to.write_text(profile.key_averages().table(sort_by=sort, row_limit=60))
        table.append({"what": name, "tokens": tokens, "tokens_per_s": rate, "mfu": mfu, "peak_gb": memory})
        print(f"{name:<24}{rate:>12,.0f} tokens/s   MFU {'n/a' if mfu is None else f'{mfu:.1%}'}", flush=True)
        del step
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
