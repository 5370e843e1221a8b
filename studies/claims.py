"""Published claims tested on the rows of the study: python -m studies.claims writes results/claims.md

claims.yaml lists them. A claim is a list of checks of losses, each with a 95 % interval over seeds and documents; its
verdict is computed from tests of these differences. A condition in a check is a run, a scaling method (nothing for
none, `bar` for the better control) and @ with a length in trained contexts L: `rope yarn @2`. The checks are

    a > b                 the loss of a is higher; `by 0.1`: by more than this, in nats per token; `since @1`: it has
                          risen more since this length without scaling, for runs that are not equally good there
    a is no worse than b  its loss is higher by less than the margin
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.errors import UserError, user_errors
from measure.groups import FEWEST
from measure.intervals import Estimate, q_values
from studies.rows import RESULTS, Rows, Seeds, compare, fill, line, publish, read_rows

ALPHA = 0.05
HOLDS, REFUTED, UNDECIDED, MISSING = "holds", "refuted", "undecided", "not run"
TOO_SMALL = "not reproducible at this budget"  # that of the training here

# The margins of "no worse", nats per token. They are fixed here, not computed. Between two runs, at lengths up to L:
# what a change of the seed makes there (the noise floor in results/matrix.md). Within one run the seed is the same, so
# differences are far smaller: up to L twice the noise of a rerun on other hardware (0.01), past L as between runs.
BETWEEN_RUNS, WITHIN_A_RUN, WITHIN_A_RUN_PAST_L = 0.04, 0.02, 0.04

# ---- checks ----


@dataclass(frozen=True)
class At:
    """Rows of one condition: a run, a scaling method and a length."""

    run: str  # name in the matrix without its seed, such as rope, base500 or pi-4L
    label: str  # of the method in evaluation: none, window, yarn, "ntk factor=8.0"; or BAR
    n: int  # tokens

    def __str__(self) -> str:
        method = "" if self.label == "none" else f" {self.label}"
        return f"{self.run}{method} @{self.n}"


@dataclass(frozen=True)
class Check:
    """The condition loss(a) - loss(b) > margin in nats per token, or < margin with less=True.

    since: compare how much the loss has risen since this length without scaling, instead of the losses, for claims
    about models that are not equally good there.
    """

    a: At
    b: At
    margin: float = 0.0
    less: bool = False
    since: int | None = None

    def measure(self, rows: Rows) -> Estimate | None:
        """The mean of loss(a) - loss(b); None without rows, or with too few seeds for a difference between runs."""
        a, b = self.conditions(rows)
        runs = () if self.since is None else (self.a.run, self.b.run)
        return compare(a, b, [rows.find(run, "none", self.since or 0) for run in runs])

    def conditions(self, rows: Rows) -> list[Seeds]:
        """The rows of both."""
        return [rows.find(at.run, at.label, at.n) for at in (self.a, self.b)]


@dataclass(frozen=True)
class Claim:
    """A published claim. It holds if all checks do."""

    number: int | str  # which other pages quote
    claim: str
    source: str
    reported: str  # what the source reports, at its scale
    checks: list[Check]
    budget: str = ""  # why the training here is too small to test it
    by_construction: str = ""  # it follows from the definitions: the test that shows it


@dataclass(frozen=True)
class Result:
    """A claim with its measurements."""

    claim: Claim
    found: list[Estimate | None]  # of each check; None: too few seeds, or no rows
    seeds: int  # the fewest of any condition; 0: no rows

    @property
    def p(self) -> tuple[float, float] | None:
        """(p of "the claim holds", p of "it is refuted"); None if a check has no estimate."""
        tests = [p_values(check, x) for check, x in zip(self.claim.checks, self.found, strict=True) if x is not None]
        if len(tests) < len(self.found) or not tests:
            return None
        met, not_met = zip(*tests, strict=True)
        return max(met), min(1.0, len(tests) * min(not_met))

    def verdict(self, q: float | None) -> str:
        """q: of the smaller p value over all claims of the table."""
        if not self.seeds:
            return MISSING
        if self.claim.budget:
            return f"{TOO_SMALL}: {self.claim.budget}"
        if self.p is None or q is None:
            return f"{UNDECIDED} (fewer than {FEWEST} seeds of each)"
        holds, refuted = self.p
        if q < ALPHA:
            return HOLDS if holds < refuted else REFUTED
        return f"{UNDECIDED} ({what_would_decide(self)})"


# ---- claims.yaml ----

CONDITION = r"(\S+)(?: (.+))? @([\d.]+)"
CHECK = r"(.+ @[\d.]+) (>|is no worse than) (.+? @[\d.]+)(?: by ([\d.]+))?(?: since @([\d.]+))?"


def read_claims(plan: str, L: int) -> list[Claim]:
    """The claims about the rows of this plan. L: the trained context, tokens."""
    claims = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))[plan]
    return [Claim(checks=[read_check(text, L) for text in claim.pop("checks")], **claim) for claim in claims]


def read_check(text: str, L: int) -> Check:
    """The check that this text describes, whose lengths are in trained contexts L, with its lengths in tokens."""
    first, relation, second, by, since = fully(CHECK, text)
    a, b = (read_condition(text, L) for text in (first, second))
    if relation == ">":
        return Check(a, b, float(by or 0), since=round(float(since) * L) if since else None)
    within = WITHIN_A_RUN if max(a.n, b.n) <= L else WITHIN_A_RUN_PAST_L
    return Check(a, b, within if a.run == b.run else BETWEEN_RUNS, less=True)


def read_condition(text: str, L: int) -> At:
    """`rope yarn @2`"""
    run, label, n = fully(CONDITION, text)
    return At(run, label or "none", round(float(n) * L))


def fully(pattern: str, text: str) -> Sequence[Any]:
    match = re.fullmatch(pattern, text)
    if not match:
        raise UserError(f"{text}: not as studies/claims.py describes it")
    return match.groups()


# ---- verdicts ----


def p_values(check: Check, result: Estimate) -> tuple[float, float]:
    """(p that the check is met, p that it is not): twice the one-sided p values, at most 1; small if it is so."""
    above, below = (min(1.0, 2 * p(check.margin)) for p in (result.p_above, result.p_below))
    return (below, above) if check.less else (above, below)


def what_would_decide(result: Result) -> str:
    """How many seeds are expected to decide an undecided claim.

    If a mean is on the wrong side of its margin, enough to refute one such check; otherwise enough to show all checks.
    """
    pairs = [(c, x) for c, x in zip(result.claim.checks, result.found, strict=True) if x is not None]
    if any(x.components is None for _, x in pairs):
        return "one seed"
    wrong = [(c, x) for c, x in pairs if (x.mean > c.margin) == c.less]
    level = ALPHA / len(pairs) if wrong else ALPHA
    needed = [x.seeds_needed(c.margin, level) for c, x in wrong or pairs]
    enough = [seeds for seeds in needed if seeds is not None]
    if not enough or (not wrong and len(enough) < len(needed)):
        return "no number of seeds would decide: more documents needed"
    more = min(enough) if wrong else max(enough)
    return f"{max(more, result.seeds + 1)} seeds would decide"


def measure(claim: Claim, rows: Rows) -> Result:
    seeds = [min(map(len, check.conditions(rows))) for check in claim.checks]
    return Result(claim, [check.measure(rows) for check in claim.checks], min(seeds, default=1))


# ---- the report ----


def describe(check: Check, result: Estimate | None, rows: Rows) -> str:
    """`rope @512 - rope @256 > 0.69: +1.234 [+1.100, +1.400]`; with too few seeds the losses of each."""
    difference = f"{check.a} - {check.b}"
    if check.since is not None:
        difference = f"({difference}) since @{check.since}"
    if result is not None:
        text = f"{result}" + (" (one seed: documents only)" if result.seeds == 1 else "")
    elif all(check.conditions(rows)):
        each = (" ".join(f"{x:.2f}" for x in rows.losses(at.run, at.label, at.n)) for at in (check.a, check.b))
        text = f"losses {' against '.join(each)}"
    else:
        text = MISSING
    return f"{difference} {'<' if check.less else '>'} {check.margin:.2g}: {text}"


def q_text(q: float | None) -> str:
    """`0.03`, `<0.001`; empty for None."""
    if q is None:
        return ""
    return "<0.001" if q < 0.001 else f"{q:.3f}" if q < 0.01 else f"{q:.2f}"


def origin(claim: Claim, plan: str, rows: Rows) -> str:
    """The file of the rows that test a claim, their commits, and the command that measures them."""
    seen = sorted({row.commit for c in claim.checks for seeds in c.conditions(rows) for row in seeds.values()})
    return f"`{plan}.jsonl` ({' '.join(seen)}), `python -m studies.matrix --plan {plan}`" if claim.checks else ""


def claims_section(plan: str, rows: Rows, claims: Sequence[Claim]) -> list[str]:
    """The lines of the table of these claims, those by construction last."""
    results = sorted((measure(claim, rows) for claim in claims), key=lambda x: bool(x.claim.by_construction))
    p = [None if x.claim.by_construction or x.claim.budget or not x.p else min(x.p) for x in results]
    q, lines = iter(q_values([each for each in p if each is not None])), []
    for x, p_of_claim in zip(results, p, strict=True):
        q_of_claim = None if p_of_claim is None else next(q)
        claim, one = x.claim, x.seeds == 1 and all(found is None or found.seeds == 1 for found in x.found)
        measured = "; ".join(describe(c, found, rows) for c, found in zip(claim.checks, x.found, strict=True))
        verdict = f"by construction: {claim.by_construction}" if claim.by_construction else x.verdict(q_of_claim)
        verdict = f"**{verdict}**" + (", one seed" if one and verdict in (HOLDS, REFUTED) else "")
        cells = [str(claim.number), claim.claim, f"{claim.source}: {claim.reported}", measured]
        cells += [origin(claim, plan, rows), "" if claim.by_construction else str(x.seeds)]
        lines.append(line([*cells, q_text(q_of_claim), verdict]))
    return lines


def report() -> str:
    """The text of results/claims.md."""
    files = {plan: read_rows(RESULTS / f"{plan}.jsonl") for plan in ("rope", "encodings")}
    L = files["rope"].trained_ctx
    margins = {"between": BETWEEN_RUNS, "within": WITHIN_A_RUN, "past": WITHIN_A_RUN_PAST_L}
    tables = {plan: claims_section(plan, rows, read_claims(plan, L)) for plan, rows in files.items()}
    return fill("claims.md", L=L, alpha=ALPHA, fewest=FEWEST, **margins, **tables)


@user_errors
def main() -> None:
    publish("claims.md", report())


if __name__ == "__main__":
    main()
