"""Measure a trained run against context length: python eval.py ctx=8192 scaling=ntk

By default (matched targets) the last tokens of windows of the same held-out documents are scored at every length n = 64
.. ctx, with the n tokens before them as input. The targets are the same at every n, so a change of the loss is due to
the context. Every evaluation also measures no scaling and two controls that see as many tokens as the trained context
has: in the window control each query attends to so many tokens, in truncation only so many are given (the row without
scaling at the longest trained length, so it costs nothing more). A method that does not beat the better control has not
extended the context.

Finished lengths are kept in files under runs/NAME/eval and are not measured again.
"""

from conf.cli import command
from conf.schema import EvalConfig
from engine import device as devices, distributed
from engine.files import locked
from engine.run import Run
from hf.open import open_run
from measure.breakdowns import requested_groups, show_groups
from measure.curves import align, read_run, select
from measure.evaluation import NONE, WINDOW, Evaluation, Method, requested_method
from measure.report import Accuracy, Losses, print_wrapped
from measure.wandb_curves import log_curve
from model import spectrum


def evaluate(cfg: EvalConfig) -> None:
    """Measure no scaling, the window control and the requested method, then print, log and draw their curves.

    Under torchrun all ranks measure, and rank 0 alone prints and writes.
    """
    # ---- the run, the task and its texts, the methods ----
    device = devices.start(cfg.device, cfg.kernel, many_lengths=True)
    run = open_run(cfg, device)  # also sets cfg.ctx where it was null
    evaluation = Evaluation(run, cfg, device)
    task = evaluation.task
    requested = requested_method(cfg)
    # NONE first: the others use its rows where they change nothing
    methods = [NONE, WINDOW, *([] if requested in (NONE, WINDOW) else [requested])]
    groups = requested_groups(evaluation, cfg)
    if distributed.rank() == 0:
        print_start(run, requested, evaluation)

    # ---- measure: lengths that have been measured before are read from their files, the others are computed ----
    missing = {m.label: evaluation.missing_lengths(m, cfg.fresh) for m in methods}
    work = [(m, n) for m in methods for n in missing[m.label]]
    with evaluation.running(work):
        measured = [evaluation.curve(m, cfg.fresh) for m in methods]

    # ---- show: tables, figure, wandb ----
    if distributed.rank() > 0:
        return
    curves = {c.label: c for c in align(measured)}
    report = Accuracy(task.threshold, task.chance) if task.accuracy else Losses(task.guess)
    report.print_evaluation(list(curves.values()), curves[requested.label])
    if groups:
        show_groups(evaluation, curves, requested, groups)
    folder, name = run.folder / "eval", task.label.split()[0]
    figure = folder / f"ctx{evaluation.ctx}{'' if name == 'matched' else f'-{name}'}.png"
    # All curves of this run on the same targets, also those of earlier commands
    selected = select(read_run(run.folder, run.digest), evaluation.texts, evaluation.target_keys)
    title = f"{run.name}: pos={run.context.pos}, trained at {run.context.train_ctx} tokens, task={task.label}"
    with locked(folder, wait=True):  # another evaluation of this run may draw the same figure
        report.draw(selected, figure, title)
    for method in methods:
        if missing[method.label]:  # else all its lengths have been logged before
            log_curve(cfg.project, evaluation, method, curves, figure)
    others = "" if cfg.runs == "runs" else f" --runs {cfg.runs}"
    print(f"\nrows: {folder}/*.jsonl\npicture: {figure}\nwith other runs: python compare.py{others}")


def print_start(run: Run, requested: Method, evaluation: Evaluation) -> None:
    """Print the run, a warning for settings that do not suit it, and the scored tokens."""
    for line in run.describe().splitlines():
        print_wrapped(line)
    for warning in filter(None, (spectrum.warning(knobs, run.context) for knobs in requested.scalings)):
        print(warning)
    task, documents = evaluation.task, len(evaluation.task.names)
    others = " (the training's validation scores others)" if run.validation else ""
    texts = "" if task.accuracy else f" of {documents} held-out documents{others}"
    print_wrapped(f"scored: {task.describe()}{texts}")
    if documents < 24:
        print(f"note: there are only {documents} documents or examples for ctx={evaluation.ctx}: wide intervals")


main = command("eval", evaluate)

if __name__ == "__main__":
    main()
