"""LaMPE (Zhang et al. 2025, arXiv 2508.02308; github.com/scar-on/LaMPE): three grains of distance, which depend on n.

A text of n tokens is mapped to M distances, M = 3/4 L sigmoid(rise n / L + shift). Of them, the head and the tail are
exact, and the distances between are evenly compressed:

    distance r below s1             r
    in the middle                   s1 + (r - s1) (M - s1 - s2) / (n - s1 - s2)
    from n - s2 on                  r - n + M

The paper rounds the middle down, and its code the position of each token; here nothing is rounded. The code maps the
whole text to M distances and then adds offsets of head and tail, so its largest distance is above M: 5117 for n =
32768, M = 4501, where ours is 4500. rise and shift have to be fitted for each model: the default is the code's fit of
Llama 3 in units of L, with its sizes of head and tail. The code has STRING's factor on cos and sin
(model/scaling/string.py); here there is none. Evaluation only.
"""

from dataclasses import dataclass

import torch

from conf.errors import check
from model.regions import PositionMap, Region
from model.scaling import ContextChange, TrainedContext

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


@dataclass(frozen=True)
class Grained(PositionMap):
    """A head of `near` (s1 above) distances, and a tail. n, mapped: tokens of the text, and M."""

    tail: int
    n: int
    mapped: int

    def regions(self) -> list[Region]:
        before, after = (x - self.near - self.tail for x in (self.n, self.mapped))
        return [
            Region(lambda m: m - self.near + 1, slow=before / after, start=self.near),
            Region(lambda m: m - self.n + self.tail + 1, lambda m: m - (self.n - self.mapped)),
        ]


def scale(
    trained: TrainedContext, n: int, size: int | None, tail: int | None, rise: float, shift: float, always: bool
) -> ContextChange:
    """L here is the longest trained context. size, tail: s1 and s2 in tokens, None: L / 16 and L / 40. always: also at
    n <= L, where M is less than n.
    """
    L = trained.longest_trained_ctx
    s1 = trained.checked_size(size, default=L // 16)
    s2 = L // 40 if tail is None else tail
    check(0 <= s2 < (most := max(1, L - s1)), "scaling.tail", s2, f"at least 0, and less than {most} with size={s1}")
    M = max(int(0.75 * L * torch.tensor(rise * n / L + shift).sigmoid()), s1 + s2 + 1)
    if n <= M or (n <= L and not always):
        return ContextChange()
    return ContextChange(position_map=Grained(s1, s2, n, M))
