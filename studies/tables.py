"""The rows of the matrix as Markdown tables: python -m studies.tables writes results/matrix.md

A cell is a perplexity, as the mean over seeds with the lowest and highest seed in brackets, or a gain over the bar in
nats per token with its 95 % interval and its q value.
"""

from collections.abc import Callable, Sequence

import numpy as np

from conf.errors import user_errors
from measure.intervals import Estimate, estimate, interval_text
from studies.claims import estimate_text, q_text, with_q
from studies.plan import EXTENSIONS
from studies.rows import BAR, Rows, difference, fill, header, line, report_command, source

NOISE = """`rope` and `rope_interleaved` are the same function up to a permutation of dimensions, so their difference is
noise of the training (A/A), and so is a difference between two seeds. A difference between two runs that is not larger
than these means little at that length. In nats per token:
"""

CONTROLS = """Loss of the window control minus loss of truncation, nats per token. Where it is positive, the window
breaks the model, and truncation is the bar.
"""


# ---- cells ----


def mean_and_range(values: list[float], show: Callable[[float], str]) -> str:
    """`20.0 (10.0-40.0)`; only the mean for one value; empty for none."""
    if not values:
        return ""
    mean, low, high = show(float(np.mean(values))), show(min(values)), show(max(values))
    return mean if len(values) == 1 else f"{mean} ({low}-{high})"


def perplexity(rows: Rows, run: str, label: str, n: int) -> str:
    """exp of the mean loss over seeds, with the range over seeds."""
    return mean_and_range(rows.losses(run, label, n).tolist(), lambda nats: f"{np.exp(nats):.1f}")


def gain(rows: Rows, run: str, label: str, n: int) -> Estimate | str:
    """How much lower the loss is than that of the better control; or the text of a cell without a number."""
    if label == "window" and rows.find(run, BAR, n) == rows.find(run, label, n):
        return "the bar"
    gains = rows.gain(run, label, n)
    return estimate(gains) if len(gains) else ""


def gain_cells(gains: list[list[Estimate | str]]) -> list[list[str]]:
    """The cells of a table of gains, `+0.100 [+0.032, +0.179] q=0.03`; q over all of them."""

    def show(cell: Estimate | str, q: float | None) -> str:
        if isinstance(cell, str):
            return cell
        q_of_cell = q_text(q)
        text = interval_text(cell.mean, *cell.interval)
        return f"{text} q{'' if q_of_cell.startswith('<') else '='}{q_of_cell}"

    q = iter(with_q([None if isinstance(cell, str) else cell.p for line in gains for cell in line]))
    return [[show(cell, next(q)) for cell in line] for line in gains]


def by_length(rows: Rows, runs: dict[str, str], ns: list[int]) -> list[str]:
    """A table of runs without scaling, a column for each length. runs: name in the table -> name in the matrix"""
    lines = header(["", "seeds", "bits/byte within L", *(f"n = {n}" for n in ns)])
    for title, run in runs.items():
        by_seed = {row.seed: row.in_window for row in rows.rows if row.name == run and row.in_window}
        bits = mean_and_range([*by_seed.values()], lambda bits: f"{bits:.3f}")
        lines.append(line([title, str(len(by_seed)), bits, *(perplexity(rows, run, "none", n) for n in ns)]))
    return lines


def by_condition(rows: Rows, names: dict[tuple[str, str], str], ns: list[int]) -> list[str]:
    """A table of conditions, a column for each length. names: (run, label of the method) -> its name in the table"""
    lines = [line([name, *(perplexity(rows, *pair, n) for n in ns)]) for pair, name in names.items()]
    return [*header(["", *(f"n = {n}" for n in ns)]), *lines]


def order_of(rows: Rows, run: str, label: str, n: int) -> float:
    """The mean loss over seeds, as a sort key; infinite if there are no rows."""
    losses = rows.losses(run, label, n)
    return float(losses.mean()) if len(losses) else np.inf


# ---- the sections of results/matrix.md; L: the trained context ----


def heading(title: str, rows: Rows) -> str:
    return f"## {title}" + (f" ({rows.mark})" if rows.mark else "") + "\n"


def noise_section(rows: Rows) -> list[str]:
    """The same model against itself: rope against rope_interleaved, and the seeds of rope against each other."""
    between = ("standard deviation between seeds of `rope`", "largest difference between two seeds of `rope`")
    text = [heading("Noise floor", rows), NOISE, *header(["n", "`rope_interleaved` - `rope`", "seeds", *between])]
    for n in rows.lengths("encodings"):
        found = difference(rows.find("rope_interleaved", "none", n), rows.find("rope", "none", n))
        between_runs = estimate_text(estimate(found)) if len(found) else ""
        losses = rows.losses("rope", "none", n)
        several = len(losses) > 1
        spread = [f"{losses.std(ddof=1):.3f}", f"{np.ptp(losses):.3f}"] if several else ["", ""]
        text.append(line([str(n), between_runs, str(len(found)), *spread]))
    return [*text, ""]


def controls_section(rows: Rows, L: int) -> list[str]:
    """The loss of the window control minus that of truncation, for every encoding."""
    beyond = [n for n in rows.lengths("encodings") if n > L]
    text = ["", heading("The two controls", rows), CONTROLS, *header(["", *(f"n = {n}" for n in beyond)])]
    for run in rows.runs("encodings"):
        found = [difference(rows.find(run, "window", n), rows.find(run, "none", L)) for n in beyond]
        text.append(line([f"`{run}`", *(f"{x.mean():+.3f}" if len(x) else "" for x in found)]))
    return text


def encodings_section(rows: Rows, L: int, title: str) -> list[str]:
    """Every encoding without scaling, sorted by the loss at 8 L."""
    encodings = sorted(rows.runs("encodings"), key=lambda run: order_of(rows, run, "none", 8 * L))
    text = [title, "`python -m studies.matrix --only encodings`\n"]
    return text + by_length(rows, {f"`{run}`": run for run in encodings}, rows.lengths("encodings"))


def methods_of(rows: Rows, L: int) -> list[str]:
    """The labels of the methods evaluated on rope past L, sorted by the loss at 2 L."""
    labels = sorted({label for run, label, n in rows.by_condition if run == "rope" and n > L})
    return sorted(labels, key=lambda label: order_of(rows, "rope", label, 2 * L))


def rope_section(rows: Rows, L: int) -> list[str]:
    """RoPE with every scaling method: perplexity, then gain over the bar past L. Sorted by the loss at 2 L."""
    methods, ns = methods_of(rows, L), rows.lengths("encodings")
    text = ["", heading("RoPE with every scaling method", rows)]
    text += ["`python -m studies.matrix --only rope-s0,rope-s1,rope-s2`\n"]
    text += by_condition(rows, {("rope", m): f"`{m}`" for m in methods}, ns)

    beyond = [n for n in ns if n > L]
    seeds = len(rows.find("rope", "none", L))
    text += [f"\nGain over the bar in nats per token, with 95 % intervals over {seeds} seeds and documents, and q:\n"]
    # Methods with a fixed factor ("pi factor=fixed") are left out: they are measured for their loss within L only
    gains = {f"`{m}`": [gain(rows, "rope", m, n) for n in beyond] for m in methods if "=" not in m}
    return text + gain_table([f"{n / L:g}x" for n in beyond], gains)


def gain_table(columns: list[str], gains: dict[str, list[Estimate | str]]) -> list[str]:
    """A table of gains: name of a line -> its cells."""
    lines = zip(gains, gain_cells([*gains.values()]), strict=True)
    return [*header(["", *columns]), *(line([name, *cells]) for name, cells in lines)]


def other_rotary_section(rows: Rows, L: int) -> list[str]:
    """Gain of every method for the other rotary encodings, which are those that yarn applies to."""
    rotary = [run for run in rows.runs("encodings", "yarn") if run != "rope"]
    single = [m for m in methods_of(rows, L) if "=" not in m and "+" not in m]
    text = []
    for n in (4 * L, 16 * L) if rotary else ():
        title = f"Other rotary encodings with every scaling method: gain over the bar at n = {n}"
        counts = {run: len(rows.find(run, "yarn", n)) for run in ["rope", *rotary]}
        columns = [f"`{run}`, {count} seed{'' if count == 1 else 's'}" for run, count in counts.items()]
        gains = {f"`{m}`": [gain(rows, run, m, n) for run in counts] for m in single}
        text += ["", heading(title, rows), *gain_table(columns, gains)]
    return text


def base_section(rows: Rows) -> list[str]:
    """RoPE's base in pre-training, with rope as the run of the default base; seeds that all bases have."""
    runs = {f"{base:,.0f}": run for base, run in rows.bases().items()}
    text = ["", heading("RoPE's base in pre-training", rows), "`python -m studies.matrix --only base`\n"]
    return [*text, *by_length(rows.with_seeds_of("base"), runs, rows.lengths("base"))] if runs else []


def finetune_section(rows: Rows, L: int) -> list[str]:
    """The extensions by fine-tuning steps; 0 steps are the method without fine-tuning."""
    tuned = [row for row in rows.rows if row.part == "finetune"]
    if not tuned:
        return []
    rows = rows.with_seeds_of("finetune")
    ns = sorted({row.n for row in tuned})
    # (steps, their share of the pre-training in %)
    budgets = sorted({(row.finetune_steps, row.percent) for row in tuned if row.finetune_steps})
    text = ["", heading(f"RoPE fine-tuned at {4 * L}, evaluated without further scaling", rows)]
    text += ["`python -m studies.matrix --only finetune`; 0 steps: the scaling method without fine-tuning\n"]
    text += header(["", "steps", "% of pre-training", "seeds", *(f"n = {n}" for n in ns)])

    conditions = []  # (cells, run, label of the method)
    for method in EXTENSIONS:
        title = "direct" if method == "none" else f"`{method}`"
        conditions.append(([title, "0", "0"], "rope", method))
        conditions += [([title, str(k), f"{percent:g}"], f"{method}-{k}", "none") for k, percent in budgets]
    scratch = [run for run in rows.runs("finetune") if run.startswith("scratch")]
    conditions += [([f"trained at {4 * L} from scratch", "", ""], run, "none") for run in scratch]
    for cells, run, label in conditions:
        seeds = len(rows.find(run, label, 4 * L))
        if seeds:
            text.append(line([*cells, str(seeds), *(perplexity(rows, run, label, n) for n in ns)]))
    return text


def targets_text(rows: Rows) -> tuple[str, str]:
    """(`8 windows`, at which lengths fewer of them are scored) of the encodings' rows without scaling."""
    nones = [row for row in rows.rows if row.part == "encodings" and row.label == "none"]
    windows = {row.n: len(row.scored_windows) for row in nones}
    most = max(windows.values())
    counts = sorted((count, n) for n, count in windows.items() if count < most)
    fewer = ", ".join(f"{count} at n = {n}" for count, n in counts)
    return f"{most} window{'' if most == 1 else 's'}", f" (fewer windows: {fewer})" if fewer else ""


def report(sources: Sequence[Rows]) -> str:
    """The text of results/matrix.md."""
    encodings, scaled = source(sources, "encodings"), source(sources, "encodings", "yarn")
    first = next(row for row in encodings.rows if row.part == "encodings" and row.label == "none")
    L = first.train_ctx
    windows, fewer = targets_text(encodings)
    targets = round(first.targets_per_window)
    about = {"L": L, "documents": first.documents, "targets": targets, "windows": windows, "fewer": fewer}
    text = noise_section(encodings)
    text += encodings_section(encodings, L, heading("Encodings without scaling", encodings))
    for rows in sources[sources.index(encodings) + 1 :]:
        if missing := {*rows.runs("encodings")} - {*encodings.runs("encodings")}:
            of_missing = Rows([row for row in rows.rows if row.name in missing | {"rope"}])  # rope: to compare with
            title = f"## Encodings without scaling, those without new rows ({rows.mark})\n"
            text += ["", *encodings_section(of_missing, L, title)]
    text += controls_section(encodings, L)
    text += rope_section(scaled, L)
    text += other_rotary_section(scaled, L)
    text += base_section(source(sources, "base"))
    text += finetune_section(source(sources, "finetune"), L)
    return fill("matrix.md", **about, sections=text)


if __name__ == "__main__":
    user_errors(report_command)(report, "matrix.md")
