"""The in-window loss on held-out text, which train.py reports."""

import math

import torch
from torch import Tensor

from conf.schema import TrainConfig
from data.corpus import HeldOut
from data.held_out import validation_windows
from engine import distributed
from engine.device import autocast
from model.gpt import GPT
from model.scaling import ContextChange


class Validation:
    """The validation of a training: the loss on cfg.val_windows held-out windows of ctx tokens.

    The windows are the same at every validation, and every token of a window is scored.
    """

    def __init__(self, corpus: HeldOut, cfg: TrainConfig, device: torch.device):
        windows = validation_windows(corpus, cfg.ctx, cfg.val_windows)  # int64 [windows, ctx + 1]
        targets = windows[:, 1:]
        self.tokens, self.bytes = targets.numel(), int(torch.from_numpy(corpus.token_bytes)[targets].sum())
        self.passes = windows.split(max(1, cfg.micro_tokens // cfg.ctx))
        self.device, self.dtype = device, cfg.dtype

    @torch.no_grad()
    def measure(self, model: GPT, change: ContextChange) -> dict[str, float]:
        """{"loss": nats per token, "ppl": exp(loss), "bits_per_byte": total loss in bits / bytes of the scored text}.

        change: the scaling that the run is trained with. Ranks share the windows; all of them call it together.
        """
        nats = 0.0
        with torch.compiler.set_stance("force_eager"):  # two passes do not repay a compile
            for i, counts in distributed.shard_work(len(self.passes)):
                w: Tensor = self.passes[i].to(self.device)
                with autocast(self.device, self.dtype):
                    nats += counts * model.losses(w[:, :-1], w[:, 1:], change=change).sum().item()
        nats = math.fsum(distributed.interleave([nats]))  # of all ranks
        loss = nats / self.tokens
        return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bits_per_byte": nats / math.log(2) / self.bytes}


def describe_validation(v: dict[str, float]) -> str:
    """One line about the result of Validation.measure."""
    return f"loss {v['loss']:.3f} nats/token, perplexity {v['ppl']:.2f}, {v['bits_per_byte']:.3f} bits/byte"
