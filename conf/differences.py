"""Which settings of a command differ from those of the run that it would resume."""

from dataclasses import asdict
from typing import Any

from conf.schema import RUN_CONTROL, TrainConfig


def differences(new: TrainConfig, old: TrainConfig) -> list[str]:
    """`KEY=NEW (the run has OLD)` for every setting that differs, except those in RUN_CONTROL."""
    a, b = flatten(asdict(new)), flatten(asdict(old))
    keys = [k for k in {**a, **b} if k not in RUN_CONTROL and a.get(k, "nothing") != b.get(k, "nothing")]
    return [f"{k}={a.get(k, 'nothing')} (the run has {b.get(k, 'nothing')})" for k in keys]


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 8}} -> {"model.width": 8}"""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
