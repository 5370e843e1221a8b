"""Tokens per second, and how much of a GPU's peak that is (MFU, model FLOPs utilisation)."""

import time

import torch

from conf.schema import ModelConfig, TrainConfig
from engine import distributed


def flops_per_token(n_parameters: int, m: ModelConfig, ctx: int) -> int:
    """FLOPs of training per token: 6 N + 12 L H Q T (PaLM, Chowdhery et al., arXiv 2204.02311, appendix B).

    N parameters, all of them; L layers, H heads, Q head width, T = ctx. Recomputation is not counted.
    """
    return 6 * n_parameters + 12 * m.n_layers * m.n_heads * m.head_width * ctx


class Throughput:
    """Training speed since the last restart."""

    def __init__(self, cfg: TrainConfig, n_parameters: int, device: torch.device):
        self.batch_tokens = cfg.batch_tokens
        self.flops = flops_per_token(n_parameters, cfg.model, cfg.ctx)
        self.peak = None  # FLOP/s
        if device.type == "cuda" and cfg.attention == "softmax":
            from engine.gpu_limits import peak_flops

            self.peak = peak_flops(device, cfg.dtype)

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
