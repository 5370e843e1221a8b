"""Open the run that eval.py's run= names: one of ours, or hf:PATH, gguf:PATH or pretrained:NAME."""

from typing import Any

import torch

from conf.eval_schema import EvalConfig
from engine import device as devices
from engine.run import Run


def open_run(cfg: EvalConfig, device: torch.device) -> Run:
    """The run that cfg.run names, or for None the newest run that can be evaluated with these settings.

    The model is on `device` and in evaluation mode, and has bfloat16 weights if it computes in bfloat16. UserError if
    there is no such run, or if its encoding or the requested scaling cannot be used at the longest length.
    """
    common: dict[str, Any] = {"ctx": cfg.longest_ctx, "scalings": cfg.scalings, "runs": cfg.runs, "device": device}
    if ":" in (cfg.run or ""):
        from hf.open import open_foreign

        run = open_foreign(cfg, **common)
    else:
        run = Run.open(cfg.run, cache=cfg.cache, exp=cfg.trained_with, **common)
    if devices.uses_bfloat16(device, cfg.dtype):
        devices.store_in_bfloat16(run.model)
    return run
