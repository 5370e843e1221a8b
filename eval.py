"""Measure a trained run against context length: python eval.py ctx=8192 scaling=ntk

Matched targets: the last `score` tokens of the same held-out documents, given the last n tokens, for n = 64 .. ctx.
The targets never change, so whatever changes with n is done by the context. On the same axes, always: no scaling, and
the window control (each query sees the trained context's width, nothing more), which a real extension must beat.
"""

import hashlib
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from tqdm import tqdm

import compare
from conf.schema import ROOT, EvalConfig, TrainConfig, entry, eval_config, one_line_errors
from data import tokens
from model import checkpoint, gpt, runtime, scaling
from model.scaling import Scaled, Unfit

FORMAT = 1  # of the curves; raise it when their meaning changes
TOKENS_AT_ONCE = 8192  # in one forward pass


def lengths(ctx: int | list[int], score: int, train_ctx: int) -> list[int]:
    """score, 2 score, 4 score, ... below ctx, with the trained context and ctx itself; a list is taken as it is."""
    if isinstance(ctx, list):
        return sorted(set(ctx))
    doubling = {score * 2**k for k in range(ctx.bit_length()) if score * 2**k < ctx}
    return sorted(doubling | {ctx} | ({train_ctx} if score <= train_ctx < ctx else set()))


def nll(model: Any, targets: Tensor, n: int, scaled: Scaled, score: int) -> Tensor:
    """Nats that the last `score` tokens of targets [B, ctx + 1] cost, given the last n tokens: [B, score]."""
    windows = targets[:, -n - 1 :]
    return model.losses(windows[:, :-1], windows[:, -score:], scaled=scaled)


def fits(cfg: EvalConfig, run: TrainConfig, ctx: int) -> None:
    """Unfit, in words, if this run cannot be read at ctx with this scaling."""
    encoding = gpt.build_encoding(run)
    if encoding.max_positions is not None and ctx > encoding.max_positions:
        raise Unfit(
            f"pos={run.pos['kind']} has {encoding.max_positions} positions and cannot be read at ctx={ctx} "
            f"(ctx={encoding.max_positions} can; or train with pos.max_positions={ctx})"
        )
    scaling.resolve(cfg.scaling, gpt.trained(run, encoding), ctx, ctx)


def choose(cfg: EvalConfig, ctx: int) -> tuple[str, str]:
    """(name of the run to evaluate, why it)."""
    runs = checkpoint.find(cfg.runs)
    if cfg.run is not None:
        named = [c for name, c in runs if name == cfg.run]
        if not named:
            known = f"there are {', '.join(name for name, _ in runs)}" if runs else "first: python train.py pos=rope"
            raise ValueError(f"run={cfg.run}: no trained run of that name in {cfg.runs}/: {known}")
        fits(cfg, named[0], ctx)
        return cfg.run, "as named"
    unfit = []
    for name, run in runs:
        if cfg.trained_with is not None and run.exp != cfg.trained_with:
            continue
        try:
            fits(cfg, run, ctx)
            return name, "the newest that fits" + (f"; passed over {'; '.join(unfit)}" if unfit else "")
        except Unfit as e:
            unfit.append(f"{name}: {e}")
    if unfit:
        raise ValueError(f"no run in {cfg.runs}/ fits: {'; '.join(unfit)}")
    with_exp = f" with exp={cfg.trained_with}" if cfg.trained_with else ""
    raise ValueError(f"no trained run{with_exp} in {cfg.runs}/: first: python train.py pos=rope{with_exp[5:]}")


def usual(name: str) -> dict:
    """The settings that conf/scaling/NAME.yaml gives."""
    return OmegaConf.to_object(OmegaConf.load(ROOT / "conf" / "scaling" / f"{name}.yaml"))


def label(name: str, knobs: dict) -> str:
    """The scaling's name and whatever differs from its yaml: `yarn beta_fast=4.0`."""
    return " ".join([name, *(f"{k}={v}" for k, v in knobs.items() if usual(name).get(k) != v)])


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
@one_line_errors
def main(hydra_cfg: DictConfig) -> None:
    cfg = eval_config(hydra_cfg)
    ctx = max(cfg.ctx) if isinstance(cfg.ctx, list) else cfg.ctx
    name, why = choose(cfg, ctx)
    run = Path(cfg.runs) / name
    device = runtime.pick_device(cfg.device)
    state = checkpoint.load(run, device)
    train: TrainConfig = state["cfg"]
    corpus = tokens.prepare(train.data, cfg.cache)
    if corpus.key != state["corpus"]:
        raise ValueError(f"{run}: its corpus has changed since it was trained, so nothing is held out: train again")
    names, targets = tokens.matched_targets(corpus, ctx, cfg.documents)
    model = gpt.build(train, corpus.vocab_size).to(device).eval()
    model.load_state_dict(state["model"])
    trained, L = gpt.trained(train, model.pos), train.ctx
    ns = lengths(cfg.ctx, cfg.score, L)

    scored = targets[:, -cfg.score :].contiguous()
    target_key = hashlib.sha256(" ".join(names).encode() + scored.numpy().tobytes()).hexdigest()[:12]
    n_tokens, n_bytes = scored.numel(), int(corpus.token_bytes[scored.numpy()].sum())
    done = "" if state["step"] == train.steps else f" of {train.steps}, unfinished"
    print(f"run: {name} ({why}): pos={train.pos['kind']}, trained at ctx {L}, step {state['step']}{done}")
    print(f"targets: the last {cfg.score} tokens of {len(names)} held-out documents, {n_bytes:,} bytes")
    if len(names) < 24:
        print(f"note: only {len(names)} held-out documents are longer than {ctx} tokens, so the intervals are wide")

    # What is measured: no scaling, the control, and the scaling asked for, each under what identifies its curve
    dtype = "bfloat16" if runtime.uses_bfloat16(device, cfg.dtype) else "float32"
    digest = hashlib.sha256((run / "ckpt.pt").read_bytes()).hexdigest()
    chosen = HydraConfig.get().runtime.choices["scaling"]
    asked, specs = label(chosen, cfg.scaling), {}
    for choice, knobs in (("none", usual("none")), ("window", usual("window")), (chosen, cfg.scaling)):
        identity = json.dumps([FORMAT, digest, target_key, ns, cfg.score, dtype, knobs], sort_keys=True)
        curve, key = label(choice, knobs), hashlib.sha256(identity.encode()).hexdigest()[:8]
        specs[curve] = (knobs, run / "eval" / f"{curve.replace(' ', '-')}-ctx{ctx}-{key}.jsonl")

    curves: dict[str, list[dict]] = {}
    todo = [k for k, (_, file) in specs.items() if cfg.fresh or not file.exists()]
    with runtime.Stop() as stop, torch.inference_mode():
        bar = tqdm(total=len(todo) * len(names) * sum(ns), unit="tok", unit_scale=True, dynamic_ncols=True,
                   mininterval=0.5 if sys.stderr.isatty() else 15, disable=not todo)  # fmt: skip
        for curve, (knobs, file) in specs.items():
            if curve not in todo:
                curves[curve] = compare.read(file)
                continue
            rows = []
            for n in ns:
                began = time.monotonic()
                scaled = scaling.resolve(knobs, trained, n, ctx)
                sums = []
                for part in targets.split(max(1, TOKENS_AT_ONCE // n)):
                    bar.set_postfix_str(f"{curve}, n={n}", refresh=False)
                    with runtime.autocast(device, cfg.dtype):
                        sums.append(nll(model, part.to(device), n, scaled, cfg.score).double().sum(dim=1).cpu())
                    bar.update(len(part) * n)
                    if stop:
                        bar.close()
                        print(f"stopped; the curves that were finished are kept in {run / 'eval'}")
                        sys.exit(stop.exit_code)
                per_document = torch.cat(sums).numpy()
                loss = per_document.sum() / n_tokens
                low, high = compare.bootstrap(per_document, n_tokens)
                rows.append({
                    "run": name, "pos": train.pos["kind"], "train_ctx": L, "step": state["step"], "seed": train.seed,
                    "label": curve, "scaling": knobs, "n": n, "factor": scaled.factor, "window": scaled.window,
                    "attention_factor": scaled.attention_factor, "loss": loss, "low": low, "high": high,
                    "ppl": math.exp(min(loss, 700)), "bits_per_byte": loss * n_tokens / math.log(2) / n_bytes,
                    "tokens": n_tokens, "bytes": n_bytes, "documents": len(names), "score": cfg.score, "ctx": ctx,
                    "targets": target_key, "weights": digest[:12], "dtype": dtype, "device": device.type,
                    "seconds": round(time.monotonic() - began, 2), "nll": per_document.round(4).tolist(),
                })  # fmt: skip
            text = "".join(json.dumps(row) + "\n" for row in rows)
            checkpoint.write_atomically(file, lambda f, text=text: f.write(text.encode()))
            curves[curve] = rows
        bar.close()
    report(curves, asked, L)
    window = {row["n"]: row for row in curves["window"]}
    for curve in todo:
        about = {"run": name, "label": curve, "scaling": specs[curve][0], "train": asdict(train)}
        with runtime.tracker(cfg.project, "eval", name, f"{name} {curve}", about, "eval/ctx") as log:
            for row in curves[curve]:
                keys = ("loss", "ppl", "bits_per_byte", "factor")
                point = {f"eval/{k}": row[k] for k in keys} | {
                    "eval/gain_over_window": compare.gain(row, window[row["n"]])[0]
                }
                log.log({"eval/ctx": row["n"], **point})

    picture = run / "eval" / f"ctx{ctx}.png"
    drawn = compare.select([compare.read(f) for f in (run / "eval").glob("*.jsonl")], target_key)
    compare.draw(drawn, picture, f"{name}: pos={train.pos['kind']}, trained at {L} tokens")
    print(f"\nrows: {run / 'eval'}/*.jsonl   picture: {picture}   with other runs: python compare.py")


def report(curves: dict[str, list[dict]], asked: str, L: int) -> None:
    """The table and the headline numbers of the scaling that was asked for."""
    none, window, own = (curves[k] for k in ("none", "window", asked))
    shown = {"none": none, "window": window, asked: own}
    print(
        f"\n{'':13}"
        + "".join(f"{k[:16]:>17}" for k in shown)
        + f"{asked[:16] + ', 95 %':>23}{'gain over window, 95 %':>27}"
    )
    print(
        f"{'n':>7}{'n/L':>6}" + f"{'ppl  bits/byte':>17}" * len(shown) + f"{'factor':>8}{'ppl':>15}{'nats/token':>27}"
    )
    for i, row in enumerate(own):
        cells = "".join(f"{c[i]['ppl']:>10.2f}{c[i]['bits_per_byte']:>7.3f}" for c in shown.values())
        mean, low, high = compare.gain(row, window[i])
        interval = f"{math.exp(row['low']):.1f} .. {math.exp(row['high']):.1f}"
        print(
            f"{row['n']:>7}{row['n'] / L:>6.3g}{cells}{row['factor']:>8.3g}{interval:>15}"
            f"{mean:>+9.3f} [{low:+.3f}, {high:+.3f}]"
        )
    last = own[-1]
    mean, low, high = compare.gain(last, window[-1])
    if last["n"] > L and asked != "window":
        verdict = "better than" if low > 0 else "worse than" if high < 0 else "no different from"
        print(
            f"\ngain over the window control at n={last['n']} ({last['n'] / L:g}x): {mean:+.3f} nats/token "
            f"[{low:+.3f}, {high:+.3f}]: {verdict} seeing only {window[-1]['window']} tokens at a time"
        )
    inside = [i for i, row in enumerate(own) if row["n"] <= L]
    if inside and asked not in ("none", "window"):
        i = inside[-1]
        tax, low, high = compare.difference(own[i], none[i])
        price = (
            f"{tax:+.3f} nats/token [{low:+.3f}, {high:+.3f}]" if own[i]["factor"] > 1 else "0, the factor is 1 there"
        )
        print(f"tax inside the trained context (n={own[i]['n']}, factor {own[i]['factor']:g}): {price}")


if __name__ == "__main__":
    # exp is a group of train.py's settings: here it picks among the runs that were trained with it
    sys.argv[1:] = [f"trained_with={a[4:]}" if a.startswith("exp=") else a for a in sys.argv[1:]]
    entry(main)
