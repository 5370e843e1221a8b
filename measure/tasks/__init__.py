"""Tasks define the tokens that are scored at a context length n. One file each; conf/task/NAME.yaml has `kind: FILE`.

A new task is one .py here, with a subclass of Task named `build`, and one .yaml; nothing else changes.
"""

from collections.abc import Callable

from torch import Tensor

from conf.registry import build_from_knobs, load_kind

# losses(tokens [B, T], targets [B, S]) -> nats [B, S]: the loss of targets, which follow the last S of tokens
Losses = Callable[[Tensor, Tensor], Tensor]


class Task:
    """Scores parts of held-out documents, given n of their tokens. The yaml's knobs are the parameters of __init__."""

    label: str  # identifies what is scored, with every knob that shapes it: curves of one label are comparable
    shortest: int = 64  # the shortest length that is evaluated by default
    minimum: int = 1  # the shortest length that can be evaluated
    from_start: bool = False  # take the first tokens of each document instead of the last
    same_targets: bool = True  # the same tokens are scored at every n

    def score(self, losses: Losses, text: Tensor, n: int) -> Tensor:
        """Nats of each scored token, [B, scored], at length n. text [B, ctx + 1]: documents, cut."""
        raise NotImplementedError

    def describe(self, ctx: int) -> str:
        """What is scored of each document, for a line of output."""
        raise NotImplementedError

    def targets(self, text: Tensor, n: int) -> Tensor:
        """The tokens that are scored at length n, [B, scored]."""
        return self.score(lambda tokens, targets: targets, text, n)

    def cost(self, text: Tensor, n: int) -> int:
        """The number of tokens that the model processes at length n."""
        processed = []

        def count(tokens: Tensor, targets: Tensor) -> Tensor:
            processed.append(tokens.numel())
            return targets

        self.score(count, text, n)
        return sum(processed)


def build(knobs: dict) -> Task:
    """The task that a yaml of conf/task names. UserError for a wrong knob."""
    return build_from_knobs(load_kind("measure.tasks", knobs["kind"], "build", "task"), knobs, "task")
