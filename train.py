"""Train a small GPT with any positional encoding: python train.py pos=rope

Run the same command again to resume from the last checkpoint. `python train.py --help` lists every setting.

The run is the folder runs/NAME with config.json and ckpt.pt. The loss is in nats per token. Under torchrun the same
code runs in every process; engine/distributed.py has the calls between them, which one process makes alone.
"""

import math
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from conf.cli import command
from conf.errors import UserError, check
from conf.registry import describe as describe_knobs
from conf.schema import SampleConfig, TrainConfig
from data import corpus as corpora
from data.batches import PARTS, batch, training_positions
from engine import checkpoint, device as devices, distributed, finetune
from engine.compile import compile_blocks, recompute_blocks, should_compile
from engine.distributed import say
from engine.files import locked
from engine.finetune import Parent
from engine.generate import words
from engine.optimizer import make_optimizers, schedule
from engine.progress import StopSignal, Throughput, progress_bar
from engine.run import default_ctx, parent_run
from engine.validation import Validation, describe_validation
from engine.wandb_log import TrainingLog
from hf.open import foreign_parent
from model import gpt, spectrum
from model.pos.rope import Rope
from model.scaling import ContextChange, TrainedContext

COMPILE_AT = 10  # steps of a new run before the half minute of compilation, so that a mistake shows earlier


def train(cfg: TrainConfig) -> None:
    """Train the run of these settings from the start, or resume it from its last checkpoint.

    The batch of a step is a pure function of (seed, step), so a resumed run sees the same batches as an uninterrupted
    one. UserError for settings that do not fit together, for an existing run with other settings, and for a loss that
    is not finite. After SIGINT or SIGTERM the run is saved and the process exits with code 130 or 143.
    """
    torch.set_flush_denormal(True)  # before init= reads weights (devices.start says why)
    folder = Path(cfg.runs, str(cfg.name))
    parent = None
    if cfg.init:  # its settings are copied into cfg
        parent = foreign_parent(cfg) if ":" in cfg.init else parent_run(cfg)
        finetune.inherit(cfg, parent)
    check_settings(cfg)
    device = devices.start(cfg.device, cfg.kernel)
    if device.type == "cpu":
        devices.keep_freed_memory()
    with ExitStack() as stack:
        distributed.on_rank0(lambda: stack.enter_context(locked(folder)))
        state = checkpoint.last_state(folder, cfg)
        if state and state["step"] == cfg.steps:
            say(f"{folder}: already trained; fresh=true starts over")
            say(f"held-out {describe_validation(state['validation'])}")
            return
        training = Training(cfg, folder, device, parent, state)
        state = parent = None  # free their tensors
        training.print_start()
        text = "step {n_fmt} of {total_fmt}, {elapsed}"
        with StopSignal() as stop, training.log, progress_bar(cfg.steps, text, done=training.start) as bar:
            training.start_clock()
            while training.done < cfg.steps and not training.stopped:
                training.step(bar)
                training.report(bar, stop)
        if training.stopped:
            again = "the same command without fresh=true" if cfg.fresh else "the same command again"
            say(f"stopped: {folder} is saved at step {training.done} of {cfg.steps}; run {again} to resume")
            sys.exit(stop.exit_code)
        training.print_end()


def check_settings(cfg: TrainConfig) -> None:
    """UserError for settings that are valid one by one but do not fit together.

    Examples: shard=true in one process, a scaling method that does not apply to the encoding, positions drawn from a
    longer range than the encoding has.
    """
    distributed.local_rows(cfg.batch_tokens, cfg.ctx)  # UserError if they cannot be split
    check(not cfg.shard or distributed.world() > 1, "shard", True, "false without torchrun --nproc_per_node=N ...")
    encoding = gpt.build_encoding(cfg)
    change = gpt.trained_scaling(cfg, gpt.trained_context(cfg, encoding))
    for knobs in cfg.scalings:
        right = "left to evaluation: a map of positions is no part of a training"
        check("always" not in knobs, "scaling", describe_knobs("scaling", knobs), right)
    if cfg.positions == "random_float" and (type(encoding) is not Rope or change.logn or change.position_map):
        given = f"{gpt.describe_encoding(cfg)} scaling={describe_knobs('scaling', cfg.scaling)} plus={cfg.plus}"
        ropes = "pos=rope, rope_interleaved, rope_partial or rope_proportional"
        raise UserError(f"positions=random_float: needs {ropes}, layers=uniform, no log-n or map, not {given}")
    if cfg.positions != "ordered" and cfg.longest is not None and encoding.max_positions is not None:
        right = f"at most {encoding.max_positions}, the positions of pos={describe_knobs('pos', cfg.pos)}"
        check(cfg.longest <= encoding.max_positions, "longest", cfg.longest, right)


class Training:
    """A training in progress: its corpus, model and optimizer, and how far it is."""

    def __init__(
        self, cfg: TrainConfig, folder: Path, device: torch.device, parent: Parent | None, state: dict[str, Any] | None
    ):
        """parent: where a new run starts (init=). state: of the last checkpoint, with which it is resumed; or None."""
        self.cfg, self.folder, self.device = cfg, folder, device
        self.local_rows = distributed.local_rows(cfg.batch_tokens, cfg.ctx)
        known = parent.tokenizer if parent else state["tokenizer"] if state else None

        # ---- corpus, model and optimizer ----
        with distributed.rank0_first():
            self.corpus = corpora.prepare(cfg.data, cfg.cache, known)
        self.tokenizer = getattr(self.corpus.encoding, "content", None)  # of a tokenizer.json, for ckpt.pt
        keys = {state["corpus"] if state else None, parent.corpus if parent else None}
        if keys - {None, self.corpus.key}:
            raise UserError(f"{folder}: the corpus has changed since this run began: choose name=NEW or fresh=true")
        self.model = gpt.build(cfg, self.corpus.vocab_size)
        if parent:
            finetune.load_weights(self.model, parent, cfg)
        if cfg.recompute:
            recompute_blocks(self.model)
        bfloat16 = devices.uses_bfloat16(device, cfg.dtype)
        self.losses = distributed.wrap_model(self.model, device, cfg.shard, bfloat16)
        self.optimizers = make_optimizers(self.model, cfg.optim, bfloat16)
        self.done, self.seconds = 0, 0.0  # steps, and their time before this process
        if state:
            checkpoint.restore(folder, state, self.model, self.optimizers)
            self.done, self.seconds = state["step"], state["seconds"]
        else:
            distributed.on_rank0(lambda: checkpoint.start(folder, cfg))
        self.start = self.saved = self.done

        # ---- derived from the settings ----
        self.context = gpt.trained_context(cfg, self.model.pos)
        self.change = gpt.trained_scaling(cfg, self.context)
        self.step_change = change_of_steps(cfg, self.change, self.context)
        self.validation = Validation(self.corpus, cfg, device)
        self.result: dict[str, float] = state["validation"] if state else {}  # of the last validation
        self.n_parameters = self.model.n_parameters()
        dtype = "bfloat16" if bfloat16 else "float32"
        facts = {"n_parameters": self.n_parameters, "device": device.type, "dtype": dtype}
        self.log = TrainingLog(cfg, folder, self.start, facts)
        # 6 N FLOPs per token, forward and backward. All steps count, not only the remaining ones: a resumed run must
        # make the same choice as an uninterrupted one, because compiled code rounds differently.
        flops = 6 * self.n_parameters * cfg.batch_tokens * cfg.steps
        self.compiles = should_compile(cfg.compile, device, flops)
        # A running sum of losses and gradient norms on the device: it is not finite from the first bad value on, so
        # it can be checked when the run logs or saves instead of waiting for the GPU at every step.
        self.health = torch.zeros((), device=device)
        self.stopped = False
        self.throughput = Throughput(cfg, self.n_parameters, device)

    def start_clock(self) -> None:
        self.began = time.monotonic()
        self.throughput.restart(self.done)

    # ---- one optimizer step of batch_tokens ----

    def step(self, bar: tqdm) -> None:
        """Forward and backward passes of the micro-batches, clipping, and the update of the weights."""
        cfg = self.cfg
        if self.compiles and self.done == max(self.start, COMPILE_AT):
            bar.set_postfix_str("compiling, about half a minute the first time")
            compile_blocks(self.model)
        batches = training_batches(cfg, self.corpus, self.done, self.local_rows, self.device)
        self.loss = torch.zeros((), device=self.device)  # of this rank's rows, nats per token
        for i, (windows, positions) in enumerate(batches):
            with distributed.no_sync(self.losses, more=i + 1 < len(batches)):
                with devices.autocast(self.device, cfg.dtype):
                    losses = self.losses(windows[:, :-1], windows[:, 1:], positions, self.step_change)
                    part = losses.mean() / len(batches)
                part.backward()
            self.loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), cfg.optim.clip)
        self.norm = distributed.full_tensor(norm)
        share = schedule(self.done, cfg.steps, cfg.optim)
        self.lr = share * self.optimizers[0].param_groups[0]["peak"]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak"]
            optimizer.step()
            optimizer.zero_grad()
        self.health += self.loss + self.norm
        self.done += 1
        bar.update()

    # ---- after a step: log, validate and save at their intervals, and always after the last step ----

    def report(self, bar: tqdm, stop: StopSignal) -> None:
        cfg, last = self.cfg, self.done == self.cfg.steps
        self.stopped = distributed.any_rank(bool(stop)) and not last
        logging, validating, saving = (
            self.done % every == 0 or last for every in (cfg.log_every, cfg.val_every, cfg.save_every)
        )
        saving |= self.stopped
        if not (logging or validating or saving):
            return
        if logging:  # which waits for the GPU, so not at every step
            point = {"loss": distributed.mean(self.loss), "lr": self.lr}
            point |= {**self.throughput.measure(self.done), "grad_norm": self.norm.item()}
            self.log.point(self.done, point)
            bar.set_postfix_str(describe_point(point, (cfg.steps - self.done) * cfg.batch_tokens), refresh=False)
        if validating:
            self.result = self.validation.measure(self.model, self.change)
            self.log.point(self.done, {f"val_{name}": value for name, value in self.result.items()})
            if distributed.rank() == 0:
                bar.write(f"step {self.done}: held-out {describe_validation(self.result)}")
        self.check_finite()
        if saving:
            self.save()
        self.throughput.restart(self.done)

    def check_finite(self) -> None:
        """UserError if a loss or the norm of a gradient was not finite, on any rank."""
        if not math.isfinite(distributed.mean(self.health) + self.result.get("loss", 0.0)):
            last = f"{self.folder}/ckpt.pt has step {self.saved}" if self.saved else "nothing was saved yet"
            lower = f"try optim.lr below {self.cfg.optim.lr}"
            raise UserError(f"the loss or its gradient is not finite by step {self.done}: {last}; {lower}")

    def save(self) -> None:
        """Write ckpt.pt, on rank 0. UserError if it cannot be written; the previous one is then unchanged."""
        state = {
            "config": asdict(self.cfg),
            "step": self.done,
            "corpus": self.corpus.key,
            "tokenizer": self.tokenizer,
            "seconds": self.elapsed(),
            "validation": self.result,
            **distributed.gather_state(self.model, self.optimizers),
        }
        distributed.on_rank0(lambda: checkpoint.save(self.folder, state))
        self.saved = self.done
        self.log.saved(state)

    def elapsed(self) -> float:
        """Seconds of this training, with those of earlier parts of a resumed run."""
        return self.seconds + time.monotonic() - self.began

    # ---- output ----

    def print_start(self) -> None:
        """Print the model, its settings, what the run of init= was trained with, and what should be known of them."""
        cfg, held_out = self.cfg, len(self.corpus.held_out)
        processes = f", {distributed.world()} processes" if distributed.world() > 1 else ""
        resumed = f", resumed at step {self.start}" if self.start else ""
        vocabulary = f"vocabulary of {self.model.head.out_features} tokens"
        say(f"{self.folder}: {gpt.describe_encoding(cfg)}, {self.n_parameters / 1e6:.2f}M parameters, {vocabulary}")
        steps = f"{cfg.steps} steps of {cfg.batch_tokens} tokens in windows of L = {cfg.ctx}"
        say(f"  {steps}, on {self.device.type}{processes}{resumed}")
        if cfg.init:
            say(finetune.describe(cfg, self.change.factor))
        say("loss: nats per token, -ln of the probability that the right token was given")
        few = f"; data.holdout={cfg.data['holdout']} needs a larger corpus" if held_out < cfg.data["holdout"] else ""
        say(f"held out: {held_out} documents, never trained on{few}")
        if warning := spectrum.warning(cfg.scaling, self.context):
            say(warning)

    def print_end(self) -> None:
        """Print the speed, some generated words, and a command that evaluates the run."""
        cfg, seconds = self.cfg, self.elapsed()
        tokens = cfg.steps * cfg.batch_tokens
        say(f"trained {self.folder}: {tokens:,} tokens in {seconds / 60:.1f} min ({tokens / seconds:,.0f} tokens/s)")
        if distributed.rank() == 0 and not cfg.shard:  # a part of a model cannot write
            sample = SampleConfig(tokens=min(30, cfg.ctx), dtype=cfg.dtype)
            print(f"it writes: {words(self.model, self.change, self.corpus.encoding, sample, self.device)}"[:80])
        # As in README: ntk after the default run, yarn after exp=quick, which has 64 tokens
        scaling = "none" if self.model.pos.inv_freq is None or cfg.init else "ntk" if cfg.ctx >= 256 else "yarn"
        folders = [f"{k}={getattr(cfg, k)}" for k in ("runs", "cache") if getattr(cfg, k) != getattr(TrainConfig, k)]
        lengths, ctx = sorted(len(d.tokens) for d in self.corpus.held_out), default_ctx(cfg, self.model.pos)
        if lengths[-1] <= ctx:  # then so many as half of the documents have; 64 are scored
            folders.append(f"ctx={max(lengths[len(lengths) // 2], min(lengths[-1], 65)) - 1}")
        settings = shlex.join([f"run={cfg.name}", f"scaling={scaling}", *folders])
        say(f"next: python eval.py {settings}")


def describe_point(point: dict[str, float], tokens_left: int) -> str:
    """For the progress bar: loss, speed since the last point, and at this speed the time left."""
    mfu, speed = f", MFU {point['mfu']:.1%}" if "mfu" in point else "", point["tokens_per_s"]
    return f"loss {point['loss']:.3f}, {speed:,.0f} tokens/s{mfu}, {timedelta(seconds=round(tokens_left / speed))} left"


# ---- batches ----


def change_of_steps(cfg: TrainConfig, change: ContextChange, context: TrainedContext) -> ContextChange:
    """The change of a run, for the positions of its steps: random_float counts in PARTS of a token."""
    if cfg.positions != "random_float":
        return change
    inv_freq = context.inv_freq if change.inv_freq is None else change.inv_freq
    return replace(change, inv_freq=inv_freq / PARTS)


def count_micro_batches(rows: int, cfg: TrainConfig) -> int:
    """The number of equal micro-batches into which a rank's rows are split.

    Each has at most cfg.micro_tokens tokens, or is one row. The number divides `rows`, so that the mean over
    micro-batches is the mean over the batch.
    """
    least = math.ceil(rows * cfg.ctx / max(cfg.micro_tokens, cfg.ctx))
    return next(parts for parts in range(least, rows + 1) if rows % parts == 0)


def training_batches(
    cfg: TrainConfig, corpus: corpora.Corpus, step: int, local_rows: slice, device: torch.device
) -> list[tuple[Tensor, Tensor | None]]:
    """This rank's micro-batches: windows, int64 [rows, ctx + 1], and their positions [rows, ctx], or None: in order."""
    rows, count = cfg.batch_tokens // cfg.ctx, count_micro_batches(local_rows.stop - local_rows.start, cfg)
    windows = batch(corpus.train, step, seed=cfg.seed, size=rows, ctx=cfg.ctx)[local_rows]

    def pieces(x: Tensor) -> tuple[Tensor, ...]:
        # From pinned memory to a GPU, or the copy would wait for the steps before it
        return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True).chunk(count)

    if cfg.positions == "ordered":
        return [(piece, None) for piece in pieces(windows)]
    assert cfg.longest  # by TrainConfig.validate
    positions = training_positions(cfg.positions, step, seed=cfg.seed, rows=rows, ctx=cfg.ctx, longest=cfg.longest)
    return list(zip(pieces(windows), pieces(positions[local_rows]), strict=True))  # [rows, ctx] each


main = command("train", train)

if __name__ == "__main__":
    main()
