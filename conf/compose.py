"""Compose settings as the command line does, but inside a running program: for tests, benchmarks and notebooks."""

from hydra import compose as hydra_compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from conf.eval_schema import EvalConfig, eval_config
from conf.registry import ROOT
from conf.schema import TrainConfig, train_config


def compose(config: str, *overrides: str) -> DictConfig:
    """The unchecked configuration that `python CONFIG.py OVERRIDES` would run with.

    config: train, eval or sample. Replaces Hydra's global state, so it must not be called inside a Hydra main function.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra_compose(config, list(overrides), return_hydra_config=True)
    HydraConfig.instance().set_config(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def train_settings(*overrides: str) -> TrainConfig:
    """The checked settings of `python train.py OVERRIDES`."""
    return train_config(compose("train", *overrides))


def eval_settings(*overrides: str) -> EvalConfig:
    """The checked settings of `python eval.py OVERRIDES`."""
    return eval_config(compose("eval", *overrides))
