"""wandb runs, online or offline, that need no account and no network and never stop what they log.

WANDB_MODE sets the mode; without it, online if this machine is logged in, else offline. disabled: wandb is not
imported. Every problem becomes one printed line.
"""

import functools
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from conf.schema import TrainConfig
from engine import checkpoint, distributed
from engine.files import commit, write_atomically
from model import gpt

CONNECT, FINISH = 4.0, 6.0  # seconds to wait for the server at the beginning and the end of a run; else it is for ever

_server_gone = ""  # the error of a run, after which those of this process are offline


@functools.cache  # each line once
def say(line: str) -> None:
    """Print a line about wandb above a progress bar."""
    tqdm.write(f"wandb: {line}")


def new_id(name: str) -> str:
    """A readable id that no other run has."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')[:100]}-{secrets.token_hex(4)}"


class Log:
    """Context manager: the wandb run of this id. Its calls raise nothing that comes from wandb.

    Nothing is logged with WANDB_MODE=disabled, on ranks above 0, and if the run cannot be opened.
    """

    def __init__(self, **about: Any):
        """about: arguments of wandb.init, with job_type, id and config."""
        self.run: Any = None
        self.about: dict[str, Any] = {"resume": None, **about}

    def __enter__(self) -> Self:
        if os.environ.get("WANDB_MODE") != "disabled" and distributed.rank() == 0:
            self._attempt(self._open)
            if self.run is None:  # the server did not answer: try again, offline
                self._attempt(self._open)
        return self

    def __call__(self, work: Callable[[Any, Any], Any]) -> None:
        """work(wandb, run), if the run is open."""
        if self.run is not None:
            self._attempt(lambda: work(self.wandb, self.run))

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.run is not None:
            self._attempt(lambda: self.run.finish(exit_code=int(kind is not None)))

    def _open(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which waits for the server when the process ends
        os.environ.setdefault("WANDB_HTTP_TIMEOUT", "5")  # of questions to the server while a run is open
        import wandb

        self.wandb, training = wandb, self.about["job_type"] == "train"
        mode: Any = "offline" if _server_gone else os.environ.get("WANDB_MODE")
        mode = mode or ("online" if wandb.login(prompt=False, verify=False) else "offline")
        self.about["config"]["commit"] = commit()
        limits: Any = {"init_timeout": CONNECT, "finish_timeout": FINISH, "finish_timeout_raises": True}
        quiet: Any = {"silent": True, "console": "off", "x_disable_stats": not training}
        if _server_gone:
            wandb.teardown()  # ends the run that failed, whose id would be in use
        self.run = wandb.init(mode=mode, settings=wandb.Settings(**limits, **quiet), **self.about)
        if self.run.offline:
            why = f" ({_server_gone})" if _server_gone else ""
            say(f"offline{why}; to upload: wandb sync --yes ./{os.path.relpath(Path(self.run.dir).parent.parent)}")
        else:
            say(str(self.run.url if training else self.run.project_url))

    def _attempt(self, work: Callable[[], Any]) -> None:
        """work(), without its exceptions. With an open run they are printed, otherwise by the run that is offline."""
        global _server_gone
        try:
            work()
        except Exception as e:
            again = self.run is None and _server_gone
            _server_gone = f"{type(e).__name__}: {(str(e).splitlines() or ['no answer'])[0][:70]}"
            if self.run is not None:
                folder = os.path.relpath(Path(self.run.dir).parent)
                say(f"{_server_gone}; to upload the rest: wandb sync --yes --include-online ./{folder}")
            elif again:
                say(f"nothing is logged ({_server_gone})")


def run_config(name: str, cfg: TrainConfig) -> dict[str, Any]:
    """The part of the config that a training and its evaluations have in common, so that both can be grouped by it."""
    return {**asdict(cfg), "run": name, "encoding": gpt.describe_encoding(cfg).removeprefix("pos=")}


class TrainingLog(Log):
    """Context manager: the wandb run of the training in `folder`, one run also if the training is resumed.

    Its id is kept in the file wandb_id there. A training that starts at step 0 gets a new one, also in the folder of an
    earlier one (fresh=true). facts: what the run's page shows beside the settings, such as the number of parameters.
    """

    def __init__(self, cfg: TrainConfig, folder: Path, start: int, facts: dict[str, Any]):
        self.cfg, self.folder, file = cfg, folder, folder / "wandb_id"
        self.config = {**run_config(folder.name, cfg), **facts}
        run_id = file.read_text(encoding="utf-8").strip() if start > 0 and file.exists() else new_id(folder.name)
        about = {"group": folder.name, "name": folder.name, "id": run_id, "config": self.config}
        super().__init__(project=cfg.project, job_type="train", resume="allow", **about)

    def _open(self) -> None:
        write_atomically(self.folder / "wandb_id", lambda f: f.write(self.about["id"].encode()))
        super()._open()

    def point(self, step: int, values: dict[str, float]) -> None:
        """Log values as train/NAME at this step."""
        self(lambda _, run: run.log({f"train/{name}": value for name, value in values.items()}, step=step))

    def saved(self, state: dict[str, Any]) -> None:
        """The checkpoint with this state has been written: log the time, and after the last step of which weights."""
        summary = {"minutes": state["seconds"] / 60, "n_parameters": self.config["n_parameters"]}
        if state["step"] == self.cfg.steps:
            summary["weights"] = checkpoint.digest(state["model"])[:12]  # eval.weights of their curves
        self(lambda _, run: run.summary.update(summary))
