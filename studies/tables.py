"""The rows of the study as Markdown tables: python -m studies.tables writes matrix.md, encodings.md, ladder.md,
tasks.md and real.md into results/.

A cell is a perplexity, as the mean over seeds with the lowest and highest seed in brackets, or a gain over the bar in
nats per token with its 95 % interval and its q value.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conf.errors import user_errors
from measure.curves import Curve
from measure.groups import FEWEST
from measure.intervals import Estimate, estimate, interval_text, mean_interval, q_values, ratio_interval
from measure.report import OWN, describe_context, effective_context, whole_answers
from studies import gain_parts
from studies.claims import q_text
from studies.plan import EXTENSIONS, LADDER, LADDER_THIRD, REAL_DOCUMENTS, REAL_TOKENS, SHORTER, SOLVED, TASKS
from studies.rows import BAR, RESULTS, Rows, difference, fill, header, line, publish, read_rows

WIDE = 0.2  # nats: where the gains of seeds are in two groups and differ by more, they stand in place of an interval

# ---- cells ----


def mean_and_range(values: Sequence[float], show: Callable[[float], str]) -> str:
    """`20.0 (10.0 to 40.0)`; only the mean for one value; empty for none."""
    if not len(values):
        return ""
    mean, low, high = show(float(np.mean(values))), show(min(values)), show(max(values))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def perplexity(rows: Rows, run: str, label: str, n: int) -> str:
    """exp of the mean loss over seeds, with the range over seeds."""
    return mean_and_range(rows.losses(run, label, n).tolist(), lambda nats: f"{np.exp(nats):.1f}")


def gain(rows: Rows, run: str, label: str, n: int) -> Estimate | str:
    """How much lower the loss is than that of the better control; or the text of a cell without an interval."""
    if label == "window" and rows.find(run, BAR, n) == rows.find(run, label, n):
        return "the bar"
    return in_seeds(rows.gain(run, label, n))


def in_seeds(deltas: np.ndarray) -> Estimate | str:
    """Of differences [seeds, documents]: their mean, or the values of the seeds, if these are in two groups."""
    if not len(deltas):
        return ""
    of_seeds = deltas.mean(axis=1)
    spread = np.ptp(of_seeds)
    in_two_groups = spread > WIDE and np.diff(np.sort(of_seeds)).max() > spread / 2
    return f"seeds {' '.join(f'{x:+.2f}' for x in of_seeds)}" if in_two_groups else estimate(deltas)


def gain_table(columns: list[str], gains: dict[str, list[Estimate | str]]) -> list[str]:
    """A table of gains: name of a line -> its cells, `+0.100 [+0.032, +0.179] q=0.03`; q over all of them."""
    q = iter(q_values([cell.p for cells in gains.values() for cell in cells if isinstance(cell, Estimate)]))

    def show(cell: Estimate | str) -> str:
        return cell if isinstance(cell, str) else f"{cell} q={q_text(next(q))}".replace("=<", "<")

    lines = [line([name, *map(show, cells)]) for name, cells in gains.items()]
    return [*header(["", *columns]), *lines]


# ---- the sections; L: the trained context ----


def noise_section(rows: Rows, *runs: str) -> list[str]:
    """By how much trainings of a run differ that differ only in the seed."""
    columns = "standard deviation", "largest difference", "one against one", f"{FEWEST} against {FEWEST}"
    lines = header(["run", "n", "trainings", *columns])
    for run, n in sorted((run, n) for run, label, n in rows.by_condition if label == "none" and run in runs):
        losses = rows.losses(run, "none", n)
        if len(losses) > 1:
            found = losses.std(ddof=1), np.ptp(losses), gain_parts.chance(losses, 1), gain_parts.chance(losses, FEWEST)
            lines.append(line([f"`{run}`", str(n), str(len(losses)), *(f"{nats:.3f}" for nats in found)]))
    return lines


def methods_of(rows: Rows, run: str) -> list[str]:
    """The labels of the methods that a run was evaluated with past L, by the loss at 2 L."""
    L = rows.trained_ctx
    labels = {label for of, label, n in rows.by_condition if of == run and n > L and "=" not in label}
    return sorted(labels, key=lambda label: rows.losses(run, label, 2 * L).mean())


def methods_section(rows: Rows, run: str = "rope") -> list[str]:
    """A run with every scaling method: perplexity."""
    ns = sorted({n for of, _, n in rows.by_condition if of == run})
    table = [line([f"`{m}`", *(perplexity(rows, run, m, n) for n in ns)]) for m in methods_of(rows, run)]
    return [*header(["", *(f"n = {n}" for n in ns)]), *table]


def gains_section(rows: Rows, run: str = "rope") -> list[str]:
    """A run with every scaling method: gain over the bar past L."""
    beyond = sorted({n for of, _, n in rows.by_condition if of == run and n > rows.trained_ctx})
    counts = {m: len(rows.find(run, m, beyond[-1])) for m in methods_of(rows, run)}
    names = {m: f"`{m}`" + (f", {n} seeds" if n < max(counts.values()) else "") for m, n in counts.items()}
    gains = {name: [gain(rows, run, m, n) for n in beyond] for m, name in names.items()}
    return gain_table([f"{n / rows.trained_ctx:g} L" for n in beyond], gains)


def parts_section(rows: Rows, *runs: str) -> list[str]:
    """Of the methods of each run at 2, 4 and 8 L: seeds, reward, tax, and share of the headroom."""
    lines = []
    for (run, label, n), seeds in sorted(rows.by_condition.items(), key=lambda x: x[0][2]):
        multiple = n / rows.trained_ctx
        if run in runs and label != "window" and multiple in (2, 4, 8):
            parts = [gain_parts.part_of_gain(rows, run, label, n, reward) for reward in (True, False)]
            if len(parts[0]):
                share = gain_parts.share_of_headroom(rows, run, label, n)
                percent = interval_text(*(100 * x for x in share), ".0f") if share else ""
                name = f"`{label}`" if len(runs) == 1 else f"`{run}`, {label}"
                cells = [name, str(len(seeds)), *(str(estimate(part)) for part in parts), percent]
                lines.append(line([f"{multiple:g} L", *cells]))
    names = ["n", "method", "seeds", "reward: antecedent between L and n back", "tax: all other targets"]
    return [*header([*names, "gain, % of the headroom"]), *lines] if lines else []


def antecedents_section(rows: Rows, run: str = "rope") -> list[str]:
    """The gain per target of two methods, by the antecedent of the targets, at 2, 4 and 8 L."""
    L = rows.trained_ctx
    columns = [(label, multiple * L) for label in ("yarn", "rerope + logn") for multiple in (2, 4, 8)]
    cells: dict[str, list[str]] = {}
    for label, n in columns:
        groups = gain_parts.gains_of_groups(rows, run, label, n)
        of_all = sum(counts.sum() for _, counts in groups.values())
        for name, (nats, counts) in groups.items():
            cells.setdefault(name, [f"{100 * counts.sum() / of_all:.1f} %"])
            cells[name].append(interval_text(*ratio_interval(nats, counts)))
    names = [f"`{label}`, {n // L} L" for label, n in columns]
    return [*header(["antecedent", "targets", *names]), *(line([name, *x]) for name, x in cells.items())]


def by_length(rows: Rows, runs: dict[str, str]) -> list[str]:
    """A table of runs, a column for each length. runs: name in the rows -> name in the table"""
    ns = sorted({n for run, at, n in rows.by_condition if run in runs and at == "none"})
    lines = header(["", "seeds", "bits/byte within L", *(f"n = {n}" for n in ns)])
    for run, name in runs.items():
        by_seed = {row.training: row.in_window for row in rows.rows if row.name == run and row.in_window}
        bits = mean_and_range([*by_seed.values()], lambda bits: f"{bits:.3f}")
        lines.append(line([name, str(len(by_seed)), bits, *(perplexity(rows, run, "none", n) for n in ns)]))
    return lines


def base_section(rows: Rows) -> list[str]:
    runs = sorted({(row.base, row.name) for row in rows.rows if row.part == "base" or row.name == "rope"})
    return by_length(rows, {run: f"`{run}`, base {base:,.0f}" for base, run in runs}) if len(runs) > 1 else []


def finetune_section(rows: Rows) -> list[str]:
    """The fine-tuned runs, and the headroom at the lengths that they were fine-tuned at."""
    runs, L = {run: f"`{run}`" for run in rows.runs("finetune")}, rows.trained_ctx
    found = {multiple: gain_parts.headroom(rows, "rope", multiple * L) for multiple in EXTENSIONS}
    rooms = [f"{multiple} L {estimate(room)}" for multiple, room in found.items() if len(room)]
    return [*by_length(rows, runs), "", f"Headroom, nats per token: {', '.join(rooms)}."]


def encodings_section(rows: Rows) -> list[str]:
    """Every encoding and schedule without scaling, sorted by the loss at 8 L."""
    runs = sorted(rows.runs("encodings"), key=lambda run: rows.losses(run, "none", 8 * rows.trained_ctx).mean())
    return by_length(rows, {run: f"`{run}`" for run in runs})


def rises_section(rows: Rows) -> list[str]:
    """The rise of the loss since L of every encoding, and its gain over the better control with its own method.

    Also the rise less that of rope at an equal loss at L. In the order of the rise at 8 L.
    """
    L, cells, rise_at_8L = rows.trained_ctx, {}, {}
    ns = [multiple * L for multiple in (2, 8, 32)]
    for run, label in dict.fromkeys((run, label) for run, label, _ in rows.by_condition if label != "window"):
        inside = rows.find(run, "none", L)
        rises = [difference(rows.find(run, label, n), inside) for n in ns]
        pairs = [(rise, gain_parts.rise_of_rope(rows, run, n)) for rise, n in zip(rises, ns, strict=True)]
        others = ["" if run in ("rope", *SHORTER) or min(map(len, x)) < FEWEST else estimate(*x) for x in pairs]
        name = f"`{run}`" + ("" if label == "none" else f", {label}")
        trained = max((row.longest_trained_ctx for row in inside.values()), default=L)
        gains = [gain(rows, run, label, n) if n > trained else "" for n in ns]
        cells[name] = [*map(in_seeds, rises), *others, *gains]
        rise_at_8L[name] = rises[1].mean() if len(rises[1]) else np.inf
    columns = [f"{what}, {n // L} L" for what in ("rise", "less RoPE's", "gain") for n in ns]
    return gain_table(columns, {name: cells[name] for name in sorted(cells, key=lambda name: rise_at_8L[name])})


def ladder_section(rows: Rows, *names: str) -> list[str]:
    """The gain of every method at each of these sizes, and of PI over no scaling, and how it grows."""
    L, sizes = rows.trained_ctx, [float(name.split("M")[0]) for name in names]
    methods, cells = [m for m in methods_of(rows, f"ladder-{names[0]}") if m != "window"], {}
    for name, worse, better in (*((f"`{m}`", BAR, m) for m in methods), ("`pi` over `none`", "none", "pi")):
        for n in (2 * L, 4 * L, 8 * L):
            gains = [difference(*(rows.find(f"ladder-{size}", x, n) for x in (worse, better))) for size in names]
            growth = gain_parts.growth(sizes, gains) if min(map(len, gains)) >= FEWEST else ""
            cells[f"{name}, {n // L} L"] = [*map(in_seeds, gains), growth]
    return gain_table([*names, "for ten times the parameters"], cells)


def task_section(rows: Rows, task: str) -> list[str]:
    """Of every run that learned a task and each method: right answer tokens, whole answers, effective context."""
    conditions = dict.fromkeys((run, label) for run, label, _ in rows.by_condition if run.startswith(f"{task}-"))
    if not conditions:
        return []
    ns = sorted({n for run, _, n in rows.by_condition if (run, "none") in conditions})
    distances, lines = [*next(iter(rows.find(*next(iter(conditions)), ns[-1]).values())).answers], []
    for run, label in conditions:
        found, cells = {n: [*rows.find(run, label, n).values()] for n in ns}, []
        for seeds in found.values():
            hits = 100 * np.array([row.hits for row in seeds])  # [seeds, texts], %
            whole = np.mean([whole_answers(row.answers) for row in seeds])
            cells.append(f"{of_seeds(hits)}, {whole:.0f}")
        curves = [Curve([*at]) for at in zip(*found.values(), strict=True)]
        for levels in ([SOLVED] * len(curves), [OWN * (curve.first.accuracy or 1) for curve in curves]):
            contexts = [effective_context(curve, x)[0] for curve, x in zip(curves, levels, strict=True)]
            cells.append(" ".join(describe_context(n, ns) for n in contexts))
        cells += [f"{100 * np.mean([row.answers[d] for row in found[ns[-1]]]):.0f}" for d in distances]
        cells.append("" if label == "window" else of_seeds(100 * gain_parts.beyond_window(rows, run, label, ns[-1])))
        name = f"`{run.removeprefix(f'{task}-')}`" + ("" if label == "none" else f", {label}")
        lines.append(line([name, str(len(curves)), *cells]))
    columns = ["", "seeds", *(f"n = {n}: tokens, whole" for n in ns)]
    columns += [f"effective context of each seed, {x}" for x in ("80 %", f"85 % of the tokens at {ns[0]}")]
    columns += [f"distance {d} at n = {ns[-1]}" for d in distances]
    return [*header([*columns, f"distance {distances[-1]} less the window control's"]), *lines]


def of_seeds(shares: np.ndarray) -> str:
    """Of percentages [seeds, texts]: the mean with its interval, or with the range of two seeds, too few for one."""
    if len(shares) == 2:
        return mean_and_range(shares.mean(axis=1).tolist(), lambda x: f"{x:.0f}")
    return interval_text(*mean_interval(shares), ".0f")


def cost_section(rows: Rows) -> list[str]:
    """What the rows of each part cost, where they say it: hours of one thread."""
    names, lines = ["part", "trainings", "hours of training", "hours of evaluation"], []
    for part in dict.fromkeys(row.part for row in rows.rows if row.threads):
        trainings, *hours = cost(rows, part)
        lines.append(line([part, str(trainings), *(f"{x:.1f}" for x in hours)]))
    return [*header(names), *lines] if lines else ["Not recorded."]


def cost(rows: Rows, part: str) -> tuple[int, float, float]:
    """(trainings, hours of one thread that they took, hours of evaluation) of a part."""
    of_part = [row for row in rows.rows if row.part == part]
    runs = {row.run: row.train_seconds * row.threads for row in of_part}
    return len(runs), sum(runs.values()) / 3600, sum(row.seconds * row.threads for row in of_part) / 3600


def targets_text(rows: Rows) -> str:
    """`the last 64 tokens of each of 8 windows in 32 held-out documents (2 windows at n = 4096)`"""
    windows = {row.n: len(row.scored_windows) for row in rows.rows if row.label == "none"}
    most, first = max(windows.values()), rows.rows[0]
    fewer = ", ".join(f"{count} at n = {n}" for n, count in sorted(windows.items()) if count < most)
    note = f" (fewer windows: {fewer})" if fewer else ""
    where = f"{most} windows in {first.documents} held-out documents{note}"
    return f"the last {round(first.targets_per_window)} tokens of each of {where}"


def rope_report() -> str:
    """The text of results/matrix.md."""
    rows = read_rows(RESULTS / "rope.jsonl")
    tables = {"noise": noise_section(rows, "rope"), "methods": methods_section(rows), "gains": gains_section(rows)}
    tables |= {"parts": parts_section(rows, "rope"), "antecedents": antecedents_section(rows)}
    tables |= {"finetune": finetune_section(rows), "books": tables_of("books", "books-rope")}
    return fill("matrix.md", **about(rows), **tables, cost=cost_section(rows))


def about(rows: Rows) -> dict[str, Any]:
    """What the texts around the tables of a plan say of its rows."""
    return {"L": rows.trained_ctx, "targets": targets_text(rows), "fewest": FEWEST, "wide": WIDE}


def tables_of(plan: str, run: str) -> list[str]:
    """The tables of a run with every method: perplexity, gain, tax and reward."""
    rows = read_rows(RESULTS / f"{plan}.jsonl")
    tables = [section(rows, run) for section in (methods_section, gains_section, parts_section)]
    return [text for table in tables for text in (*table, "")][:-1]


def encodings_report() -> str:
    """The text of results/encodings.md."""
    rows, former = (read_rows(RESULTS / f"{name}.jsonl") for name in ("encodings", "adamw"))
    tables = {"perplexities": encodings_section(rows), "rises": rises_section(rows), "cost": cost_section(rows)}
    tables |= {"noise": noise_section(rows, "rope"), "bases": base_section(rows)}
    tables["parts"] = parts_section(rows, *rows.runs("encodings"))
    tables |= {"former_perplexities": encodings_section(former), "former_rises": rises_section(former)}
    return fill("encodings.md", **about(rows), **tables)


def ladder_report() -> str:
    """The text of results/ladder.md."""
    rows, equal = read_rows(RESULTS / "ladder.jsonl"), (f"{LADDER_THIRD}-third", [*LADDER][-1])
    runs = [f"ladder-{name}" for name in (*LADDER, equal[0])]
    tables = {"sizes": by_length(rows, {run: f"`{run}`" for run in runs}), "noise": noise_section(rows, *runs)}
    tables |= {"gains": ladder_section(rows, *LADDER), "equal": ladder_section(rows, *equal)}
    tables["parts"] = parts_section(rows, *runs)
    return fill("ladder.md", **tables, cost=cost_section(rows))


def tasks_report() -> str:
    """The text of results/tasks.md."""
    tables = {}
    for size, file in (("", "tasks"), ("small_", "tasks_small")):
        rows = read_rows(RESULTS / f"{file}.jsonl")
        tables |= {f"{size}{task}": task_section(rows, task) for task in TASKS} | {f"{size}cost": cost_section(rows)}
    return fill("tasks.md", **tables)


def real_report() -> str:
    """The text of results/real.md."""
    rows, corpora = read_rows(RESULTS / "real.jsonl"), [*REAL_DOCUMENTS]
    counts = {row.name: row.documents for row in rows.rows if row.task == "matched"}
    documents = " and ".join(f"{counts[f'smollm2-{corpus}']} of `{corpus}`" for corpus in corpora)
    tables = {corpus: tables_of("real", f"smollm2-{corpus}") for corpus in corpora}
    tables |= {"copying": task_section(rows, "copying"), "cost": cost_section(rows)}
    return fill("real.md", **tables, L=rows.trained_ctx, tokens=REAL_TOKENS, documents=documents)


REPORTS = {"matrix.md": rope_report, "encodings.md": encodings_report, "tasks.md": tasks_report, "real.md": real_report}
REPORTS |= {"ladder.md": ladder_report}


@user_errors
def main() -> None:
    for name, report in REPORTS.items():
        publish(name, report())


if __name__ == "__main__":
    main()
