"""Published claims tested on the rows of the study: python -m studies.claims writes results/claims.md

claims.yaml lists them. A claim is a list of checks of losses, each with a 95 % interval over seeds and documents; its
verdict is computed from tests of these differences. A condition in a check is a run, a scaling method (nothing for
none, `bar` for the better control) and @ with a length in trained contexts L: `rope yarn @2`. The checks are

    a > b                 the loss of a is higher; `by 0.1`: by more than this, in nats per token; `since @1`: it has
                          risen more since this length without scaling, for runs that are not equally good there
    a is no worse than b  its loss is higher by less than the margin
    a differs from b      in the mean of the absolute differences, by more than the margin within one run
    a equals b            ... by less than this margin
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.errors import user_errors
from measure.intervals import Estimate, estimate, interval_text, q_values
from model.spectrum import frequencies
from studies.decay import HEAD_DIM, POSITIONS, score
from studies.rows import Rows, contrast, fill, line, report_command

ALPHA = 0.05
HOLDS, REFUTED, UNDECIDED, MISSING = "holds", "refuted", "undecided", "not run"

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

# ---- checks ----


@dataclass(frozen=True)
class At:
    """Rows of one condition: a run, a scaling method and a length."""

    run: str  # name in the matrix without its seed, such as rope, base500 or pi-200
    label: str  # of the method in evaluation: none, window, yarn, "ntk factor=fixed"; shifted, unshifted; or BAR
    n: int  # tokens

    def __str__(self) -> str:
        method = "" if self.label == "none" else f" {self.label}"
        return f"{self.run}{method} @{self.n}"


@dataclass(frozen=True)
class Check:
    """The condition loss(a) - loss(b) > margin in nats per token, or < margin with less=True.

    absolute: compare the mean over windows and documents of |loss(a) - loss(b)|, for claims that two losses differ or
    are equal. since: compare how much the loss has risen since this length without scaling, instead of the losses, for
    claims about models that are not equally good there.
    """

    a: At
    b: At
    margin: float = 0.0
    less: bool = False
    absolute: bool = False
    since: int | None = None

    def measure(self, rows: Rows) -> Estimate | None:
        """The mean of loss(a) - loss(b) over seeds, documents and windows that both have; None if there are none."""
        plus, minus = ([rows.find(at.run, at.label, at.n)] for at in (self.a, self.b))
        if self.since is not None:
            plus.append(rows.find(self.b.run, "none", self.since))
            minus.append(rows.find(self.a.run, "none", self.since))
        values = contrast(plus, minus, self.absolute)
        return estimate(values) if len(values) else None


@dataclass(frozen=True)
class DecayCheck(Check):
    """The condition score(a) - score(b) > margin, where score is the mean of q . k / D over the distances from n on.

    q and k are all ones, as in studies/decay.py. The label of `a` and `b` is "base B score". The difference is exact.
    """

    def measure(self, rows: Rows) -> Estimate:
        return Estimate(self.score(self.a) - self.score(self.b))

    def score(self, at: At) -> float:
        inv_freq = frequencies(HEAD_DIM, float(at.label.split()[1]))
        return score(inv_freq, POSITIONS)[at.n :].mean().item()


@dataclass(frozen=True)
class Claim:
    """A published claim. It holds if all checks do."""

    claim: str
    source: str
    reported: str  # what the source reports, at its scale
    checks: list[Check]
    by_construction: bool = False  # it follows from the definitions: the rows test the code, not the claim


Measured = Sequence[tuple[Check, Estimate | None]]  # the checks of a claim; None: no rows


# ---- claims.yaml ----

CONDITION = r"(\S+)(?: (.+))? @([\d.]+)"
CHECK = r"(.+ @[\d.]+) (>|is no worse than|differs from|equals) (.+? @[\d.]+)(?: by ([\d.]+))?(?: since @([\d.]+))?"


def read_claims(study: str, L: int) -> list[Claim]:
    """The claims about the rows of this study, `matrix` or `layers`. L: the trained context, tokens."""
    claims = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))[study]
    return [Claim(checks=[read_check(text, L) for text in claim.pop("checks")], **claim) for claim in claims]


def read_check(text: str, L: int) -> Check:
    """The check that this text describes, whose lengths are in trained contexts L, with its lengths in tokens."""
    first, relation, second, by, since = fully(CHECK, text)
    conditions = (fully(CONDITION, at) for at in (first, second))
    a, b = (At(run, label or "none", round(float(n) * L)) for run, label, n in conditions)
    if a.run == "decay":
        return DecayCheck(a, b)
    if relation == ">":
        return Check(a, b, float(by or 0), since=round(float(since) * L) if since else None)
    of_this_length = margin(max(a.n, b.n) / L, one_run=a.run == b.run)
    absolute = relation != "is no worse than"
    return Check(a, b, of_this_length, less=relation != "differs from", absolute=absolute)


def fully(pattern: str, text: str) -> Sequence[Any]:
    match = re.fullmatch(pattern, text)
    if not match:
        raise ValueError(f"claims.yaml: not a check: {text}")
    return match.groups()


def margin(n: float, one_run: bool) -> float:
    """The margin of "no worse" at a length in trained contexts, nats per token."""
    table = MARGINS_WITHIN_A_RUN if one_run else MARGINS_BETWEEN_RUNS
    return next((nats for length, nats in table.items() if n <= length), list(table.values())[-1])


# ---- verdicts ----


def p_values(check: Check, result: Estimate) -> tuple[float, float]:
    """(p that the check is met, p that it is not): twice the one-sided p values, at most 1; small if it is so."""
    above, below = (min(1.0, 2 * p(check.margin)) for p in (result.p_above, result.p_below))
    return (below, above) if check.less else (above, below)


def decide(measured: Measured) -> tuple[str, float | None]:
    """(verdict, its p value) of a claim from its checks; (MISSING, None) if a check has no rows."""
    results = [(check, result) for check, result in measured if result is not None]
    if len(results) < len(measured):
        return MISSING, None
    met, not_met = zip(*(p_values(check, result) for check, result in results), strict=True)
    holds, refuted = max(met), min(1.0, len(results) * min(not_met))
    if holds < ALPHA:
        return HOLDS, holds
    if refuted < ALPHA:
        return REFUTED, refuted
    return f"{UNDECIDED} ({what_would_decide(results)})", min(holds, refuted)


def what_would_decide(results: Sequence[tuple[Check, Estimate]]) -> str:
    """How many seeds are expected to decide an undecided claim.

    If a mean is on the wrong side of its margin, enough to refute one such check; otherwise enough to show all checks.
    """
    if any(result.components is None for _, result in results):
        return "one seed"
    wrong = [(c, r) for c, r in results if (r.mean > c.margin) == c.less]
    level = ALPHA / len(results) if wrong else ALPHA
    needed = [r.seeds_needed(c.margin, level) for c, r in wrong or results]
    enough = [seeds for seeds in needed if seeds is not None]
    if not enough or (not wrong and len(enough) < len(needed)):
        return "no number of seeds would decide: more documents needed"
    return f"{min(enough) if wrong else max(enough)} seeds would decide"


def measure(claim: Claim, sources: Sequence[Rows]) -> tuple[Measured, str]:
    """(the checks with their results, the mark of the rows): of the first source that has all conditions."""
    found = [([(check, check.measure(rows)) for check in claim.checks], rows.mark) for rows in sources]
    return next((x for x in found if all(result is not None for _, result in x[0])), found[0])


# ---- the report ----


def estimate_text(result: Estimate) -> str:
    """`+1.234 [+1.100, +1.400]`; only the mean if it is exact."""
    if not result.variance:
        return f"{result.mean:+.3f}"
    return interval_text(result.mean, *result.interval) + (" (one seed: documents only)" if result.seeds == 1 else "")


def describe(check: Check, result: Estimate | None) -> str:
    """`rope @512 - rope @256 > 0.69: +1.234 [+1.100, +1.400]`"""
    difference = f"{check.a} - {check.b}"
    if check.absolute:
        difference = f"abs({difference})"
    if check.since is not None:
        difference = f"({difference}) since @{check.since}"
    sign = "<" if check.less else ">"
    return f"{difference} {sign} {check.margin:.2g}: {MISSING if result is None else estimate_text(result)}"


def q_text(q: float | None) -> str:
    """`0.03`, `<0.001`; empty for None."""
    if q is None:
        return ""
    return "<0.001" if q < 0.001 else f"{q:.3f}" if q < 0.01 else f"{q:.2f}"


def with_q(p_of: Sequence[float | None]) -> list[float | None]:
    """The q values of the p values; None stays None."""
    q = iter(q_values([p for p in p_of if p is not None]))
    return [None if p is None else next(q) for p in p_of]


def verdict_text(measured: Measured, mark: str) -> str:
    """`**holds**, one seed`, with the mark of the rows if they have one."""
    verdict = decide(measured)[0]
    exact = all(result is not None and not result.variance for _, result in measured)
    only = ", one seed" if seeds_of(measured) == 1 and not exact and verdict in (HOLDS, REFUTED) else ""
    return f"**{verdict}**{only}" + (f", {mark}" if mark else "")


def seeds_of(measured: Measured) -> int:
    return min(result.seeds if result else 0 for _, result in measured)


def claims_sections(sources: Sequence[Rows], claims: Sequence[Claim]) -> tuple[list[str], list[str]]:
    """(the lines of the measured claims, the lines of those by construction). Both have the numbers in `claims`."""
    results = [measure(claim, sources) for claim in claims]
    tests = [measured for claim, (measured, _) in zip(claims, results, strict=True) if not claim.by_construction]
    q = iter(with_q([decide(measured)[1] for measured in tests]))
    tables: tuple[list[str], list[str]] = [], []
    for number, (claim, (measured, mark)) in enumerate(zip(claims, results, strict=True), 1):
        differences = "; ".join(describe(check, result) for check, result in measured)
        cells = [str(number), claim.claim, f"{claim.source}: {claim.reported}", differences, str(seeds_of(measured))]
        cells += [] if claim.by_construction else [q_text(next(q))]
        tables[claim.by_construction].append(line([*cells, verdict_text(measured, mark)]))
    return tables


def pi_section(sources: Sequence[Rows], L: int) -> list[str]:
    """PI against no scaling at every length past L; of the first source that has both."""

    def curve(rows: Rows) -> list[tuple[Check, Estimate | None]]:
        lengths = sorted({n for _, label, n in rows.by_condition if label == "pi" and n > L})
        checks = [Check(At("rope", "none", n), At("rope", "pi", n)) for n in lengths]
        return [(check, result) for check in checks if (result := check.measure(rows))]

    points, mark = next(((points, rows.mark) for rows in sources if (points := curve(rows))), ([], ""))
    outcomes = [decide([point]) for point in points]
    wording = {HOLDS: "PI is better", REFUTED: "PI is worse"}
    lines = []
    for (check, result), (verdict, _), q in zip(points, outcomes, with_q([p for _, p in outcomes]), strict=True):
        assert result is not None
        text = f"**{wording.get(verdict, verdict)}**" + (f", {mark}" if mark else "")
        lines.append(line([f"{check.a.n / L:g}", estimate_text(result), str(result.seeds), q_text(q), text]))
    return lines


def margins_text(margins: dict[int, float]) -> str:
    """`0.02 up to 1 L, 0.04 past it`"""
    *up_to, (_, last) = margins.items()
    return ", ".join(f"{nats:g} up to {length} L" for length, nats in up_to) + f", {last:g} past it"


def report(sources: Sequence[Rows]) -> str:
    """The text of results/claims.md."""
    L = sources[0].trained_ctx
    margins = {"between": margins_text(MARGINS_BETWEEN_RUNS), "within": margins_text(MARGINS_WITHIN_A_RUN)}
    measured, by_construction = claims_sections(sources, read_claims("matrix", L))
    tables = {"measured": measured, "pi": pi_section(sources, L), "by_construction": by_construction}
    return fill("claims.md", L=L, alpha=ALPHA, **margins, **tables)


if __name__ == "__main__":
    user_errors(report_command)(report, "claims.md")
