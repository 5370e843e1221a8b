"""Checkpoints of a run with shard=true: while it trains, each process writes its part, runs/NAME/shards/STEP.

At the end the parts become the one portable ckpt.pt, which eval.py opens. Training resumes at any number of processes.
torch keeps the index of the parts as a pickle (.metadata): resume only runs that you trained yourself. Imported under
torchrun only, except for `newest`.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine import checkpoint, distributed


def newest(run: Path) -> dict[str, Any] | None:
    """The values of the last complete sharded checkpoint without its tensors; None if there is none.

    The key `folder` is the folder of its shards, for `restore`.
    """
    steps = [int(p.parent.name) for p in (run / "shards").glob("*/plain.pt")]
    if not steps:
        return None
    folder = run / "shards" / str(max(steps))
    return {**checkpoint.load(folder, file="plain.pt"), "folder": folder}


def save(run: Path, plain: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, final: bool) -> None:
    """Every rank writes its shard of weights and optimizer state to runs/NAME/shards/STEP. All ranks call it together.

    plain: the other values of the checkpoint. They are written last, to plain.pt, so a folder that contains plain.pt is
    complete. Then rank 0 deletes the older checkpoints. final: rank 0 writes the portable ckpt.pt instead.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if final:
        state = full_state(model, optimizer)
        distributed.ranks().on_rank0(lambda: checkpoint.save(run, state | plain))
        return
    folder = run / "shards" / str(plain["step"])
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    def finish() -> None:
        state = {"format": checkpoint.FORMAT, **plain}
        checkpoint.write_atomically(folder / "plain.pt", lambda f: torch.save(state, f))
        for other in (run / "shards").iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    distributed.ranks().on_rank0(finish)


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the shards in folder into model and optimizer, in place. The number of ranks may differ from when they were
    written: torch.distributed.checkpoint redistributes the shards."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)  # tensors of the right shapes, to be filled
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    """The states of model and optimizer in rank 0's memory, in a one-device run's layout; empty on other ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, optimizer_state = get_state_dict(model, optimizer, options=options)
    moments: dict[str, Any] = dict(optimizer_state)
    if not moments:
        return {}
    # get_state_dict names the parameters; a plain optimizer numbers them
    names = [name for group in moments["param_groups"] for name in group["params"]]
    groups = [{**g, "params": [names.index(name) for name in g["params"]]} for g in moments["param_groups"]]
    state = {i: moments["state"][name] for i, name in enumerate(names)}
    return {"model": weights, "optimizer": {"state": state, "param_groups": groups}}
