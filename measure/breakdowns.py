"""What eval.py shows in addition, if asked: by_position=true, by_antecedent=true, key_tokens=RUN."""

from collections.abc import Sequence

from conf.errors import check
from conf.eval_schema import EvalConfig
from measure import positions
from measure.antecedents import antecedent_groups
from measure.curves import Curve
from measure.evaluation import Evaluation, Method
from measure.groups import report
from measure.key_tokens import key_token_groups
from model.scaling import NO_CHANGE


class Breakdowns:
    """The requested breakdowns of one evaluation. UserError for one that its task or the reference run cannot have."""

    def __init__(self, evaluation: Evaluation, methods: Sequence[Method], requested: Method, cfg: EvalConfig):
        self.evaluation, self.methods, self.requested, self.cfg = evaluation, methods, requested, cfg
        right = "false: a task with an answer has no loss by position"
        check(not (cfg.by_position and evaluation.task.accuracy), "by_position", cfg.by_position, right)
        self.groups = [antecedent_groups(evaluation)] if cfg.by_antecedent else []
        if cfg.key_tokens:
            self.groups.append(key_token_groups(evaluation, cfg.key_tokens, cfg.runs))
        # Processed by `measure`: the first ctx tokens of each document, with each method
        shape = (cfg.by_position * len(methods) * len(evaluation.task.names), evaluation.ctx)
        self.flops = evaluation.flops(shape, evaluation.ctx, NO_CHANGE)
        self.by_position: dict[str, list[dict]] = {}

    def measure(self) -> None:
        """Compute the losses by position. The other breakdowns use the losses that the curves were computed from."""
        if self.cfg.by_position:
            self.by_position = {m.label: positions.loss_by_position(self.evaluation, m) for m in self.methods}

    def show(self, curves: dict[str, Curve]) -> None:
        """Print the tables, and write rows and pictures. curves: label -> curve."""
        if self.by_position:
            positions.print_and_write(self.evaluation, self.methods, self.by_position)
        for groups in self.groups:
            report(self.evaluation, curves, self.requested, groups, self.cfg.project)
