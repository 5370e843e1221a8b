"""Types and ranges of every setting. YAML holds the values; past `main` the code sees these dataclasses only.

The knobs of an encoding, a scaling method or a corpus are typed by its own function's signature: conf/registry.py.
"""

import re
import typing
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.errors import check, one_line
from conf.registry import choices


@dataclass
class ModelConfig:
    n_layers: int = MISSING
    n_heads: int = MISSING
    n_kv_heads: int | None = None  # None: as many as n_heads; fewer: grouped-query attention
    head_dim: int | None = None  # None: width / n_heads
    width: int = MISSING
    mlp: str = "gelu"  # gelu (by tanh), gelu_exact or swiglu
    mlp_ratio: int = 4
    mlp_width: int | None = None  # None: mlp_ratio * width, and 2/3 of it for swiglu
    tied_head: bool = True
    norm: str = "rms"  # rms, or layer: LayerNorm, with biases
    norm_eps: float = 1e-6
    qk_norm: bool = False  # divide each head of q and k by its root mean square
    qk_norm_weight: bool = False  # and multiply by a weight for each of its dimensions, as Qwen3
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    residual: str = "serial"  # or parallel: attention and MLP read the same x (GPT-NeoX); parallel_shared: by one norm

    @property
    def head_width(self) -> int:
        return self.head_dim or self.width // self.n_heads

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads


@dataclass
class OptimConfig:
    lr: float = MISSING  # the peak
    warmup: int = MISSING  # steps
    final_lr: float = 0.0  # at the last step, as a share of the peak
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # of the gradient's norm


@dataclass
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    pos: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    scaling: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
    plus: Any = None  # names of scaling methods on top
    exp: str = ""
    attention: str = "softmax"
    init: str | None = None  # a trained run whose weights this one starts from
    pretrained: dict[str, Any] = field(default_factory=dict)  # what train.py knows of it: run, weights, ctx, tokens
    ctx: int = MISSING
    positions: str = "ordered"
    longest: int | None = None  # with positions=random or pose: positions are drawn from 0 .. longest - 1
    batch_tokens: int = MISSING
    micro_tokens: int = MISSING
    steps: int = MISSING
    seed: int = 0
    dtype: str = "auto"
    shard: bool = False
    val_every: int = MISSING
    val_windows: int = MISSING
    # run control: may differ between a run's start and its continuation
    name: str | None = None
    fresh: bool = False
    save_every: int = MISSING
    log_every: int = MISSING
    compile: str = "auto"
    kernel: str = "auto"
    device: str = "auto"
    runs: str = "runs"
    cache: str = ".cache"
    project: str = "ropewalk"


RUN_CONTROL = ("name", "fresh", "save_every", "log_every", "compile", "kernel", "device", "runs", "cache", "project")


@dataclass
class EvalConfig:
    scaling: dict[str, Any] = field(default_factory=dict)
    plus: Any = None
    protocol: str = "matched"
    stride: int = 256
    positions: bool = False
    ctx: Any = MISSING
    run: str | None = None
    train_ctx: int | None = None
    data: dict[str, Any] = field(default_factory=dict)
    trained_with: str | None = None
    documents: int = MISSING
    score: int = MISSING
    fresh: bool = False
    dtype: str = "auto"
    kernel: str = "auto"
    device: str = "auto"
    runs: str = "runs"
    cache: str = ".cache"
    project: str = "ropewalk"


@dataclass
class SampleConfig:
    scaling: dict[str, Any] = field(default_factory=dict)
    plus: Any = None
    prompt: str = ""
    tokens: int = MISSING
    temperature: float = MISSING
    top_k: int | None = None
    seed: int = 0
    decode: str = "exact"
    run: str | None = None
    trained_with: str | None = None
    dtype: str = "auto"
    kernel: str = "auto"
    device: str = "auto"
    runs: str = "runs"
    cache: str = ".cache"


store = ConfigStore.instance()
store.store(name="train_schema", node=TrainConfig)
store.store(name="eval_schema", node=EvalConfig)
store.store(name="sample_schema", node=SampleConfig)


def train_config(cfg: DictConfig) -> TrainConfig:
    c: TrainConfig = _to_object(cfg, TrainConfig)
    for key in ("ctx", "batch_tokens", "micro_tokens", "steps", "save_every", "log_every", "val_every", "val_windows"):
        check(getattr(c, key) >= 1, key, getattr(c, key), "at least 1")
    check(c.seed >= 0, "seed", c.seed, "at least 0")
    check(c.dtype in ("auto", "float32", "bfloat16"), "dtype", c.dtype, "auto, float32 or bfloat16")
    c.compile = c.compile.lower()  # YAML reads true and false as booleans
    check(c.compile in ("auto", "true", "false"), "compile", c.compile, "auto, true or false")
    check(c.batch_tokens % c.ctx == 0, "batch_tokens", c.batch_tokens, f"a multiple of ctx={c.ctx}")
    check(c.attention in ("softmax", "linear"), "attention", c.attention, "softmax or linear")
    check(c.positions in ("ordered", "random", "pose"), "positions", c.positions, "ordered, random or pose")
    if c.positions != "ordered":
        c.longest = c.longest or 8 * c.ctx
        check(c.longest >= c.ctx, "longest", c.longest, f"at least ctx={c.ctx}")
    c.plus = names(c.plus, "plus", "scaling")
    m, o = c.model, c.optim
    for key in ("n_layers", "n_heads", "width", "mlp_ratio"):
        check(getattr(m, key) >= 1, f"model.{key}", getattr(m, key), "at least 1")
    for key in ("head_dim", "mlp_width"):
        check(getattr(m, key) is None or getattr(m, key) >= 1, f"model.{key}", getattr(m, key), "null or at least 1")
    ok = m.width % m.n_heads == 0 or m.head_dim is not None
    check(ok, "model.width", m.width, f"a multiple of model.n_heads={m.n_heads}")
    ok = m.n_kv_heads is None or (m.n_kv_heads >= 1 and m.n_heads % m.n_kv_heads == 0)
    check(ok, "model.n_kv_heads", m.n_kv_heads, f"a divisor of model.n_heads={m.n_heads}")
    check(m.mlp in ("gelu", "gelu_exact", "swiglu"), "model.mlp", m.mlp, "gelu, gelu_exact or swiglu")
    check(m.norm in ("rms", "layer"), "model.norm", m.norm, "rms or layer")
    ok = m.residual in ("serial", "parallel", "parallel_shared")
    check(ok, "model.residual", m.residual, "serial, parallel or parallel_shared")
    check(m.qk_norm or not m.qk_norm_weight, "model.qk_norm_weight", m.qk_norm_weight, "false without model.qk_norm")
    check(not (m.tied_head and m.head_bias), "model.head_bias", m.head_bias, "false with model.tied_head")
    check(m.norm_eps > 0, "model.norm_eps", m.norm_eps, "above 0")
    check(o.lr > 0, "optim.lr", o.lr, "above 0")
    check(o.warmup >= 0, "optim.warmup", o.warmup, "at least 0")
    check(0 <= o.final_lr <= 1, "optim.final_lr", o.final_lr, "between 0 and 1")
    for key in ("beta1", "beta2"):
        check(0 <= getattr(o, key) < 1, f"optim.{key}", getattr(o, key), "at least 0 and less than 1")
    check(o.weight_decay >= 0, "optim.weight_decay", o.weight_decay, "at least 0")
    check(o.clip > 0, "optim.clip", o.clip, "above 0")
    d = c.data
    check(d["tokenizer"] in ("bpe", "bytes", "gpt2"), "data.tokenizer", d["tokenizer"], "bpe, bytes or gpt2")
    ok = isinstance(d["vocab_size"], int) and 257 <= d["vocab_size"] <= 2**18
    check(ok, "data.vocab_size", d["vocab_size"], "a whole number from 257 to 262144")
    check(
        isinstance(d["holdout"], int) and d["holdout"] >= 1, "data.holdout", d["holdout"], "a whole number, at least 1"
    )
    c.name = c.name or _default_name(c)
    check(
        bool(re.fullmatch(r"[A-Za-z0-9._-]+", c.name)) and c.name[0] != ".", "name", c.name, "of letters, digits, . _ -"
    )
    return c


def eval_config(cfg: DictConfig) -> EvalConfig:
    c: EvalConfig = _to_object(cfg, EvalConfig)
    lengths = c.ctx if isinstance(c.ctx, list) else [c.ctx]
    ok = bool(lengths) and all(isinstance(n, int) and not isinstance(n, bool) for n in lengths)
    check(ok, "ctx", c.ctx, "a whole number, or a list of them: ctx=8192 or ctx=[256,1024]")
    check(c.score >= 1, "score", c.score, "at least 1")
    check(min(lengths) >= c.score, "ctx", c.ctx, f"at least score={c.score}, the number of tokens that are scored")
    c.plus = names(c.plus, "plus", "scaling")
    ok = c.protocol in ("matched", "sliding", "prefix")
    check(ok, "protocol", c.protocol, "matched, sliding or prefix")
    check(c.stride >= 1, "stride", c.stride, "at least 1")
    check(c.documents >= 1, "documents", c.documents, "at least 1")
    if not (c.run or "").startswith("hf:"):
        check(not c.data, "data", c.data.get("kind"), "left out: a run is read on its own, only run=hf:PATH on any")
        check(c.train_ctx is None, "train_ctx", c.train_ctx, "left out: a run knows its own, only run=hf:PATH may not")
    check(c.train_ctx is None or c.train_ctx >= 1, "train_ctx", c.train_ctx, "at least 1")
    check(c.dtype in ("auto", "float32", "bfloat16"), "dtype", c.dtype, "auto, float32 or bfloat16")
    return c


def names(value: Any, setting: str, group: str) -> list[str]:
    """A list of names of conf/GROUP, given as nothing, one name or a list."""
    value = [] if value in (None, "") else value if isinstance(value, list) else [value]
    for name in value:
        check(name in choices(group), setting, name, f"one of {', '.join(choices(group))}")
    return value


def sample_config(cfg: DictConfig) -> SampleConfig:
    c: SampleConfig = _to_object(cfg, SampleConfig)
    c.plus = names(c.plus, "plus", "scaling")
    check(c.tokens >= 1, "tokens", c.tokens, "at least 1")
    check(c.temperature >= 0, "temperature", c.temperature, "at least 0 (0 takes the likeliest token)")
    check(c.top_k is None or c.top_k >= 1, "top_k", c.top_k, "at least 1, or null for all tokens")
    check(c.seed >= 0, "seed", c.seed, "at least 0")
    check(c.decode in ("exact", "rebased"), "decode", c.decode, "exact or rebased")
    check(c.dtype in ("auto", "float32", "bfloat16"), "dtype", c.dtype, "auto, float32 or bfloat16")
    return c


def from_dict(plain: dict) -> TrainConfig:
    """A TrainConfig as a checkpoint or a run's config.json holds it. ValueError if it is something else."""
    try:
        return typing.cast(TrainConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), plain)))
    except OmegaConfBaseException as e:
        raise ValueError(one_line(e)) from None


def differences(new: TrainConfig, old: TrainConfig) -> list[str]:
    """'key=new (the run has old)' for every setting that shapes the result and differs."""

    def flat(c: Any, prefix: str = "") -> dict[str, Any]:
        if isinstance(c, ModelConfig | OptimConfig | TrainConfig):
            c = {
                f.name: getattr(c, f.name)
                for f in fields(c)
                if c.__class__ is not TrainConfig or f.name not in RUN_CONTROL
            }
        if not isinstance(c, dict):
            return {prefix: c}
        return {k: v for key, value in c.items() for k, v in flat(value, f"{prefix}.{key}".lstrip(".")).items()}

    a, b = flat(new), flat(old)
    missing = "nothing"
    keys = [k for k in {**a, **b} if a.get(k, missing) != b.get(k, missing)]
    return [f"{k}={a.get(k, missing)} (the run has {b.get(k, missing)})" for k in keys]


def _to_object(cfg: DictConfig, kind: type) -> Any:
    missing = OmegaConf.missing_keys(cfg)
    if missing:
        raise ValueError(f"{', '.join(sorted(missing))}: must be given a value")
    # OmegaConf lets +foo=1 through
    for prefix, node, schema in (
        ("", cfg, kind),
        *((f"{f.name}.", cfg[f.name], f.type) for f in fields(kind) if f.type in (ModelConfig, OptimConfig)),
    ):
        known = [f.name for f in fields(schema)]
        if unknown := [k for k in node if k not in known]:
            raise ValueError(f"{prefix}{unknown[0]}={node[unknown[0]]}: no such setting; there are {', '.join(known)}")
    obj = OmegaConf.to_object(cfg)
    if not isinstance(obj, kind):
        raise ValueError(f"the settings are not those of {kind.__name__}: keep its schema first in the defaults list")
    return obj


def _default_name(c: TrainConfig) -> str:
    """rope, alibi-seed1, rope-tiny-lr0.001: the encoding, then whatever else the command line chose, sorted."""
    if not HydraConfig.initialized():
        return "run"
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
