"""SelfExtend (Jin et al. 2024, arXiv 2401.01325): distant tokens have the positions of groups of tokens.

The nearest w keys keep their distance to the query. For keys that are further away, each group of `group` tokens shares
one position: key n is rotated as if at n // group, and query m as if at m // group + w - w // group. The second term
makes the distances of groups continue from about w. The authors' code divides w / group without rounding in some files
(self_extend_patch/Llama.py) and rounds it down in others, which differs where group does not divide w; here it is
always rounded down. Evaluation only.
"""

import itertools
from dataclasses import dataclass

from conf.errors import UserError
from model.regions import PositionMap, Region
from model.scaling import ContextChange, NotApplicable, TrainedContext

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


@dataclass(frozen=True)
class Grouped(PositionMap):
    """Keys at distance `near` (w above) or more have the positions of their groups."""

    group: int

    def regions(self) -> list[Region]:
        shift = self.near - self.near // self.group
        return [Region(lambda m: m - self.near + 1, lambda m: m // self.group + shift, lambda n: n // self.group)]


def scale(trained: TrainedContext, n: int, size: int | None, group: int | str, always: bool) -> ContextChange:
    """L here is the longest trained context. size: w in tokens, None: L / 2. group: tokens that share a position,
    "auto": the fewest with which no distance exceeds L. always: also at n <= L.
    """
    L = trained.longest_trained_ctx
    w = trained.checked_size(size, default=L // 2)
    if group == "auto":
        if w == L:
            raise NotApplicable(f"group=auto needs size below the trained context, {L}")
        group = next(g for g in itertools.count(1) if (n - 1) // g + w - w // g < L)
    elif isinstance(group, str) or group < 1:
        raise UserError(f"scaling.group={group}: must be auto or a whole number of at least 1")
    return ContextChange(position_map=Grouped(w, group)) if n > L or always else ContextChange()
