"""The rows of studies.matrix as tables: python -m studies.tables writes results/matrix.md"""

from collections.abc import Callable

import numpy as np

from conf.errors import one_line_errors
from studies.claims import interval, nll
from studies.matrix import EXTENSIONS, run_of, write_table
from studies.published import At

Rows = list[dict]

HEAD = """# The matrix in tables

Made by `python -m studies.tables` from `matrix.jsonl`; do not edit. Perplexity of the same targets, the last {targets}
tokens of {documents} held-out documents, given n tokens (L = {L}): the mean over seeds and, in brackets, the least and
the most of them. Each row of `matrix.jsonl` holds the command that trained its run, its commit and the loss of every
document.
"""


def seeds_of(rows: Rows, part: str) -> Rows:
    """The rows of the seeds that this part of the study has, so that it is compared with rope of the same seeds."""
    known = {r["seed"] for r in rows if r["part"] == part}
    return [r for r in rows if r["seed"] in known]


def header(cells: list[str]) -> list[str]:
    return ["| " + " | ".join(cells) + " |", "|---" * len(cells) + "|"]


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def spread(values: list[float], show: Callable[[float], str]) -> str:
    """The mean, and the range where there is one; '' of nothing."""
    if not values:
        return ""
    mean, low, high = show(float(np.mean(values))), show(min(values)), show(max(values))
    return mean if len(values) == 1 else f"{mean} ({low}-{high})"


def losses(rows: Rows, run: str, label: str, n: int) -> list[float]:
    """Nats per token, of each seed."""
    return [float(x.mean()) for x in nll(rows, At(run, label, n)).values()]


def perplexity(rows: Rows, run: str, label: str, n: int) -> str:
    return spread(losses(rows, run, label, n), lambda x: f"{np.exp(x):.1f}")


def gain(rows: Rows, run: str, label: str, n: int) -> str:
    """Over the window control of the same seed, nats per token, 95 % over seeds and documents."""
    window, own = nll(rows, At(run, "window", n)), nll(rows, At(run, label, n))
    both = sorted(window.keys() & own.keys())
    if not both:
        return ""
    mean, low, high = interval(np.stack([window[s] - own[s] for s in both]))
    return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]"


def in_window(rows: Rows, run: str) -> list[str]:
    """[how many seeds, their held-out bits per byte in the window]"""
    by_seed = {r["seed"]: r["in_window"] for r in rows if run_of(r) == run and "in_window" in r}
    return [str(len(by_seed)), spread(list(by_seed.values()), lambda x: f"{x:.3f}")]


def by_length(rows: Rows, runs: list[tuple[str, str]], ns: list[int]) -> list[str]:
    """runs: (name in the matrix, as it is called here)"""
    lines = header(["", "seeds", "bits/byte, in window", *(f"n = {n}" for n in ns)])
    for run, called in runs:
        lines.append(line([called, *in_window(rows, run), *(perplexity(rows, run, "none", n) for n in ns)]))
    return lines


def table(rows: Rows) -> str:
    first = rows[0]
    L = first["train_ctx"]
    ns = sorted({r["n"] for r in rows if r["part"] == "encodings" and r["label"] == "none"})
    beyond = [n for n in ns if n > L]
    text = [HEAD.format(L=L, documents=len(first["nll"]), targets=first["tokens"] // len(first["nll"]))]

    def at(run: str, label: str, n: int) -> float:
        return float(np.mean(losses(rows, run, label, n) or [np.inf]))

    def part(name: str, *labels: str) -> list[str]:
        return sorted({run_of(r) for r in rows if r["part"] == name and (not labels or r["label"] in labels)})

    encodings = sorted(part("encodings"), key=lambda run: at(run, "none", 8 * L))
    text += ["## Encodings, nothing changed\n", "`python -m studies.matrix --only encodings`\n"]
    text += by_length(rows, [(run, f"`{run}`") for run in encodings], ns)

    labels = sorted({r["label"] for r in rows if run_of(r) == "rope" and r["n"] > L})
    methods = sorted(labels, key=lambda label: at("rope", label, 2 * L))
    text += ["\n## RoPE by every method\n", "`python -m studies.matrix --only rope-s0,rope-s1,rope-s2`\n"]
    text += header(["", *(f"n = {n}" for n in ns)])
    text += [line([f"`{m}`", *(perplexity(rows, "rope", m, n) for n in ns)]) for m in methods]

    text += ["\nGain over the window control of the same seed, nats per token, 95 % over seeds and documents:\n"]
    text += header(["", *(f"{n // L}x" for n in beyond)])
    text += [line([f"`{m}`", *(gain(rows, "rope", m, n) for n in beyond)]) for m in methods if "=" not in m]

    rotary = [run for run in part("encodings", "yarn") if run != "rope"]
    for n in (4 * L, 16 * L) if rotary else ():
        text += [f"\n## Other rotary encodings by every method, gain over their own window control at {n}\n"]
        counts = {run: len(losses(rows, run, "yarn", n)) for run in ["rope", *rotary]}
        text += header(["", *(f"`{run}`, {k} seed{'s' if k > 1 else ''}" for run, k in counts.items())])
        text += [line([f"`{m}`", *(gain(rows, run, m, n) for run in ["rope", *rotary])])
                 for m in methods if "=" not in m and "+" not in m and m != "window"]  # fmt: skip

    bases = {float(r["base"]): run_of(r) for r in rows if r["part"] == "base"}
    if bases:
        bases, same = bases | {10000.0: "rope"}, seeds_of(rows, "base")
        text += ["\n## RoPE's base in pre-training\n", "`python -m studies.matrix --only base`\n"]
        text += by_length(same, [(run, f"{b:,.0f}") for b, run in sorted(bases.items())], ns)

    tuned = [r for r in rows if r["part"] == "finetune"]
    if tuned:
        rows = seeds_of(rows, "finetune")
        near = sorted({r["n"] for r in tuned})
        shares = sorted({(r["finetune_steps"], r["percent"]) for r in tuned if r["finetune_steps"]})
        text += [f"\n## Fine-tuned at {4 * L}, read without further scaling\n"]
        text += ["`python -m studies.matrix --only finetune`; 0 steps: the method alone\n"]
        text += header(["", "steps", "% of pre-training", "seeds", *(f"n = {n}" for n in near)])
        for method in EXTENSIONS:
            called = "direct" if method == "none" else f"`{method}`"
            for steps, share in [(0, 0), *shares]:
                run, label = (f"{method}-{steps}", "none") if steps else ("rope", method)
                count = len(nll(rows, At(run, label, 4 * L)))
                if count:
                    cells = [perplexity(rows, run, label, n) for n in near]
                    text.append(line([called, str(steps), f"{share:g}", str(count), *cells]))
        for run in part("finetune"):
            if run.startswith("scratch"):
                cells = [perplexity(rows, run, "none", n) for n in near]
                count = len(nll(rows, At(run, "none", 4 * L)))
                text.append(line([f"trained at {4 * L} from scratch", "", "", str(count), *cells]))
    return "\n".join(text) + "\n"


def main() -> None:
    write_table(table, __doc__ or "", "matrix.md")


if __name__ == "__main__":
    one_line_errors(main)()
