"""The rows of the matrix as Markdown tables: python -m studies.tables writes results/matrix.md

A cell is a perplexity, as the mean over seeds with the lowest and highest seed in brackets, or a gain over the window
control in nats per token with its 95 % interval.
"""

from collections.abc import Callable, Sequence

import numpy as np

from conf.errors import user_errors_in_one_line
from studies.matrix import EXTENSIONS
from studies.rows import Rows, document_losses, interval, report_command, run_of, seeds_of

HEAD = """# The matrix in tables

Made by `python -m studies.tables` from `matrix.jsonl`; do not edit. Perplexity of the same targets, the last {targets}
tokens of {documents} held-out documents, given n tokens (L = {L}): the mean over seeds and, in brackets, the least and
the most of them. Each row of `matrix.jsonl` holds the command that trained its run, its commit and the loss of every
document.
"""


# ---- Markdown ----


def line(cells: Sequence[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def header(cells: Sequence[str]) -> list[str]:
    """The first two lines of a Markdown table: the names of the columns, and the rule below them."""
    return [line(cells), "|---" * len(cells) + "|"]


def mean_and_range(values: list[float], show: Callable[[float], str]) -> str:
    """`20.0 (10.0-40.0)`; only the mean for one value; empty for none."""
    if not values:
        return ""
    mean, low, high = show(float(np.mean(values))), show(min(values)), show(max(values))
    return mean if len(values) == 1 else f"{mean} ({low}-{high})"


# ---- cells ----


def losses(rows: Rows, run: str, label: str, n: int) -> list[float]:
    """The mean loss of each seed, nats per token."""
    return [float(per_document.mean()) for per_document in document_losses(rows, run, label, n).values()]


def perplexity(rows: Rows, run: str, label: str, n: int) -> str:
    """exp of the mean loss over seeds, with the range over seeds."""
    return mean_and_range(losses(rows, run, label, n), lambda nats: f"{np.exp(nats):.1f}")


def gain(rows: Rows, run: str, label: str, n: int) -> str:
    """How much lower the loss is than that of the same seed's window control, nats per token [95 % interval]."""
    window, method = document_losses(rows, run, "window", n), document_losses(rows, run, label, n)
    seeds = sorted(window.keys() & method.keys())
    if not seeds:
        return ""
    mean, low, high = interval(np.stack([window[seed] - method[seed] for seed in seeds]))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def in_window(rows: Rows, run: str) -> list[str]:
    """[number of seeds, their held-out bits per byte within the trained context]"""
    by_seed = {row["seed"]: row["in_window"] for row in rows if run_of(row) == run and "in_window" in row}
    return [str(len(by_seed)), mean_and_range(list(by_seed.values()), lambda bits: f"{bits:.3f}")]


def by_length(rows: Rows, runs: list[tuple[str, str]], ns: list[int]) -> list[str]:
    """A table of runs without scaling, a column for each length. runs: (name in the matrix, name in the table)"""
    lines = header(["", "seeds", "bits/byte, in window", *(f"n = {n}" for n in ns)])
    for run, title in runs:
        lines.append(line([title, *in_window(rows, run), *(perplexity(rows, run, "none", n) for n in ns)]))
    return lines


def order_of(rows: Rows, run: str, label: str, n: int) -> float:
    """The mean loss over seeds, as a sort key; infinite if there are no rows."""
    return float(np.mean(losses(rows, run, label, n) or [np.inf]))


def runs_of(rows: Rows, part: str, label: str | None = None) -> list[str]:
    """The names of the part's runs, without seeds; label: only runs that were evaluated with this method."""
    return sorted({run_of(row) for row in rows if row["part"] == part and label in (None, row["label"])})


# ---- the sections of results/matrix.md; ns: the evaluated lengths, L: the trained context ----


def encodings_section(rows: Rows, ns: list[int], L: int) -> list[str]:
    """Every encoding without scaling, sorted by the loss at 8 L."""
    encodings = sorted(runs_of(rows, "encodings"), key=lambda run: order_of(rows, run, "none", 8 * L))
    text = ["## Encodings, nothing changed\n", "`python -m studies.matrix --only encodings`\n"]
    return text + by_length(rows, [(run, f"`{run}`") for run in encodings], ns)


def rope_section(rows: Rows, methods: list[str], ns: list[int], L: int) -> list[str]:
    """RoPE by every method: perplexity, then gain over the window control past L."""
    text = ["\n## RoPE by every method\n", "`python -m studies.matrix --only rope-s0,rope-s1,rope-s2`\n"]
    text += header(["", *(f"n = {n}" for n in ns)])
    text += [line([f"`{m}`", *(perplexity(rows, "rope", m, n) for n in ns)]) for m in methods]

    beyond = [n for n in ns if n > L]
    text += ["\nGain over the window control of the same seed, nats per token, 95 % over seeds and documents:\n"]
    text += header(["", *(f"{n // L}x" for n in beyond)])
    # Methods with a fixed factor ("pi factor=fixed") are left out: they are measured for their loss within L only
    text += [line([f"`{m}`", *(gain(rows, "rope", m, n) for n in beyond)]) for m in methods if "=" not in m]
    return text


def other_rotary_section(rows: Rows, methods: list[str], L: int) -> list[str]:
    """Gain of every method for the other rotary encodings, which are those that yarn applies to."""
    rotary = [run for run in runs_of(rows, "encodings", "yarn") if run != "rope"]
    if not rotary:
        return []
    single = [m for m in methods if "=" not in m and "+" not in m and m != "window"]
    text = []
    for n in (4 * L, 16 * L):
        text += [f"\n## Other rotary encodings by every method, gain over their own window control at {n}\n"]
        counts = {run: len(losses(rows, run, "yarn", n)) for run in ["rope", *rotary]}
        text += header(["", *(f"`{run}`, {count} seed{'s' if count > 1 else ''}" for run, count in counts.items())])
        text += [line([f"`{m}`", *(gain(rows, run, m, n) for run in counts)]) for m in single]
    return text


def base_section(rows: Rows, ns: list[int]) -> list[str]:
    """RoPE's base in pre-training, with rope as the run of the default base; seeds that all bases have."""
    bases = {float(row["base"]): run_of(row) for row in rows if row["part"] == "base"}
    if not bases:
        return []
    bases[10000.0] = "rope"
    text = ["\n## RoPE's base in pre-training\n", "`python -m studies.matrix --only base`\n"]
    return text + by_length(seeds_of(rows, "base"), [(run, f"{base:,.0f}") for base, run in sorted(bases.items())], ns)


def finetune_section(rows: Rows, L: int) -> list[str]:
    """The extensions by fine-tuning steps; 0 steps are the method without fine-tuning."""
    tuned = [row for row in rows if row["part"] == "finetune"]
    if not tuned:
        return []
    rows = seeds_of(rows, "finetune")
    ns = sorted({row["n"] for row in tuned})
    # (steps, their share of the pre-training in %)
    budgets = sorted({(row["finetune_steps"], row["percent"]) for row in tuned if row["finetune_steps"]})
    text = [f"\n## Fine-tuned at {4 * L}, read without further scaling\n"]
    text += ["`python -m studies.matrix --only finetune`; 0 steps: the method alone\n"]
    text += header(["", "steps", "% of pre-training", "seeds", *(f"n = {n}" for n in ns)])

    def add_line(cells: list[str], run: str, label: str) -> None:
        """cells, the number of seeds, and perplexities."""
        seeds = len(losses(rows, run, label, 4 * L))
        if seeds:
            text.append(line([*cells, str(seeds), *(perplexity(rows, run, label, n) for n in ns)]))

    for method in EXTENSIONS:
        title = "direct" if method == "none" else f"`{method}`"
        add_line([title, "0", "0"], "rope", method)
        for steps, percent in budgets:
            add_line([title, str(steps), f"{percent:g}"], f"{method}-{steps}", "none")
    for run in runs_of(rows, "finetune"):
        if run.startswith("scratch"):
            add_line([f"trained at {4 * L} from scratch", "", ""], run, "none")
    return text


def report(rows: Rows) -> str:
    """The text of results/matrix.md."""
    first = rows[0]
    L, documents = first["train_ctx"], len(first["nll"])
    ns = sorted({row["n"] for row in rows if row["part"] == "encodings" and row["label"] == "none"})
    labels = sorted({row["label"] for row in rows if run_of(row) == "rope" and row["n"] > L})
    methods = sorted(labels, key=lambda label: order_of(rows, "rope", label, 2 * L))
    text = [HEAD.format(L=L, documents=documents, targets=first["tokens"] // documents)]
    text += encodings_section(rows, ns, L)
    text += rope_section(rows, methods, ns, L)
    text += other_rotary_section(rows, methods, L)
    text += base_section(rows, ns)
    text += finetune_section(rows, L)
    return "\n".join(text) + "\n"


def main() -> None:
    report_command(report, "The rows of the matrix as tables", "matrix.md")


if __name__ == "__main__":
    user_errors_in_one_line(main)()
