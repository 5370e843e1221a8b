"""Hugging Face families of several kinds of layer: their schedules, scaling of each kind, decoding, and both ways.

That their logits are those of transformers is tested in tests/test_hf.py, with the other families.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import export
import train
from conf.layer_schedule import LayerSchedule, LayerType
from conf.registry import yaml_values
from model import gpt
from model.scaling import NO_CHANGE, NotApplicable, resolve
from tests import hf_models as reading
from tests.helpers import run_eval, write_documents
from tests.hf_models import L, edit, rope_types, save_complete, save_random

pytestmark = pytest.mark.reference


def layers_of(family: str, rope: dict, folder: Path, **changes: Any) -> LayerSchedule | None:
    """The schedule that is read from a random model of the family, whose config.json is changed."""
    save_random(family, rope, folder)
    edit(folder, **changes)
    return reading.read(folder, 96, L)[0].layers


def kind(window: int | None, scaled: bool, pos: dict | None = None) -> LayerType:
    return LayerType(pos, window, 0, scaled)


def rope(base: float) -> dict[str, Any]:
    return {"kind": "rope", "base": base, "interleaved": False, "rotary_fraction": 1.0}


def test_the_schedules_of_the_families(tmp_path):
    """Windows, bases and layers without positions, and which kinds of layer a scaling applies to."""
    no_positions = {"kind": "none"}
    assert layers_of("gemma3_text", {}, tmp_path) == LayerSchedule(
        "LLGLL", {"L": kind(12, False, rope(10_000.0)), "G": kind(None, True)}
    )
    assert layers_of("olmo3", rope_types(1)["yarn"], tmp_path) == LayerSchedule(
        "LLLGL", {"L": kind(12, False, rope(30.0)), "G": kind(None, True)}
    )
    assert layers_of("smollm3", {}, tmp_path) == LayerSchedule(
        "GGNG", {"G": kind(None, True), "N": kind(None, True, no_positions)}
    )
    assert layers_of("cohere2", {}, tmp_path) == LayerSchedule(
        "LLNLL", {"L": kind(12, False), "N": kind(None, True, no_positions)}
    )
    # One rope_parameters for all layers: a scaling in it applies to the window layers, too
    yarn = rope_types(1)["yarn"]
    assert layers_of("cohere2", yarn, tmp_path).types["L"] == kind(12, True)
    assert layers_of("mistral, window", yarn, tmp_path) == LayerSchedule("LL", {"L": kind(12, True)})
    assert layers_of("qwen2, window", {}, tmp_path).pattern == "GL"
    assert layers_of("qwen2, window", {}, tmp_path, use_sliding_window=False, layer_types=None) is None
    assert layers_of("smollm3, windows, untied", {}, tmp_path) == LayerSchedule(
        "MLNGL",
        {
            "M": kind(12, False, no_positions),
            "L": kind(12, False),
            "N": kind(None, True, no_positions),
            "G": kind(None, True),
        },
    )


def test_a_scaling_of_the_window_layers_alone_or_of_both_kinds(tmp_path):
    """transformers allows rope_parameters of any type for each type of layer."""
    save_random("gemma3_text", {}, tmp_path)
    base = {"rope_theta": 100.0}
    yarn = {**rope_types(1)["yarn"], **base}
    for full, sliding, scaled in (({}, yarn, [False, True]), (yarn, yarn, [True, True])):
        parameters = {"full_attention": {**base, **full}, "sliding_attention": {**base, **sliding}}
        edit(tmp_path, rope_parameters=parameters, max_position_embeddings=4 * L)
        cfg = reading.read(tmp_path, 96)[0]
        assert [cfg.layers.types[letter].scaled for letter in "GL"] == scaled and cfg.scaling["kind"] == "yarn"
        reading.assert_equal(reading.our_logits(tmp_path), reading.load(tmp_path), (48,))


def test_a_method_at_reading_changes_the_layers_that_the_schedule_says(tmp_path):
    save_random("gemma3_text", {}, tmp_path)
    cfg = reading.read(tmp_path, 96)[0]
    context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
    change = resolve(yaml_values("scaling", "ntk"), context, 96, 96)
    full, sliding = change.by_type  # in the order of the letters, G and L
    assert sliding == NO_CHANGE and full.inv_freq is not None
    assert context.train_ctx == L and [k.layer_type.window for k in context.by_type] == [None, 12]
    save_random("cohere2", {}, tmp_path)  # its global layers have no frequencies, its window layers need no others
    cfg = reading.read(tmp_path, 96)[0]
    context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
    with pytest.raises(NotApplicable, match=r"scaling=ntk is not applicable: it needs rotary frequencies, and pos="):
        resolve(yaml_values("scaling", "ntk"), context, 96, 96)
    assert [k.logn for k in resolve(yaml_values("scaling", "logn"), context, 96, 96).by_type] == [L, None]


def test_eval_names_the_schedule_and_measures_the_controls(here, capsys):
    save_complete("gemma3_text")
    tokenizer = tokenizers.Tokenizer.from_file("model/tokenizer.json")
    begin = tokenizers.processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 256)])
    tokenizer.post_processor = begin
    tokenizer.save("model/tokenizer.json")
    write_documents(here)
    few = ("ctx=64", "documents=2", "task.windows=1", "task.scored_tokens=16")
    run_eval("run=hf:model", "data=text", "data.files=docs/*.txt", *few, "scaling=yarn", "dtype=float32")
    out = capsys.readouterr().out
    assert "layers=gemma3_text (LLGLL)" in out
    assert "note: its tokenizer puts <eos> at the beginning of a text; none is added here" in out
    files = {f.name.split("-")[0]: f.read_text() for f in (here / "runs/hf-model/eval").glob("*.jsonl")}
    losses = {label: json.loads(rows.splitlines()[-1])["loss"] for label, rows in files.items()}
    assert files.keys() >= {"none", "window", "yarn"} and len(set(losses.values())) == len(losses)


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3", "smollm3, windows, untied", "cohere2"])
def test_there_and_back(family, here, monkeypatch):
    """A checkpoint, fine-tuned by a step of almost no length and exported: the same model, in the same family."""
    save_complete(family)
    write_documents(here)
    argv = "exp=smoke init=hf:model data=text data.files=docs/*.txt name=x steps=1 optim=adamw optim.lr=1e-9".split()
    monkeypatch.setattr("sys.argv", ["train.py", *argv, f"ctx={L}"])
    train.main()
    monkeypatch.setattr("sys.argv", ["export.py", "run=x", "out=back"])
    export.main()
    before, after = (load_file(f"{folder}/model.safetensors") for folder in ("model", "back"))
    assert before.keys() == after.keys()
    for key, x in before.items():
        if (family, key) == ("cohere2", "model.norm.weight"):
            x = 0.3 * x  # its factor of the logits
        # Gemma's divisor of the scores is multiplied into the norm of the queries
        assert (x - after[key]).abs().max() < 1e-6 or ("q_norm" in key and family == "gemma3_text"), key
    config = json.loads(Path("back/config.json").read_text())
    assert config["model_type"] == json.loads(Path("model/config.json").read_text())["model_type"]
    theirs, ours = (reading.load(Path(folder)) for folder in ("model", "back"))
    tokens = torch.randint(300, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = theirs(tokens).logits
        assert (ours(tokens).logits - want).abs().max() < 1e-4 * want.abs().max()
