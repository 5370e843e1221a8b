"""init=RUN: start from a trained run's weights, with its model and corpus, and its encoding or another one."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from conf.errors import UserError, check
from conf.registry import describe as describe_knobs, yaml_name
from conf.run_name import overrides
from conf.schema import TrainConfig
from engine import checkpoint
from engine.newest_run import known_runs
from model import gpt
from model.pos.rope import Rope
from model.scaling import TrainedContext


def inherit(cfg: TrainConfig) -> dict[str, Any]:
    """Copy the parent run's model, data and attention settings into cfg, and record the parent in it.

    pos and layers are copied too, unless the command line changes them. Returns the parent's checkpoint. UserError
    if there is no such run, or if a setting that it fixes was given.
    """
    assert cfg.init is not None and cfg.name is not None
    refuse_overrides(cfg, "model", "data", "attention")
    parent = Path(cfg.runs) / cfg.init
    if parent == Path(cfg.runs) / cfg.name:
        raise UserError(f"init={cfg.init}: the new run needs another name: name=NEW")
    if not (parent / "ckpt.pt").exists():
        raise UserError(f"init={cfg.init}: no trained run of that name in {cfg.runs}/: {known_runs(cfg.runs)}")
    state = checkpoint.load(parent)
    old: TrainConfig = state["cfg"]
    cfg.model, cfg.data, cfg.attention = old.model, old.data, old.attention
    pretrained = old.pretrained or {"ctx": old.ctx, "tokens": state["step"] * old.batch_tokens}
    cfg.pretrained = {**pretrained, "run": cfg.init, "weights": checkpoint.digest(parent)}
    choose_encoding(cfg, old)
    return state


def refuse_overrides(cfg: TrainConfig, *keys: str) -> None:
    """UserError if one of these settings or groups, which the parent fixes, is on the command line."""
    for key in keys:
        if fixed := [o for o in overrides() if re.match(rf"{key}[.=]", o)]:
            raise UserError(f"init={cfg.init}: {fixed[0]} cannot be chosen, it comes from that run")


# ---- another encoding than the parent's ----


def choose_encoding(cfg: TrainConfig, old: TrainConfig) -> None:
    """Set cfg.pos and cfg.layers to those of the parent, unless the command line changes them.

    pos=NAME replaces the encoding, pos.KNOB=VALUE a knob of the parent's, layers=NAME the layer schedule, layers.X.KEY
    a setting of the parent's. A change is recorded in cfg.pretrained. UserError for a change after which the weights
    would be of no use.
    """
    given = {o.partition("=")[0] for o in overrides()}
    if "pos" not in given:
        knobs = {key.removeprefix("pos."): cfg.pos[key.removeprefix("pos.")] for key in given if key.startswith("pos.")}
        for knob, value in knobs.items():
            right = f"left out: pos={yaml_name('pos', old.pos)} of {cfg.init} has no {knob}"
            check(knob in old.pos, f"pos.{knob}", value, right)
        cfg.pos = {**old.pos, **knobs}
    lone = sorted(key for key in given if key.startswith("layers."))
    if "layers" in given:
        if cfg.layers:
            from conf.layer_schedule import resolve_layers

            cfg.layers = resolve_layers(cfg)
    elif not lone:
        cfg.layers = old.layers
    elif old.layers:
        from conf.layer_schedule import change_schedule

        cfg.layers = change_schedule(old.layers, cfg.layers, cfg)
    else:
        raise UserError(f"{lone[0]}: needs layers=NAME beside it: {cfg.init} has no layer schedule")
    before, now = rotations(old), rotations(cfg)
    if before and not {pairs for pairs, _ in now} <= {pairs for pairs, _ in before}:
        right = f"{describe_knobs('pos', old.pos)}: other dimensions would be rotated together than in its training"
        raise UserError(f"init={cfg.init}: pos={describe_knobs('pos', cfg.pos)} does not fit the weights of {right}")
    cfg.pretrained.pop("encoding", None)  # of an earlier change
    if (cfg.pos, cfg.layers) != (old.pos, old.layers):
        cfg.pretrained["encoding"] = gpt.describe_encoding(old)
        kept = {frequencies for _, frequencies in now} <= {frequencies for _, frequencies in before}
        if not (kept if now else cfg.pos == old.pos):
            cfg.pretrained["ctx"] = cfg.ctx  # at which the new frequencies are trained


def rotations(cfg: TrainConfig) -> set[tuple[int | None, tuple[float, ...]]]:
    """How the layers rotate: (P of pairs (i, i + P), or None for pairs (2i, 2i + 1); the frequencies)."""
    encoding = gpt.build_encoding(cfg)
    parts = getattr(encoding, "encodings", [encoding])  # those of a layer schedule
    return {
        (None if e.interleaved else len(e.inv_freq) + e.still, tuple(e.inv_freq.tolist()))
        for e in parts
        if isinstance(e, Rope)
    }


def load_weights(model: gpt.GPT, weights: dict[str, Tensor], cfg: TrainConfig) -> None:
    """Load the parent's weights into a new model. If its encoding is another, print what is kept, dropped and new.

    Then all weights are kept but those of an encoding that the new model lacks, or that have another shape in it.
    """
    if "encoding" not in cfg.pretrained:
        model.load_state_dict(weights)
        return
    own = model.state_dict()
    found = {without_schedule(name): x for name, x in weights.items()}
    kept = {name: x for name in own if (x := found.get(without_schedule(name))) is not None}
    kept = {name: x for name, x in kept.items() if x.shape == own[name].shape}
    model.load_state_dict(own | kept)
    new = ", ".join(name for name in own if name not in kept) or "nothing"
    used = set(map(without_schedule, kept))
    dropped = ", ".join(name for name in found if name not in used) or "nothing"
    change = f"{cfg.pretrained['encoding']} -> {gpt.describe_encoding(cfg)}"
    print(f"{change}: kept {len(kept)} tensors; dropped: {dropped}; newly initialised: {new}")


def without_schedule(name: str) -> str:
    """The name of a weight in a model without a layer schedule, which has the encoding of pos= among others."""
    return name.replace("pos.encodings.0.", "pos.")


# ---- output ----


def describe(cfg: TrainConfig, factor: float) -> str:
    """For the start of a training: the parent run, its context and tokens, and the settings that differ now.

    factor: the extension factor of the scaling that the run is trained with.
    """
    name = cfg.init if ":" in (cfg.init or "") else f"{cfg.runs}/{cfg.init}"
    parent, tokens, scaling = cfg.pretrained, cfg.pretrained["tokens"], describe_knobs("scaling", cfg.scaling)
    before = f"with {parent['encoding']}" if "encoding" in parent else f"at ctx {parent['ctx']}"
    return (
        f"from {name}: pre-trained {before}{f' on {tokens:,} tokens' if tokens else ''}; "
        f"this run: ctx {cfg.ctx}, scaling={scaling} (factor {factor:g}), {describe_cost(cfg)}"
    )


def describe_extension(cfg: TrainConfig, context: TrainedContext) -> str:
    """For the start of an evaluation: at which contexts this run was pre-trained and fine-tuned."""
    if "encoding" in cfg.pretrained:
        before = f"{cfg.pretrained['run']}, with {cfg.pretrained['encoding']}"
        return f"pre-trained as {before}; then changed and trained at ctx {cfg.ctx}"
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
