"""The calls to wandb. Modules that import wandb are themselves imported only where something is to be logged."""

import importlib
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType

from conf.schema import TrainConfig
from engine import distributed


def wandb_module(name: str) -> ModuleType | None:
    """The module of ours that logs to wandb, or None: with WANDB_MODE=disabled, and on ranks above 0.

    Also None, with a line that says why, if wandb cannot be imported: it never stops a training or an evaluation.
    """
    if os.environ.get("WANDB_MODE") == "disabled" or distributed.rank() > 0:
        return None
    try:
        return importlib.import_module(name)
    except Exception as e:  # a broken installation raises anything
        print(f"wandb: cannot be imported ({type(e).__name__}: {e}), so nothing is logged", file=sys.stderr)
        return None


class TrainingLog:
    """What train.py logs. This one drops it; engine/wandb_training.py has the one that sends it to wandb."""

    def point(self, step: int, values: dict[str, float]) -> None:
        """Log values as train/NAME at this step."""

    def saved(self, step: int, seconds: float) -> None:
        """The checkpoint of this step has been written. seconds: duration of the training, all its parts together."""


def training_log(cfg: TrainConfig, folder: Path, start: int, measured: dict) -> AbstractContextManager[TrainingLog]:
    """Context manager: the log of the training in `folder`, which begins at step `start` (above 0: it is resumed).

    measured: what the run's page shows beside the settings, such as the number of parameters.
    """
    module = wandb_module("engine.wandb_training")
    return module.open_log(cfg, folder, start, measured) if module else nullcontext(TrainingLog())
