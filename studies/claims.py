"""Published claims tested on our rows: python -m studies.claims

Every claim of published.py is a list of differences between two sets of rows of results/matrix.jsonl, each with a 95 %
interval over seeds and documents. Its verdict is computed from these intervals. Writes results/claims.md.
"""

from dataclasses import replace

import numpy as np

from conf.errors import user_errors_in_one_line
from studies.published import CLAIMS, SAME, Check, Claim
from studies.rows import Interval, Rows, interval, report_command

HOLDS, FAILS, UNSEEN, MISSING = "holds", "does not hold here", "cannot be seen at this scale", "not run"


HEAD = """# Published claims against our rows

Made by `python -m studies.claims` from `matrix.jsonl`; do not edit. Differences of loss in nats per token of the same
targets, with 95 % intervals over seeds and documents; @n is the context given, L = {L} the one trained at.
The verdict follows from the intervals: all on the claim's side of its margin, one wholly on the other side, or neither
({unseen}). "No worse" means by less than {same}.

| | claim | source, and what it says there | our rows | seeds | verdict |
|---|---|---|---|---|---|"""


# ---- one claim ----


def in_tokens(check: Check, L: int) -> Check:
    """The check with its lengths in tokens instead of trained contexts. L: the trained context in tokens."""
    a, b = (replace(at, n=round(at.n * L)) for at in (check.a, check.b))
    return replace(check, a=a, b=b)


def measure(rows: Rows, check: Check) -> tuple[Interval | None, int]:
    """(interval of a - b in nats per token, number of seeds that both conditions have); None if they share no seed.

    The lengths of the check are in tokens (`in_tokens`).
    """
    a, b = check.values(rows, check.a), check.values(rows, check.b)
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None, 0
    delta = np.stack([a[seed] - b[seed] for seed in seeds])  # [seeds, documents]
    return interval(np.abs(delta) if check.absolute else delta), len(seeds)


def verdict(measured: list[tuple[Check, Interval | None]]) -> str:
    """The verdict of a claim from the intervals of its checks.

    HOLDS if every interval is on the claimed side of its margin, FAILS if at least one is completely on the other side,
    UNSEEN if neither, MISSING if a check has no rows.
    """
    intervals = [(check, result) for check, result in measured if result is not None]
    if len(intervals) < len(measured):
        return MISSING
    right = [high < check.margin if check.less else low > check.margin for check, (_, low, high) in intervals]
    wrong = [low > check.margin if check.less else high < check.margin for check, (_, low, high) in intervals]
    if all(right):
        return HOLDS
    return FAILS if any(wrong) else UNSEEN


# ---- the report ----


def describe(check: Check, result: Interval | None) -> str:
    """`rope @512 - rope @256 > 0.69: +1.234 [+1.100, +1.400]`"""
    difference = f"{check.a} - {check.b}"
    if check.absolute:
        difference = f"size of {difference}"
    sign = "<" if check.less else ">"
    value = MISSING if result is None else f"{result[0]:+.3f} [{result[1]:+.3f}, {result[2]:+.3f}]"
    return f"{difference} {sign} {check.margin:.2g}: {value}"


def claim_line(number: int, claim: Claim, rows: Rows, L: int) -> str:
    """A claim's line of the table."""
    checks = [in_tokens(check, L) for check in claim.checks]
    measured = [measure(rows, check) for check in checks]
    results = [(check, result) for check, (result, _) in zip(checks, measured, strict=True)]
    source = f"{claim.source}: {claim.reported}"
    ours = "; ".join(describe(check, result) for check, result in results)
    seeds = min(n_seeds for _, n_seeds in measured)
    return f"| {number} | {claim.text} | {source} | {ours} | {seeds} | **{verdict(results)}** |"


def report(rows: Rows) -> str:
    """The text of results/claims.md."""
    L = rows[0]["train_ctx"]
    lines = [HEAD.format(L=L, unseen=UNSEEN, same=SAME)]
    lines += [claim_line(number, claim, rows, L) for number, claim in enumerate(CLAIMS, 1)]
    return "\n".join(lines) + "\n"


def main() -> None:
    report_command(report, "Published claims tested on the rows of the matrix", "claims.md")


if __name__ == "__main__":
    user_errors_in_one_line(main)()
