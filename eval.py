"""Measure a trained run against context length: python eval.py ctx=8192 scaling=ntk

By default (matched targets) the last tokens of windows of the same held-out documents are scored at every length
n = 64 .. ctx, with the n tokens before them as input. The targets are the same at every n, so a change of the loss is
due to the context. Every evaluation also measures no scaling and two controls that see as many tokens as the trained
context has: in the window control each query attends to so many tokens, in truncation only so many are given. A method
that does not beat the better control has not extended the context.

Finished lengths are kept in files under runs/NAME/eval and are not measured again.
"""

if __name__ == "__main__":  # before the imports: torch takes seconds
    from conf.command_line import answer_early

    answer_early("eval")


import importlib

import hydra
from omegaconf import DictConfig

from conf.eval_schema import EvalConfig, eval_config
from conf.hydra_patches import exp_sets_evaluation, run_main, sweep_job
from engine import device as devices, distributed
from engine.run import Run
from engine.tracking import wandb_module
from measure.curves import align, read_curves, select
from measure.evaluation import NONE, WINDOW, Evaluation, Method, requested_method
from model import spectrum
from model.scaling import warning
from open_run import open_run


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
@sweep_job
def main(hydra_cfg: DictConfig) -> None:
    evaluate(eval_config(hydra_cfg))


def evaluate(cfg: EvalConfig) -> None:
    """Measure no scaling, the window control and the requested method, then print, log and draw their curves.

    UserError if there is no such run, or if the encoding or the scaling does not apply at this length. Under torchrun
    all ranks measure, and rank 0 alone prints and writes.
    """
    # ---- the run, the task and its texts ----
    device = devices.start(cfg.device, cfg.kernel, many_lengths=True)
    run = open_run(cfg, device)
    evaluation = Evaluation(run, cfg, device)
    requested = requested_method(cfg)
    methods = [NONE, WINDOW, *([] if requested in (NONE, WINDOW) else [requested])]
    breakdowns = None
    if cfg.by_position or cfg.by_antecedent or cfg.key_tokens:
        from measure.breakdowns import Breakdowns

        breakdowns = Breakdowns(evaluation, methods, requested, cfg)
    print_start(run, requested, evaluation)

    # ---- measure: lengths that have been measured before are read from their files, the others are computed ----
    missing = {m.label: evaluation.missing_lengths(m, cfg.fresh) for m in methods}
    work = [(m, n) for m in methods for n in missing[m.label]]
    with evaluation.running(work, breakdowns.flops if breakdowns else 0):
        measured = [evaluation.curve(m, cfg.fresh) for m in methods]
        if breakdowns:
            breakdowns.measure()

    # ---- show: tables, figure, wandb ----
    curves = {c.label: c for c in align(measured)}
    view = importlib.import_module("measure.accuracy" if evaluation.task.accuracy else "measure.losses")
    view.print_curves(evaluation.task, *curves.values())
    if distributed.rank() > 0:
        return
    if breakdowns:
        breakdowns.show(curves)
    folder, task = run.folder / "eval", evaluation.task.label.split()[0]
    figure = folder / f"ctx{evaluation.ctx}{'' if task == 'matched' else f'-{task}'}.png"
    # All curves of this run on the same targets, also those of earlier commands
    selected = select(read_curves(folder.glob("*.jsonl")), evaluation.texts, evaluation.targets)
    title = f"{run.name}: pos={run.context.pos}, trained at {run.context.train_ctx} tokens"
    view.draw_curves(selected, figure, title, evaluation.task)
    new = [method for method in methods if missing[method.label]]
    if new and (log := wandb_module("measure.wandb_curves")):
        log.log_curves(cfg.project, evaluation, new, curves, figure)
    print(f"\nrows: {folder}/*.jsonl   picture: {figure}   with other runs: python compare.py")


def print_start(run: Run, requested: Method, evaluation: Evaluation) -> None:
    """Print the run, the spectrum of its encoding, and the scored tokens, with a note if there are few documents."""
    print(run.describe())
    warnings = [warning(knobs, run.context) for knobs in requested.scalings]
    for line in filter(None, [spectrum.card(run.context), *warnings]):
        print(line)
    task, documents = evaluation.task, len(evaluation.task.names)
    print(f"targets: {task.describe()}" + ("" if task.accuracy else f" of {documents} held-out documents"))
    if run.validation and not task.accuracy:
        print("note: other targets than those of the training's validation, which scores all positions of its windows")
    if documents < 24:
        print(f"note: there are only {documents} documents or examples for ctx={evaluation.ctx}: wide intervals")


if __name__ == "__main__":
    run_main(main, exp_sets_evaluation)
