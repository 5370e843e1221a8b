"""What a long command shows and listens to: the progress bar, the speed, Ctrl-C and SIGTERM."""

import signal
import sys
import time
from typing import Any

import torch
from tqdm import tqdm

from conf.schema import ModelConfig, TrainConfig
from engine import distributed
from engine.device import peak_flops


class Lines:
    """A file for tqdm where stderr is not a terminal: every state of the bar is a new line in place of the last one."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr)


def progress_bar(total: float, show: str, done: int = 0, hidden: bool = False) -> tqdm:
    """A progress bar on a terminal, and a line every 15 s in a log file; on rank 0 only.

    total, done: units; what an earlier part of the run has done. show: what stands after the percentage, in the fields
    of tqdm's bar_format. hidden: print nothing.
    """
    terminal = sys.stderr.isatty()
    text = "{percentage:3.0f}%" + ("|{bar}| " if terminal else " ") + show + "{postfix}"
    output: Any = {"dynamic_ncols": True, "mininterval": 0.5} if terminal else {"file": Lines(), "mininterval": 15}
    disable = hidden or distributed.rank() > 0
    return tqdm(total=total, initial=done, disable=disable, maxinterval=30, bar_format=text, **output)


class StopSignal:
    """Context manager in which SIGINT (Ctrl-C) and SIGTERM only set a flag; bool(stop) is the flag.

    The loop checks the flag after each step, saves and exits with `exit_code`. A second Ctrl-C ends the process at
    once. On exit the previous signal handlers are restored.
    """

    number = 0  # of the signal that came

    def __enter__(self) -> "StopSignal":
        self.handlers = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        if distributed.world() == 1:  # torchrun forwards the Ctrl-C that its children have received already
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *exc: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return bool(self.number)

    @property
    def exit_code(self) -> int:
        """128 + the number of the signal, the convention of shells."""
        return 128 + (self.number or signal.SIGTERM)  # no signal here: another rank received it


def flops_per_token(n_parameters: int, m: ModelConfig, ctx: int) -> int:
    """FLOPs of training per token: 6 N + 12 L H Q T (PaLM, Chowdhery et al., arXiv 2204.02311, appendix B).

    N parameters, all of them; L layers, H heads, Q head width, T = ctx. Recomputation is not counted.
    """
    return 6 * n_parameters + 12 * m.n_layers * m.n_heads * m.head_width * ctx


class Throughput:
    """Training speed since the last restart: tokens per second, and the share of the GPU's peak (MFU)."""

    def __init__(self, cfg: TrainConfig, n_parameters: int, device: torch.device):
        self.batch_tokens = cfg.batch_tokens
        self.flops = flops_per_token(n_parameters, cfg.model, cfg.ctx)
        self.peak = peak_flops(device, cfg.dtype) if cfg.attention == "softmax" else None  # FLOP/s

    def restart(self, step: int) -> None:
        """Count from the end of this step on, so that validation and checkpoints are left out."""
        self.began, self.step = time.monotonic(), step

    def measure(self, step: int) -> dict[str, float]:
        """The speed since the last restart: {"tokens_per_s": of all ranks together, "mfu": 0 to 1}.

        mfu: model FLOPs per second divided by the peak of all GPUs; the key is missing if the peak is not known.
        """
        tokens_per_s = (step - self.step) * self.batch_tokens / (time.monotonic() - self.began)
        mfu = {"mfu": tokens_per_s * self.flops / (self.peak * distributed.world())} if self.peak else {}
        return {"tokens_per_s": tokens_per_s, **mfu}
