"""Whether the memory suffices for a model. Imported for large ones."""

import contextlib
from pathlib import Path

import torch

from conf.errors import UserError
from conf.schema import TrainConfig
from model.gpt import GPT, build_encoding


def check_memory(cfg: TrainConfig, vocab_size: int, device: torch.device) -> None:
    """UserError if a training needs more memory than this machine has free. Only Linux can be asked.

    On a CPU weights, gradients and the two moments of AdamW, all float32; for a GPU the weights, which are drawn here.
    """
    try:
        with torch.device("meta"):
            n = GPT(cfg.model, build_encoding(cfg), vocab_size, cfg.attention == "linear").n_parameters()
    except RuntimeError:  # the bytes of one matrix do not fit 64 bits
        n = 2**63
    gigabytes = 4 * n * (4 if device.type == "cpu" else 1) / 1e9
    with contextlib.suppress(OSError, LookupError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) / 1e6
        if gigabytes > available:
            needed = f"{n:,} parameters need {gigabytes:,.1f} GB of memory"
            raise UserError(f"model: {needed}, and {available:.1f} GB are free: choose a smaller one")
