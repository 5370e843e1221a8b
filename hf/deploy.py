"""What other software has to be told to use a scaling: config.json of transformers, flags of vLLM and llama.cpp.

The setting is read back by our own reader, and given only if the model then has the layers that were measured: a family
may scale other layers, or have no such rope type. vLLM: docs.vllm.ai/en/stable/features/context_extension. llama.cpp:
tools/server/README.md; its YaRN has the ends of the ramp and the temperature that transformers' has.
"""

import json
from dataclasses import replace
from typing import Any

from conf.errors import UserError, check
from conf.registry import describe
from conf.schema import EvalConfig
from engine.run import Run
from hf.checkpoint import Config
from hf.families import FAMILIES, read_settings
from hf.open import open_checkpoint
from hf.positions import EXPRESSIBLE, FULL, WRITTEN_AS, layer_keys, layers_of

# The file keeps its share of rotated dimensions. Not the dynamic methods: at L they cost nothing, a written base does
DEPLOYABLE = {key: right for key, right in EXPRESSIBLE.items() if key != "pos.rotary_fraction"}
DEPLOYABLE["scaling"] = (*WRITTEN_AS, "ntk")


def scaled_keys(run: Run, config: Config, scalings: list[dict], ctx: int) -> dict[str, Any]:
    """The keys of config.json with which transformers computes, at every length, what a method does at ctx tokens.

    config: as read by `read_settings`. UserError if the family cannot say it.
    """
    L, method, model_type = run.context.train_ctx, scalings[0], config.values["model_type"]
    deployed = {"scaling": method, "plus": [knobs["kind"] for knobs in scalings[1:]], "ctx": ctx, "init": "hf"}
    layers = layers_of(replace(run.cfg, **deployed, pretrained={"ctx": L}), DEPLOYABLE)
    by_type = FAMILIES[model_type].positions.sliding_base is not None
    keys = {"rope_parameters": layer_keys(layers, ctx, by_type)["rope_parameters"], "max_position_embeddings": ctx}
    values = {key: value for key, value in config.values.items() if key != "rope_scaling"} | keys
    c = Config(config.path, values)
    c.keys_read |= values.keys()  # the others were checked when the file was read
    back, _, _ = read_settings(c, ctx, L if method["kind"] == "pi" else None)
    same = layers_of(back, DEPLOYABLE) == layers
    check(same, "rope_parameters", method["kind"], f"another: {model_type} scales other layers by it")
    return {"text_config": keys} if config.prefix else keys


def deployment(run: Run, cfg: EvalConfig, scalings: list[dict], ctx: int) -> dict[str, str]:
    """Software -> what to give it, or why it cannot be given."""
    try:
        check(":" in (cfg.run or ""), "run", run.name, "hf:DIR, written by export.py")
        config = open_checkpoint(cfg.run or "", ignore_keys=cfg.ignore_keys).config
        read_settings(config, 1, cfg.train_ctx)
        keys = scaled_keys(run, config, scalings, ctx)
    except UserError as e:
        return {"transformers, vLLM, llama.cpp": f"none can be told to use this: {e}"}
    factor, L = run.change(scalings, ctx, ctx).factor, run.context.train_ctx
    rope = keys.get("text_config", keys)["rope_parameters"]
    flags = {
        "yarn": f"--rope-scaling yarn --rope-scale {factor:g} --yarn-orig-ctx {L}",
        "pi": f"--rope-scaling linear --rope-scale {factor:g}",
        "ntk": f"--rope-scaling none --rope-freq-base {rope.get(FULL, rope).get('rope_theta', 0):.10g}",
    }
    fixed = run.cfg.layers or run.cfg.scaling["kind"] in ("llama3", "longrope")  # whose divisors a GGUF file keeps
    name = "" if fixed else describe("scaling", {**scalings[0], "factor": "auto"})
    arch = {"mistral": "llama"}.get(config.values["model_type"], config.values["model_type"])
    misread = rope.get(FULL, rope).get("rope_type") == "llama3" and (arch, L) != ("llama", 8192)
    convert = "none: its converter needs Llama and L = 8192" if misread else "no flag: convert it with this config.json"
    more = f"-c {ctx} --override-kv {arch}.context_length=int:{ctx}"  # llama-server serves no more than context_length
    return {
        "transformers 5, in config.json instead of rope_scaling": json.dumps(keys)[1:-1],
        "vLLM": f"--max-model-len {ctx} --hf-overrides '{json.dumps(keys)}'",
        "llama.cpp": f"{flags[name]} {more}" if name in flags else convert,
    }
