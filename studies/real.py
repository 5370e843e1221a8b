"""A real model by the main methods, on code and on books: python -m studies.real

SmolLM2-135M (run=pretrained:smollm2, L = 8192) is evaluated at 1, 1.5 and 2 times its trained context with the targets
and the statistics of the study; the figure sets it beside the study's small RoPE model.
Writes results/real.jsonl, real.md, and real.png, .svg and .pdf. It can be stopped at any time; when it is run again,
finished lengths are kept. Its evaluations are those of eval.py, in child processes.
"""

import argparse
import itertools
import json
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import user_errors
from conf.registry import ROOT
from engine.files import commit, write_atomically
from hf.open import open_checkpoint, read_settings
from measure import plots
from measure.curves import read_curve, write_jsonl
from measure.intervals import Estimate, estimate, interval_text
from studies.jobs import Stopped, run_script
from studies.rows import RESULTS, Rows, StudyRow, fill, header, line, read_rows

CORPORA = {"sympy": "code", "books": "books"}
SWEEPS = (("scaling=pi,ntk,yarn,llama3",), ("scaling=rerope", "plus=logn"))  # none and window come with every method
METHODS = ("none", "pi", "ntk", "yarn", "llama3", "rerope + logn")
FACTORS = (1.0, 1.5, 2.0)  # lengths, as multiples of L
Gains = dict[tuple[str, float], np.ndarray]  # (method, n / L) -> its gain, nats per token [seeds, documents]
TICKS = (-3, -1, -0.3, -0.1, 0, 0.1)  # nats per token, of the figure
TINY = "rope"  # the run of results/rope.jsonl that is set beside it

# ---- measure ----


def measure(args: argparse.Namespace) -> None:
    """Evaluate all methods on both corpora, in child processes. Stopped past the deadline."""
    deadline = time.monotonic() + 60 * args.minutes
    lengths = [round(f * trained_context(args.run)) for f in FACTORS]
    for corpus, sweep in itertools.product(CORPORA, SWEEPS):
        print(f"\n=== {corpus}: {' '.join(sweep)} ===", flush=True)
        where = [f"run={args.run}", f"runs={folder(args, corpus)}", f"data={corpus}", "by_antecedent=true"]
        targets = [f"documents={args.documents}", f"task.scored_tokens={args.scored_tokens}", "task.far_windows=1"]
        command = ["eval.py", "-m", *where, f"ctx=[{','.join(map(str, lengths))}]", *targets, *sweep]
        run_script([*command, *args.overrides], deadline)


def trained_context(run: str) -> int:
    """L of the model, tokens. UserError if there is no such model."""
    cfg, _, _ = read_settings(open_checkpoint(run).config, ctx=1, train_ctx=None)
    return cfg.pretrained.get("ctx", cfg.ctx)


def folder(args: argparse.Namespace, corpus: str) -> Path:
    """Where the curves of these settings are: other models, documents or texts have folders of their own."""
    settings = " ".join([args.run, f"{args.documents}x{args.scored_tokens}", *args.overrides])
    return Path(args.runs) / re.sub(r"[^A-Za-z0-9.]+", "-", settings) / corpus


def read_evaluation(args: argparse.Namespace, corpus: str) -> Rows:
    """The rows of all curves on this corpus."""
    files = sorted(folder(args, corpus).glob("*/eval/*.jsonl"))
    origin = {"part": corpus, "commit": commit(), "command": f"python -m studies.real --documents {args.documents}"}
    return Rows([StudyRow(**asdict(row), **origin) for file in files for row in read_curve(file).rows])


def antecedents(args: argparse.Namespace, corpus: str) -> dict[str, list[dict[str, Any]]]:
    """label -> the rows of its gains by the distance to the antecedent."""
    files = sorted(folder(args, corpus).glob("*/eval/groups/antecedent-*.jsonl"))
    groups = [[json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()] for file in files]
    return {rows[0]["label"]: rows for rows in groups}


# ---- gains ----


def gains_of(rows: Rows, run: str) -> Gains:
    """The gain of each method over the better control at the lengths of FACTORS."""
    lengths = {factor: round(factor * rows.trained_ctx) for factor in FACTORS}
    found = {(m, factor): rows.gain(run, m, n) for m in METHODS for factor, n in lengths.items()}
    return {condition: gains for condition, gains in found.items() if len(gains)}


def show(result: Estimate) -> str:
    return interval_text(result.mean, *result.interval)


# ---- tables and figure ----


def tables(args: argparse.Namespace, real: dict[str, Rows]) -> str:
    """The content of results/real.md. real: corpus -> its rows."""
    first = next(iter(real.values())).rows[0]
    counts = {corpus: rows.rows[0].documents for corpus, rows in real.items()}
    documents = " and ".join(f"{count} of {CORPORA[corpus]}" for corpus, count in counts.items())
    notes = "; ".join(open_checkpoint(args.run).notes)
    about = {"name": first.run, "notes": notes, "L": first.train_ctx, "documents": documents}
    lines = []
    for corpus, text in CORPORA.items():
        lines += ["", f"## Perplexity and gain, {text}", "", *gain_table(real[corpus])]
        lines += ["", f"## Gain by the distance to the antecedent, {text}", ""]
        lines.append("The antecedent of a target is the latest earlier occurrence of its last five tokens.\n")
        lines += antecedent_table(antecedents(args, corpus), first.train_ctx)
    return fill("real.md", tokens=args.scored_tokens, **about, sections=lines)


def gain_table(rows: Rows) -> list[str]:
    """A line for each method: its perplexities, and its gains past L."""
    run = rows.rows[0].name
    gains = gains_of(rows, run)
    ns = [round(f * rows.trained_ctx) for f in FACTORS]
    lines = header(["", *(f"n = {n}: perplexity" for n in ns), *(f"{f:g} L: gain" for f in FACTORS[1:])])
    for method in (*METHODS, "window"):
        perplexities = [f"{np.exp(rows.losses(run, method, n).item()):.2f}" for n in ns]
        cells = [show(estimate(gains[method, f])) if method != "window" else "" for f in FACTORS[1:]]
        lines.append(line([method, *perplexities, *cells]))
    return lines


def antecedent_table(by_method: dict[str, list[dict[str, Any]]], L: int) -> list[str]:
    """A line for each length past L and method, a column for each group of distances, and their shares below."""
    ns = [round(f * L) for f in FACTORS[1:]]
    first = [row for row in next(iter(by_method.values())) if row["n"] == ns[0]]
    lines = header(["n", "method", *(row["group"] for row in first)])
    for n, method in itertools.product(ns, METHODS[1:]):
        found = {row["group"]: row for row in by_method.get(method, []) if row["n"] == n and row["gain"] is not None}
        gains = [found.get(row["group"]) for row in first]
        cells = [interval_text(row["gain"], row["low"], row["high"]) if row else "" for row in gains]
        lines.append(line([str(n), method, *cells]))
    return [*lines, line(["", "share of targets", *(f"{100 * row['share']:.1f} %" for row in first)])]


def draw(panels: dict[str, Gains], path: Path) -> None:
    """Gain against n / L with 95 % intervals. panels: title -> the gains in it"""
    size = {"figsize": (4.2 * len(panels), 4.4), "dpi": 150}
    fig, axes = plots.pyplot().subplots(1, len(panels), squeeze=False, sharey=True, **size)
    for ax, (title, gains) in zip(axes[0], panels.items(), strict=True):
        for i, method in enumerate(METHODS):
            points = [(f, estimate(gains[method, f])) for f in FACTORS if (method, f) in gains]
            x = [f + 0.025 * (i - len(METHODS) / 2) for f, _ in points]
            ends = [[abs(result.interval[k] - result.mean) for _, result in points] for k in (0, 1)]
            look = {"fmt": "o-", "markersize": 4, "capsize": 2, "linewidth": 1.2, "label": method}
            means = [result.mean for _, result in points]
            ax.errorbar(x, means, ends, color=plots.color_of("methods", method), **look)
        ax.axhline(0, color="#333333", linewidth=1)
        ax.set_yscale("symlog", linthresh=0.3)
        ax.set_yticks(TICKS, [f"{y:g}" for y in TICKS])
        ax.set_xticks(FACTORS, [f"{f:g}" for f in FACTORS])
        ax.set_xlabel("context length n / L")
        ax.set_title(title, fontsize=9, loc="left")
    axes[0][0].set_ylabel("gain over the better control, nats/token")
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    fig.tight_layout()
    plots.save(fig, path, ".png", ".svg", ".pdf")


# ---- the command ----


def main() -> None:
    """Measure what is missing, then write rows, tables and figure."""
    args = parse_arguments()
    try:
        measure(args)
    except Stopped:
        raise SystemExit("stopped: run the same command again to resume") from None
    real = {corpus: read_evaluation(args, corpus) for corpus in CORPORA}
    panels = {
        f"{rows.rows[0].run}, {CORPORA[corpus]}": gains_of(rows, rows.rows[0].name) for corpus, rows in real.items()
    }
    tiny = read_rows(args.tiny) if args.tiny.exists() else None
    if tiny:
        panels[f"small model of the study (L = {tiny.trained_ctx}), code"] = gains_of(tiny, TINY)
    write_jsonl(args.out / "real.jsonl", [row for rows in real.values() for row in rows.rows])
    text = tables(args, real)
    write_atomically(args.out / "real.md", lambda f: f.write(text.encode()))
    draw(panels, args.out / "real")
    print(text + f"\nrows: {args.out}/real.jsonl   tables: {args.out}/real.md   figure: {args.out}/real.png")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", default="pretrained:smollm2", help="the model: pretrained:NAME, gguf:FILE, hf:FOLDER")
    parser.add_argument("--documents", type=int, default=6, help="of each corpus")
    parser.add_argument("--scored-tokens", type=int, default=512, help="of each document")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time; resumable")
    parser.add_argument("--runs", default="runs/real", help="the folder of the curves")
    parser.add_argument("--tiny", type=Path, default=RESULTS / "rope.jsonl", help="the rows of the small model")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="the folder of the results")
    parser.add_argument("overrides", nargs="*", help="further settings of eval.py, such as data.files=...")
    return parser.parse_args()


if __name__ == "__main__":
    user_errors(main)()
