"""Lay the evaluated curves of any runs over each other, offline: python compare.py [RUN ...]

Prints one table and draws one figure of every curve that eval.py has measured on the same targets. Curves on other
texts (another task, corpus or documents) are named and left out, because their losses are not comparable. Nothing is
measured here.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from conf.errors import UserError, user_errors
from engine import checkpoint
from engine.files import locked
from measure.curves import Curve, read_run, select_shared
from measure.page import write_page
from measure.report import Accuracy, Losses, print_left_out


@user_errors
def main() -> None:
    """Parse the command line, select the comparable curves, and print and draw them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="*", help="names of runs; all of them if none is named")
    parser.add_argument("--only", help="labels to show, such as none,window; all of them otherwise")
    parser.add_argument("--gain", action="store_true", help="print each curve's gain over the better control, too")
    parser.add_argument(
        "--task", help="compare curves of this task, such as recall; otherwise of the most common texts"
    )
    parser.add_argument("--threshold", type=float, default=0.8, help="of the effective context: accuracy from 0 to 1")
    parser.add_argument("--runs", default="runs", help="the folder of runs")
    parser.add_argument("--out", default="compare.png", help="the figure, in the folder of runs unless it has a /")
    parser.add_argument("--html", action="store_true", help="write a page to explore the curves in a browser, too")
    args = parser.parse_args()

    if Path(args.out).suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {args.out}: must end in .png, .svg or .pdf")
    if not args.runs:
        raise UserError("--runs: must be the path of a folder")
    out = Path(args.out) if "/" in args.out else Path(args.runs) / args.out

    # ---- the curves that can be compared: those on the same targets ----
    curves = read_curves(args.runs, args.run)
    if args.task and not (curves := [c for c in curves if c.first.task.split()[0] == args.task]):
        raise UserError(f"--task {args.task}: no curve of this task: first: python eval.py task={args.task}")
    texts = most_shared_texts(curves)
    selected = select_shared(curves, texts)
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
    print_left_out(curves, texts)
    with locked(out.parent, wait=True):  # another compare.py may write the same files
        report.draw(shown, out, f"Curves against context length, on the same targets, {of_task}", selected)
        print(f"figure: {out}")
        if args.html:
            page = out.with_suffix(".html")
            write_page(selected, page, f"Curves of {args.runs}, {of_task}")
            print(f"page: {page}")


def read_curves(runs: str, names: list[str]) -> list[Curve]:
    """The curves of the present weights of the named runs, or of all runs under the folder `runs` if names is empty.

    UserError for a name without a run, for a run that has not been evaluated, and if there is no curve at all.
    """
    for name in names:
        if not (Path(runs) / name).is_dir():
            raise UserError(f"{name}: no such run in {runs}/")
        if not list(Path(runs, name, "eval").glob("*.jsonl")):
            raise UserError(f"{name}: has not been evaluated yet: python eval.py run={name}")
    evaluated = {file.parent.parent for file in Path(runs).glob("*/eval/*.jsonl")}
    folders = sorted(folder for folder in evaluated if not names or folder.name in names)
    if not folders:
        raise UserError(f"no evaluated curve in {runs}/: first: python eval.py ctx=8192 scaling=ntk")
    curves = []
    for folder in folders:
        try:
            curves += read_run(folder, checkpoint.digest_of(folder))
        except UserError as e:  # a damaged ckpt.pt
            print(f"left out: {e}", file=sys.stderr)
    if not curves:
        raise UserError(f"no curve in {runs}/ can be read: evaluate again: python eval.py ctx=8192 scaling=ntk")
    return curves


def most_shared_texts(curves: list[Curve]) -> str:
    """The key of the texts that most runs were evaluated on; of several such keys, the one with the most curves.

    The key is `Row.texts` (measure/curves.py), a hash of the task and its texts.
    """
    found = {(row.texts, c.run, c.label) for c in curves for row in c.rows}
    runs = Counter(texts for texts, _ in {(texts, run) for texts, run, _ in found})
    count = Counter(texts for texts, *_ in found)
    return max(count, key=lambda texts: (runs[texts], count[texts]))


if __name__ == "__main__":
    main()
