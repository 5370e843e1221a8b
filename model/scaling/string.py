"""STRING (An et al. 2024, arXiv 2410.18745; github.com/HKUNLP/STRING): short distances overwrite the long ones.

Distances near L are rare in training: L - r pairs of a window of L tokens have the distance r. So keys at distance
r >= S are rotated as if at distance r - S + W, also in texts of at most L tokens; the W nearest tokens stay nearest.
The authors' code, but not the paper, also multiplies all cos and sin by 0.1 ln 2 + 1; here there is no such factor.
Where their pass over a whole prompt counts the pair at distance S twice, their decoding and this count it once,
shifted. Evaluation only.
"""

from dataclasses import dataclass

from conf.errors import check
from model.regions import PositionMap, Region
from model.scaling import ContextChange, TrainedContext


@dataclass(frozen=True)
class Shifted(PositionMap):
    """Keys at distance `near` (S above) or more are nearer by S - `local` (W above)."""

    local: int

    def regions(self) -> list[Region]:
        return [Region(lambda m: m - self.near + 1, lambda m: m - self.near + self.local)]


def scale(trained: TrainedContext, n: int, size: int | None, local: int | None, always: bool) -> ContextChange:
    """L here is the longest trained context. size: S in tokens, None: L / 3; the paper advises L / 3 to L / 2. local: W
    in tokens, None: 32 or S / 2, whichever is less. No distance exceeds L up to n = L + S - W. always: also at n <= L.
    """
    L = trained.longest_trained_ctx
    S = trained.checked_size(size, default=L // 3)
    W = min(32, S // 2) if local is None else local
    check(0 <= W <= S, "scaling.local", local, f"at least 0 and at most size={S}")
    return ContextChange(position_map=Shifted(S, W)) if n > L or always else ContextChange()
