"""wandb runs, online or offline: a problem with wandb never stops a training or an evaluation."""

import contextlib
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from engine import distributed


@contextmanager
def tracker(project: str, job_type: str, group: str, name: str, config: dict, step_metric: str) -> Generator[Any]:
    """Context manager: a wandb run that needs no account and no network and never asks for a login.

    WANDB_MODE sets the mode; without it, online if this machine is logged in, else offline. If a mode does not start,
    the next one is tried, and `disabled` always starts. All metrics `job_type/*` are drawn against step_metric, so
    that the curves of several runs share an axis. Ranks above 0 get a disabled run.
    """
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        with contextlib.suppress(Exception):
            mode = "online" if wandb.login(prompt=False, verify=False) else None
    modes = [mode or "offline", "offline", "disabled"] if distributed.rank() == 0 else ["disabled"]
    for attempt in dict.fromkeys(modes):  # the last one, disabled, always starts
        try:
            settings = wandb.Settings(init_timeout=15, silent=True, console="off")
            labels: dict[str, Any] = {"job_type": job_type, "group": group, "name": name, "config": config}
            run = wandb.init(project=project, mode=attempt, settings=settings, **labels)  # ty: ignore[invalid-argument-type] (wandb checks the mode)
            break
        except Exception as e:
            print(f"wandb: {attempt} did not start ({str(e).splitlines()[0]}); continuing without", file=sys.stderr)
    run.define_metric(step_metric, hidden=True)
    run.define_metric(f"{job_type}/*", step_metric=step_metric)
    try:
        yield run
    finally:
        with contextlib.suppress(Exception):
            run.finish()
