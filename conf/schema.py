"""Types and ranges of train.py's settings. YAML holds the values; after `train_config` the code sees dataclasses.

A range stands beside its field, as Annotated[type, rule]. The knobs of an encoding, a scaling method, a corpus or a
task are typed by the signature of its function: conf/registry.py. The settings of eval.py are in conf/eval_schema.py,
those of sample.py in sample.py.
"""

import functools
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

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


def one_of(*names: str) -> Rule:
    return Rule(lambda x: x in names, f"{', '.join(names[:-1])} or {names[-1]}")


SHARE = Rule(lambda x: 0 <= x <= 1, "between 0 and 1")
MOMENTUM = Rule(lambda x: 0 <= x < 1, "at least 0 and less than 1")
DATA_RULES = {  # of the keys that every corpus has
    "tokenizer": one_of("bpe", "bytes", "gpt2"),
    "vocab_size": Rule(lambda x: isinstance(x, int) and 257 <= x <= 2**18, "a whole number from 257 to 262144"),
    "holdout": Rule(lambda x: isinstance(x, int) and x >= 1, "a whole number, at least 1"),
}


def check_rules(settings: Any, prefix: str = "") -> None:
    """UserError for the first field whose value breaks the rule in its annotation; nested dataclasses are included."""
    for name, hint in typing.get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        if is_dataclass(value):
            check_rules(value, f"{prefix}{name}.")
        for rule in getattr(hint, "__metadata__", ()):
            optional = "null or " if type(None) in typing.get_args(hint.__origin__) else ""
            check(value is None or rule.holds(value), f"{prefix}{name}", value, optional + rule.text)


# ---- the settings ----


@dataclass
class ModelConfig:
    """The network without its positional encoding: the keys of conf/model/*.yaml."""

    n_layers: Annotated[int, at_least(1)] = MISSING
    n_heads: Annotated[int, at_least(1)] = MISSING
    n_kv_heads: int | None = None  # None: as many as n_heads; fewer: grouped-query attention
    head_dim: Annotated[int | None, at_least(1)] = None  # None: width / n_heads
    width: Annotated[int, at_least(1)] = MISSING
    mlp: Annotated[str, one_of("gelu", "gelu_exact", "swiglu")] = "gelu"  # gelu: the tanh approximation
    mlp_ratio: Annotated[int, at_least(1)] = 4
    mlp_width: Annotated[int | None, at_least(1)] = None  # None: mlp_ratio * width, and 2/3 of it for swiglu
    tied_head: bool = True
    norm: Annotated[str, one_of("rms", "layer")] = "rms"  # layer: LayerNorm, with biases
    norm_eps: Annotated[float, above(0)] = 1e-6
    qk_norm: bool = False  # divide each head of q and k by its root mean square
    qk_norm_weight: bool = False  # and multiply by a weight for each of its dimensions, as Qwen3
    qk_norm_all_heads: bool = False  # by the root mean square of all heads together, as OLMo 2
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    # parallel: attention and MLP read the same x (GPT-NeoX); parallel_shared: through one norm (GPT-J);
    # serial_post: serial, with the norms after attention and MLP instead of before them (OLMo 2)
    residual: Annotated[str, one_of("serial", "serial_post", "parallel", "parallel_shared")] = "serial"

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

    scaling: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
    plus: Any = None  # names of scaling methods that are added to `scaling`; a list after `name_list`
    dtype: Annotated[str, one_of("auto", "float32", "bfloat16")] = "auto"
    kernel: Annotated[str, one_of("auto", "triton", "torch")] = "auto"
    device: str = "auto"
    runs: str = "runs"
    cache: str = ".cache"

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
    pos: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    exp: str = ""
    attention: Annotated[str, one_of("softmax", "linear")] = "softmax"
    init: str | None = None  # a trained run or a foreign checkpoint whose weights this one starts from
    # Set by train.py for a run with init=: name and digest of the parent run (run, weights), and the context and number
    # of tokens of the pre-training (ctx, tokens)
    pretrained: dict[str, Any] = field(default_factory=dict)
    ctx: Annotated[int, at_least(1)] = MISSING
    positions: Annotated[str, one_of("ordered", "random", "pose")] = "ordered"
    longest: int | None = None  # with positions=random or pose: positions are drawn from 0 .. longest - 1
    batch_tokens: Annotated[int, at_least(1)] = MISSING
    micro_tokens: Annotated[int, at_least(1)] = MISSING
    steps: Annotated[int, at_least(1)] = MISSING
    seed: Annotated[int, at_least(0)] = 0
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
    project: str = "ropewalk"


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
    c.name = c.name or _default_name(c)
    ok = bool(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", c.name))
    check(ok, "name", c.name, "of letters, digits, . _ -")
    check_rules(c)
    check(c.batch_tokens % c.ctx == 0, "batch_tokens", c.batch_tokens, f"a multiple of ctx={c.ctx}")
    if c.positions != "ordered":
        c.longest = c.longest or 8 * c.ctx
        check(c.longest >= c.ctx, "longest", c.longest, f"at least ctx={c.ctx}")
    c.plus = name_list(c.plus, "plus", "scaling")
    m, d = c.model, c.data
    ok = m.width % m.n_heads == 0 or m.head_dim is not None
    check(ok, "model.width", m.width, f"a multiple of model.n_heads={m.n_heads}")
    ok = m.n_kv_heads is None or (m.n_kv_heads >= 1 and m.n_heads % m.n_kv_heads == 0)
    check(ok, "model.n_kv_heads", m.n_kv_heads, f"a divisor of model.n_heads={m.n_heads}")
    for key in ("qk_norm_weight", "qk_norm_all_heads"):
        check(m.qk_norm or not getattr(m, key), f"model.{key}", getattr(m, key), "false without model.qk_norm")
    check(not (m.tied_head and m.head_bias), "model.head_bias", m.head_bias, "false with model.tied_head")
    for key, rule in DATA_RULES.items():
        check(rule.holds(d[key]), f"data.{key}", d[key], rule.text)
    return c


def name_list(value: Any, setting: str, group: str) -> list[str]:
    """A list of names of conf/GROUP, from nothing, one name or a list. UserError for an unknown name."""
    value = [] if value in (None, "") else value if isinstance(value, list) else [value]
    for name in value:
        check(name in choices(group), setting, name, f"one of {', '.join(choices(group))}")
    return value


def from_dict(plain: dict) -> TrainConfig:
    """A TrainConfig from the dictionary in a checkpoint or a config.json. UserError if it is something else."""
    return to_object(OmegaConf.create(plain), TrainConfig)


schema_of = functools.cache(OmegaConf.structured)  # of a dataclass; merging copies it


def to_object(cfg: DictConfig, kind: type[Any]) -> Any:
    """cfg as an instance of the dataclass `kind`, with nested dataclasses.

    UserError for a missing value, an unknown key, a value of a wrong type or an interpolation that cannot be resolved.
    """
    try:
        # As plain values: a DictConfig may have keys that its schema lacks, added with +KEY=VALUE
        merged = OmegaConf.merge(schema_of(kind), OmegaConf.to_container(cfg))
        if missing := OmegaConf.missing_keys(merged):
            raise UserError(f"{', '.join(sorted(missing))}: must be given a value")
        return OmegaConf.to_object(merged)
    except ConfigKeyError as e:
        there_are = ", ".join(f.name for f in fields(typing.cast(Any, e.object_type)))
        value = OmegaConf.select(cfg, str(e.full_key))
        raise UserError(f"{e.full_key}={value}: no such setting; there are {there_are}") from None
    except OmegaConfBaseException as e:
        from conf.hydra_messages import hydra_message

        raise UserError(hydra_message(e)) from e


def _default_name(c: TrainConfig) -> str:
    """The run's name from the command line: `rope`, `alibi-seed1`, `rope-tiny-lr0.001`.

    First the encoding (or the parent run), then the chosen groups and the other settings, each sorted by key, so that
    the order of the arguments does not matter.
    """
    hydra = HydraConfig.get()
    groups, settings = [], []
    for override in sorted(hydra.overrides.task):
        key, _, value = override.lstrip("+~").partition("=")
        if key in ("model", "data", "optim", "exp", "scaling", "attention", "positions"):
            groups.append(value)
        elif key not in ("pos", "init", *RUN_CONTROL):
            settings.append(key.rpartition(".")[2] + value)
    name = "-".join([c.init or hydra.runtime.choices["pos"], *groups, *settings])
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("_")
