"""What surrounds a model while it runs: device and precision, compiling, stopping cleanly, wandb."""

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from conf.schema import ModelConfig
from model import parallel

# Below this many FLOPs of training a cold compile (about half a minute on two cores) costs more than it gains.
COMPILE_GAINS_FROM = 4e13


def pick_device(name: str) -> torch.device:
    """name, or for auto a GPU if there is one. Under torchrun each process of a machine takes a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and parallel.world() > 1:
        local, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= n:
            raise ValueError(
                f"device=cuda: process {local} of this machine finds {n} GPUs: --nproc_per_node={n} at most"
            )
        name = f"cuda:{local}"
        torch.cuda.set_device(local)
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"device={name}: cannot be used here ({str(e).splitlines()[0]})") from None
    return device


def uses_bfloat16(device: torch.device, dtype: str) -> bool:
    """Where it is asked for, or, with dtype=auto, where the hardware computes in it."""
    if dtype != "auto":
        return dtype == "bfloat16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


# Dense bfloat16 matrix FLOP/s with float32 sums, from NVIDIA's data sheets; a name's first match counts. The sheets of
# Hopper and later quote twice as much, with sparsity.
PEAKS = {
    "A100": 312e12, "A800": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989e12,
    "H800": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12,
}  # fmt: skip


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Of one GPU; None where it is not known: another GPU, a slice of one (MIG), a CPU, float32."""
    if device.type != "cuda" or not uses_bfloat16(device, dtype):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(gpu: str) -> float | None:
    words = f" {gpu.replace('-', ' ')} "
    return None if " MIG " in words else next((peak for name, peak in PEAKS.items() if f" {name} " in words), None)


def flops_per_token(n_parameters: int, m: ModelConfig, ctx: int) -> int:
    """Of training: 6 N + 12 L H Q T (PaLM, Chowdhery et al., arXiv 2204.02311, appendix B), N all parameters."""
    return 6 * n_parameters + 12 * m.n_layers * m.n_heads * m.head_width * ctx


def autocast(device: torch.device, dtype: str) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16, enabled=uses_bfloat16(device, dtype))


def compile_blocks(model: nn.Module) -> None:
    """Compile one block, which all share, and the loss; in place, so that state dicts keep their names.

    Not the whole model: that is no faster here and takes longer to compile.
    """
    torch.compiler.reset()  # what an earlier job of a sweep compiled counts against dynamo's limit of recompilations
    torch._dynamo.config.suppress_errors = True  # no compiler, or one that fails: go on without
    for block in model.blocks:
        block.compile(dynamic=False)
    model._block_losses = torch.compile(model._block_losses, dynamic=False)


def should_compile(setting: str, device: torch.device, flops: float) -> bool:
    if setting != "auto":
        return setting == "true"
    if device.type == "cuda":
        return True
    return flops > COMPILE_GAINS_FROM and any(map(shutil.which, ("g++", "clang++")))


class Stop:
    """While it is open, Ctrl-C and SIGTERM set a flag for the loop to see; a second Ctrl-C ends at once."""

    def __init__(self) -> None:
        self.signal = 0

    def __enter__(self) -> "Stop":
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.signal = number
        if parallel.world() == 1:  # torchrun sends on the Ctrl-C that its children have had already
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        return 128 + (self.signal or signal.SIGTERM)  # none here: it was another process that was told


@contextmanager
def tracker(project: str, job_type: str, group: str, name: str, config: dict, step_metric: str) -> Iterator[Any]:
    """A wandb run that needs no account and no network, never asks, and never ends the work that it logs.

    WANDB_MODE decides; without it, online if this machine is logged in, else offline. All `job_type/*` curves are
    drawn against step_metric, so the curves of any runs lie over each other.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        with contextlib.suppress(Exception):
            mode = "online" if wandb.login(prompt=False, verify=False) else None
    run = None
    for attempt in dict.fromkeys([mode or "offline", "offline", "disabled"] if parallel.rank() == 0 else ["disabled"]):
        try:
            settings = wandb.Settings(init_timeout=15, silent=True, console="off")
            about = {"job_type": job_type, "group": group, "name": name, "config": config}
            run = wandb.init(project=project, mode=attempt, settings=settings, **about)
            break
        except Exception as e:
            print(f"wandb: {attempt} did not start ({str(e).splitlines()[0]}); going on without", file=sys.stderr)
    run.define_metric(step_metric, hidden=True)
    run.define_metric(f"{job_type}/*", step_metric=step_metric)
    try:
        yield run
    finally:
        with contextlib.suppress(Exception):
            run.finish()
