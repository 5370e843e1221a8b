"""Lay the evaluated curves of any runs over each other, offline: python compare.py [RUN ...]

Prints one table and draws one figure of every curve that eval.py has measured on the same targets. Runs that differ
only in their seed are one curve, their mean. With two or more names it also tells whether the others are better than
the first. Curves on other targets are left out, with the reason, because their losses are not comparable. Nothing is
measured here.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conf.errors import UserError, ensure, user_errors
from conf.registry import yaml_name
from engine import checkpoint
from engine.files import locked
from engine.run import find_runs
from measure.curves import Curve, Row, read_run, select_shared
from measure.groups import Configs, group_names, print_verdicts
from measure.page import write_page
from measure.report import Accuracy, Losses


@user_errors
def main() -> None:
    """Parse the command line, select the comparable curves, and print and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="*", help="runs, or groups of seeds; all if none is named")
    parser.add_argument("--only", help="labels to show, such as none,window; all of them otherwise")
    parser.add_argument("--gain", action="store_true", help="print each curve's gain over the better control, too")
    parser.add_argument("--task", help="compare curves of this task, such as recall; else of the most common texts")
    parser.add_argument("--threshold", type=float, default=0.8, help="of the effective context: accuracy from 0 to 1")
    parser.add_argument("--runs", default="runs", help="the folder of runs")
    parser.add_argument("--out", default="compare.png", help="the figure, in the folder of runs unless it has a /")
    parser.add_argument("--html", action="store_true", help="write a page to explore the curves in a browser, too")
    args = parser.parse_args()

    ensure(Path(args.out).suffix in (".png", ".svg", ".pdf"), f"--out {args.out}: must end in .png, .svg or .pdf")
    out = Path(args.out) if "/" in args.out else Path(args.runs) / args.out

    # ---- the curves that can be compared: those on the same targets ----
    configs = find_runs(args.runs)
    curves = read_curves(args.runs, args.run, configs)
    if args.task and not (curves := [c for c in curves if c.first.task.split()[0] == args.task]):
        raise UserError(f"--task {args.task}: no curve of this task: first: python eval.py task={args.task}")
    selected = select_shared(curves, most_shared_texts(curves))
    labels = sorted({c.label for c in selected})
    only = args.only.split(",") if args.only else labels
    if unknown := [label for label in only if label not in labels]:
        raise UserError(f"--only {args.only}: no curve is labelled {unknown[0]}; there are {', '.join(labels)}")
    shown = [c for c in selected if c.label in only]

    # ---- tables, figure, page ----
    of_task = f"task={shown[0].first.task}"
    report = Accuracy(args.threshold) if shown[0].first.hits else Losses()
    report.print_comparison(shown)
    if args.gain and isinstance(report, Losses):
        report.print_gains(shown, selected)
    if len(args.run) > 1 and isinstance(report, Losses):
        print_verdicts(selected, args.run, [label for label in only if label != "window"], configs)
    print_left_out(curves, shown[0].first, configs)
    with locked(out.parent, wait=True):  # another compare.py may write the same files
        report.draw(shown, out, f"Curves against context length, on the same targets, {of_task}", selected)
        print(f"figure: {out}")
        if args.html:
            page = out.with_suffix(".html")
            write_page(selected, page, f"Curves of {args.runs}, {of_task}")
            print(f"page: {page}")


def read_curves(runs: str, names: Sequence[str], configs: Configs) -> list[Curve]:
    """The curves of the present weights of all runs or, if there are names, of these, with their groups.

    names: of groups, or of runs, which are then shown alone. configs: run -> settings; a run without them, and one that
    is still in training, is in no group. UserError for a name without an evaluated run, and if there is no curve.
    """
    groups = group_names(configs)
    evaluated = sorted({file.parent.parent.name for file in Path(runs).glob("*/eval/*.jsonl")})
    shown = {} if names else {run: groups.get(run, run) for run in evaluated}
    for name in names:
        of_name = [run for run in evaluated if groups.get(run) == name] or [run for run in evaluated if run == name]
        ensure(of_name, f"{name}: no evaluated run of this name in {runs}/: first: python eval.py run={name}")
        shown |= dict.fromkeys(of_name, name)
    curves = []
    for run, group in shown.items():
        folder, steps = Path(runs, run), configs[run].steps if run in configs else 0
        early = group if [*shown.values()].count(group) == 1 else f"{run} (in training)"
        try:
            found = read_run(folder, checkpoint.digest_of(folder))
            curves += [replace(c, named=group if c.first.step >= steps else early) for c in found]
        except UserError as e:  # a damaged ckpt.pt
            print(f"left out: {e}", file=sys.stderr)
    ensure(curves, f"no evaluated curve in {runs}/: first: python eval.py ctx=8192 scaling=ntk")
    return curves


def most_shared_texts(curves: list[Curve]) -> str:
    """The key of the texts that most runs were evaluated on; of several such keys, that of most curves, then targets.

    The key is `Row.texts` (measure/curves.py), a hash of the task and its texts.
    """
    found = dict.fromkeys((row.texts, c.run, c.label) for c in curves for row in c.rows)
    runs = Counter(texts for texts, _ in dict.fromkeys((texts, run) for texts, run, _ in found))
    count = Counter(texts for texts, *_ in found)
    targets = {row.texts: row.tokens for c in curves for row in c.rows}
    return max(count, key=lambda texts: (runs[texts], count[texts], targets[texts]))


def print_left_out(curves: Sequence[Curve], here: Row, configs: Configs) -> None:
    """Name the curves on other texts than the row `here`, with the reason and a command that shows them.

    Two vocabularies never have the same targets, also on the same text: targets are the last tokens of windows that end
    at a token, so they cover other bytes.
    """
    wanted, lines = facts(here, configs), set()
    shown = {(c.run, c.label) for c in curves if any(row.texts == here.texts for row in c.rows)}
    others = ((c, [row for row in c.rows if row.texts != here.texts]) for c in curves)
    for c, row in ((c, rows[0]) for c, rows in others if rows):
        found, name = facts(row, configs), c.group.partition(" (in")[0]
        differs = next(key for key in found if found[key] != wanted.get(key))
        command = f"python compare.py {name}" + f" --task {row.task.split()[0]}" * (differs == "task")
        if differs in ("ctx", "documents", "task.windows", "task.scored_tokens", "texts"):
            command = f"python eval.py run={c.run} ctx={here.ctx} documents={here.documents}"
            command += f" {differs}={wanted[differs]}" * differs.startswith("task.")
        if differs == "task" or (c.run, c.label) not in shown:
            lines.add(f"  {c.group}: {differs} {found[differs]}, not {wanted.get(differs)}: {command}")
    if lines:
        print("\nleft out, because other tokens are scored:", *sorted(lines), sep="\n")


def facts(row: Row, configs: Configs) -> dict[str, object]:
    """What the scored tokens of a row follow from, as far as it is known, and first what explains the most."""
    data = configs[row.run].data if row.run in configs else {}
    known = {"corpus": yaml_name("data", data), "vocabulary": "{tokenizer} {vocab_size}".format(**data)} if data else {}
    known |= {"ctx": row.ctx, "documents": row.documents, "task.windows": len(row.scored_windows)}
    return {"task": row.task} | known | {"task.scored_tokens": round(row.targets_per_window), "texts": row.texts}


if __name__ == "__main__":
    main()
