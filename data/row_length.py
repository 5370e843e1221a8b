"""ctx_start=: rows are short at first and grow to the training context (SkyLadder, Zhu et al. 2025, arXiv 2503.15450).

The windows of a step are the same as without it, and are cut into pieces. So every token is seen as often and in the
same order; only how far back attention can see differs.
"""

from torch import Tensor


def row_length(step: int, steps: int, ctx: int, start: int, full_at: float) -> int:
    """The length of the rows at a step 0 .. steps - 1, tokens: a pure function of its arguments.

    A linear function of the step that begins at `start` and is ctx from step full_at * steps on, rounded down to a
    divisor of ctx.
    """
    if step >= full_at * steps:
        return ctx
    length = start + int((ctx - start) * step / (full_at * steps))
    return max(divisor for divisor in range(1, length + 1) if ctx % divisor == 0)


def cut_rows(windows: Tensor, length: int) -> Tensor:
    """Windows [rows, ctx + 1] -> [rows * ctx / length, length + 1], in order.

    As neighbouring windows do, neighbouring pieces share one token: the last target of one is the first input of the
    next, so that all ctx targets of a window remain.
    """
    return windows.unfold(1, length + 1, length).flatten(0, 1)
