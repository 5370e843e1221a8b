"""Saving a training and resuming it: one ckpt.pt, or with shard=true the parts of engine/shards.py until the end."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from conf.errors import UserError, file_errors
from conf.schema import TrainConfig
from engine import checkpoint, distributed


def saved_state(cfg: TrainConfig, folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The last checkpoint of the run in folder, with its tensors on device; None without one, or with fresh=true.

    UserError if it was trained with other settings (except RUN_CONTROL of conf/schema.py), if it is damaged, or if the
    ranks see different checkpoints. Shards are not loaded here but in `restore`: the state then has the key `folder`.
    """
    state = None
    with file_errors(folder):
        if (folder / "ckpt.pt").exists() and not cfg.fresh:
            state = checkpoint.load(folder, device)
        elif (folder / "shards").exists() and not cfg.fresh:
            from engine import shards

            state = shards.newest(folder)
    distributed.ranks().assert_same(f"the step that {folder} was saved at", state and state["step"])
    if not state:
        return None
    from conf.differences import differences

    if different := differences(cfg, state["cfg"]):
        raise UserError(f"{folder} has other settings: {', '.join(different)}: choose name=NEW or fresh=true")
    return state


def restore(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Load weights and optimizer state of a checkpoint from `saved_state` into model and optimizer, in place."""
    if "folder" in state:
        from engine import shards

        shards.restore(state["folder"], model, optimizer)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def save(folder: Path, values: dict, model: nn.Module, optimizer: Optimizer, *, sharded: bool, final: bool) -> None:
    """Write a checkpoint: values (settings, step, corpus ...), weights and optimizer state. All ranks call it.

    sharded: every rank writes its part, except in the final checkpoint, which is always the one portable ckpt.pt.
    UserError if it cannot be written; the previous checkpoint is then unchanged.
    """
    if sharded:
        from engine import shards

        return shards.save(folder, values, model, optimizer, final)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **values}
    distributed.ranks().on_rank0(lambda: checkpoint.save(folder, state))
