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

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor
from tqdm import tqdm

import compare
import kernels
import report
from conf.errors import entry, one_line_errors
from conf.registry import usual
from conf.schema import EvalConfig, TrainConfig, eval_config
from data import tokens
from model import checkpoint, gpt, hf, parallel, protocols, runtime, scaling
from model.scaling import Unfit
from studies import spectrum

FORMAT = 2  # of the curves; raise it when their meaning changes
TOKENS_AT_ONCE = 8192  # in one forward pass


def lengths(ctx: int | list[int], score: int, marks: tuple[int, ...]) -> list[int]:
    """score, 2 score, 4 score, ... below ctx, with ctx and the trained contexts; a list is taken as it is."""
    if isinstance(ctx, list):
        return sorted(set(ctx))
    doubling = {score * 2**k for k in range(ctx.bit_length()) if score * 2**k < ctx}
    return sorted(doubling | {ctx} | {m for m in marks if score <= m < ctx})


def fits(cfg: EvalConfig, run: TrainConfig, ctx: int) -> None:
    """Unfit, in words, if this run cannot be read at ctx with this scaling."""
    encoding = gpt.build_encoding(run)
    if encoding.max_positions is not None and ctx > encoding.max_positions:
        raise Unfit(
            f"pos={run.pos['kind']} has {encoding.max_positions} positions and cannot be read at ctx={ctx} "
            f"(ctx={encoding.max_positions} can; or train with pos.max_positions={ctx})"
        )
    scaling.resolve(cfg.scaling, gpt.trained(run, encoding), ctx, ctx, [usual("scaling", k) for k in cfg.plus])


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


def label(name: str, knobs: dict) -> str:
    """The scaling's name and whatever differs from its yaml: `yarn beta_fast=4.0`."""
    return " ".join([name, *(f"{k}={v}" for k, v in knobs.items() if usual("scaling", name).get(k) != v)])


@hydra.main(version_base="1.3", config_path="conf", config_name="eval")
@one_line_errors
def main(hydra_cfg: DictConfig) -> None:
    cfg = eval_config(hydra_cfg)
    ctx = max(cfg.ctx) if isinstance(cfg.ctx, list) else cfg.ctx
    device = runtime.pick_device(cfg.device)
    kernels.choose(cfg.kernel, device)
    parallel.join(device)
    if hf.is_checkpoint(cfg.run):
        why, state, corpus = hf.load(cfg, ctx)
        name = state["cfg"].name
        fits(cfg, state["cfg"], ctx)
    else:
        name, why = choose(cfg, ctx)
        state = checkpoint.load(Path(cfg.runs) / name, device)
        data = state["cfg"].data
        corpus = parallel.once(lambda: tokens.prepare(data, cfg.cache)) or tokens.prepare(data, cfg.cache)
    run, train = Path(cfg.runs) / name, state["cfg"]
    if corpus.key != state["corpus"]:
        raise ValueError(f"{run}: its corpus has changed since it was trained, so nothing is held out: train again")
    names, text = tokens.long_documents(corpus, ctx, cfg.documents, start=cfg.protocol == "prefix")
    model = gpt.load(train, corpus.vocab_size, state["model"]).to(device).eval()
    trained = gpt.trained(train, model.pos)

    def own(n: int) -> scaling.Scaled:
        """What the run was trained with; Hugging Face's models follow the length in it."""
        return gpt.own_scaling(train, model.pos, n if hf.is_checkpoint(cfg.run) else None)

    L, reach = trained.train_ctx, trained.reach
    ns = lengths(cfg.ctx, cfg.score, (L // 2, L, reach))

    # Targets that were chosen alike are comparable, across runs too: the key of a target set is in every row
    score = protocols.protocol(cfg.protocol, cfg.score, cfg.stride)
    how = cfg.protocol + {"matched": "", "sliding": f" stride={cfg.stride}", "prefix": ""}[cfg.protocol]
    scored = protocols.targets(score, text, ctx).numpy()
    target_key = hashlib.sha256(f"{how} {names}".encode() + scored.tobytes()).hexdigest()[:12]
    done = "" if state["step"] == train.steps else f" of {train.steps}, unfinished"
    step = "" if hf.is_checkpoint(cfg.run) else f", step {state['step']}{done}"
    print(f"run: {name} ({why}): pos={train.pos['kind']}, trained at ctx {train.ctx}{step}")
    if train.init:
        print(f"  pre-trained at ctx {L} ({train.pretrained['run']}), extended to {reach} by scaling="
              f"{train.scaling['kind']}: none is as fine-tuned, the window control {reach} wide")  # fmt: skip
    plus = [usual("scaling", k) for k in cfg.plus]
    for line in (spectrum.card(trained), *(spectrum.warning(knobs, trained) for knobs in (cfg.scaling, *plus))):
        print(line, end="\n" if line else "")
    what = {
        "matched": f"the last {cfg.score} tokens",
        "sliding": f"the last {ctx} tokens, by windows of n that move by {cfg.stride} (n at most),",
        "prefix": "the first n tokens (other targets at every n)",
    }[cfg.protocol]
    print(f"targets: {what} of {len(names)} held-out documents, {int(corpus.token_bytes[scored].sum()):,} bytes")
    if len(names) < 24:
        print(f"note: only {len(names)} held-out documents are longer than {ctx} tokens, so the intervals are wide")

    # What is measured: no scaling, the control, and the scaling asked for, each under what identifies its curve
    dtype = "bfloat16" if runtime.uses_bfloat16(device, cfg.dtype) else "float32"
    digest, chosen = state.get("digest") or checkpoint.digest(run), HydraConfig.get().runtime.choices["scaling"]
    asked, specs = " + ".join([label(chosen, cfg.scaling), *cfg.plus]), {}
    methods = {"none": [usual("scaling", "none")], "window": [usual("scaling", "window")], asked: [cfg.scaling, *plus]}
    for curve, knobs in methods.items():
        identity = json.dumps([FORMAT, digest, target_key, ns, dtype, knobs], sort_keys=True)
        key = hashlib.sha256(identity.encode()).hexdigest()[:8]
        specs[curve] = (knobs, run / "eval" / f"{curve.replace(' ', '-')}-ctx{ctx}-{key}.jsonl")
    todo = [k for k, (_, file) in specs.items() if cfg.fresh or not file.exists()]
    total = len(todo) * sum(protocols.cost(score, text, n) for n in ns) + cfg.positions * len(specs) * len(text) * ctx
    repeated = min(L, ctx)  # tokens: a passage of half of it, twice
    total += len(text) * repeated
    bar = tqdm(total=total, unit="tok", unit_scale=True, dynamic_ncols=True,
               mininterval=0.5 if sys.stderr.isatty() else 15,
               disable=parallel.rank() > 0 or not (todo or cfg.positions))  # fmt: skip

    def measure(protocol: protocols.Protocol, n: int, scaled: scaling.Scaled) -> Tensor:
        """What the protocol scores, nats [documents, scored], a few documents at a time."""

        def losses(tokens: Tensor, targets: Tensor) -> Tensor:
            with runtime.autocast(device, cfg.dtype):
                nats = model.losses(tokens.to(device), targets.to(device), scaled=scaled).double().cpu()
            bar.update(min(tokens.numel() * parallel.world(), bar.total - bar.n))  # about what all have read
            if stop:
                bar.close()
                print(f"stopped; the curves that were finished are kept in {run / 'eval'}")
                sys.exit(stop.exit_code)
            return nats

        # Several processes share the documents by whole passes, so that every number is the one that one process gets
        mine = text.split(max(1, TOKENS_AT_ONCE // n))[parallel.rank() :: parallel.world()]
        return torch.cat(parallel.gather([protocol(losses, part, n) for part in mine]))

    curves: dict[str, list[dict]] = {}
    positions: dict[str, list[dict]] = {}
    with runtime.Stop() as stop, parallel.survivor(stop), torch.inference_mode():
        for curve, (knobs, file) in specs.items():
            if cfg.positions:
                bar.set_postfix_str(f"{curve}, by position", refresh=False)
                scaled = scaling.on_top(own(ctx), scaling.resolve(knobs[0], trained, ctx, ctx, knobs[1:]))
                positions[curve] = report.position_rows(measure(protocols.prefix, ctx, scaled))
            if curve not in todo:
                curves[curve] = compare.read(file)
                continue
            rows = []
            for n in ns:
                began = time.monotonic()
                bar.set_postfix_str(f"{curve}, n={n}", refresh=False)
                scaled = scaling.on_top(own(n), scaling.resolve(knobs[0], trained, n, ctx, knobs[1:]))
                per_document = measure(score, n, scaled).sum(dim=1).numpy()
                scored = protocols.targets(score, text, n).numpy()
                n_tokens, n_bytes = scored.size, int(corpus.token_bytes[scored].sum())
                loss = per_document.sum() / n_tokens
                low, high = report.bootstrap(per_document, n_tokens)
                rows.append({
                    "run": name, "pos": train.pos["kind"], "train_ctx": L, "extended_ctx": reach,
                    "step": state["step"], "seed": train.seed, "label": curve, "scaling": knobs, "n": n,
                    "factor": scaled.factor, "window": scaled.window, "attention_factor": scaled.attention_factor,
                    "loss": loss, "low": low, "high": high, "ppl": math.exp(min(loss, 700)),
                    "bits_per_byte": loss * n_tokens / math.log(2) / n_bytes, "tokens": n_tokens, "bytes": n_bytes,
                    "documents": len(names), "ctx": ctx, "protocol": how, "score": cfg.score, "targets": target_key,
                    "weights": digest[:12], "dtype": dtype, "device": device.type,
                    "seconds": round(time.monotonic() - began, 2), "nll": per_document.round(4).tolist(),
                })  # fmt: skip
            write_rows(file, rows)
            curves[curve] = rows
        copied = measure(protocols.copied, repeated, own(repeated)) if repeated >= 4 else None
    bar.close()
    report.table(curves, asked, L, reach)
    if cfg.protocol == "matched" and copied is not None:
        print(report.headroom(curves["none"], copied, L))
    if positions:
        report.position_table(positions, L)
        key = hashlib.sha256(f"{digest} {target_key} {dtype} {methods}".encode()).hexdigest()[:8]
        rows = [{"run": name, "ctx": ctx, "label": k, **row} for k, curve in positions.items() for row in curve]
        write_rows(run / "eval" / "positions" / f"{asked.replace(' ', '-')}-ctx{ctx}-{key}.jsonl", rows)
    window = {row["n"]: row for row in curves["window"]}
    for curve in todo:
        about = {"run": name, "label": curve, "scaling": specs[curve][0], "train": asdict(train)}
        with runtime.tracker(cfg.project, "eval", name, f"{name} {curve}", about, "eval/ctx") as log:
            for row in curves[curve]:
                keys = ("loss", "ppl", "bits_per_byte", "factor")
                point = {f"eval/{k}": row[k] for k in keys} | {
                    "eval/gain_over_window": report.gain(row, window[row["n"]])[0]
                }
                log.log({"eval/ctx": row["n"], **point})

    if parallel.rank() > 0:
        return
    kind = "" if cfg.protocol == "matched" else f"-{cfg.protocol}"
    picture = run / "eval" / f"ctx{ctx}{kind}.png"
    drawn = compare.select([compare.read(f) for f in (run / "eval").glob("*.jsonl")], target_key)
    compare.draw(drawn, picture, f"{name}: pos={train.pos['kind']}, trained at {L} tokens")
    print(f"\nrows: {run / 'eval'}/*.jsonl   picture: {picture}   with other runs: python compare.py")


def write_rows(file: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if parallel.rank() == 0:
        checkpoint.write_atomically(file, lambda f: f.write(text.encode()))


if __name__ == "__main__":
    # exp is a group of train.py's settings: here it picks among the runs that were trained with it
    sys.argv[1:] = [f"trained_with={a[4:]}" if a.startswith("exp=") else a for a in sys.argv[1:]]
    entry(main)
