"""Hugging Face families of several kinds of layer: scaling of each kind, and both ways.

That their logits are those of transformers is tested in tests/test_hf.py, with the other families.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import export
import train
from conf.registry import yaml_values
from model import gpt
from model.scaling import NO_CHANGE, NotApplicable, resolve
from tests import hf_models as reading
from tests.helpers import write_documents
from tests.hf_models import L, edit, rope_types, save_complete, save_random

pytestmark = pytest.mark.reference


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
