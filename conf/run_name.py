"""The name of a run that name= does not give."""

import re
import typing

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf.schema import RUN_CONTROL, TrainConfig, short


def default_name(c: TrainConfig) -> str:
    """The run's name from the command line: `rope`, `alibi-seed1`, `rope-tiny-lr0.001`.

    First the encoding (or the parent run), then the chosen groups and the other settings, each sorted by key, so that
    the order of the arguments does not matter.
    """
    hydra = HydraConfig.get()
    groups, settings = [], []
    for override in sorted(typing.cast(list, OmegaConf.to_container(hydra.overrides.task))):  # as typed, with ${...}
        key, _, value = override.lstrip("+~").partition("=")
        if key in ("model", "data", "optim", "exp", "scaling", "attention", "positions"):
            groups.append(value)
        elif key not in ("pos", "init", *RUN_CONTROL):
            settings.append(key.rpartition(".")[2] + value)
    name = "-".join([c.init or hydra.runtime.choices["pos"], *groups, *settings])
    return short(re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_"))
