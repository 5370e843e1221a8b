"""config.json of Hugging Face: which file is read, defaults and precedence, wrong values, and popular checkpoints.

tests/hf_configs/NAME.json are the config.json of popular checkpoints at tiny size. Those that are accepted must have
the logits of transformers; the table in docs/huggingface.md must be what happens.
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conf.errors import UserError
from hf.open import digest_of, open_checkpoint, read_checkpoint
from tests import hf_models as reading
from tests.hf_models import CASES, L, edit, our_logits, save_random, transformers

pytestmark = pytest.mark.reference

# ---- which files are read ----


def test_only_the_model_files_are_read(tmp_path):
    """model.safetensors before the index, and never an adapter or the same weights in another format."""
    save_random("llama", {}, tmp_path)
    cfg, before, _ = reading.read(tmp_path, L)
    digest = digest_of(cfg, before)
    other = {name: x + 1 for name, x in load_file(tmp_path / "model.safetensors").items()}
    for name in ("adapter_model", "consolidated", "zzz", "model-00001-of-00001"):
        save_file(other, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}))
    after = reading.read(tmp_path, L)[1]
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert digest_of(cfg, after) == digest
    # The index is read where there is no model.safetensors, and then only its files count
    (tmp_path / "model.safetensors").unlink()
    indexed = reading.read(tmp_path, L)[1]
    assert torch.equal(indexed["tokens.weight"], before["tokens.weight"] + 1)
    # What identifies curves: weights and settings, such as those of train_ctx=, but no name
    others = [digest_of(cfg, indexed), digest_of(dataclasses.replace(cfg, ctx=16), before)]
    assert len({digest, *others}) == 3 and digest_of(dataclasses.replace(cfg, name="copy"), before) == digest
    index.unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors there"):
        reading.read(tmp_path, L)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}', "{"]
)
def test_a_wrong_index_is_one_line(content, tmp_path):
    save_random("llama", {}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json: not a"):
        reading.read(tmp_path, L)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_names_without_the_prefix(family, tmp_path):
    """openai-community/gpt2 has h.0.attn.c_attn.weight where new files have transformer.h.0.attn.c_attn.weight.

    Files of transformers 4 also have masks and frequencies.
    """
    save_random(family, {}, tmp_path)
    file, before = tmp_path / "model.safetensors", reading.read(tmp_path, L)[1]
    saved = {re.sub(r"^(transformer|model)\.", "", name): x for name, x in load_file(file).items()}
    if family == "gpt2":
        saved |= {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96).tril() for i in range(3)}
        saved["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    if family == "llama":
        saved["layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(saved, file)
    after = reading.read(tmp_path, L)[1]
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


# ---- defaults and precedence: what transformers reads from the same file ----


def remove(folder: Path, *keys: str) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in keys}))


def rope(scaling: dict | None = None, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": parameters or None, "rope_scaling": scaling}


def longrope(context_of_file: int | None = None, **parameters: Any) -> dict[str, Any]:
    """With rope_parameters of each type of layer."""
    types = rope(full_attention={"rope_type": "longrope", **LONG, **parameters}, sliding_attention={"rope_theta": 30.0})
    return {**types, "max_position_embeddings": 4 * L, "original_max_position_embeddings": context_of_file}


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "original_max_position_embeddings": L, "rope_theta": 1e2}
LONG = {"rope_theta": 100.0, "short_factor": [1.0, 1.3, 1.6, 1.9], "long_factor": [3.0, 3.9, 4.8, 5.7]}
CONTEXT = {"original_max_position_embeddings": L}
NEOX_KEYS = {"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rope_theta": 100.0, "rotary_emb_base": 100.0}
WINDOW = {"sliding_window": 12}
SLIDING_LAST = [*["full_attention"] * 3, "sliding_attention"]
NESTED = {"rope_parameters": {**YARN, "original_max_position_embeddings": 8}}
NOTES = {"unsloth_fixed": True, "_model_name_or_path": "x", "temperature": 0.7}
OLD = {"rope_parameters": None, "torch_dtype": "float32"}  # with rope_theta and rope_scaling, before transformers 5


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {**OLD, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("llama", {**OLD, "rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("qwen2", {**OLD, "rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0, **CONTEXT}}),
        ("llama", {**OLD, "rope_theta": 500.0, "rope_scaling": reading.rope_types(1)["llama3"]}),
        ("gpt_neox", {**OLD, "rotary_emb_base": 500.0, "rotary_pct": 0.5}),
        ("gpt_neox", {**NEOX_KEYS, "rope_parameters": None}),
        ("gpt_neox", {**NEOX_KEYS, "rope_parameters": None, "rope_theta": 1e5, "partial_rotary_factor": 0.25}),
        ("gpt_neox", {"rotary_pct": 0.5, "rope_theta": 100.0, "rope_parameters": None}),
        ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 100.0}),  # beside rope_parameters with other values
        ("llama", {"rope_parameters": {**YARN, "truncate": None}}),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 0.0}}),
        ("llama", {"rope_parameters": {**YARN, "beta_fast": None, "beta_slow": 0}}),
        ("llama", {"rope_parameters": {**YARN, "factor": None}, "max_position_embeddings": 4 * L}),
        ("llama", {**NESTED, "original_max_position_embeddings": L}),
        ("llama", {"partial_rotary_factor": 1.0, **NOTES}),
        ("arcee", {"rms_norm_eps": ...}),
        ("olmo2", {"rms_norm_eps": ...}),
        ("phi3", {"rms_norm_eps": ..., "original_max_position_embeddings": ...}),
        ("stablelm", {"layer_norm_eps": ...}),
        ("starcoder2, window", {"norm_epsilon": ..., "use_bias": ..., "tie_word_embeddings": ..., "hidden_act": ...}),
        ("glm", {"rms_norm_eps": ..., "attention_bias": ..., "num_key_value_heads": ..., **OLD}),
        ("exaone4", {"rms_norm_eps": ..., "sliding_window_pattern": "LLLG", **OLD}),
        ("gpt2", {"layer_norm_epsilon": ..., "n_positions": 96, "scale_attn_weights": ..., "tie_word_embeddings": ...}),
        ("bloom", {"n_embed": 32, "hidden_size": 64}),
        ("qwen2, window", {"use_sliding_window": False, "layer_types": None}),
        # Phi-3's first files say "su" or "yarn", with the context outside; of "su" transformers 5 wants it inside, too
        ("phi3", {**rope({"type": "su", **LONG, **CONTEXT}), "max_position_embeddings": 128}),
        ("phi3", {**rope({"type": "yarn", **LONG}), "max_position_embeddings": 128}),
        ("olmo3", longrope(**CONTEXT)),
        ("smollm3", {"no_rope_layers": [0] * 4}),  # no layer rotates
        ("smollm3", {"no_rope_layers": [0] * 4, "layer_types": SLIDING_LAST, "use_sliding_window": True, **WINDOW}),
        # Keys of published files that change no logit
        ("cohere2", {"_sliding_window_pattern": 3}),
        ("starcoder2, window", {"mlp_type": "default", "scale_attn_weights": True, "layer_norm_epsilon": 1.0}),
        ("gpt2", {"_num_labels": 1, "predict_special_tokens": True, "output_past": True, "n_positions": 96}),
        ("llama", {"internal_version": "0.1", "activation": "swiglu"}),
    ],
    ids=str,
)
def test_read_as_transformers_reads_it(family, changes, tmp_path):
    save_random(family, {}, tmp_path)
    edit(tmp_path, **{k: v for k, v in changes.items() if v is not ...})
    remove(tmp_path, *(k for k, v in changes.items() if v is ...))
    train_ctx = L if "linear" in str(changes) else None
    reading.assert_equal(our_logits(tmp_path, train_ctx), reading.load(tmp_path), (20, 96))


def test_the_base_of_olmo_3_saved_by_transformers_4_is_that_of_both_types(tmp_path):
    save_random("olmo3", {}, tmp_path)
    edit(tmp_path, rope_parameters=None, rope_theta=300.0, transformers_version="4.57.1")
    computed = our_logits(tmp_path)
    types = {name: {"rope_type": "default", "rope_theta": 300.0} for name in ("full_attention", "sliding_attention")}
    edit(tmp_path, rope_parameters=types)
    reading.assert_equal(computed, reading.load(tmp_path), (96,))


def test_sizes_that_are_absent_have_the_default_of_transformers(tmp_path):
    """Mistral has 8 key-value heads and a window; null is as many as query heads."""
    torch.manual_seed(0)
    settings = {**CASES["mistral"][1], "num_attention_heads": 16, "num_key_value_heads": 8}
    reading.random_model(transformers.MistralConfig(**settings)).save_pretrained(tmp_path)
    remove(tmp_path, "num_key_value_heads", "sliding_window")
    reading.assert_equal(our_logits(tmp_path), reading.load(tmp_path), (20, 96))
    assert [x.window for x in reading.read(tmp_path, L)[0].layers.types.values()] == [4096]
    edit(tmp_path, num_key_value_heads=None)
    with pytest.raises(UserError, match=r"k_proj\.weight has shape \[96, 32\], config\.json asks for \[192, 32\]"):
        reading.read(tmp_path, L)


def test_keys_to_ignore_are_those_that_are_refused_and_each_is_noted(tmp_path, capsys):
    save_random("llama", {}, tmp_path)
    computed, original = our_logits(tmp_path), json.loads((tmp_path / "config.json").read_text())
    rope = {**original["rope_parameters"], "alpha": 1}

    def read(*keys: str) -> Any:
        return read_checkpoint(open_checkpoint(f"hf:{tmp_path}", ignore_keys=keys), 96)

    edit(tmp_path, unslothed=[4], rope_parameters=rope)
    with pytest.raises(UserError, match=r"rope_parameters\.alpha=1: .*ignore_keys=\[rope_parameters\.alpha\]"):
        read("unslothed")
    capsys.readouterr()
    logits = reading.logits_of(*read("unslothed", "rope_parameters.alpha"))
    assert torch.equal(logits(reading.tokens(40)), computed(reading.tokens(40)))
    notes = capsys.readouterr().err.splitlines()
    assert [re.fullmatch(r"note: ignored .*config\.json: (\S+)=.*", x)[1] for x in notes] == [
        "rope_parameters.alpha",
        "unslothed",
    ]
    # Not keys that are read, nor those that are absent or harmless
    (tmp_path / "config.json").write_text(json.dumps(original))
    for key in ("hidden_act", "rope_parameters.rope_theta", "unslothed", "use_cache"):
        with pytest.raises(UserError, match=rf"ignore_keys={re.escape(key)}: must be"):
            read(key)


NO_WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}
TYPES = ["full_attention", "sliding_attention", *["full_attention"] * 3]


@pytest.mark.parametrize(
    "family, changes, message",
    [
        ("llama", {"model_type": "mixtral"}, "model_type=mixtral: not supported; there are arcee, bloom, cohere2, "),
        ("llama", {"sliding_window": 64}, "sliding_window=64: not supported, and not ignored either"),
        ("llama", {"hidden_act": "relu2"}, "hidden_act=relu2: not supported: must be silu"),
        ("llama", {"activation": "relu"}, "activation=relu: not supported: must be swiglu"),
        ("llama", {"hidden_size": "32"}, "hidden_size=32: must be a whole number"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads=3: must be a divisor of 4 heads"),
        ("llama", {"num_hidden_layers": 10**6}, "has 21 tensors for 1000000 layers"),
        ("llama", {"layer_types": ["chunked_attention"] * 2}, "layer_types=['chunked_attention', "),
        ("mistral", {"layer_types": ["full_attention"] * 2, "sliding_window": 8}, "all layers must be"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types=['full_attention']: must be a list of 2"),
        ("qwen2", NO_WINDOW, "there is no sliding window"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=[1]: must be a list of 0 and 1, one for"),
        ("olmo3", {**rope(), "rope_theta": 123.0}, "transformers gives it to the full"),
        ("olmo3", longrope(8), "original_max_position_embeddings=8: not supported"),
        ("olmo3", rope(rope_theta=1.0), "rope_parameters.rope_theta=1.0: not supported"),
        ("olmo3", rope(full_attention={**YARN, "truncate": False}), "full_attention.truncate=False: not supported"),
        (
            "olmo3",
            {**rope(full_attention=YARN, sliding_attention={**YARN, "factor": 2.0}), "layer_types": TYPES},
            "full_attention and sliding_attention have different scalings",
        ),
        ("stablelm", rope(rope_type="proportional"), "rope_type=proportional: not supported: must be one of"),
        ("llama", rope(rope_type="dynamic"), "rope_parameters.factor=None: must be a number of at least 1"),
        ("llama", rope(rope_type="linear", factor=2.0), "may be the context it was trained at or the one it was"),
        ("llama", rope({"factor": 3.0}, factor=2.0), "rope_parameters has other values"),
        ("phi3", {**rope(), "original_max_position_embeddings": 8}, "max_position_embeddings=8: must be 32"),
        ("phi3", {**rope(), "partial_rotary_factor": 0.4}, "partial_rotary_factor=0.4: rotates 3 of 8 dimensions"),
        ("bloom", {"seq_length": None}, "does not contain the context it was trained at"),
        ("gpt2", {"n_positions": 64}, "n_positions=64: not supported past itself, and ctx=96: try ctx=64"),
        ("exaone4", {"layer_types": None}, "layer_types=None: must be a list"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0: must be a number of at least"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(family, changes, message, tmp_path):
    save_random(family, {}, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        reading.read(tmp_path, 96)
    assert "\n" not in str(error.value)


# ---- popular checkpoints ----

CHECKPOINTS = {path.stem: path for path in sorted((Path(__file__).parent / "hf_configs").glob("*.json"))}


def save_checkpoint(name: str, folder: Path) -> None:
    """A random model with this config.json, which is left as it is but for the vocabulary, cut to 256 tokens."""
    values = json.loads(CHECKPOINTS[name].read_text())
    values |= {k: min(v, 255) for k, v in values.items() if k.endswith("_token_id") and isinstance(v, int)}
    values.get("text_config", values)["vocab_size"] = 256
    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    model = reading.biases(
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=2.0 * p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))  # not in the form of transformers 5


# What is not accepted as it is: the trained context that has to be given, or what is refused
TRAIN_CTX = {"vicuna-7b-v1.5-16k": 4096, "bloom-560m": 2048, "gemma-3-4b-it": 32_768}
REFUSED = {
    "Llama-3.2-1B-bnb-4bit": "quantization_config",
    "Mixtral-8x7B-v0.1": "model_type=mixtral",
    "gpt-oss-20b": "model_type=gpt_oss",
    "gemma-4-26B-A4B-it": "model_type=gemma4",
}


def test_the_text_part_of_a_model_that_also_reads_images(tmp_path):
    """Either layout of its tensors, keys of images, and tie_word_embeddings beside text_config as in transformers."""
    save_random("gemma3, tied", {}, tmp_path)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    before, config = reading.read(tmp_path, 96)[1], json.loads(path.read_text())
    renamed = {name.replace("language_model.model.", "model.language_model."): x for name, x in load_file(file).items()}
    save_file({name.replace("vision_tower.", "model.vision_tower."): x for name, x in renamed.items()}, file)
    after = reading.read(tmp_path, 96)[1]
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
    edit(tmp_path, text_config={**config["text_config"], "tie_word_embeddings": False})
    reading.assert_equal(our_logits(tmp_path), reading.load(tmp_path), (20,))
    for changes, message in (
        ({"text_config": {**config["text_config"], "scale": 2}}, r"text_config\.scale=2: not supported"),
        ({"text_config": {**config["text_config"], "model_type": "llama"}}, r"text_config\.model_type=llama: "),
        ({"text_config": None}, r"text_config=None: must be an object"),
        ({"scale": 2}, r"config\.json: scale=2: not supported"),
    ):
        path.write_text(json.dumps({**config, **changes}))
        with pytest.raises(UserError, match=message):
            reading.read(tmp_path, 96)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_popular_checkpoints(name, tmp_path):
    """Accepted: with the logits of transformers. The table in docs/huggingface.md says the same."""
    if name in REFUSED:
        shutil.copy(CHECKPOINTS[name], tmp_path / "config.json")
        with pytest.raises(UserError, match=rf"config\.json: {REFUSED[name]}"):
            reading.read(tmp_path, 64)
        return
    save_checkpoint(name, tmp_path)
    train_ctx = TRAIN_CTX.get(name)
    if train_ctx:
        with pytest.raises(UserError, match=r"give the context of its training, train_ctx="):
            reading.read(tmp_path, 64)
    reading.assert_equal(our_logits(tmp_path, train_ctx), reading.load(tmp_path), (96,))
