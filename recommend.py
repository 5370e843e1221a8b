"""Which scaling, with which factor, for a model at ctx tokens: python recommend.py run=hf:PATH ctx=32768

Measured on held-out documents in about `minutes` (but at least two windows): no scaling, the two controls of eval.py,
and methods with the factor that would be deployed, ctx / L at all lengths; at ctx, and at L, where such a factor costs
something. If perplexity decides for no method, the rest of the time goes to copying from more than L tokens back.
Printed are the answer and what to give to transformers, vLLM and llama.cpp; nothing is written.
"""

import math
import time
from contextlib import suppress
from dataclasses import fields

import torch

from conf.cli import command
from conf.errors import UserError, check
from conf.registry import yaml_values
from conf.schema import EvalConfig, MeasureConfig, RecommendConfig
from engine import device as devices, distributed
from hf.deploy import deployment
from hf.open import open_run
from measure import recommendation
from measure.evaluation import NONE, Evaluation, requested_method
from measure.report import print_table, print_wrapped

PERPLEXITY = 2 / 3  # its share of the time; the rest is for copying, if perplexity decides for no method


def recommend(cfg: RecommendConfig) -> None:
    """Open the model, measure until the time is used, and print the answer."""
    # ---- the model, its trained context, the methods that apply, the texts ----
    began, seconds = time.monotonic(), 60 * cfg.minutes
    device = devices.start(cfg.device, cfg.kernel, many_lengths=True)
    check(distributed.world() == 1, "processes", distributed.world(), "1: recommend.py does not run under torchrun")
    settings = EvalConfig(**{f.name: getattr(cfg, f.name) for f in fields(MeasureConfig)}, ctx=1)
    run = open_run(settings, device)
    ctx, L = cfg.ctx, run.context.longest_trained_ctx
    check(ctx > L, "ctx", ctx, f"above {L}, up to which {run.name} was trained: there it needs no scaling")
    methods = {m.label: m for m in recommendation.candidates(run, ctx, requested_method(cfg))}
    scored = {"scored_tokens": max(1, min(512, L // 8)), "windows": 16, "far_windows": 16}
    settings.ctx, settings.task = [L, ctx], yaml_values("task", "matched") | scored
    texts = Evaluation(run, settings, device)
    check(len(texts.task.names) > 1, "ctx", ctx, f"less, or with longer texts: only {texts.task.names[0]} is longer")
    for line in (*run.describe().splitlines(), *recommendation.about_context(run)):
        print_wrapped(line)

    # ---- measure: perplexity, and in the time left copying ----
    with torch.inference_mode():
        until = began + PERPLEXITY * seconds
        control, loss, gains, costs = recommendation.compare(texts, list(methods.values()), until)
        methods |= {NONE.label: NONE}
        chosen, hits = recommendation.choose(gains, costs), {}
        # Half of the rest is left, and the texts have a place for a passage
        if not chosen and time.monotonic() < (until + began + seconds) / 2 and ctx >= 128:
            settings.ctx, settings.task = [ctx], yaml_values("task", "copying")
            best = [methods[m] for m in sorted(costs, key=lambda m: -gains[m].mean())[:2]]
            with suppress(KeyboardInterrupt, UserError):  # or the texts are too short: what there is counts
                hits = recommendation.recall(Evaluation(run, settings, device), best, began + seconds)

    # ---- the answer, and the settings ----
    print()
    print_wrapped(f"nats/token: gain at {ctx} over {control}; cost: the extra loss at {L} with the factor for {ctx}")
    rows = {}
    for m, x in sorted(gains.items(), key=lambda item: -item[1].mean()):
        perplexity = math.exp(min(loss - x.mean(), 700))
        rows[m] = {"perplexity": f"{perplexity:.2f}", "gain": recommendation.text(x)}
        rows[m] |= {"cost": recommendation.text(costs[m])} if m in costs else {}
    print_table(rows)
    missing = [m for m in methods if m not in gains]
    print_wrapped(f"{len(gains[control])} documents" + (f"; no time for {', '.join(missing)}" if missing else ""))
    scaled = [m for m in methods.values() if any("factor" in knobs for knobs in m.scalings)]
    factors = {m.label: run.change(m.scalings, ctx, ctx).factor for m in scaled}
    lines = recommendation.sentences(control, gains, costs, factors, ctx, L)
    if hits:
        chosen, line = recommendation.recall_sentence(hits, L)
        lines.append(line)
    elif not chosen:
        lines.append("Copying from further than L back was not tried: no time was left, or texts or ctx are short.")
    if not chosen and control != (truncation := f"truncation to {L}"):  # which is what the flags do
        lines.append(f"The flags below truncate: {recommendation.text(gains[truncation])} against that window.")
    if loss > 0.85 * texts.task.guess:
        lines.append(f"Doubtful: {loss:.2f} nats/token is hardly better than guessing, {texts.task.guess:.2f}.")
    for line in ("", *lines):
        print_wrapped(line)
    told = {} if chosen else {"vLLM": f"--max-model-len {L}", "llama.cpp": f"-c {L}"}
    for m in chosen:  # until there is one that software has
        found = deployment(run, settings, [run.cfg.scaling] if m == NONE.label else methods[m].scalings, ctx)
        told |= {f"{m}, {software}": setting for software, setting in found.items()}
        if len(found) > 1:
            break
    for software, setting in told.items():
        print(f"\n{software}:\n  {setting}")  # one line each, to be pasted


main = command("recommend", recommend)

if __name__ == "__main__":
    main()
