"""Loading what engine/resume.py saved. Imported when a run is resumed."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from conf.differences import differences
from conf.errors import UserError, check
from conf.schema import TrainConfig
from engine import checkpoint, distributed


def last_state(cfg: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """The last checkpoint of the run in folder; of a sharded one the values without its tensors, and the key `folder`.

    A lost config.json is written again. UserError for a damaged checkpoint, or if the run has other settings.
    """
    if (folder / "ckpt.pt").exists():
        state = checkpoint.load(folder)
        if distributed.rank() == 0 and not (folder / "config.json").exists():
            checkpoint.write_settings(folder, state["cfg"])
    else:
        check(cfg.shard, "shard", cfg.shard, f"true to resume {folder}, which is saved in parts")
        from engine import shards

        state = shards.newest(folder)
    if state and state["step"] == cfg.steps and not {"loss", "ppl", "bits_per_byte"} <= state["validation"].keys():
        raise UserError(f"{folder}: not a checkpoint that ropewalk wrote: it is finished, and has no held-out loss")
    if state and (different := differences(cfg, state["cfg"])):
        raise UserError(f"{folder} has other settings: {', '.join(different)}: choose name=NEW or fresh=true")
    return state


def restore(
    folder: Path, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    """Load weights and optimizer state of a checkpoint from `saved_state` into model and optimizer, in place.

    Returns the number of steps that are done, and the seconds that they took.
    """
    if "folder" in state:
        from engine import shards

        shards.restore(state, model, optimizer)
    else:
        with checkpoint.reading(folder / "ckpt.pt"):
            model.load_state_dict(state["model"])
            # The options of the groups (learning rate, betas ...) come from the settings, which are the same
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
            for p, moments in ((p, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]):
                if not moments["exp_avg"].shape == moments["exp_avg_sq"].shape == p.shape or moments["step"].dim():
                    raise ValueError("the optimizer's state is of another model")
    return state["step"], state["seconds"]
