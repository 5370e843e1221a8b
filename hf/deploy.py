"""What other software has to be told to use a scaling: config.json of transformers, flags of vLLM and llama.cpp.

The setting is read back by our own reader, and given only if the model then computes what was measured: a family may
scale other layers, or have no such rope type. vLLM: docs.vllm.ai/en/stable/features/context_extension. llama.cpp:
tools/server/README.md; its YaRN has the ends of the ramp and the temperature that transformers' has.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import UserError, check
from conf.registry import describe
from conf.schema import EvalConfig
from engine.run import Run
from hf.checkpoint import Config
from hf.families import FAMILIES, read_settings
from hf.open import open_checkpoint
from hf.positions import EXPRESSIBLE, layer_keys, layers_of
from hf.write import choose_family, in_their_terms
from model import gpt

LONGEST = "max_position_embeddings"
ANY_SHARE = {key: right for key, right in EXPRESSIBLE.items() if key != "pos.rotary_fraction"}  # config.json keeps it


def read_config(run: Run, cfg: EvalConfig) -> Config:
    """The config.json of a model from elsewhere, or the one with which export.py writes a run of ours."""
    if ":" in (cfg.run or ""):
        config = open_checkpoint(cfg.run or "", ignore_keys=cfg.ignore_keys).config
        read_settings(config, 1, cfg.train_ctx)  # enters text_config
        return config
    m = in_their_terms(run.cfg.model, run.model.state_dict()["blocks.0.mlp.down.weight"].shape[1])
    return Config(Path("config.json"), choose_family(run, m, run.corpus.vocab_size))


def scaled_keys(run: Run, config: Config, scalings: Sequence[dict], ctx: int) -> dict[str, Any]:
    """The keys of config.json with which transformers computes, at every length, what `scalings` does at ctx tokens.

    UserError if the family cannot say it.
    """
    method, *added = scalings
    L, family = run.context.train_ctx, FAMILIES[config.values["model_type"]]
    settings = {"scaling": method, "plus": [knobs["kind"] for knobs in added], "ctx": ctx, "init": "hf"}
    layers = layers_of(replace(run.cfg, **settings, pretrained={"ctx": L}), ANY_SHARE)
    rope = layer_keys(layers, ctx, by_type=family.positions.sliding_base is not None)["rope_parameters"]
    keys = {"rope_parameters": rope, LONGEST: ctx}
    others = {key: value for key, value in config.values.items() if key != "rope_scaling"}
    back, _, _ = read_settings(Config(config.path, others | keys), ctx, L if method["kind"] == "pi" else None)
    context = gpt.trained_context(back, gpt.build_encoding(back))
    said, measured = gpt.trained_scaling(back, context, ctx), run.change(scalings, ctx, ctx)
    effects = [
        [change.effect(ctx, own) for change, own in zip(x.by_type or [x], trained.by_type or [trained], strict=True)]
        for x, trained in ((said, context), (measured, run.context))
    ]
    same = all(
        np.allclose(a[0] or (), b[0] or (), rtol=1e-9, atol=0) and np.isclose(a[1], b[1]) and a[2:] == b[2:]
        for a, b in zip(*effects, strict=True)
    )
    check(same, "rope_parameters", method["kind"], f"another: {config.values['model_type']} scales other layers by it")
    return {"text_config": keys} if config.prefix else keys


def deployment(run: Run, cfg: EvalConfig, scalings: Sequence[dict], ctx: int) -> dict[str, str]:
    """Software -> what to give it, or why it cannot be given."""
    try:
        keys = scaled_keys(run, read_config(run, cfg), scalings, ctx)
    except UserError as e:
        return {"transformers, vLLM, llama.cpp": f"none of them can do this with this model ({e})"}
    factor, L, pos = run.change(scalings, ctx, ctx).factor, run.context.train_ctx, run.cfg.pos
    rope, kind = keys.get("text_config", keys)["rope_parameters"], scalings[0]["kind"]
    flags = {
        "yarn": f"--rope-scaling yarn --rope-scale {factor:g} --yarn-orig-ctx {L}",
        "pi": f"--rope-scaling linear --rope-scale {factor:g}",
        "ntk": f"--rope-freq-base {rope.get('rope_theta', pos['base']):.10g}",
    }
    other = "no flag: convert the checkpoint with the config.json above"
    usual = kind in flags and not run.cfg.layers and describe("scaling", {**scalings[0], "factor": "auto"}) == kind
    return {
        "transformers, in config.json instead of rope_scaling": json.dumps(keys)[1:-1],
        "vLLM": f"--max-model-len {ctx} --hf-overrides '{json.dumps(keys)}'",
        "llama.cpp": f"{flags[kind]} -c {ctx}" if usual else other,
    }
