"""Train a small GPT with any positional encoding: python train.py pos=rope

Run the same command again to resume from the last checkpoint. `python train.py --help` lists every setting.

The run is the folder runs/NAME with config.json and ckpt.pt. The loss is in nats per token. Under torchrun the same
code runs in every process; engine/distributed.py has the calls between them, and with one process they do nothing.
"""

if __name__ == "__main__":  # before the imports: torch takes seconds
    from conf.command_line import answer_early

    answer_early("train")


import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from torch import Tensor

from conf.errors import UserError, check
from conf.hydra_patches import init_keeps_groups, run_main, sweep_job
from conf.registry import describe as describe_knobs
from conf.schema import TrainConfig, train_config
from data import corpus as corpora
from data.batches import batch
from engine import checkpoint, device as devices, distributed, resume
from engine.optimizer import learning_rate, make_optimizer
from engine.progress import progress_bar
from engine.signals import StopSignal
from engine.throughput import Throughput
from engine.tracking import training_log
from engine.validation import Validation, describe_validation
from model import gpt, spectrum
from model.scaling import ContextChange, warning

COMPILE_AT = 10  # the first steps run uncompiled, so that a mistake shows before the half minute of compilation


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@sweep_job
def main(hydra_cfg: DictConfig) -> None:
    cfg = train_config(hydra_cfg)
    with resume.only_process(cfg):
        train(cfg)


def train(cfg: TrainConfig) -> None:
    """Train the run of these settings from the start, or resume it from its last checkpoint.

    The batch of a step is a pure function of (seed, step), so a resumed run sees the same batches as an uninterrupted
    one. UserError for settings that do not fit together, for an existing run with other settings, and for a loss that
    is not finite. After SIGINT or SIGTERM the run is saved and the process exits with code 130 or 143.
    """
    # ---- settings: check all of them before anything is downloaded, built or written ----
    torch.set_flush_denormal(True)  # before init= reads weights (devices.start says why)
    assert cfg.name is not None  # train_config sets it
    folder = Path(cfg.runs) / cfg.name
    parent = read_parent(cfg)
    tokenizer = parent.get("tokenizer") if parent else None  # None: that of the corpus
    local = distributed.local_rows(cfg.batch_tokens, cfg.ctx)
    check_settings(cfg)
    device = devices.start(cfg.device, cfg.kernel)
    if device.type == "cpu":
        devices.keep_freed_memory()
    ranks = distributed.ranks()

    # ---- the last checkpoint of this run, if there is one; nothing to do if it has all steps ----
    state = resume.saved_state(cfg, folder)
    if state and state["step"] == cfg.steps:
        print(f"{folder}: already trained, {describe_validation(state['validation'])}; fresh=true starts over")
        return

    # ---- corpus, model and optimizer ----
    with ranks.rank0_first():
        corpus = corpora.prepare(cfg.data, cfg.cache, tokenizer)
    if any(s["corpus"] not in (None, corpus.key) for s in (state, parent) if s):
        raise UserError(f"{folder}: the corpus has changed since this run began: choose name=NEW or fresh=true")
    model = build_model(cfg, corpus.vocab_size, parent and parent["model"], device)
    losses = ranks.wrap_model(model, device, cfg)  # model.losses, on one device or several
    optimizer = make_optimizer(model, cfg.optim)
    start, seconds = 0, 0.0
    if state:
        from engine.restore import restore

        start, seconds = restore(folder, state, model, optimizer)
    else:
        ranks.on_rank0(lambda: checkpoint.start(folder, cfg))
    state = parent = None  # free their tensors

    # ---- derived from the settings ----
    change = gpt.trained_scaling(cfg, gpt.trained_context(cfg, model.pos))
    validation = Validation(corpus, cfg, device)
    n_params = model.n_parameters()
    throughput = Throughput(cfg, n_params, device)
    # 6 N FLOPs per token, forward and backward. All steps count, not only the remaining ones: a resumed run must make
    # the same choice as an uninterrupted one, because compiled code rounds differently.
    compiles = devices.should_compile(cfg.compile, device, 6 * n_params * cfg.batch_tokens * cfg.steps)

    print_start(cfg, model, device, start, change)
    dtype = "bfloat16" if devices.uses_bfloat16(device, cfg.dtype) else "float32"
    measured = {"n_parameters": n_params, "device": device.type, "dtype": dtype}
    with (
        StopSignal() as stop,
        ranks.exit_if_a_rank_dies(stop),
        training_log(cfg, folder, start, measured) as log,
        progress_bar(cfg.steps, "step {n_fmt} of {total_fmt}, {elapsed}", done=start) as bar,
    ):
        result: dict[str, float] = {}  # of the last validation
        # A running sum of losses and gradient norms on the device: it is not finite from the first bad value on, so
        # the loop can check it when it logs or saves instead of waiting for the GPU at every step.
        health = torch.zeros((), device=device)
        began, saved = time.monotonic(), start
        throughput.restart(start)
        for step in range(start, cfg.steps):
            # ---- one optimizer step of batch_tokens ----
            if compiles and step == max(start, COMPILE_AT):
                from engine.compile import compile_blocks

                bar.set_postfix_str("compiling, about half a minute the first time")
                compile_blocks(model)
            lr = learning_rate(step, cfg.steps, cfg.optim)
            batches = training_batches(cfg, corpus, step, local, device)
            loss, norm = optimizer_step(cfg, model, losses, optimizer, batches, lr, change)
            health += loss + norm
            bar.update()

            # ---- after the step: log, validate and save at their intervals, and always after the last step ----
            done, last = step + 1, step + 1 == cfg.steps
            stopping = ranks.any_rank(bool(stop))
            logging = done % cfg.log_every == 0 or last
            validating = done % cfg.val_every == 0 or last
            saving = done % cfg.save_every == 0 or last or stopping
            if not (logging or validating or saving):
                continue
            if logging:  # .item() waits for the GPU, so not at every step
                point = {"loss": ranks.mean(loss).item(), "lr": lr, **throughput.measure(done),
                         "grad_norm": norm.item()}  # fmt: skip
                log.point(done, point)
                bar.set_postfix_str(describe_point(point, (cfg.steps - done) * cfg.batch_tokens), refresh=False)
            if validating:
                result = validation.measure(model, change)
                log.point(done, {f"val_{name}": value for name, value in result.items()})
                bar.write(f"step {done}: held-out {describe_validation(result)}")
            check_finite(cfg, ranks.mean(health) + result.get("loss", 0.0), done, saved)
            if saving:
                values = {"config": asdict(cfg), "step": done, "corpus": corpus.key, "tokenizer": tokenizer,
                          "seconds": seconds + time.monotonic() - began, "validation": result}  # fmt: skip
                resume.save(folder, values, model, optimizer, sharded=cfg.shard, final=last)
                log.saved(done, values["seconds"])
                saved = done
            throughput.restart(done)
            if stopping:
                break
    if saved < cfg.steps:
        print(f"stopped: {folder} is saved at step {saved} of {cfg.steps}; run the same command again to resume")
        sys.exit(stop.exit_code)

    # The time is that of earlier parts of a resumed run as well
    print_end(cfg, folder, model, result, seconds + time.monotonic() - began)


def read_parent(cfg: TrainConfig) -> dict[str, Any] | None:
    """The checkpoint that init= names, whose settings are copied into cfg; None without init=."""
    if not cfg.init:
        return None
    if ":" in cfg.init:
        from hf.finetune import inherit
    else:
        from engine.finetune import inherit
    return inherit(cfg)


def check_settings(cfg: TrainConfig) -> None:
    """UserError for settings that are valid one by one but do not fit together.

    Examples: shard=true in one process, a scaling method that does not apply to the encoding, positions drawn from a
    longer range than the encoding has.
    """
    if cfg.shard and distributed.world() == 1:
        raise UserError("shard=True: needs more than one process: torchrun --nproc_per_node=N train.py shard=true ...")
    encoding = gpt.build_encoding(cfg)
    gpt.trained_scaling(cfg, gpt.trained_context(cfg, encoding))
    if cfg.positions != "ordered" and cfg.longest is not None and encoding.max_positions is not None:
        right = f"at most {encoding.max_positions}, the positions of pos={describe_knobs('pos', cfg.pos)}"
        check(cfg.longest <= encoding.max_positions, "longest", cfg.longest, right)


def build_model(cfg: TrainConfig, vocab_size: int, weights: dict[str, Tensor] | None, device: torch.device) -> gpt.GPT:
    """The model to train, before it is moved to the device. weights: of the run of init=, or None for new ones."""
    if cfg.model.n_layers * cfg.model.width**2 > 2**23:  # about 100 million parameters
        from engine.memory import check_memory

        check_memory(cfg, vocab_size, device)
    with torch.device("meta" if cfg.shard and distributed.rank() else "cpu"):  # rank 0 gives the others their shards
        model = gpt.build(cfg, vocab_size)
    if weights and not model.head.weight.is_meta:
        from engine.finetune import load_weights

        load_weights(model, weights, cfg)
    if cfg.recompute:
        from engine.recompute import recompute_blocks

        recompute_blocks(model)
    return model


def count_micro_batches(rows: int, cfg: TrainConfig) -> int:
    """The number of equal micro-batches into which a rank's rows are split.

    Each has at most cfg.micro_tokens tokens, or is one row. The number divides `rows`, so that the mean over
    micro-batches is the mean over the batch.
    """
    least = math.ceil(rows * cfg.ctx / max(cfg.micro_tokens, cfg.ctx))
    return next(parts for parts in range(least, rows + 1) if rows % parts == 0)


def training_batches(
    cfg: TrainConfig, corpus: corpora.Corpus, step: int, local: slice, device: torch.device
) -> list[tuple[Tensor, Tensor | None]]:
    """This rank's micro-batches: windows, int64 [rows, ctx + 1], and their positions [rows, ctx], or None: in order.

    With ctx_start= the windows are shorter and more at first (data/row_length.py).
    """
    rows, count = cfg.batch_tokens // cfg.ctx, count_micro_batches(local.stop - local.start, cfg)
    windows = batch(corpus.train, step, seed=cfg.seed, size=rows, ctx=cfg.ctx)[local]
    if cfg.ctx_start:
        from data.row_length import cut_rows, row_length

        windows = cut_rows(windows, row_length(step, cfg.steps, cfg.ctx, cfg.ctx_start, cfg.ctx_full_at))

    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        # From pinned memory to a GPU, or the copy would wait for the steps before it
        return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True).chunk(count)

    if cfg.positions == "ordered":
        return [(piece, None) for piece in pieces(windows)]
    from data.training_positions import sample

    positions = sample(cfg.positions, step, seed=cfg.seed, rows=rows, ctx=cfg.ctx, longest=cfg.longest or cfg.ctx)
    return list(zip(pieces(windows), pieces(positions[local]), strict=True))  # [rows, ctx] each


def check_finite(cfg: TrainConfig, health: Tensor, done: int, saved: int) -> None:
    """UserError if the sum of losses and gradient norms is not finite. saved: the step of the last checkpoint, or 0."""
    if not health.isfinite():
        last_save = f"{cfg.runs}/{cfg.name}/ckpt.pt has step {saved}" if saved else "nothing was saved yet"
        lower = f"try optim.lr below {cfg.optim.lr}"
        raise UserError(f"the loss or its gradient is not finite by step {done}: {last_save}; {lower}")


def optimizer_step(
    cfg: TrainConfig, model: gpt.GPT, losses: Callable[..., Tensor], optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor | None]], lr: float, change: ContextChange,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Forward and backward passes of the micro-batches, clipping, and the update of the weights.

    Returns the mean loss of this rank's batches, nats per token, and the norm of the gradient: scalars on the device.
    """
    ranks, device = distributed.ranks(), batches[0][0].device
    loss = torch.zeros((), device=device)
    for i, (windows, positions) in enumerate(batches):
        with ranks.no_sync(losses, more=i + 1 < len(batches)):
            with devices.autocast(device, cfg.dtype):
                part = losses(windows[:, :-1], windows[:, 1:], positions, change).mean() / len(batches)
            part.backward()
        loss += part.detach()
    norm = ranks.full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


# ---- output ----


def describe_point(point: dict[str, float], tokens_left: int) -> str:
    """For the progress bar: loss, speed since the last point, and at this speed the time left."""
    mfu, speed = f", MFU {point['mfu']:.1%}" if "mfu" in point else "", point["tokens_per_s"]
    return f"loss {point['loss']:.3f}, {speed:,.0f} tokens/s{mfu}, {timedelta(seconds=round(tokens_left / speed))} left"


def print_start(cfg: TrainConfig, model: gpt.GPT, device: torch.device, start: int, change: ContextChange) -> None:
    """Print the model, its settings, the spectrum of its encoding, and what the run of init= was trained with.

    start: the step at which the run resumes, or 0.
    """
    processes = f", {distributed.world()} processes" if distributed.world() > 1 else ""
    resumed = f", resumed at step {start}" if start else ""
    print(
        f"{Path(cfg.runs, cfg.name or '')}: {model.n_parameters() / 1e6:.2f}M parameters, "
        f"{gpt.describe_encoding(cfg)}, ctx {cfg.ctx}, vocabulary {model.head.out_features}, "
        f"{cfg.steps} steps of {cfg.batch_tokens} tokens on {device.type}{processes}{resumed}"
    )
    context = gpt.trained_context(cfg, model.pos)
    for line in filter(None, [spectrum.card(context), warning(cfg.scaling, context)]):
        print(line)
    if cfg.init:
        from engine.finetune import describe

        print(describe(cfg, change.factor))


def print_end(cfg: TrainConfig, folder: Path, model: gpt.GPT, result: dict[str, float], seconds: float) -> None:
    """Print the speed, the last validation `result`, and a command that evaluates the run.

    seconds: duration of the training.
    """
    tokens = cfg.steps * cfg.batch_tokens
    print(f"trained {folder}: {tokens:,} tokens in {seconds / 60:.1f} min ({tokens / seconds:,.0f} tokens/s)")
    print(f"in window (ctx {cfg.ctx}), held out: {describe_validation(result)}")
    if cfg.init:
        from engine.finetune import describe_cost

        print(f"fine-tuning took {describe_cost(cfg)}")
    longest = min(max(8192, 2 * cfg.ctx) if cfg.ctx >= 256 else 16 * cfg.ctx, model.pos.max_positions or math.inf)
    scaling = "none" if model.pos.inv_freq is None or cfg.init else "ntk" if cfg.ctx >= 256 else "yarn"
    folders = [f"{k}={getattr(cfg, k)}" for k in ("runs", "cache") if getattr(cfg, k) != getattr(TrainConfig, k)]
    print("next: python eval.py", shlex.join([f"run={cfg.name}", f"ctx={longest}", f"scaling={scaling}", *folders]))


if __name__ == "__main__":
    run_main(main, init_keeps_groups)
