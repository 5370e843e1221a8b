"""Dual Chunk Attention (An et al. 2024, arXiv 2402.17463; in Qwen2.5-1M): positions count from the start of chunks.

The text is cut into chunks of s tokens, and key n is rotated as if at position n mod s. The position of query m depends
on the chunk of the key:

    the same chunk           m mod s
    the chunk before         min(m mod s + s, c), so that `local` = c - s tokens keep their distance across the border
    an earlier chunk         min(2 s - 1, c)

As in the authors' code, c is 3 L / 4 and `local` is L / 8; the paper has c = L - 1. That code also multiplies all cos
and sin by 0.05 ln(n / L) + 1 in texts of n > L tokens; here, as in the paper, there is no such factor. Evaluation only.
"""

from dataclasses import dataclass

from conf.errors import check
from model.regions import PositionMap, Region
from model.scaling import ContextChange, TrainedContext

PREFIX_CONSISTENT = False  # a longer input changes what earlier positions see; a test holds it to that


@dataclass(frozen=True)
class Chunks(PositionMap):
    """Chunks of `near` (s above) tokens, whose queries have the position c at most."""

    c: int

    def regions(self) -> list[Region]:
        s, c = self.near, self.c
        return [
            Region(lambda m: m // s * s, lambda m: (m % s + s).clamp(max=c), lambda n: n % s),
            Region(lambda m: m // s * s - s, lambda m: m * 0 + min(c, 2 * s - 1), lambda n: n % s),
        ]


def scale(trained: TrainedContext, n: int, size: int | None, local: int | None, always: bool) -> ContextChange:
    """L here is the longest trained context. size: c in tokens, the largest position, None: 3 L / 4. local: tokens,
    None: L / 8. always: also at n <= L.
    """
    L = trained.longest_trained_ctx
    c = trained.checked_size(size, default=3 * L // 4)
    w = min(L // 8, c - 1) if local is None else local
    check(0 <= w < c, "scaling.local", local, f"at least 0 and less than size={c}")
    return ContextChange(position_map=Chunks(c - w, c)) if n > L or always else ContextChange()
