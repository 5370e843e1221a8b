"""Train a small GPT with any positional encoding: python train.py pos=rope

The same command again goes on where it stopped. `python train.py --help` lists every setting.
"""

import math
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from tqdm import tqdm

import kernels
from conf.errors import entry, one_line_errors
from conf.schema import OptimConfig, TrainConfig, differences, train_config
from data import tokens
from model import checkpoint, gpt, parallel, positions, runtime, shards
from studies import spectrum

COMPILE_AT = 10  # the first steps run uncompiled, so that a mistake shows at once and not after the compiler


def learning_rate(step: int, steps: int, o: OptimConfig) -> float:
    """Up in a line over o.warmup steps, then down in a line to o.final_lr * o.lr at the end."""
    if step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    left = (steps - step) / max(1, steps - o.warmup)
    return o.lr * (o.final_lr + (1 - o.final_lr) * left)


def make_optimizer(model: gpt.GPT, o: OptimConfig) -> torch.optim.AdamW:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), fused=True)


def inherit(cfg: TrainConfig) -> dict:
    """For init=RUN: give cfg that run's model, encoding and data, and note where it starts from. Returns its state."""
    overrides = [o.lstrip("+~") for o in HydraConfig.get().overrides.task]
    for key in ("model", "pos", "data", "attention"):
        if given := [o for o in overrides if re.match(rf"{key}[.=]", o)]:
            raise ValueError(f"init={cfg.init}: {given[0]} cannot be chosen, it comes from that run")
    parent = Path(cfg.runs) / cfg.init
    if parent == Path(cfg.runs) / cfg.name:
        raise ValueError(f"init={cfg.init}: the new run needs a name of its own: name=NEW")
    if not (parent / "ckpt.pt").exists():
        known = ", ".join(name for name, _ in checkpoint.find(cfg.runs)) or "none yet: python train.py pos=rope"
        raise ValueError(f"init={cfg.init}: no trained run of that name in {cfg.runs}/; there are {known}")
    state = checkpoint.load(parent)
    was: TrainConfig = state["cfg"]
    cfg.model, cfg.pos, cfg.data, cfg.attention = was.model, was.pos, was.data, was.attention
    pretrained = was.pretrained or {"ctx": was.ctx, "tokens": state["step"] * was.batch_tokens}
    cfg.pretrained = {**pretrained, "run": cfg.init, "weights": checkpoint.digest(parent)}
    return state


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@one_line_errors
def main(hydra_cfg: DictConfig) -> None:
    cfg = train_config(hydra_cfg)
    run = Path(cfg.runs) / cfg.name
    parent = inherit(cfg) if cfg.init else None
    device, autocast = runtime.pick_device(cfg.device), lambda: runtime.autocast(device, cfg.dtype)
    kernels.choose(cfg.kernel, device)
    rows = cfg.batch_tokens // cfg.ctx
    own = parallel.share(cfg.batch_tokens, cfg.ctx)  # the rows of each batch that are this process's
    if cfg.shard and parallel.world() == 1:
        raise ValueError("shard=True: needs more than one process: torchrun --nproc_per_node=N train.py shard=true ...")
    encoding = gpt.build_encoding(cfg)  # its mistakes show before any work is done
    scaled = gpt.own_scaling(cfg, encoding)
    if cfg.positions != "ordered" and cfg.longest > (encoding.max_positions or cfg.longest):
        raise ValueError(f"longest={cfg.longest}: pos={cfg.pos['kind']} has {encoding.max_positions} positions")

    parallel.join(device)

    # What there is already: nothing, a part, or all of it
    state = None
    if not cfg.fresh:
        state = checkpoint.load(run, device) if (run / "ckpt.pt").exists() else shards.newest(run)
    parallel.agree(f"the step that {run} was saved at", state and state["step"])
    if state:
        if different := differences(cfg, state["cfg"]):
            raise ValueError(
                f"{run} was trained with other settings: {', '.join(different)}: choose name=NEW or fresh=true"
            )
        if state["step"] == cfg.steps:
            print(f"{run}: already trained, {cfg.steps} steps, {summary(state['validation'])}; fresh=true starts over")
            return

    corpus = parallel.once(lambda: tokens.prepare(cfg.data, cfg.cache)) or tokens.prepare(cfg.data, cfg.cache)
    if any(s["corpus"] != corpus.key for s in (state, parent) if s):
        raise ValueError(f"{run}: the corpus has changed since this run began: choose name=NEW or fresh=true")
    model = gpt.build(cfg, corpus.vocab_size)
    if parent:
        model.load_state_dict(parent["model"])
    losses = parallel.spread(model, device, cfg.shard)  # model.losses, on one device or several
    optimizer = make_optimizer(model, cfg.optim)
    start, seconds = 0, 0.0
    if state:
        if "folder" in state:
            shards.restore(state["folder"], model, optimizer)
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        start, seconds = state["step"], state["seconds"]
        del state
    else:
        parallel.once(lambda: checkpoint.start(run, cfg))

    # One step is batch_tokens; what does not fit into one forward pass is accumulated.
    mine = own.stop - own.start
    parts = math.ceil(mine * cfg.ctx / max(cfg.micro_tokens, cfg.ctx))
    while mine % parts:
        parts += 1
    held_out = tokens.validation(corpus, cfg.ctx, cfg.val_windows)
    token_bytes = torch.from_numpy(corpus.token_bytes)
    n_params = model.n_parameters()
    flops = runtime.flops_per_token(n_params, cfg.model, cfg.ctx)
    peak = runtime.peak_flops(device, cfg.dtype) if cfg.attention == "softmax" else None
    # Decided by the whole run, not by what is left of it: a resumed run must round as an uninterrupted one does.
    compiles = runtime.should_compile(cfg.compile, device, 6 * n_params * cfg.batch_tokens * cfg.steps)

    @torch.no_grad()
    def validate() -> dict[str, float]:
        """The in-window loss on held-out text: nats per token, perplexity, bits per byte."""
        nats, pieces = 0.0, held_out.split(max(1, cfg.micro_tokens // cfg.ctx))
        with torch.compiler.set_stance("force_eager"):  # two passes do not repay a compile
            for i, counts in parallel.turns(len(pieces)):
                w = pieces[i].to(device)
                with autocast():
                    nats += counts * model.losses(w[:, :-1], w[:, 1:], scaled=scaled).sum().item()
        nats = parallel.total(nats)
        loss, n_bytes = nats / held_out[:, 1:].numel(), token_bytes[held_out[:, 1:]].sum().item()
        return {"loss": loss, "ppl": math.exp(min(loss, 700)), "bits_per_byte": nats / math.log(2) / n_bytes}

    print(
        f"{run}: {n_params / 1e6:.2f}M parameters, pos={cfg.pos['kind']}, ctx {cfg.ctx}, "
        f"vocabulary {corpus.vocab_size}, {cfg.steps} steps of {cfg.batch_tokens} tokens on {device.type}"
        f"{f', {parallel.world()} processes' if parallel.world() > 1 else ''}"
        f"{f', going on from step {start}' if start else ''}"
    )
    trained = gpt.trained(cfg, encoding)
    for line in (spectrum.card(trained), spectrum.warning(cfg.scaling, trained)):
        print(line, end="\n" if line else "")
    if cfg.init:
        before = cfg.pretrained
        print(
            f"from {cfg.runs}/{cfg.init}: pre-trained at ctx {before['ctx']} on {before['tokens']:,} tokens; "
            f"this run: ctx {cfg.ctx}, scaling={cfg.scaling['kind']} (factor {scaled.factor:g}), "
            f"{share(cfg)}"
        )
    bar = tqdm(total=cfg.steps * cfg.batch_tokens, initial=start * cfg.batch_tokens, unit="tok", unit_scale=True,
               dynamic_ncols=True, mininterval=0.5 if sys.stderr.isatty() else 15,
               disable=parallel.rank() > 0)  # fmt: skip
    config = {**asdict(cfg), "n_parameters": n_params, "device": device.type}
    with (
        runtime.Stop() as stop,
        parallel.survivor(stop),
        runtime.tracker(cfg.project, "train", cfg.name, cfg.name, config, "train/step") as log,
        bar,
    ):
        validation: dict[str, float] = {}
        health = torch.zeros((), device=device)  # becomes NaN with the first loss or gradient that does, and stays so
        began, saved, stopping = time.monotonic(), start, False
        since, counted = began, start  # for the speed: where the last log, validation or checkpoint ended
        for step in range(start, cfg.steps):
            if compiles and step >= COMPILE_AT:
                bar.set_postfix_str("compiling, about half a minute the first time")
                runtime.compile_blocks(model)
                compiles = False
            lr = learning_rate(step, cfg.steps, cfg.optim)
            for group in optimizer.param_groups:
                group["lr"] = lr
            windows = tokens.batch(corpus.train, step, seed=cfg.seed, size=rows, ctx=cfg.ctx)[own]
            drawn = positions.sample(cfg.positions, step, seed=cfg.seed, rows=rows, ctx=cfg.ctx, longest=cfg.longest)
            drawn = [None] * parts if drawn is None else drawn[own].to(device).chunk(parts)
            loss = torch.zeros((), device=device)
            for i, (w, p) in enumerate(zip(windows.to(device, non_blocking=True).chunk(parts), drawn, strict=True)):
                with parallel.holding_back(losses, more=i + 1 < parts):
                    with autocast():
                        part = losses(w[:, :-1], w[:, 1:], p, scaled).mean() / parts
                    part.backward()
                loss += part.detach()
            norm = parallel.plain(torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip))
            optimizer.step()
            optimizer.zero_grad()
            health += loss + norm
            bar.update(cfg.batch_tokens)

            done, last = step + 1, step + 1 == cfg.steps
            stopping = parallel.anyone(bool(stop))
            if done % cfg.log_every == 0 or last:  # .item() waits for the GPU, so not at every step
                loss = parallel.mean(loss).item()
                speed = (done - counted) * cfg.batch_tokens / (time.monotonic() - since)
                mfu = {"train/mfu": speed * flops / (peak * parallel.world())} if peak else {}
                shown = f"{mfu['train/mfu']:.1%}" if mfu else "n/a"
                bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tok/s, MFU {shown}", refresh=False)
                log.log({"train/step": done, "train/loss": loss, "train/lr": lr, "train/tokens_per_s": speed,
                         "train/grad_norm": norm.item(), "train/tokens": done * cfg.batch_tokens, **mfu})  # fmt: skip
            saving = done % cfg.save_every == 0 or last or stopping
            if (saving or done % cfg.log_every == 0) and not torch.isfinite(parallel.mean(health)):
                kept = f"{run}/ckpt.pt keeps step {saved}" if saved else "nothing was saved yet"
                raise ValueError(
                    f"the loss or its gradient is not finite by step {done}: {kept}; try optim.lr below {cfg.optim.lr}"
                )
            if done % cfg.val_every == 0 or last:
                validation = validate()
                log.log({"train/step": done, **{f"train/val_{k}": v for k, v in validation.items()}})
                bar.write(f"step {done}: held-out {summary(validation)}")
            if saving:
                plain = {"config": asdict(cfg), "step": done, "corpus": corpus.key,
                         "seconds": seconds + time.monotonic() - began, "validation": validation}  # fmt: skip
                if cfg.shard and not last:
                    shards.save(run, plain, model, optimizer)
                else:
                    state = shards.whole(model, optimizer) if cfg.shard else {
                        "model": model.state_dict(), "optimizer": optimizer.state_dict()}  # fmt: skip
                    parallel.once(lambda state=state | plain: checkpoint.save(run, state))
                saved = done
            if saving or done % cfg.log_every == 0 or done % cfg.val_every == 0:
                since, counted = time.monotonic(), done
            if stopping and not last:
                break
    if stopping and saved < cfg.steps:
        print(f"stopped: {run} is saved at step {saved} of {cfg.steps}; the same command goes on from there")
        sys.exit(stop.exit_code)

    seconds += time.monotonic() - began
    total = cfg.steps * cfg.batch_tokens
    print(f"trained {run}: {total:,} tokens in {seconds / 60:.1f} min ({total / seconds:,.0f} tokens/s)")
    if cfg.init:
        print(f"fine-tuning took {share(cfg)}")
    print(f"in window (ctx {cfg.ctx}), held out: {summary(validation)}")
    longest = min(8192, encoding.max_positions or 8192)
    scaling = "none" if encoding.inv_freq is None or cfg.init else "ntk"
    print(f"next: python eval.py run={cfg.name} ctx={longest} scaling={scaling}")


def share(cfg: TrainConfig) -> str:
    """What fine-tuning costs: methods that look cheap in steps can be dear as a share of the pre-training."""
    tokens, before = cfg.steps * cfg.batch_tokens, cfg.pretrained["tokens"]
    return f"{tokens:,} tokens, {100 * tokens / before:.2g} % of the pre-training's {before:,}"


def summary(v: dict[str, float]) -> str:
    return f"loss {v['loss']:.3f} nats/token, perplexity {v['ppl']:.2f}, {v['bits_per_byte']:.3f} bits/byte"


if __name__ == "__main__":
    entry(main)
