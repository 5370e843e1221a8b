"""A training as a wandb run: one run for one training, also if it is resumed."""

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wandb

from conf.schema import TrainConfig
from engine import checkpoint, wandb_runs
from engine.code_version import commit
from engine.tracking import TrainingLog
from model import gpt


@contextmanager
def open_log(cfg: TrainConfig, folder: Path, start: int, measured: dict[str, Any]) -> Generator[TrainingLog]:
    """See engine/tracking.py, `training_log`."""
    name, uploads = folder.name, _uploads_checkpoint()
    config = {**run_config(name, cfg), **measured, "commit": commit()}
    timeout = wandb_runs.FINISH_WITH_CHECKPOINT if uploads else wandb_runs.FINISH
    run_id = training_id(folder, start)
    with wandb_runs.open_run(
        cfg.project, "train", name, name, run_id, config, resume=True, finish_timeout=timeout
    ) as run:
        yield WandbTrainingLog(run, cfg, folder, config, uploads)


def run_config(name: str, cfg: TrainConfig) -> dict[str, Any]:
    """The part of the config that a training and its evaluations have in common, so that both can be grouped by it."""
    return {**asdict(cfg), "run": name, "encoding": gpt.describe_encoding(cfg).removeprefix("pos=")}


def training_id(folder: Path, start: int) -> str:
    """The id of the wandb run of the training in `folder`, kept in the file wandb_id there.

    A training that starts at step 0 is a new one and gets a new id, also in the folder of an earlier one (fresh=true).
    """
    file = folder / "wandb_id"
    if start > 0 and file.exists():
        return file.read_text().strip()
    run_id = f"{wandb_runs.slug(folder.name)[:100]}-{secrets.token_hex(4)}"
    checkpoint.write_atomically(file, lambda f: f.write(run_id.encode()))
    return run_id


def _uploads_checkpoint() -> bool:
    """WANDB_LOG_MODEL is the variable that other trainers of wandb read, with these values."""
    return os.environ.get("WANDB_LOG_MODEL", "false").lower() in ("end", "checkpoint", "true", "1")


class WandbTrainingLog(TrainingLog):
    """The log of a training in an open wandb run."""

    def __init__(self, run: Any, cfg: TrainConfig, folder: Path, config: dict, uploads: bool):
        self.run, self.cfg, self.folder, self.config, self.uploads = run, cfg, folder, config, uploads

    def point(self, step: int, values: dict[str, float]) -> None:
        with wandb_runs.problems_are_said():
            self.run.log({f"train/{name}": value for name, value in values.items()}, step=step)

    def saved(self, step: int, seconds: float) -> None:
        with wandb_runs.problems_are_said():
            self.run.summary.update({"minutes": seconds / 60, "n_parameters": self.config["n_parameters"]})
            if step == self.cfg.steps:
                name = wandb_runs.slug(self.folder.name)
                made = [wandb_runs.weights_artifact(name, checkpoint.digest(self.folder), self.config)]
                if self.uploads:
                    made.append(wandb.Artifact(f"checkpoint-{name}", type="checkpoint"))
                    made[-1].add_file(str(self.folder / "ckpt.pt"))
                wandb_runs.log_artifacts(self.run, outputs=made)
