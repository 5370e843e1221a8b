"""Types and ranges of the settings of eval.py, and of every command that opens a trained run."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig

from conf.errors import check
from conf.schema import CHOSEN, LIMIT, PROJECT, CommonConfig, at_least, check_rules, name_list, to_object


@dataclass
class TrainedRunConfig(CommonConfig):
    """The settings that all commands that open a trained run have in common; documented in conf/eval.yaml."""

    run: str | None = None  # NAME, hf:PATH (eval.py only), or None for the newest that fits
    trained_with: str | None = None  # with run=None: only runs that were trained with this exp=


@dataclass
class EvalConfig(TrainedRunConfig):
    """The settings of eval.py; their meaning is documented in conf/eval.yaml."""

    task: Annotated[dict[str, Any], CHOSEN] = field(default_factory=dict)
    by_position: bool = False
    by_antecedent: bool = False
    key_tokens: str | None = None
    multiples: list[float] = field(default_factory=list)
    ctx: Any = MISSING  # the longest context length, or a list of lengths
    train_ctx: Annotated[int | None, at_least(1)] = None
    data: dict[str, Any] = field(default_factory=dict)
    documents: Annotated[int, at_least(1)] = MISSING
    fresh: bool = False
    project: Annotated[str, PROJECT] = "ropewalk"

    @property
    def longest_ctx(self) -> int:
        """The longest evaluated context, tokens. Documents must be longer, and scaling.factor=fixed refers to it."""
        return max(self.ctx) if isinstance(self.ctx, list) else self.ctx


ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def eval_config(cfg: DictConfig) -> EvalConfig:
    """The checked settings of eval.py. UserError names the first wrong one.

    data= and train_ctx= are allowed for Hugging Face checkpoints only: a run of ours has both in its checkpoint.
    """
    c: EvalConfig = to_object(cfg, EvalConfig)
    check_rules(c)
    lengths = c.ctx if isinstance(c.ctx, list) else [c.ctx]
    ok = bool(lengths) and all(isinstance(n, int) and not isinstance(n, bool) and 1 <= n < LIMIT for n in lengths)
    check(ok, "ctx", c.ctx, "a whole number of at least 1, or a list of them: ctx=8192 or ctx=[256,1024]")
    ok = not c.multiples or (all(0 < m < LIMIT for m in c.multiples) and not isinstance(c.ctx, list))
    check(ok, "multiples", c.multiples, "numbers above 0 such as [1.25,1.5], and left out where ctx is a list")
    c.plus = name_list(c.plus, "plus", "scaling")
    for setting, value in (("data", c.data.get("kind")), ("train_ctx", c.train_ctx)):
        right = "left out: a trained run has its own; only hf:PATH, gguf:PATH or pretrained:NAME may have others"
        check(value is None or ":" in (c.run or ""), setting, value, right)
    return c
