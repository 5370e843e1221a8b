"""init=RUN: start from a trained run's weights, with its model, encoding and corpus."""

import re
import typing
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from conf.errors import UserError
from conf.registry import describe as describe_knobs
from conf.schema import TrainConfig
from engine import checkpoint
from engine.newest_run import known_runs
from model.scaling import TrainedContext


def inherit(cfg: TrainConfig) -> dict[str, Any]:
    """Copy the parent run's model, pos, data and attention settings into cfg, and record the parent in it.

    Returns the parent's checkpoint. UserError if there is no such run, or if a setting that it fixes was given.
    """
    assert cfg.init is not None and cfg.name is not None
    refuse_overrides(cfg, "model", "pos", "data", "attention")
    parent = Path(cfg.runs) / cfg.init
    if parent == Path(cfg.runs) / cfg.name:
        raise UserError(f"init={cfg.init}: the new run needs another name: name=NEW")
    if not (parent / "ckpt.pt").exists():
        raise UserError(f"init={cfg.init}: no trained run of that name in {cfg.runs}/: {known_runs(cfg.runs)}")
    state = checkpoint.load(parent)
    old: TrainConfig = state["cfg"]
    cfg.model, cfg.pos, cfg.data, cfg.attention = old.model, old.pos, old.data, old.attention
    pretrained = old.pretrained or {"ctx": old.ctx, "tokens": state["step"] * old.batch_tokens}
    cfg.pretrained = {**pretrained, "run": cfg.init, "weights": checkpoint.digest(parent)}
    return state


def refuse_overrides(cfg: TrainConfig, *keys: str) -> None:
    """UserError if one of these settings or groups, which the parent fixes, is on the command line."""
    overrides = [o.lstrip("+~") for o in typing.cast(list, OmegaConf.to_container(HydraConfig.get().overrides.task))]
    for key in keys:
        if fixed := [o for o in overrides if re.match(rf"{key}[.=]", o)]:
            raise UserError(f"init={cfg.init}: {fixed[0]} cannot be chosen, it comes from that run")


def describe(cfg: TrainConfig, factor: float) -> str:
    """For the start of a training: the parent run, its context and tokens, and the settings that differ now.

    factor: the extension factor of the scaling that the run is trained with.
    """
    name = cfg.init if ":" in (cfg.init or "") else f"{cfg.runs}/{cfg.init}"
    parent, tokens, scaling = cfg.pretrained, cfg.pretrained["tokens"], describe_knobs("scaling", cfg.scaling)
    return (
        f"from {name}: pre-trained at ctx {parent['ctx']}{f' on {tokens:,} tokens' if tokens else ''}; "
        f"this run: ctx {cfg.ctx}, scaling={scaling} (factor {factor:g}), {describe_cost(cfg)}"
    )


def describe_extension(cfg: TrainConfig, context: TrainedContext) -> str:
    """For the start of an evaluation: at which contexts this run was pre-trained and fine-tuned."""
    extended, scaling = context.longest_trained_ctx, describe_knobs("scaling", cfg.scaling)
    how = f"extended to {extended} by" if cfg.ctx > context.train_ctx else f"then fine-tuned at ctx {cfg.ctx} with"
    return (
        f"pre-trained at ctx {context.train_ctx} ({cfg.pretrained['run']}), {how} scaling={scaling}: scaling=none "
        f"keeps it, and the window control sees {extended} tokens"
    )


def describe_cost(cfg: TrainConfig) -> str:
    """The number of training tokens, and their share of the pre-training in %.

    The share makes toy and full scale comparable: few steps can be a large part of a short pre-training.
    """
    tokens, before = cfg.steps * cfg.batch_tokens, cfg.pretrained["tokens"]
    if not before:
        return f"{tokens:,} tokens"
    percent = 100 * tokens / before
    return f"{tokens:,} tokens, {percent:{'.2g' if percent < 1 else ',.0f'}} % of the pre-training's {before:,}"
