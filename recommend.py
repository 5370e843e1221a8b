"""Which scaling, with which factor, for a model at ctx tokens: python recommend.py run=hf:PATH ctx=32768

Measured on held-out documents in about `minutes` (but at least two windows): no scaling, the two controls of eval.py,
and methods with the factor that would be deployed, ctx / L at all lengths; at ctx, and at L, where such a factor costs
something. If perplexity decides for no method, the rest of the time goes to copying from more than L tokens back.
Printed are the answer and what to give to transformers, vLLM and llama.cpp; nothing is written.
"""

import math
import textwrap
import time
from dataclasses import fields
from typing import Any

import torch

from conf.cli import command
from conf.errors import UserError, check
from conf.registry import yaml_values
from conf.schema import EvalConfig, MeasureConfig, RecommendConfig
from engine import device as devices, distributed
from engine.progress import progress_bar
from hf.deploy import deployment
from hf.open import open_run
from measure import recommendation
from measure.evaluation import NONE, Evaluation, requested_method
from measure.recommendation import Comparison, interval, text
from measure.report import print_table

SHARE = 2 / 3  # of the time for perplexity; if it decides for no method, the rest is for copying


@command("recommend")
def main(cfg: RecommendConfig) -> None:
    recommend(cfg)


def recommend(cfg: RecommendConfig) -> None:
    """Open the model, measure until the time is used, and print the answer."""
    # ---- the model, its trained context, the methods that apply, the texts ----
    end, device = time.monotonic() + 60 * cfg.minutes, devices.start(cfg.device, cfg.kernel, many_lengths=True)
    check(distributed.world() == 1, "processes", distributed.world(), "1: recommend.py does not run under torchrun")
    common: dict[str, Any] = {f.name: getattr(cfg, f.name) for f in fields(MeasureConfig)}
    common |= {"scaling": NONE.scalings[0], "plus": []}
    settings = EvalConfig(**common, ctx=1)
    run = open_run(settings, device)
    ctx, L = cfg.ctx, run.context.longest_trained_ctx
    check(ctx > L, "ctx", ctx, f"above {L}, up to which {run.name} was trained: there it needs no scaling")
    methods = {m.label: m for m in recommendation.candidates(run, ctx, requested_method(cfg))}
    if not methods:
        raise UserError(f"run={run.name}: pos={run.context.pos} does not rotate: only window and truncation apply")
    settings.ctx, scored = [max(1, L // 2), L, ctx], max(1, min(512, L // 8))
    settings.task = yaml_values("task", "matched") | {"scored_tokens": scored, "windows": 16, "far_windows": 16}
    texts = Evaluation(run, settings, device)
    check(len(texts.task.names) > 1, "ctx", ctx, f"less, or with longer texts: only {texts.task.names[0]} is longer")
    say(run.describe(), *recommendation.about_context(run))
    factors = {m: f" with factor {run.change(x.scalings, ctx, ctx).factor:g}" for m, x in methods.items()}
    factors = {m: "" if x.endswith("factor 1") else x for m, x in factors.items()}

    # ---- measure: perplexity, and in the time left copying ----
    bar, recalled, hits = progress_bar(60 * cfg.minutes, "{elapsed} "), None, {}
    with bar, torch.inference_mode():
        found = recommendation.compare(texts, list(methods.values()), end - (1 - SHARE) * 60 * cfg.minutes, bar)
        chosen, _ = recommendation.choose(found.gains, found.taxes)
        if chosen is None and time.monotonic() < end:
            settings.ctx, settings.task = [ctx], yaml_values("task", "copying")
            best = sorted(found.taxes, key=lambda m: -found.gains[m].mean())[:2]
            hits = recommendation.recall(Evaluation(run, settings, device), [methods[m] for m in best], end, bar)

    # ---- the answer, and the settings ----
    show(found, texts.task.guess)
    lines = recommendation.sentences(found, factors)
    if hits:
        recalled, line = recommendation.recall_sentence(hits, L)
        lines.append(line)
    elif chosen is None:
        lines.append("Copying from further than L back was not tried: no time was left, or ctx is too close to L.")
    print()
    say(*lines)
    if name := chosen or recalled:
        given = deployment(run, settings, methods[name].scalings, ctx)
    else:
        given = {"vLLM": f"--max-model-len {L}", "llama.cpp": f"-c {L}"}
    for software, setting in given.items():
        say("", f"{software}:", f"  {setting}")


def say(*lines: str) -> None:
    """Print lines, wrapped to 80 columns between words."""
    for line in "\n".join(lines).splitlines():
        print(textwrap.fill(line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))


def show(found: Comparison, guess: float) -> None:
    """Print the table of all methods, and what to know about it. guess: the loss of guessing, nats per token."""
    print(f"\nn = {found.ctx}; gain over {found.control}, and tax at {found.L}, in nats/token")
    gain, tax, lines = "gain [95 %]", "tax of the factor", {}
    for label, gains in sorted(found.gains.items(), key=lambda item: -item[1].mean()):
        lines[label] = {"perplexity": f"{math.exp(min(found.loss - gains.mean(), 700)):.2f}", gain: text(gains)}
        lines[label] |= {tax: text(found.taxes[label])} if label in found.taxes else {}
    print_table(lines)
    notes = [f"over {len(found.rise)} documents"]
    notes += [f"not measured, for lack of time: {', '.join(found.unmeasured)}"] if found.unmeasured else []
    if interval(found.rise)[0] > 0:
        rises = f"without scaling the loss rises by {text(found.rise)} from {found.L // 2} to {found.L} tokens"
        notes.append(f"doubtful: {rises}, as past the trained context: is that smaller?")
    if found.loss > 0.85 * guess:
        notes.append(f"doubtful: {found.loss:.2f} nats/token is hardly better than {guess:.2f}, a random guess")
    say(*notes)


if __name__ == "__main__":
    main()
