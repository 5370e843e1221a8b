"""The checkpoint of a run, runs/NAME/ckpt.pt: save it, load it, resume from it.

One format for a run of one process and of several: with shard=true the full state is gathered on rank 0 to be saved,
and sent from there when the run is resumed. config.json beside it has the same settings, for readers and for finding
runs without loading weights.
"""

import hashlib
import json
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.errors import UserError
from conf.schema import TrainConfig, differences, from_dict
from engine import distributed
from engine.files import write_atomically

FORMAT = 3  # version of ckpt.pt; raise it when its keys change
# What a file of another content makes torch and our own checks raise
ERRORS = (OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError)


def start(run: Path, cfg: TrainConfig) -> None:
    """Create the folder of a new run and write its settings to config.json.

    Weights of an earlier run in this folder (fresh=true) are removed first, so that they never appear next to settings
    that they do not belong to.
    """
    (run / "ckpt.pt").unlink(missing_ok=True)
    write_atomically(run / "config.json", lambda f: f.write(json.dumps(asdict(cfg), indent=1).encode()))


# ---- the file ----


def save(run: Path, state: dict[str, Any]) -> None:
    """Write ckpt.pt of the run in folder `run`, atomically.

    state: config, model and optimizer as state dicts, step, corpus (its key), tokenizer (as JSON, or None), seconds of
    training, validation (its last result).
    """
    write_atomically(run / "ckpt.pt", lambda f: torch.save({"format": FORMAT, **state}, f))


def load(run: Path) -> dict[str, Any]:
    """The state that `save` wrote, with its tensors on the CPU, and under the key cfg its TrainConfig.

    torch unpickles only tensors and plain values (weights_only=True). UserError if the file is missing, incomplete or
    from another version.
    """
    path = run / "ckpt.pt"
    with reading(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ValueError("it is of another version, or no checkpoint")
        return {**state, "cfg": from_dict(state["config"])}


@contextmanager
def reading(path: Path) -> Generator[None]:
    """Context manager: an error inside it is due to the content of the file at path, or to the machine: UserError."""
    try:
        yield
    except ERRORS as e:
        reason = (str(getattr(e, "strerror", None) or e) or type(e).__name__).splitlines()[0]
        raise UserError(f"{path}: cannot be read as a checkpoint of this version ({reason})") from e


def digest(weights: dict[str, Tensor]) -> str:
    """The sha256 of weights in hexadecimal. Curves and fine-tuned runs store it to identify what they belong to.

    It is that of their values in float32, in which bfloat16 weights are exact.
    """
    sha = hashlib.sha256()
    for name in sorted(weights):
        sha.update(name.encode())
        sha.update(weights[name].detach().cpu().float().contiguous().numpy().tobytes())
    return sha.hexdigest()


def digest_of(run: Path) -> str | None:
    """The digest of the weights of the run in this folder; None without a ckpt.pt, as for a model from elsewhere."""
    return digest(load(run)["model"]) if (run / "ckpt.pt").exists() else None


# ---- the state of a training ----


def last_state(run: Path, cfg: TrainConfig) -> dict[str, Any] | None:
    """The last checkpoint of the run in folder `run`, to be resumed with cfg; None without one, or with fresh=true.

    UserError if it was trained with other settings (except RUN_CONTROL of conf/schema.py), or if the ranks see
    different checkpoints.
    """
    state = load(run) if not cfg.fresh and (run / "ckpt.pt").exists() else None
    distributed.assert_same(f"the step that {run} was saved at", state and state["step"])
    if state and (different := differences(cfg, state["cfg"])):
        raise UserError(f"{run} has other settings: {', '.join(different)}: choose name=NEW or fresh=true")
    return state


def restore(run: Path, state: dict[str, Any], model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Load weights and moments of a checkpoint into model and optimizers, in place. All ranks call it.

    The options of the optimizers (learning rate, betas ...) stay those of the settings.
    """
    chosen = [{k: v for k, v in group.items() if k != "params"} for o in optimizers for group in o.param_groups]
    with reading(run / "ckpt.pt"):
        if state["model"].keys() != model.state_dict().keys():  # torch would leave a lost weight as it was drawn
            raise ValueError("its weights are those of another model")
        distributed.scatter_state(model, optimizers, state)
    for group, values in zip([group for o in optimizers for group in o.param_groups], chosen, strict=True):
        group.update(values)
