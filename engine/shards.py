"""Checkpoints of a run with shard=true: while it trains, each process writes its part, runs/NAME/shards/STEP/RANK.pt.

At the end the parts become the one portable ckpt.pt, which eval.py opens. Training resumes at any number of processes.
The parts hold tensors and plain values only, and are read as such; torch.distributed.checkpoint would unpickle its
index and every value that is no tensor. Imported with shard=true only.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf.errors import UserError
from engine import checkpoint, distributed

PLAIN = {key: hint for key, hint in checkpoint.PARTS.items() if key not in ("model", "optimizer")}  # of plain.pt


def newest(run: Path) -> dict[str, Any] | None:
    """The values of the last complete sharded checkpoint without its tensors; None if there is none.

    The key `folder` is the folder of its parts, for `restore`. UserError for one of an earlier version.
    """
    steps = [int(p.parent.name) for p in (run / "shards").glob("*/plain.pt") if p.parent.name.isdecimal()]
    if not steps:
        return None
    folder = run / "shards" / str(max(steps))
    state = checkpoint.read(folder / "plain.pt", PLAIN)
    if not isinstance(state.get("parts"), int):
        way = "finish the run with that version, or start over with fresh=true"
        raise UserError(f"{folder}: saved by an earlier version, with pickles, which are not loaded: {way}")
    return {**state, "folder": folder}


def save(run: Path, plain: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, final: bool) -> None:
    """Every rank writes its part of weights and optimizer state to runs/NAME/shards/STEP. All ranks call it together.

    plain: the other values of the checkpoint. They are written last, to plain.pt, so a folder that contains plain.pt is
    complete. Then rank 0 deletes the older checkpoints. final: rank 0 writes the portable ckpt.pt instead.
    """
    ranks = distributed.ranks()
    if final:
        state = full_state(model, optimizer)
        ranks.on_rank0(lambda: checkpoint.save(run, state | plain))
        return
    folder, error = run / "shards" / str(plain["step"]), ""
    part = {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    try:
        part = {"format": checkpoint.FORMAT, **local_tensors(part)}
        checkpoint.write_atomically(folder / f"{distributed.rank()}.pt", lambda f: torch.save(part, f))
    except UserError as e:
        error = str(e)
    if errors := [e for e in ranks.interleave([error]) if e]:  # no rank continues before all have written
        raise UserError(errors[0])

    def finish() -> None:
        state = {"format": checkpoint.FORMAT, "parts": distributed.world(), **plain}
        checkpoint.write_atomically(folder / "plain.pt", lambda f: torch.save(state, f))
        for other in (run / "shards").iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    ranks.on_rank0(finish)


def local_tensors(tree: Any) -> Any:
    """A nested dict with this rank's rows of each DTensor in its place; everything else as it is."""
    if isinstance(tree, dict):
        return {key: local_tensors(value) for key, value in tree.items()}
    return tree.to_local() if hasattr(tree, "to_local") else tree


def restore(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the parts of the state from `newest` into model and optimizer, in place.

    The number of ranks may differ from when they were written. Every rank reads the files of all parts, memory-mapped,
    and compares the checksums of some of them.
    """
    files = [state["folder"] / f"{i}.pt" for i in range(state["parts"])]
    for path in files[distributed.rank() :: distributed.world()]:
        checkpoint.read(path, {"model": dict, "optimizer": dict})  # for its checksums
    parts = []
    for path in files:
        with checkpoint.reading(path):
            parts.append(torch.load(path, map_location="cpu", weights_only=True, mmap=True))

    def like(x: Tensor, saved: Callable[[dict], Tensor]) -> Tensor:
        """The saved tensor, distributed over the ranks as x is."""
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(x, DTensor):
            return saved(parts[0])
        full = torch.cat([saved(part) for part in parts])  # FSDP2 gives each rank consecutive rows
        if full.shape != x.shape or full.dtype != torch.float32 or not full.isfinite().all():
            raise ValueError(f"a tensor of shape {[*full.shape]}, which must be {[*x.shape]} and finite")
        # Every rank has the full tensor, so nothing is sent
        return distribute_tensor(full.to(x.device), x.device_mesh, x.placements, src_data_rank=None)

    with checkpoint.reading(state["folder"]), torch.no_grad():
        for name, x in model.state_dict().items():
            x.copy_(like(x, lambda part, name=name: part["model"][name]))
        groups, moments = optimizer.state_dict()["param_groups"], {}
        for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            moments[i] = {"step": parts[0]["optimizer"][i]["step"].clone()}
            for key in ("exp_avg", "exp_avg_sq"):
                moments[i][key] = like(p, lambda part, i=i, key=key: part["optimizer"][i][key])
        optimizer.load_state_dict({"state": moments, "param_groups": groups})


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
