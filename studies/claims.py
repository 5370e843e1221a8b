"""What is published against what our rows say: python -m studies.claims

Every claim (published.py) is a list of differences between two sets of rows of results/matrix.jsonl, each with a 95 %
interval over seeds and documents. The verdict follows from the intervals by `verdict`, and is never typed. Writes
results/claims.md.
"""

import csv
from dataclasses import replace

import numpy as np

from conf.errors import one_line_errors
from conf.registry import ROOT
from studies.matrix import run_of, write_table
from studies.published import CLAIMS, SAME, At, Check

HOLDS, FAILS, UNSEEN, MISSING = "holds", "does not hold here", "cannot be seen at this scale", "not run"


HEAD = """# Published claims against our rows

Made by `python -m studies.claims` from `matrix.jsonl`; do not edit. Differences of loss in nats per token of the same
targets, with 95 % intervals over seeds and documents; @n is the context given, L = {L} the one trained at.
The verdict follows from the intervals: all on the claim's side of its margin, one wholly on the other side, or neither
({unseen}). "No worse" means by less than {same}.

| | claim | source, and what it says there | our rows | seeds | verdict |
|---|---|---|---|---|---|"""


def nll(rows: list[dict], at: At) -> dict[int, np.ndarray]:
    """seed -> nats per token of each document; of the decay study, q . k / D at each distance from n on."""
    if at.run.startswith("decay"):
        with (ROOT / "results/decay.csv").open() as f:
            return {0: np.array([float(x[f"{at.run[6:]} {at.label}"]) for x in csv.DictReader(f)])[at.n :]}
    found = [r for r in rows if (run_of(r), r["label"], r["n"]) == (at.run, at.label, at.n)]
    return {r["seed"]: np.array(r["nll"]) * len(r["nll"]) / r["tokens"] for r in found}


def interval(delta: np.ndarray, draws: int = 4000) -> tuple[float, float, float]:
    """(mean, low, high): 95 % over seeds and documents, from differences [seeds, documents], both resampled.

    Documents are the same for all seeds, so the two are crossed. Three seeds are few: with so few draws to choose from
    the interval is rather too narrow than too wide.
    """
    rng = np.random.default_rng(0)
    seeds, documents = delta.shape
    times_seed, times_document = (rng.multinomial(k, np.full(k, 1 / k), size=draws) for k in (seeds, documents))
    means = ((times_seed @ delta) * times_document).sum(axis=1) / delta.size
    low, high = np.percentile(means, [2.5, 97.5])
    return float(delta.mean()), float(low), float(high)


def verdict(checks: list[tuple[Check, tuple[float, float, float] | None]]) -> str:
    """All intervals on the claim's side of their margins: holds. One wholly on the other: does not. Else unseen."""
    if any(interval is None for _, interval in checks):
        return MISSING
    right = [high < c.margin if c.less else low > c.margin for c, (_, low, high) in checks]
    wrong = [low > c.margin if c.less else high < c.margin for c, (_, low, high) in checks]
    return HOLDS if all(right) else FAILS if any(wrong) else UNSEEN


def in_tokens(check: Check, L: int) -> Check:
    """The check with its lengths, given in trained contexts, in tokens."""
    a, b = (replace(at, n=round(at.n * L)) for at in (check.a, check.b))
    return replace(check, a=a, b=b)


def measure(rows: list[dict], check: Check) -> tuple[tuple[float, float, float] | None, int]:
    """(interval of loss(a) - loss(b) over the seeds that both have, how many these are)."""
    a, b = nll(rows, check.a), nll(rows, check.b)
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None, 0
    delta = np.stack([a[s] - b[s] for s in seeds])
    return interval(np.abs(delta) if check.absolute else delta), len(seeds)


def table(rows: list[dict]) -> str:
    L = rows[0]["train_ctx"]
    lines = [HEAD.format(L=L, unseen=UNSEEN, same=SAME)]
    for number, claim in enumerate(CLAIMS, 1):
        measured = [(c, *measure(rows, c)) for c in (in_tokens(c, L) for c in claim.checks)]
        cells = []
        for c, found, _ in measured:
            sign = "<" if c.less else ">"
            said = "not run" if found is None else f"{found[0]:+.3f} [{found[1]:+.3f}, {found[2]:+.3f}]"
            difference = f"size of {c.a} - {c.b}" if c.absolute else f"{c.a} - {c.b}"
            cells.append(f"{difference} {sign} {c.margin:.2g}: {said}")
        seeds = min(s for *_, s in measured)
        result = verdict([(c, found) for c, found, _ in measured])
        ours = "; ".join(cells)
        said = f"{claim.source}: {claim.says}"
        lines.append(f"| {number} | {claim.text} | {said} | {ours} | {seeds} | **{result}** |")
    return "\n".join(lines) + "\n"


def main() -> None:
    write_table(table, __doc__ or "", "claims.md")


if __name__ == "__main__":
    one_line_errors(main)()
