"""Published claims about newer encodings and layer schedules, tested on rows: python -m studies.layers

The rows are those of `python -m studies.matrix --plan layers`, results/layers.jsonl. Writes results/layers.md: the
perplexity of every run, its gain over the better control, and the claims, tested as those of studies.claims. A claim
whose runs were not trained is "not run".
"""

from collections.abc import Sequence

from conf.errors import user_errors
from conf.registry import ROOT
from studies.claims import claims_sections, read_claims
from studies.rows import Rows, fill, report_command
from studies.tables import by_condition, gain, gain_table


def conditions(rows: Rows) -> dict[tuple[str, str], str]:
    """(run, label of the method) -> its name in the tables. The window control is left out."""
    pairs = dict.fromkeys((run, label) for run, label, _ in rows.by_condition if label != "window")
    return {(run, label): f"`{run}`" + ("" if label == "none" else f", {label}") for run, label in pairs}


def precisions(rows: Rows) -> list[str]:
    """Which runs were trained and evaluated in which dtype, if there are several."""
    runs: dict[str, list[str]] = {}
    for run, dtype in dict.fromkeys((row.name, row.dtype) for row in rows.rows):
        runs.setdefault(dtype, []).append(f"`{run}`")
    if len(runs) < 2:
        return []
    texts = (f"{dtype}: {', '.join(names)}" for dtype, names in runs.items())
    return ["", f"Trained and evaluated in {'; '.join(texts)}."]


def report(sources: Sequence[Rows]) -> str:
    """The text of results/layers.md."""
    (rows,) = sources
    L = rows.trained_ctx
    measured, _ = claims_sections(sources, read_claims("layers", L))
    ns, names = sorted({row.n for row in rows.rows}), conditions(rows)
    trained, beyond = {row.name: row.longest_trained_ctx for row in rows.rows}, [n for n in ns if n > L]
    cells = {
        name: [gain(rows, run, label, n) if n > trained[run] else "" for n in beyond]
        for (run, label), name in names.items()
    }
    perplexities = [*by_condition(rows, names, ns), *precisions(rows)]
    gains = gain_table([f"n = {n}" for n in beyond], cells)
    return fill("layers.md", L=L, four_L=4 * L, perplexities=perplexities, gains=gains, measured=measured)


if __name__ == "__main__":
    user_errors(report_command)(report, "layers.md", [ROOT / "results/layers.jsonl"])
