"""The settings on the command line, and from them the name of a run that name= does not give."""

import hashlib
import re
import typing

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf.schema import RUN_CONTROL, TrainConfig


def overrides() -> list[str]:
    """The settings on the command line, without the signs + and ~, and with ${...} as it was typed."""
    return [o.lstrip("+~") for o in typing.cast(list, OmegaConf.to_container(HydraConfig.get().overrides.task))]


def default_name(c: TrainConfig) -> str:
    """The run's name from the command line: `rope`, `alibi-seed1`, `rope-tiny-lr0.001`.

    First the encoding (or the parent run), then the chosen groups and the other settings, each sorted by key, so that
    the order of the arguments does not matter.
    """
    hydra = HydraConfig.get()
    groups, settings = [], []
    for override in sorted(overrides()):
        key, _, value = override.partition("=")
        if key in ("model", "data", "optim", "exp", "scaling", "attention", "positions", "layers"):
            groups.append(value)
        elif key == "pos" and c.init:  # the parent's name comes first
            groups.append(f"to-{value}")
        elif key not in ("pos", "init", *RUN_CONTROL):
            settings.append(key.rpartition(".")[2] + value)
    name = "-".join([c.init or hydra.runtime.choices["pos"], *groups, *settings])
    return short(re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_"))


def short(name: str, limit: int = 120) -> str:
    """A name for a file: at most `limit` characters, the last 9 of them a hash of the part that is cut off."""
    return name if len(name) <= limit else f"{name[: limit - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
