"""Tokens/s and MFU of training steps, relative to the first one: python -m bench.step pos=rope pos=fox layers=swan

Each argument has the settings of one training as train.py accepts them: `pos=rope compile=true`, or on a GPU `exp=gpt2
batch_tokens=32768 kernel=torch`. A step is one micro-batch of batch_tokens random tokens, with the vocabulary that
train.py would use (50,304 tokens for exp=gpt2). Only compile=true compiles. All models are in one process, rounds
alternate between them, and medians of the step times are compared. The row is appended to results/step.jsonl.
"""

import itertools
import shlex
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernels
from bench.rows import append, parser
from conf.cli import train_settings
from conf.errors import user_errors
from conf.schema import TrainConfig
from data.batches import batch
from data.tokenizer import padded
from engine import device as devices
from engine.compile import compile_blocks
from engine.device import peak_flops
from engine.optimizer import make_optimizers
from engine.progress import flops_per_token
from model import gpt


class Step:
    """The step of train.py with these settings in one process; a call returns the loss.

    On a CPU it sets malloc, and that numbers below 1e-38 are 0, for the other steps as well.
    """

    def __init__(self, cfg: TrainConfig):
        self.cfg, self.device = cfg, devices.start(cfg.device, cfg.kernel)
        if self.device.type == "cpu":
            devices.keep_freed_memory()
        V = padded(cfg.data["vocab_size"])
        self.model = gpt.build(cfg, V).to(self.device)
        self.optimizers = make_optimizers(self.model, cfg.optim, devices.uses_bfloat16(self.device, cfg.dtype))
        if cfg.compile == "true":
            compile_blocks(self.model, fallback=False)
        self.data = np.random.default_rng(0).integers(V, size=2_000_000).astype(np.uint16)
        self.count = itertools.count()

    def __call__(self) -> Tensor:
        cfg, i = self.cfg, next(self.count)
        kernels.choose(cfg.kernel, self.device)  # which is global, and another step may have another
        windows = batch(self.data, i, seed=0, size=cfg.batch_tokens // cfg.ctx, ctx=cfg.ctx).to(self.device)
        with devices.autocast(self.device, cfg.dtype):
            loss = self.model.losses(windows[:, :-1], windows[:, 1:]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.optim.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def flops(self) -> int:
        """Of one call."""
        return self.cfg.batch_tokens * flops_per_token(self.model.n_parameters(), self.cfg.model, self.cfg.ctx)


def interleaved(steps: Mapping[str, Callable[[], Tensor]], rounds: int = 7, count: int = 6) -> dict[str, float]:
    """The median time of each step in seconds. In every round each of them runs `count` times, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():  # warm up and compile
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            for _ in range(count):
                began = time.perf_counter()
                step().item()  # waits for a GPU
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(t) for name, t in times.items()}


def sizes(cfg: TrainConfig) -> dict[str, Any]:
    """Of a row: what was trained."""
    m, bfloat16 = cfg.model, devices.uses_bfloat16(devices.pick_device(cfg.device), cfg.dtype)
    model = {"layers": m.n_layers, "width": m.width, "ctx": cfg.ctx, "vocabulary": padded(cfg.data["vocab_size"])}
    return {**model, "batch_tokens": cfg.batch_tokens, "bfloat16": bfloat16}


@user_errors
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # instead of running uncompiled
def main() -> None:
    command = parser(__doc__, "step.jsonl")
    command.add_argument("training", nargs="+", help="settings of train.py, in quotes if there are several")
    command.add_argument("--rounds", type=int, default=7)
    args = command.parse_args()
    steps = {name: Step(train_settings(*shlex.split(name))) for name in args.training}
    first = steps[args.training[0]]
    row = sizes(first.cfg)
    seconds = interleaved(steps, args.rounds)
    speed = {name: round(step.cfg.batch_tokens / seconds[name]) for name, step in steps.items()}
    relative = {name: round(value / speed[args.training[0]], 3) for name, value in speed.items()}
    if peak := peak_flops(first.device, first.cfg.dtype):
        row["mfu"] = {name: round(step.flops() / seconds[name] / peak, 4) for name, step in steps.items()}
    append(args.out, {**row, "tokens_per_s": speed, "relative": relative})


if __name__ == "__main__":
    main()
