"""Measure a trained run against context length: python eval.py ctx=8192 scaling=ntk

By default (matched targets) the last tokens of the same held-out documents are scored at every length n = 64 .. ctx,
with the last n tokens of the document as input. The targets are the same at every n, so a change of the loss is due to
the context. Every evaluation also measures two controls: no scaling, and the window control, in which each query
attends to as many tokens as the trained context has. A method that does not beat the window control has not extended
the context.

A finished curve is a file under runs/NAME/eval and is not measured again.
"""

from dataclasses import asdict

import hydra
from omegaconf import DictConfig

from conf.eval_schema import EvalConfig, eval_config
from conf.hydra_patches import exp_selects_runs, run_main, sweep_job
from engine import device as devices, distributed
from engine.run import Run
from engine.tracking import tracker
from measure import tables, tasks
from measure.curves import Curve, read_curve, select
from measure.evaluation import NONE, WINDOW, Evaluation, Method, requested_method
from measure.statistics import gain
from model import spectrum
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
    # ---- the run, the task and the documents ----
    device = devices.start(cfg.device, cfg.kernel)
    run = open_run(cfg, device)
    evaluation = Evaluation(run, tasks.build(cfg.task), cfg, device)
    requested = requested_method(cfg)
    methods = [NONE, WINDOW]
    if requested not in methods:
        methods.append(requested)
    print_start(run, requested, evaluation)

    # ---- measure: curves that have been measured before are read from their files, the others are computed ----
    missing = [m for m in methods if cfg.fresh or not evaluation.curve_file(m).exists()]
    by_position: dict[str, list[dict]] = {}
    with evaluation.running(curves=len(missing), by_position=cfg.by_position * len(methods)):
        curves = {m.label: evaluation.curve(m, cfg.fresh) for m in methods}
        if cfg.by_position:
            from measure import positions

            by_position = {m.label: positions.loss_by_position(evaluation, m) for m in methods}
        copy_gain = evaluation.copy_gain()

    # ---- show: tables, wandb, figure ----
    tables.print_curves(curves["none"], curves["window"], curves[requested.label])
    if evaluation.task.same_targets and copy_gain is not None:
        print(tables.headroom(curves["none"], copy_gain))
    if distributed.rank() > 0:
        return
    if by_position:
        positions.print_and_write(evaluation, methods, by_position)
    for method in missing:
        log_to_wandb(cfg.project, run, method, curves[method.label], curves["window"])
    draw(evaluation)


def print_start(run: Run, requested: Method, evaluation: Evaluation) -> None:
    """Print the run, the spectrum of its encoding, and the scored tokens, with a note if there are few documents."""
    print(run.describe())
    warnings = [spectrum.warning(knobs, run.context) for knobs in requested.scalings]
    for line in filter(None, [spectrum.card(run.context), *warnings]):
        print(line)
    documents, ctx = len(evaluation.documents), evaluation.ctx
    scored, n_bytes = evaluation.task.describe(ctx), evaluation.target_bytes
    print(f"targets: {scored} of {documents} held-out documents, {n_bytes:,} bytes")
    if documents < 24:
        print(f"note: only {documents} held-out documents are longer than {ctx} tokens, so the intervals are wide")


def log_to_wandb(project: str, run: Run, method: Method, curve: Curve, window: Curve) -> None:
    """Log a curve as one wandb run: eval/loss, eval/ppl, eval/bits_per_byte, eval/factor and the gain against eval/ctx.

    One wandb run for each curve, so that the dashboard can show the curves of any runs in one panel. window: the curve
    of the window control at the same lengths.
    """
    config = {"run": run.name, "label": method.label, "scaling": method.scalings, "train": asdict(run.cfg)}
    with tracker(project, "eval", run.name, f"{run.name} {method.label}", config, "eval/ctx") as log:
        for row, control in zip(curve.rows, window.rows, strict=True):
            point = {f"eval/{key}": getattr(row, key) for key in ("loss", "ppl", "bits_per_byte", "factor")}
            log.log({"eval/ctx": row.n, **point, "eval/gain_over_window": gain(row, control)[0]})


def draw(evaluation: Evaluation) -> None:
    """Draw all curves of this run that were evaluated on the same targets, also those of earlier commands."""
    from measure import plots

    run, folder = evaluation.run, evaluation.run.folder / "eval"
    task = evaluation.task.label.split()[0]
    figure = folder / f"ctx{evaluation.ctx}{'' if task == 'matched' else f'-{task}'}.png"
    curves = select([read_curve(file) for file in folder.glob("*.jsonl")], evaluation.targets)
    plots.draw_curves(curves, figure, f"{run.name}: pos={run.context.pos}, trained at {run.context.train_ctx} tokens")
    print(f"\nrows: {folder}/*.jsonl   picture: {figure}   with other runs: python compare.py")


if __name__ == "__main__":
    run_main(main, exp_selects_runs)
