"""Open the run that eval.py's run= names: one of ours, or a Hugging Face checkpoint with run=hf:PATH."""

from typing import Any

import torch

from conf.eval_schema import EvalConfig
from engine.run import Run


def open_run(cfg: EvalConfig, device: torch.device) -> Run:
    """The run that cfg.run names, or for None the newest run that can be evaluated with these settings.

    The model is on `device` and in evaluation mode. UserError if there is no such run, or if its encoding or the
    requested scaling cannot be used at the longest length.
    """
    common: dict[str, Any] = {"ctx": cfg.longest_ctx, "scalings": cfg.scalings, "runs": cfg.runs, "device": device}
    if cfg.run is not None and cfg.run.startswith("hf:"):
        from hf.read import open_hf

        return open_hf(cfg.run.removeprefix("hf:"), train_ctx=cfg.train_ctx, data=cfg.data, **common)
    return Run.open(cfg.run, cache=cfg.cache, exp=cfg.trained_with, **common)
