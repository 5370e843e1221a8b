"""init=: start from the weights of a trained run or of a foreign checkpoint, with its encoding or another one."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from conf import layer_schedule
from conf.cli import overrides
from conf.errors import UserError
from conf.registry import describe as describe_knobs
from conf.schema import TrainConfig
from engine import distributed
from model import gpt
from model.pos.rope import Rope
from model.scaling import NO_CHANGE, TrainedContext


@dataclass(frozen=True)
class Parent:
    """What a training that starts from init= takes from there.

    Made by `parent_run` of engine/run.py, or by `foreign_parent` of hf/open.py.
    """

    cfg: TrainConfig  # its model, data, attention, pos and layers are inherited
    weights: dict[str, Tensor]
    tokenizer: str | None  # of the corpus that is trained on, as JSON; None: that of the corpus
    corpus: str | None  # the key of its corpus, if it must be the same
    pretrained: dict[str, Any]  # context and tokens of the pre-training, name and digest: TrainConfig.pretrained
    fixed: tuple[str, ...] = ("model", "data", "attention")  # settings and groups that cannot be chosen


def inherit(cfg: TrainConfig, parent: Parent) -> None:
    """Copy the parent's model, data and attention settings into cfg, and record the parent in it.

    pos, layers and scaling are copied too, unless the command line changes them. UserError for a setting that the
    parent fixes.
    """
    for key in parent.fixed:
        if fixed := [o for o in overrides() if re.match(rf"{re.escape(key)}[.=]", o)]:
            raise UserError(f"init={cfg.init}: {fixed[0]} cannot be chosen, it comes from that run")
    old = parent.cfg
    cfg.model, cfg.data, cfg.attention, cfg.pretrained = old.model, old.data, old.attention, dict(parent.pretrained)
    choose_encoding(cfg, old)


# ---- another encoding than the parent's ----


def choose_encoding(cfg: TrainConfig, old: TrainConfig) -> None:
    """Set cfg.pos and cfg.layers to those of the parent, unless the command line changes them.

    pos=NAME replaces the encoding, pos.KNOB=VALUE a knob of the parent's, layers=NAME the layer schedule. A
    change is recorded in cfg.pretrained; without one, the scaling is the parent's, too. UserError for a change after
    which the weights would be of no use.
    """
    given = {o.partition("=")[0] for o in overrides()}
    if "pos" not in given:
        if cfg.pos["kind"] not in ("rope", old.pos["kind"]):  # the schedule replaces the default, rope
            raise UserError(f"layers={cfg.layers['name']}: its pos={cfg.pos['kind']} must be chosen as well with init=")
        cfg.pos = old.pos | given_knobs("pos", cfg.pos, given)
    if cfg.layers:
        cfg.layers = layer_schedule.resolve(cfg.layers, cfg.model.n_layers, cfg.ctx, cfg.pos)
    elif "layers" not in given:
        cfg.layers = old.layers
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
            cfg.pretrained.pop("longest", None)
    elif "scaling" not in given:
        cfg.scaling = old.scaling | given_knobs("scaling", cfg.scaling, given)
        cfg.plus = cfg.plus if "plus" in given else old.plus


def given_knobs(group: str, knobs: dict, given: Collection[str]) -> dict:
    """Those of a group's knobs that the command line sets."""
    return {knob: knobs.get(knob) for knob in (x.removeprefix(f"{group}.") for x in given if x.startswith(f"{group}."))}


def rotations(cfg: TrainConfig) -> set[tuple[int | None, tuple[float, ...]]]:
    """How the layers rotate: (P of pairs (i, i + P), or None for pairs (2i, 2i + 1); the frequencies)."""
    encoding = gpt.build_encoding(cfg)
    parts = getattr(encoding, "encodings", [encoding])  # those of a layer schedule
    return {
        (None if e.interleaved else len(e.inv_freq) + e.still, tuple(e.frequencies(NO_CHANGE).tolist()))
        for e in parts
        if isinstance(e, Rope)
    }


def load_weights(model: gpt.GPT, parent: Parent, cfg: TrainConfig) -> None:
    """Load the parent's weights into a new model. If its encoding is another, print what is kept, dropped and new.

    Then all weights are kept but those of an encoding that the new model lacks, that have another shape in it, or that
    are not trained and follow from other settings of pos= (FoPE's coefficients).
    """
    if "encoding" not in cfg.pretrained:
        model.load_state_dict(parent.weights)
        return
    own, found = model.state_dict(), {without_schedule(name): x for name, x in parent.weights.items()}
    computed = {name for name, _ in model.named_buffers()} if cfg.pos != parent.cfg.pos else set()
    same = {name: found.get(without_schedule(name)) for name in own.keys() - computed}
    kept = {name: x for name, x in same.items() if x is not None and x.shape == own[name].shape}
    model.load_state_dict(own | kept)
    new = ", ".join(sorted(own.keys() - kept)) or "nothing"
    dropped = ", ".join(sorted(found.keys() - set(map(without_schedule, kept)))) or "nothing"
    change = f"{cfg.pretrained['encoding']} -> {gpt.describe_encoding(cfg)}"
    distributed.say(f"{change}: kept {len(kept)} tensors; dropped: {dropped}; newly initialised: {new}")


def without_schedule(name: str) -> str:
    """The name of a weight in a model without a layer schedule, which has the encoding of pos= among others."""
    return name.replace("pos.encodings.0.", "pos.")


# ---- output ----


def before(cfg: TrainConfig) -> str:
    """How the parent was trained."""
    return f"with {cfg.pretrained['encoding']}" if "encoding" in cfg.pretrained else f"at ctx {cfg.pretrained['ctx']}"


def method(cfg: TrainConfig) -> str:
    """The scaling that the run is trained with: `ntk + logn`."""
    return " + ".join([describe_knobs("scaling", cfg.scaling), *(cfg.plus or [])])


def describe(cfg: TrainConfig, factor: float) -> str:
    """For the start of a training: where it starts, its settings, and its share of the pre-training's tokens.

    The share makes toy and full scale comparable: few steps can be a large part of a short pre-training. factor: the
    extension factor of the scaling that the run is trained with.
    """
    of, tokens = cfg.pretrained["tokens"], cfg.steps * cfg.batch_tokens
    share = f", {tokens / of:.2%} of the pre-training's {of:,}" if of else ""
    this = f"ctx {cfg.ctx}, scaling={method(cfg)} (factor {factor:g}), {tokens:,} tokens{share}"
    return f"from {cfg.init}: pre-trained {before(cfg)}; this run: {this}"


def describe_extension(cfg: TrainConfig, context: TrainedContext) -> str:
    """For the start of an evaluation: at which contexts this run was pre-trained and fine-tuned."""
    now = f"scaling=none keeps it, and the window control sees {context.longest_trained_ctx} tokens"
    return f"pre-trained {before(cfg)}, then trained at ctx {cfg.ctx} with scaling={method(cfg)}: {now}"
