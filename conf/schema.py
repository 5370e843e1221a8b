"""Types and ranges of train.py's settings. YAML holds the values; after `train_config` the code sees dataclasses.

A range stands beside its field, as Annotated[type, rule]. The knobs of an encoding, a scaling method, a corpus or a
task are typed by the signature of its function: conf/registry.py. The settings of eval.py are in conf/eval_schema.py,
those of sample.py in sample.py.
"""

import functools
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import UserError, check
from conf.registry import choices, yaml_values

# ---- rules ----


@dataclass(frozen=True)
class Rule:
    """A condition on a value. holds(value) tests it; the error message is `SETTING=VALUE: must be TEXT`."""

    holds: Callable[[Any], bool]
    text: str


def at_least(low: float) -> Rule:
    return Rule(lambda x: x >= low, f"at least {low}")


def above(low: float) -> Rule:
    return Rule(lambda x: x > low, f"above {low}")


def between(low: int, high: int) -> Rule:
    return Rule(lambda x: low <= x <= high, f"from {low} to {high}")


def one_of(*names: str) -> Rule:
    return Rule(lambda x: x in names, f"{', '.join(names[:-1])} or {names[-1]}")


LIMIT = 2**63  # what 64 bits hold
SIZE = between(1, 2**24)  # far above any model's, and products of two fit 64 bits
SEED = between(0, 2**63 - 1)  # what torch takes
CHOSEN = Rule(lambda x: isinstance(x.get("kind"), str), "chosen: a name, not removed")
FOLDER = Rule(bool, "the path of a folder")
PROJECT = Rule(lambda x: bool(re.fullmatch(r"[^/\\#?%:]{1,128}", x)), "1 to 128 characters without / \\ # ? % :")
SHARE = Rule(lambda x: 0 <= x <= 1, "between 0 and 1")
MOMENTUM = Rule(lambda x: 0 <= x < 1, "at least 0 and less than 1")
DATA_RULES = {  # of the keys that every corpus has
    "tokenizer": one_of("bpe", "bytes", "gpt2"),
    "vocab_size": Rule(lambda x: isinstance(x, int) and 257 <= x <= 2**18, "a whole number from 257 to 262144"),
    "holdout": Rule(lambda x: isinstance(x, int) and x >= 1, "a whole number, at least 1"),
}


def check_rules(settings: Any, prefix: str = "") -> None:
    """UserError for the first field whose value breaks the rule in its annotation, or is not finite.

    Nested dataclasses are included. Numbers among the knobs of a group are checked by `build_from_knobs`.
    """
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            check_rules(value, f"{prefix}{name}.")
        finite = not isinstance(value, int | float) or abs(value) < LIMIT  # false for NaN, too
        check(finite, f"{prefix}{name}", value, "a finite number below 2^63")
        for rule in getattr(hint, "__metadata__", ()):
            optional = "null or " if type(None) in typing.get_args(hint.__origin__) else ""
            check(value is None or rule.holds(value), f"{prefix}{name}", value, optional + rule.text)


# ---- the settings ----


@dataclass
class ModelConfig:
    """The network without its positional encoding: the keys of conf/model/*.yaml."""

    n_layers: Annotated[int, between(1, 1024)] = MISSING
    n_heads: Annotated[int, SIZE] = MISSING
    n_kv_heads: Annotated[int | None, SIZE] = None  # None: as many as n_heads; fewer: grouped-query attention
    head_dim: Annotated[int | None, SIZE] = None  # None: width / n_heads
    width: Annotated[int, SIZE] = MISSING
    mlp: Annotated[str, one_of("gelu", "gelu_exact", "relu2", "swiglu", "geglu")] = "gelu"  # gelu: tanh approximation
    mlp_ratio: Annotated[int, SIZE] = 4
    mlp_width: Annotated[int | None, SIZE] = None  # None: mlp_ratio * width, and 2/3 of it with a gate
    tied_head: bool = True
    norm: Annotated[str, one_of("rms", "layer")] = "rms"  # layer: LayerNorm
    norm_bias: bool = True  # whether LayerNorm has biases; false for Cohere 2 and MPT
    norm_eps: Annotated[float, above(0)] = 1e-6
    qk_norm: bool = False  # divide each head of q and k by its root mean square
    qk_norm_weight: bool = False  # and multiply by a weight for each of its dimensions, as Qwen3
    qk_norm_all_heads: bool = False  # by the root mean square of all heads together, as OLMo 2
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    # parallel: attention and MLP read the same x (GPT-NeoX); parallel_shared: through one norm (GPT-J);
    # serial_post: serial, with the norms after attention and MLP instead of before them (OLMo 2);
    # serial_both: with norms before and after them (Gemma 3)
    residual: Annotated[str, one_of("serial", "serial_post", "serial_both", "parallel", "parallel_shared")] = "serial"

    @property
    def head_width(self) -> int:
        """D, the dimensions of one head."""
        return self.head_dim or self.width // self.n_heads

    @property
    def kv_heads(self) -> int:
        """G, the number of key-value heads."""
        return self.n_kv_heads or self.n_heads


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule (engine/optimizer.py): the keys of conf/optim/*.yaml."""

    lr: Annotated[float, above(0)] = MISSING  # the peak
    warmup: Annotated[int, at_least(0)] = MISSING  # steps
    final_lr: Annotated[float, SHARE] = 0.0  # at the last step, as a share of the peak
    beta1: Annotated[float, MOMENTUM] = 0.9
    beta2: Annotated[float, MOMENTUM] = 0.95
    weight_decay: Annotated[float, at_least(0)] = 0.1  # on matrices only
    clip: Annotated[float, above(0)] = 1.0  # maximum norm of the gradient


@dataclass
class CommonConfig:
    """The settings that training, evaluation and generation have in common, documented in conf/train.yaml."""

    scaling: Annotated[dict[str, Any], CHOSEN] = field(default_factory=lambda: {"kind": "none"})
    plus: Any = None  # names of scaling methods that are added to `scaling`; a list after `name_list`
    dtype: Annotated[str, one_of("auto", "float32", "bfloat16")] = "auto"
    kernel: Annotated[str, one_of("auto", "triton", "torch")] = "auto"
    device: str = "auto"
    runs: Annotated[str, FOLDER] = "runs"
    cache: Annotated[str, FOLDER] = ".cache"

    @property
    def scalings(self) -> list[dict]:
        """The knobs of the scaling method and of those added to it."""
        return [self.scaling, *(yaml_values("scaling", name) for name in self.plus or [])]


@dataclass
class TrainConfig(CommonConfig):
    """All settings of a training; their meaning is documented in conf/train.yaml. They are saved with the run.

    pos, data and scaling are the contents of one yaml of their group: `kind` and the knobs of that kind, which are
    checked against the signature of the function they are for (conf/registry.py). MISSING: the yaml must set it.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pos: Annotated[dict[str, Any], CHOSEN] = field(default_factory=dict)
    data: Annotated[dict[str, Any], CHOSEN] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)  # resolved by conf/layer_schedule.py; {}: uniform
    exp: str = ""
    attention: Annotated[str, one_of("softmax", "linear")] = "softmax"
    init: str | None = None  # a trained run or a foreign checkpoint whose weights this one starts from
    # Set by train.py for a run with init=: name and digest of the parent run (run, weights), and the context and number
    # of tokens of the pre-training (ctx, tokens)
    pretrained: dict[str, Any] = field(default_factory=dict)
    ctx: Annotated[int, at_least(1)] = MISSING
    positions: Annotated[str, one_of("ordered", "random", "pose")] = "ordered"
    longest: int | None = None  # with positions=random or pose: positions are drawn from 0 .. longest - 1
    ctx_start: Annotated[int | None, at_least(1)] = None
    ctx_full_at: Annotated[float, SHARE] = 0.6
    batch_tokens: Annotated[int, at_least(1)] = MISSING
    micro_tokens: Annotated[int, at_least(1)] = MISSING
    steps: Annotated[int, at_least(1)] = MISSING
    seed: Annotated[int, SEED] = 0
    shard: bool = False
    recompute: bool = False
    val_every: Annotated[int, at_least(1)] = MISSING
    val_windows: Annotated[int, at_least(1)] = MISSING
    # Run control: these may change when a run is resumed, as kernel, device, runs and cache may.
    name: str | None = None
    fresh: bool = False
    save_every: Annotated[int, at_least(1)] = MISSING
    log_every: Annotated[int, at_least(1)] = MISSING
    compile: Annotated[str, one_of("auto", "true", "false")] = "auto"
    project: Annotated[str, PROJECT] = "ropewalk"


# Settings that do not change the trained weights: a run is resumed although they differ (`differences`)
RUN_CONTROL = ("name", "fresh", "save_every", "log_every", "compile", "recompute", "kernel", "device", "runs", "cache",
               "project")  # fmt: skip


ConfigStore.instance().store(name="train_schema", node=TrainConfig)


# ---- from Hydra's config to checked settings ----


def train_config(cfg: DictConfig) -> TrainConfig:
    """The checked settings of train.py, from Hydra's configuration. UserError names the first wrong one.

    Fills in the defaults that depend on other settings: the run's name, and `longest` for random positions.
    """
    c: TrainConfig = to_object(cfg, TrainConfig)
    c.compile = c.compile.lower()  # YAML reads true and false as booleans, which arrive as True and False
    check_rules(c)
    if not c.name:
        from conf.run_name import default_name

        c.name = default_name(c)
    ok = bool(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{,199}", c.name))
    check(ok, "name", c.name, "of letters, digits, . _ -, at most 200 of them")
    check(c.batch_tokens % c.ctx == 0, "batch_tokens", c.batch_tokens, f"a multiple of ctx={c.ctx}")
    if c.positions != "ordered":
        c.longest = c.longest or 8 * c.ctx
        check(c.longest >= c.ctx, "longest", c.longest, f"at least ctx={c.ctx}")
    if c.ctx_start:
        check(c.ctx % c.ctx_start == 0, "ctx_start", c.ctx_start, f"null or a divisor of ctx={c.ctx}")
        check(c.positions == "ordered", "ctx_start", c.ctx_start, f"null with positions={c.positions}")
    c.plus = name_list(c.plus, "plus", "scaling")
    m, d = c.model, c.data
    ok = m.width % m.n_heads == 0 or m.head_dim is not None
    check(ok, "model.width", m.width, f"a multiple of model.n_heads={m.n_heads}")
    check(m.n_heads % m.kv_heads == 0, "model.n_kv_heads", m.n_kv_heads, f"a divisor of model.n_heads={m.n_heads}")
    for key in ("qk_norm_weight", "qk_norm_all_heads"):
        check(m.qk_norm or not getattr(m, key), f"model.{key}", getattr(m, key), "false without model.qk_norm")
    check(m.norm == "layer" or m.norm_bias, "model.norm_bias", m.norm_bias, "true without model.norm=layer")
    check(not (m.tied_head and m.head_bias), "model.head_bias", m.head_bias, "false with model.tied_head")
    for key, rule in DATA_RULES.items():
        check(rule.holds(d.get(key)), f"data.{key}", d.get(key), rule.text)
    if c.layers and not c.init:  # with init=RUN they depend on that run: engine/finetune.py
        from conf.layer_schedule import resolve_layers

        c.layers = resolve_layers(c)
    return c


def name_list(value: Any, setting: str, group: str) -> list[str]:
    """A list of names of conf/GROUP, from nothing, one name or a list. UserError for an unknown name."""
    value = [] if value in (None, "") else value if isinstance(value, list) else [value]
    for name in value:
        check(name in choices(group), setting, name, f"one of {', '.join(choices(group))}")
    return value


def from_dict(plain: dict) -> TrainConfig:
    """A TrainConfig from the dictionary in a checkpoint or a config.json. UserError if it is something else."""
    check_rules(c := to_object(OmegaConf.create(plain), TrainConfig))
    return c


schema_of = functools.cache(OmegaConf.structured)  # of a dataclass; merging copies it


def to_object(cfg: DictConfig, kind: type[Any]) -> Any:
    """cfg as an instance of the dataclass `kind`, with nested dataclasses.

    UserError for a missing value, an unknown key, a value of a wrong type or an interpolation that cannot be resolved.
    """
    try:
        # As plain values: a DictConfig may have keys that its schema lacks, added with +KEY=VALUE
        merged = OmegaConf.merge(schema_of(kind), OmegaConf.to_container(cfg, resolve=True))
        if missing := OmegaConf.missing_keys(merged):
            raise UserError(f"{', '.join(sorted(missing))}: must be given a value")
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as e:
        from conf.hydra_messages import settings_error

        raise settings_error(e, cfg) from e
