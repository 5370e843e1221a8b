"""What claims are made of: comparisons between rows of the matrix. published.py and layers.py have the claims.

Lengths are in trained contexts: 2 * L is twice the context that the rows' models were trained at.
"""

import csv
from dataclasses import dataclass

import numpy as np

from conf.errors import UserError
from conf.registry import ROOT
from measure.mixed_effects import Estimate, estimate
from studies.rows import Losses, Rows, losses, minus, per_document

L = 1.0

# The margins of "no worse" and "the same", in nats per token, by the length in trained contexts: a length has the
# margin of the first entry that is not shorter, and the last one if all are. They are fixed here, not computed.
#
# Between two runs: the differences between rope and rope_interleaved, which are the same function class (A/A), in the
# first study: 0.04 within the window (the end of the interval) and 0.24 at 2 L (the mean). A smaller difference between
# runs is what a change of the seed makes. At 4 L to 32 L the A/A difference was below 0.24.
# Within one run the seed is the same, so differences are far smaller. Up to L: twice the noise of a rerun on other
# hardware (0.01). Past L: what a change of the seed makes within the window, the same 0.04.
MARGINS_BETWEEN_RUNS = {1: 0.04, 2: 0.24}
MARGINS_WITHIN_A_RUN = {1: 0.02, 2: 0.04}


@dataclass(frozen=True)
class At:
    """Rows of one condition: a run, a scaling method and a length."""

    run: str  # name in the matrix without its seed, such as rope, base500 or pi-200
    label: str  # of the method in evaluation: none, window, yarn, "ntk factor=fixed"; shifted, unshifted; or BAR
    n: float  # in trained contexts, and after claims.in_tokens in tokens

    def __str__(self) -> str:
        method = "" if self.label == "none" else f" {self.label}"
        return f"{self.run}{method} @{self.n:g}"


@dataclass(frozen=True)
class Check:
    """The condition loss(a) - loss(b) > margin in nats per token, or < margin with less=True.

    absolute: compare the mean over windows and documents of |loss(a) - loss(b)|, for claims that two losses differ or
    are equal. since: compare how much the loss has risen since this length without scaling, instead of the losses, for
    claims about models that are not equally good there; in the same unit as At.n.
    """

    a: At
    b: At
    margin: float = 0.0
    less: bool = False
    absolute: bool = False
    since: float | None = None

    def measure(self, rows: Rows) -> Estimate | None:
        """The mean of loss(a) - loss(b) over seeds, documents and windows that both have; None if there are none."""
        difference = minus(self.values(rows, self.a), self.values(rows, self.b))
        if not difference:
            return None
        if self.absolute:
            difference = {seed: {w: np.abs(x) for w, x in windows.items()} for seed, windows in difference.items()}
        return estimate(per_document(difference))

    def values(self, rows: Rows, at: At) -> Losses:
        """What is subtracted: the losses of a or b, or their rise. Lengths in tokens."""
        values = losses(rows, at.run, at.label, int(at.n))
        return values if self.since is None else minus(values, losses(rows, at.run, "none", int(self.since)))


@dataclass(frozen=True)
class DecayCheck(Check):
    """The condition score(a) - score(b) > margin, where score is the mean of q . k / D over the distances from n on.

    q and k are all ones. The values come from results/decay.csv, the table of studies.decay, instead of the rows. The
    run of `a` and `b` is "decay base B". They are computed from a formula, so the difference is exact.
    """

    def measure(self, rows: Rows) -> Estimate:
        """The exact difference. UserError if the table is missing."""
        return Estimate(self.score(self.a) - self.score(self.b))

    def score(self, at: At) -> float:
        """The mean of q . k / D over the distances from n on."""
        path = ROOT / "results/decay.csv"
        column = f"{at.run.removeprefix('decay ')} {at.label}"
        try:
            with path.open() as f:
                scores = [float(row[column]) for row in csv.DictReader(f)]
        except (OSError, KeyError, ValueError):
            raise UserError(f"{path}: no table with a column `{column}`: first python -m studies.decay") from None
        return float(np.mean(scores[int(at.n) :]))


@dataclass(frozen=True)
class Claim:
    """A published claim. It holds if all checks do."""

    text: str
    source: str
    reported: str  # what the source reports, at its scale
    checks: list[Check]
    by_construction: bool = False  # it follows from the definitions: the rows test the code, not the claim


# ---- checks that several claims use ----


def worse(run: str, label: str, n: float, run_b: str, label_b: str, n_b: float, by: float = 0.0) -> Check:
    """The first condition has a higher loss than the second, by more than `by` nats per token."""
    return Check(At(run, label, n), At(run_b, label_b, n_b), by)


def margin(n: float, one_run: bool) -> float:
    """The margin of "no worse" at a length in trained contexts, nats per token."""
    table = MARGINS_WITHIN_A_RUN if one_run else MARGINS_BETWEEN_RUNS
    return next((nats for length, nats in table.items() if n <= length), list(table.values())[-1])


def no_worse(run: str, label: str, n: float, run_b: str, label_b: str, n_b: float) -> Check:
    """The loss of the first condition is at most the margin above that of the second, at the longer of the lengths."""
    return Check(At(run, label, n), At(run_b, label_b, n_b), margin(max(n, n_b), run == run_b), less=True)


def rises_less(run: str, than: str, lengths: tuple[float, ...]) -> list[Check]:
    """The loss rises less from that at L than the loss of another run: for runs that are not equally good there."""
    return [Check(At(than, "none", n), At(run, "none", n), since=L) for n in lengths]


def shift_changes(run: str) -> Check:
    """The loss of the same text differs between positions 0 .. L/2 - 1 and L/2 .. L - 1."""
    return Check(At(run, "shifted", L / 2), At(run, "unshifted", L / 2), margin(L / 2, one_run=True), absolute=True)


def shift_changes_nothing(run: str) -> Check:
    """The loss of the same text differs by less than the margin between these two ranges of positions."""
    a, b = At(run, "shifted", L / 2), At(run, "unshifted", L / 2)
    return Check(a, b, margin(L / 2, one_run=True), less=True, absolute=True)


def decays_less(base: int, than: int) -> Check:
    """From distance L on, q . k is higher with this base than with a smaller one."""
    return DecayCheck(At(f"decay base {base}", "score", L), At(f"decay base {than}", "score", L))
