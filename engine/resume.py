"""Saving a training and resuming it: one ckpt.pt, or with shard=true the parts of engine/shards.py until the end."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from conf.errors import file_errors
from conf.files import locked
from conf.schema import TrainConfig
from engine import checkpoint, distributed


def saved_state(cfg: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """The last checkpoint of the run in folder, with its tensors on the CPU; None without one, or with fresh=true.

    UserError if it was trained with other settings (except RUN_CONTROL of conf/schema.py), if it is damaged, or if the
    ranks see different checkpoints. Shards are not loaded here but in `restore`: the state then has the key `folder`.
    """
    with file_errors(folder):
        saved = not cfg.fresh and any((folder / name).exists() for name in ("ckpt.pt", "shards"))
    state = None
    if saved:
        from engine.restore import last_state

        state = last_state(cfg, folder)
    distributed.ranks().assert_same(f"the step that {folder} was saved at", state and state["step"])
    return state


def only_process(cfg: TrainConfig) -> AbstractContextManager:
    """Context manager around a training: UserError that names the other process if one is training the same run."""
    return locked(Path(cfg.runs) / str(cfg.name)) if distributed.rank() == 0 else nullcontext()


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
