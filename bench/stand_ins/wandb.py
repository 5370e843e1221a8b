"""Stands in for wandb on a machine without it (bench/gpu_check.sh): takes all calls and does nothing."""

from typing import Any


class Settings:
    def __init__(self, **settings: Any):
        pass


class Run:
    """A run that forgets everything: every method exists."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def login(**options: Any) -> bool:
    return False


def init(**options: Any) -> Run:
    return Run()


def Image(*args: Any, **kwargs: Any) -> None:
    return None
