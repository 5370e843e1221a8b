"""Every setting of train.py, eval.py, recommend.py and sample.py: its type, default, meaning and range, once.

`from_hydra` turns Hydra's configuration into these dataclasses. The knobs of an encoding, a scaling method, a corpus or
a task are typed by the signature of its function: conf/registry.py.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf import layer_schedule
from conf.errors import UserError, check
from conf.registry import build_from_knobs, check_type, choices, has_type, yaml_values

# ---- rules ----


@dataclass(frozen=True)
class Rule:
    """A condition on a value. holds(value) tests it; the error message is `SETTING=VALUE: must be TEXT`."""

    holds: Callable[[Any], Any]  # what it returns is true or false
    text: str


def at_least(low: float) -> Rule:
    return Rule(lambda x: x >= low, f"at least {low}")


def above(low: float) -> Rule:
    return Rule(lambda x: x > low, f"above {low}")


def between(low: int, high: int) -> Rule:
    return Rule(lambda x: low <= x <= high, f"from {low} to {high}")


def one_of(*names: str) -> Rule:
    return Rule(lambda x: x in names, f"{', '.join(names[:-1])} or {names[-1]}")


METHODS = choices("scaling")
PLUS = Rule(lambda x: has_type(x, list[str]) and {*x} <= {*METHODS}, f"names of conf/scaling: {', '.join(METHODS)}")
SIZE = between(1, 2**24)  # far above any model's, and products of two fit 64 bits
FOLDER = Rule(bool, "the path of a folder")
CHOSEN = Rule(lambda x: isinstance(x.get("kind"), str), "chosen: a name, not removed")
NAME = Rule(lambda x: re.fullmatch(r"[\w-][\w.-]{,199}", x, re.A), "at most 200 letters, digits, . _ -")
MOMENTUM = Rule(lambda x: 0 <= x < 1, "at least 0 and less than 1")
TEMPERATURE = Rule(lambda x: x == 0 or x >= 0.001, "0 or at least 0.001")  # logits are divided by it, in float32
GATE = one_of("none", "head", "element")
POSITIONS = one_of("ordered", "random", "random_float", "pose")
RESIDUAL = one_of("serial", "serial_post", "serial_both", "parallel", "parallel_shared")
LENGTHS = Rule(
    lambda x: x != [] and all(has_type(n, int) and n >= 1 for n in (x if isinstance(x, list) else [x])),
    "a whole number of at least 1, or a list of them: ctx=8192 or ctx=[256,1024]",
)
KEYS = Rule(all, "a list of keys: [KEY,OBJECT.KEY]")
DATA_RULES = {  # of the keys that every corpus has
    "tokenizer": Rule(lambda x: re.fullmatch(r"bpe|bytes|gpt2|.+\.json", str(x)), "bpe, bytes, gpt2 or PATH.json"),
    "vocab_size": Rule(lambda x: has_type(x, int) and 257 <= x <= 2**18, "a whole number from 257 to 262144"),
    "holdout": Rule(lambda x: has_type(x, int) and x >= 1, "a whole number of at least 1"),
}
IGNORED = "of a model from elsewhere: keys of its config.json to read it without, although they may change it"
FOREIGN_ONLY = "left out: a trained run has its own; only hf:PATH, gguf:PATH or pretrained:NAME may have others"


def setting(default: Any, meaning: str, rule: Rule | None = None) -> Any:
    """A field of a dataclass of settings. meaning: for --help; rule: its range, which `check_rules` tests."""
    metadata = {"help": meaning, "rule": rule}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_rules(settings: Any, prefix: str = "") -> None:
    """UserError for the first field, also of a nested dataclass, with a value that breaks its rule."""
    for f in fields(settings):
        name, value, rule = prefix + f.name, getattr(settings, f.name), f.metadata.get("rule")
        if is_dataclass(value):
            check_rules(value, f"{name}.")
        check(value != MISSING, name, value, "given a value")
        if rule and value is not None:
            check(rule.holds(value), name, value, rule.text)


# ---- the settings ----


@dataclass
class ModelConfig:
    """The network without its positional encoding: the keys of conf/model/*.yaml."""

    n_layers: int = setting(MISSING, "blocks", between(1, 1024))
    n_heads: int = setting(MISSING, "of queries", SIZE)
    n_kv_heads: int | None = setting(None, "null: as many as n_heads; fewer: grouped-query attention", SIZE)
    head_dim: int | None = setting(None, "null: width / n_heads", SIZE)
    width: int = setting(MISSING, "of the residual stream", SIZE)
    mlp: str = setting("gelu", "gelu: by tanh", one_of("gelu", "gelu_exact", "relu2", "swiglu", "geglu"))
    mlp_ratio: int = setting(4, "the MLP's width, as a multiple of width", SIZE)
    mlp_width: int | None = setting(None, "null: mlp_ratio * width, and 2/3 of it with a gate", SIZE)
    tied_head: bool = setting(True, "the head's weight is that of the token embedding")
    zero_init: bool = setting(False, "the matrices that write into the residual stream begin at 0")
    norm: str = setting("rms", "layer is LayerNorm", one_of("rms", "layer"))
    norm_bias: bool = setting(True, "whether LayerNorm has biases; false for Cohere 2")
    norm_eps: float = setting(1e-6, "is added to the mean square", above(0))
    qk_norm: bool = setting(False, "divide each head of q and k by its root mean square")
    qk_norm_weight: bool = setting(False, "and multiply by a weight for each of its dimensions, as Qwen3")
    qk_norm_all_heads: bool = setting(False, "by the root mean square of all heads together, as OLMo 2")
    attention_softcap: float | None = setting(None, "c: scores become c tanh(score / c), as in Gemma 2", above(0))
    attention_gate: str = setting("none", "multiply each head, or element, by sigmoid(W x) before the output", GATE)
    logit_softcap: float | None = setting(None, "c: logits become c tanh(logit / c), as in Gemma 2", above(0))
    qkv_bias: bool = setting(False, "biases of the projections to q, k and v")
    out_bias: bool = setting(False, "a bias of the attention's output")
    mlp_bias: bool = setting(False, "biases of the MLP")
    head_bias: bool = setting(False, "a bias of the head")
    residual: str = setting("serial", "_post: OLMo 2, _both: Gemma 3; parallel: NeoX, _shared: GPT-J", RESIDUAL)

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
    """The optimizers and their learning-rate schedule (engine/optimizer.py): the keys of conf/optim/*.yaml."""

    lr: float = setting(MISSING, "the peak", above(0))
    matrix_lr: float | None = setting(None, "the peak of Muon, for the matrices of the blocks; null: AdamW", above(0))
    momentum: float = setting(0.95, "of Muon", MOMENTUM)
    ns_steps: int = setting(5, "of Muon's Newton-Schulz iteration", between(1, 99))
    warmup: int = setting(MISSING, "steps of linear warm-up", at_least(0))
    final_lr: float = setting(0.0, "after the last step, as a share of lr", between(0, 1))
    beta1: float = setting(0.9, "of the mean of the gradient", MOMENTUM)
    beta2: float = setting(0.95, "of the mean of its square", MOMENTUM)
    weight_decay: float = setting(0.1, "of the matrices of the blocks", at_least(0))
    clip: float = setting(1.0, "maximum norm of the gradient", above(0))


@dataclass
class CommonConfig:
    """The settings that training, evaluation and generation have in common."""

    scaling: dict[str, Any] = setting({"kind": "none"}, "the scaling method past the trained context", CHOSEN)
    plus: Any = setting([], "scaling methods added to scaling=: scaling=ntk plus=logn", PLUS)  # after `validate` a list
    dtype: str = setting("auto", "auto: bfloat16 where it is faster", one_of("auto", "float32", "bfloat16"))
    kernel: str = setting("auto", "of the rotation; auto: triton where it runs", one_of("auto", "triton", "torch"))
    device: str = setting("auto", "cuda if there is one, else cpu")
    runs: str = setting("runs", "the folder of runs", FOLDER)
    cache: str = setting(".cache", "the folder of prepared corpora", FOLDER)

    @property
    def scalings(self) -> list[dict]:
        """The knobs of the scaling method and of those added to it."""
        return [self.scaling, *(yaml_values("scaling", name) for name in self.plus or [])]

    def validate(self) -> None:
        """UserError for a value out of its range, or for values that do not fit together. Also fills in defaults."""
        self.plus = self.plus if isinstance(self.plus, list) else [self.plus] if self.plus else []
        check_rules(self)


@dataclass
class TrainConfig(CommonConfig):
    """All settings of a training. They are saved with the run.

    pos, data, layers and scaling are the contents of one yaml of their group: `kind` and the knobs of that kind.
    """

    model: ModelConfig = field(default_factory=ModelConfig, metadata={"help": "the shape of the network"})
    optim: OptimConfig = field(default_factory=OptimConfig, metadata={"help": "the optimizer; finetune for init="})
    pos: dict[str, Any] = setting({}, "the positional encoding", CHOSEN)
    data: dict[str, Any] = setting({}, "the corpus", CHOSEN)
    # A LayerSchedule, or None: uniform. From Hydra, and until `init` is known, the yaml of conf/layers
    layers: Any = setting(None, "which layers have a window, another encoding or base: docs/layers.md")
    exp: str = setting("", "a named experiment: a set of settings, such as exp=smoke")
    attention: str = setting("softmax", "in all layers", one_of("softmax", "linear"))
    init: str | None = setting(None, "start from runs/NAME, hf:FOLDER, gguf:FILE or pretrained:smollm2: docs/layers.md")
    ignore_keys: list[str] = setting([], IGNORED, KEYS)
    # Set by train.py for a run with init=: name and digest of the parent run (run, weights), the context and number of
    # tokens of the pre-training (ctx, tokens); if the parent was fine-tuned, its longest context since then
    # (longest); if it had another encoding or schedule, which (encoding)
    pretrained: dict[str, Any] = field(default_factory=dict)
    # Set by train.py: the settings on its command line, for the command that trains further seeds
    typed: list[str] = field(default_factory=lambda: ["..."])
    ctx: int = setting(256, "tokens in the training window: L", at_least(1))
    positions: str = setting("ordered", "or drawn from a longer range than ctx: docs/encodings.md", POSITIONS)
    longest: int | None = setting(None, "the range of drawn positions; null: 8 ctx")
    batch_tokens: int = setting(2048, "tokens per optimiser step", at_least(1))
    micro_tokens: int = setting(16384, "at most so many per forward pass; gradients are accumulated", at_least(1))
    steps: int = setting(2600, "optimiser steps", at_least(1))
    seed: int = setting(0, "of the weights and the batches", at_least(0))
    shard: bool = setting(False, "under torchrun: split the model over the processes (FSDP2)")
    recompute: bool = setting(False, "compute activations again in the backward pass: less memory, a third more time")
    val_every: int = setting(650, "steps between validations", at_least(1))
    val_windows: int = setting(256, "held-out windows of ctx tokens in each validation", at_least(1))
    # Run control: these may change when a run is resumed, as kernel, device, runs and cache may.
    name: str | None = setting(None, "runs/NAME; null makes it from what the command line changed", NAME)
    fresh: bool = setting(False, "start over")
    save_every: int = setting(100, "steps between checkpoints", at_least(1))
    log_every: int = setting(10, "steps between logged points", at_least(1))
    compile: str = setting("auto", "auto: on CUDA, and on a CPU in long runs", one_of("auto", "true", "false"))
    project: str = setting("ropewalk", "in wandb")

    def validate(self) -> None:
        self.compile = self.compile.lower()  # YAML reads true and false as booleans, which arrive as True and False
        super().validate()
        check(self.batch_tokens % self.ctx == 0, "batch_tokens", self.batch_tokens, f"a multiple of ctx={self.ctx}")
        check(not self.ignore_keys or ":" in (self.init or ""), "ignore_keys", self.ignore_keys, FOREIGN_ONLY)
        if self.positions != "ordered":
            self.longest = self.longest or 8 * self.ctx
            check(self.ctx <= self.longest <= 2**24, "longest", self.longest, f"from ctx={self.ctx} to {2**24}")
        m = self.model
        ok = m.width % m.n_heads == 0 or m.head_dim is not None
        check(ok, "model.width", m.width, f"a multiple of model.n_heads={m.n_heads}")
        check(m.n_heads % m.kv_heads == 0, "model.n_kv_heads", m.n_kv_heads, f"a divisor of model.n_heads={m.n_heads}")
        ok = m.qk_norm or not (m.qk_norm_weight or m.qk_norm_all_heads)
        check(ok, "model.qk_norm", m.qk_norm, "true with model.qk_norm_weight or model.qk_norm_all_heads")
        check(m.norm == "layer" or m.norm_bias, "model.norm_bias", m.norm_bias, "true without model.norm=layer")
        check(not (m.tied_head and m.head_bias), "model.head_bias", m.head_bias, "false with model.tied_head")
        for key, rule in DATA_RULES.items():
            check(rule.holds(self.data.get(key)), f"data.{key}", self.data.get(key), rule.text)
        if not self.init and self.layers:  # with init=RUN they depend on that run: engine/finetune.py
            self.layers = layer_schedule.resolve(self.layers, m.n_layers, self.ctx, self.pos)
        self.layers = self.layers or None


# Settings that do not change the trained weights: a run is resumed although they differ (`differences`)
RUN_CONTROL = (
    *("name", "typed", "fresh", "save_every", "log_every", "compile", "recompute"),
    *("kernel", "device", "runs", "cache", "project", "shard", "pretrained.longest"),
)


@dataclass
class TrainedRunConfig(CommonConfig):
    """The settings that all commands that open a trained run have in common."""

    run: str | None = setting(None, "runs/NAME; null: the newest run that fits")
    exp: str | None = setting(None, "with run=null: the newest run of this experiment", one_of(*choices("train/exp")))


@dataclass
class MeasureConfig(TrainedRunConfig):
    """The settings that eval.py and recommend.py have in common: a run of ours or a model from elsewhere, and texts."""

    run: str | None = setting(None, "runs/NAME, hf:FOLDER, gguf:FILE or pretrained:smollm2; null: the newest that fits")
    data: dict[str, Any] = setting({}, "of a model from elsewhere: the corpus that is scored; null: sympy")
    documents: int = setting(32, "at most so many, or texts for each distance of an answer", at_least(1))
    train_ctx: int | None = setting(None, "of a model from elsewhere: L, if not in its config.json", at_least(1))
    ignore_keys: list[str] = setting([], IGNORED, KEYS)

    def validate(self) -> None:
        """Also for settings of a model from elsewhere where the model is a run of ours, which has its own."""
        super().validate()
        given = {"data": self.data.get("kind"), "train_ctx": self.train_ctx, "ignore_keys": self.ignore_keys}
        for name, value in given.items():
            check(not value or ":" in (self.run or ""), name, value, FOREIGN_ONLY)


@dataclass
class EvalConfig(MeasureConfig):
    """The settings of eval.py."""

    task: dict[str, Any] = setting({}, "what is scored at a length n", CHOSEN)
    ctx: Any = setting(None, "at 64, 128, ... ctx tokens; [512,1024]: at these and L; null: by L (hf:X: 8192)", LENGTHS)
    by_antecedent: bool = setting(False, "print the gain by the distance to where a target's last tokens occurred, too")
    fresh: bool = setting(False, "measure curves again that have been measured before")
    project: str = setting("ropewalk", "in wandb")

    @property
    def longest_ctx(self) -> int:
        """The longest evaluated context, tokens, to which scaling.factor=fixed refers; 0 with ctx=null."""
        return max(self.ctx) if isinstance(self.ctx, list) else self.ctx or 0


@dataclass
class RecommendConfig(MeasureConfig):
    """The settings of recommend.py. scaling and plus: a method to be measured beside the usual ones."""

    ctx: int = setting(MISSING, "tokens that the model is to process", SIZE)
    minutes: float = setting(10.0, "time to use; more settles smaller differences", above(0))
    documents: int = setting(32, "at most so many held-out documents or files", at_least(2))


@dataclass
class SampleConfig(TrainedRunConfig):
    """The settings of sample.py."""

    prompt: str = setting("", "the text to continue, in Hydra's quotes if it has spaces at its ends or signs")
    tokens: int = setting(200, "tokens to generate", at_least(1))
    temperature: float = setting(0.8, "logits are divided by it; 0: always the most likely token", TEMPERATURE)
    top_k: int | None = setting(50, "draw from the 50 most likely tokens; null: from all tokens", at_least(1))
    seed: int = setting(0, "of the drawing", at_least(0))


PARTS = {"model": ModelConfig, "optim": OptimConfig}
SCHEMAS = {"train": TrainConfig, "eval": EvalConfig, "recommend": RecommendConfig, "sample": SampleConfig}
for _name, _schema in SCHEMAS.items():
    ConfigStore.instance().store(name=f"{_name}_schema", node=_schema)


# ---- from Hydra's configuration to checked settings ----


def from_hydra(cfg: DictConfig, kind: type[Any]) -> Any:
    """cfg as an instance of the dataclass `kind`, checked. UserError names the first wrong setting."""
    try:
        plain: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as e:  # an interpolation that cannot be resolved
        raise UserError(f"{e.full_key}: {str(e).splitlines()[0]}") from e
    settings = from_plain(kind, plain)
    settings.validate()
    return settings


def from_plain(kind: type[Any], plain: dict) -> Any:
    """An instance of the dataclass `kind` with these values as they are: nothing in them is interpolated."""
    check_type("settings", plain, dict)
    parts = {key: build_from_knobs(part, plain[key], key) for key, part in PARTS.items() if key in plain}
    return build_from_knobs(kind, {**plain, **parts}, "")


def from_dict(plain: dict) -> TrainConfig:
    """A TrainConfig from the dictionary in a checkpoint or a config.json. UserError if it is something else."""
    check_rules(c := from_plain(TrainConfig, plain))
    c.layers = layer_schedule.from_saved(c.layers) if c.layers else None
    return c


# ---- comparing settings ----


def differences(new: TrainConfig, old: TrainConfig) -> list[str]:
    """`KEY=NEW (the run has OLD)` for every setting that differs, except those in RUN_CONTROL."""
    a, b = ({k.replace("layers.types.", "layers."): v for k, v in flatten(asdict(c)).items()} for c in (new, old))
    keys = [k for k in {**a, **b} if k not in RUN_CONTROL and a.get(k, "nothing") != b.get(k, "nothing")]
    return [f"{k}={a.get(k, 'nothing')} (the run has {b.get(k, 'nothing')})" for k in keys]


def flatten(tree: dict, prefix: str = "") -> dict[str, Any]:
    """{"model": {"width": 8}} -> {"model.width": 8}"""
    flat = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
