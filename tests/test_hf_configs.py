"""config.json of Hugging Face: which file is read, defaults and precedence, wrong values, and popular checkpoints.

tests/hf_configs/NAME.json are the config.json of popular checkpoints at tiny size. Those that are accepted must have
the logits of transformers; the table in docs/huggingface.md must be what happens.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hf.read as reading
from conf.errors import UserError
from hf.checkpoint import open_folder
from hf.config import HARMLESS
from model.scaling import NotApplicable
from tests.helpers import ROOT, run_eval, write_documents
from tests.hf_models import (
    CASES,
    L,
    biases,
    difference,
    edit,
    logits_of,
    our_logits,
    rotary_pairs,
    save_random,
    with_tokenizer,
)

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests: pip install it")
transformers.logging.set_verbosity_error()

# ---- which files are read ----


def test_only_the_model_files_are_read(tmp_path):
    """model.safetensors before the index, and never an adapter or the same weights in another format."""
    save_random("llama", {}, tmp_path)
    cfg, before, _ = reading.read(tmp_path, L)
    digest = open_folder(tmp_path).digest(cfg.pretrained)
    other = {name: x + 1 for name, x in load_file(tmp_path / "model.safetensors").items()}
    for name in ("adapter_model", "consolidated", "zzz", "model-00001-of-00001"):
        save_file(other, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}))
    after = reading.read(tmp_path, L)[1]
    assert (
        all(torch.equal(before[k], after[k]) for k in before) and open_folder(tmp_path).digest(cfg.pretrained) == digest
    )
    # The index is read where there is no model.safetensors, and then only its files count
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(reading.read(tmp_path, L)[1]["tokens.weight"], before["tokens.weight"] + 1)
    indexed = open_folder(tmp_path).digest(cfg.pretrained)
    (tmp_path / "zzz.safetensors").unlink()
    assert open_folder(tmp_path).digest(cfg.pretrained) == indexed != digest
    index.unlink()
    with pytest.raises(UserError, match=r"no model\.safetensors there.*\(adapter_model\.safetensors is not read"):
        reading.read(tmp_path, L)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}', "{"]
)
def test_a_wrong_index_is_one_line(content, tmp_path):
    save_random("llama", {}, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"index\.json: not an index of safetensors files"):
        reading.read(tmp_path, L)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama"])
def test_names_without_the_prefix(family, tmp_path):
    """openai-community/gpt2 has h.0.attn.c_attn.weight where new files have transformer.h.0.attn.c_attn.weight."""
    save_random(family, {}, tmp_path)
    file, before = tmp_path / "model.safetensors", reading.read(tmp_path, L)[1]
    saved = {re.sub(r"^(transformer|model)\.", "", name): x for name, x in load_file(file).items()}
    if family == "gpt2":
        saved |= {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96).tril() for i in range(3)}
        saved["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(saved, file)
    after = reading.read(tmp_path, L)[1]
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


# ---- defaults and precedence: what transformers reads from the same file ----


def remove(folder: Path, *keys: str) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in values.items() if k not in keys}))


def assert_equals_transformers(folder: Path, lengths: tuple[int, ...] = (20, 96)) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    computed = our_logits(folder)
    for n in lengths:
        error, largest = difference(computed, expected, n)
        assert error <= 1e-4 and largest > 1, (n, error, largest)


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "original_max_position_embeddings": L, "rope_theta": 1e2}
NEOX_KEYS = {"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rope_theta": 100.0, "rotary_emb_base": 100.0}
NESTED = {"rope_parameters": {**YARN, "original_max_position_embeddings": 8}}
NOTES = {"unsloth_fixed": True, "_model_name_or_path": "x", "temperature": 0.7}


@pytest.mark.parametrize(
    "family, changes",
    [
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
        ("gpt2", {"layer_norm_epsilon": ..., "n_positions": 96, "scale_attn_weights": ..., "tie_word_embeddings": ...}),
        ("gptj", {"n_inner": None, "n_positions": 96, "layer_norm_epsilon": ...}),
        ("bloom", {"n_embed": 32, "hidden_size": 64}),
    ],
    ids=str,
)  # fmt: skip
def test_read_as_transformers_reads_it(family, changes, tmp_path):
    save_random(family, {}, tmp_path)
    edit(tmp_path, **{k: v for k, v in changes.items() if v is not ...})
    remove(tmp_path, *(k for k, v in changes.items() if v is ...))
    assert_equals_transformers(tmp_path)


def test_the_names_of_longrope_before_longrope(tmp_path):
    """Phi-3's first files say "su" or "yarn", and have original_max_position_embeddings at the top level."""
    divisors = [1.0 + 0.3 * i for i in range(rotary_pairs("phi3"))]
    save_random("phi3", {}, tmp_path)
    for kind in ("su", "yarn"):
        scaling: dict[str, Any] = {"type": kind, "short_factor": divisors, "long_factor": [3 * d for d in divisors]}
        if kind == "su":  # transformers 5.23 reads it only with this key in the object, too
            scaling["original_max_position_embeddings"] = L
        edit(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=100.0, max_position_embeddings=4 * L)
        assert_equals_transformers(tmp_path)


def test_gptj_rotates_64_dimensions_without_the_key(tmp_path):
    settings = {**CASES["gptj"][1], "n_embd": 160, "n_head": 2}
    del settings["rotary_dim"]
    torch.manual_seed(0)
    biases(transformers.GPTJForCausalLM(transformers.GPTJConfig(**settings))).save_pretrained(tmp_path)
    remove(tmp_path, "rotary_dim")
    assert_equals_transformers(tmp_path)


def test_mistral_has_8_key_value_heads_without_the_key(tmp_path):
    settings = {**CASES["mistral"][1], "num_attention_heads": 16, "num_key_value_heads": 8}
    torch.manual_seed(0)
    biases(transformers.MistralForCausalLM(transformers.MistralConfig(**settings))).save_pretrained(tmp_path)
    remove(tmp_path, "num_key_value_heads")
    assert_equals_transformers(tmp_path)
    edit(tmp_path, num_key_value_heads=None)  # null is as many as query heads, which these weights are not
    with pytest.raises(UserError, match=r"k_proj\.weight has shape \[96, 32\], and config\.json asks for \[192, 32\]"):
        reading.read(tmp_path, L)


def test_notes_of_training_tools_are_named_and_ignored(tmp_path, capsys):
    save_random("llama", {}, tmp_path)
    edit(tmp_path, unsloth_version="2025.1", unsloth_fixed=True, auto_map={"AutoConfig": "x"})
    capsys.readouterr()
    reading.read(tmp_path, L)
    assert re.fullmatch(r"note: .*config\.json: unsloth_version, unsloth_fixed: ignored, .*\n", capsys.readouterr().err)
    edit(tmp_path, unslothed=True)
    with pytest.raises(UserError, match=r"unslothed=True: not supported, and not ignored either"):
        reading.read(tmp_path, L)
    remove(tmp_path, "unsloth_version", "unsloth_fixed", "unslothed")
    edit(tmp_path, **dict.fromkeys(HARMLESS[2:], 1))
    capsys.readouterr()
    reading.read(tmp_path, L)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "family, changes, ctx, right",
    [
        ("gpt2", {}, 97, r"n_positions=96: not supported past itself, and ctx=97: try ctx=96"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, 96, r"rope_scaling\.rope_type=linear: not"),
        ("stablelm", {"qk_layernorm": True}, 96, r"qk_layernorm=True: not supported"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, 96, r"_post_layernorm=True: not supported"),
        ("bloom", {"seq_length": None}, 96, r"train_ctx: must be given a value: .*config\.json does not contain"),
        ("mpt", {"attn_config": {"alibi": False}}, 96, r"attn_config\.alibi=False: not supported: must be True"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, 96, r"attn_config\.alibi_bias_max=16: not supported"),
        ("mpt", {"attn_config": {"clip_qkv": 6.0}}, 96, r"attn_config\.clip_qkv=6\.0: not supported"),
        ("mpt", {"attn_config": {"qk_ln": True}}, 96, r"attn_config\.qk_ln=True: not supported"),
        ("mpt", {"logit_scale": 0.1}, 96, r"logit_scale=0\.1: not supported"),
        ("mpt", {"no_bias": False}, 96, r"no_bias=False: not supported: must be true"),
        ("granite", {"logits_scaling": 0}, 96, r"logits_scaling=0: must be above 0"),
        ("gptj", {"rotary_dim": None}, 96, r"rotary_dim=None: must be a whole number"),
        ("phi3", {"partial_rotary_factor": 0.4}, 96, r"partial_rotary_factor=0\.4: rotates 3 of 8 dimensions"),
        ("llama", {"num_key_value_heads": 3}, 96, r"num_key_value_heads=3: must be a divisor of the 4 attention heads"),
        ("llama", {"num_hidden_layers": 10**6}, 96, r"has 21 tensors for 1000000 layers"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_refused_is_named(family, changes, ctx, right, tmp_path):
    save_random(family, {}, tmp_path)
    if family == "phi3":
        edit(tmp_path, rope_parameters=None)
    edit(tmp_path, **changes)
    with pytest.raises(UserError, match=right) as error:
        reading.read(tmp_path, ctx)
    assert "\n" not in str(error.value)


# ---- encodings without a rotation, through eval.py ----


@pytest.mark.parametrize("family, train_ctx", [("gpt2", 96), ("bloom", L)])
def test_eval_and_its_controls(family, train_ctx, here, capsys):
    """No scaling and both controls at every length; a method for rotary frequencies is refused where there are none."""
    settings = {**CASES[family][1], "vocab_size": 300, "initializer_range": 0.1}
    torch.manual_seed(0)
    config = getattr(transformers, f"{CASES[family][0]}Config")(**settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")
    with_tokenizer(Path("model"))
    write_documents(here)
    common = ("run=hf:model", "data=text", "data.files=docs/*.txt", "documents=2", "task.scored_tokens=16")
    with pytest.raises(NotApplicable, match=r"scaling=yarn is not applicable: it needs rotary frequencies, and pos="):
        run_eval(*common, "ctx=64", "scaling=yarn")
    if family == "gpt2":
        with pytest.raises(UserError, match=r"n_positions=96: not supported past itself, and ctx=128: try ctx=96"):
            run_eval(*common, "ctx=128")
    run_eval(*common, "ctx=64", "task.windows=1", "dtype=float32")
    files = {f.name.split("-")[0]: f for f in (here / "runs/hf-model/eval").glob("*.jsonl")}
    rows = {label: [json.loads(line) for line in f.read_text().splitlines()][-1] for label, f in files.items()}
    assert rows.keys() >= {"none", "window"} and {row["n"] for row in rows.values()} == {64}
    assert {row["train_ctx"] for row in rows.values()} == {train_ctx}
    # past L the window control does not see everything
    assert (rows["window"]["loss"] != rows["none"]["loss"]) == (train_ctx < 64)


# ---- values of wrong types ----

WRONG: list[Any] = [None, True, "4", -1, 0, 0.5, 3, float("nan"), 10**30, [1], {"a": 1}]


# Keys that may be there although transformers does not write them
OPTIONAL = dict.fromkeys(
    ("head_dim", "sliding_window", "layer_types", "rope_scaling", "rope_theta", "num_key_value_heads",
     "original_max_position_embeddings", "partial_rotary_factor", "rotary_emb_base")
)  # fmt: skip


def mutations(values: dict) -> Iterator[tuple[str, dict]]:
    """(label, changes) of config.json: each key with each wrong value, also within its objects."""
    for key, value in values.items():
        for wrong in WRONG:
            yield f"{key}={wrong}", {key: wrong}
        for inner in [k for k in value if k not in HARMLESS] if isinstance(value, dict) else []:
            for wrong in WRONG:
                yield f"{key}.{inner}={wrong}", {key: {**value, inner: wrong}}


FAMILIES_BY_SETTINGS = ["llama", "qwen2", "gpt_neox", "gptj", "phi3", "granite", "stablelm", "gpt2", "bloom", "mpt",
                        "gemma3_text", "smollm3", "cohere2"]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES_BY_SETTINGS)
def test_a_wrong_value_is_one_line_or_harmless(family, tmp_path):
    """Every key of config.json with values of wrong types: a UserError, or a model with finite logits."""
    rope = {}
    if family == "llama":
        rope = {**YARN, "attention_factor": 1.1, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": True}
    if family == "phi3":
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope["original_max_position_embeddings"] = L
    if family == "gemma3_text":
        rope = YARN
    save_random(family, rope, tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())
    keys = {k: v for k, v in (OPTIONAL | original).items() if k not in HARMLESS or k in ("model_type", "architectures")}
    unchanged = reading.read(tmp_path, 40)[0]
    loaded = refused = 0
    for label, changes in mutations(keys):
        (tmp_path / "config.json").write_text(json.dumps({**original, **changes}))
        try:
            cfg, *rest = reading.read(tmp_path, 40)
            same = cfg == unchanged and not label.startswith(("scale_attn", "residual_m", "attention_m", "embedding_m"))
            logits = torch.zeros(1) if same else logits_of(cfg, *rest)(torch.arange(40)[None] % 90)
        except UserError as e:
            assert "\n" not in str(e) and len(str(e)) < 400, (label, e)
            refused += 1
        except Exception as e:
            raise AssertionError(f"{label}: {type(e).__name__}: {e}") from e
        else:
            assert logits.isfinite().all(), label
            loaded += 1
    assert refused > 50 and loaded > 20, (refused, loaded)


# ---- popular checkpoints ----

CHECKPOINTS = {path.stem: path for path in sorted((Path(__file__).parent / "hf_configs").glob("*.json"))}
TRAIN_CTX = {"bloom-560m": 2048, "vicuna-7b-v1.5-16k": 4096}  # their config.json does not contain it


def save_checkpoint(name: str, folder: Path) -> None:
    """A random model with this config.json, which is left as it is but for the vocabulary, cut to 256 tokens."""
    values = json.loads(CHECKPOINTS[name].read_text())
    values |= {k: v and min(v, 255) for k, v in values.items() if k.endswith("_token_id")} | {"vocab_size": 256}
    (folder / "config.json").write_text(json.dumps(values))
    torch.manual_seed(0)
    model = biases(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=2.0 * p.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))  # not in the form of transformers 5


def outcome(name: str, folder: Path) -> str:
    """The cell of the table in docs/huggingface.md: what `eval.py run=hf:FOLDER` does with this config.json."""
    train_ctx = TRAIN_CTX.get(name)
    text = "accepted" if train_ctx is None else f"accepted with `train_ctx={train_ctx}`"
    try:
        reading.read(folder, 64, train_ctx)
    except UserError as e:
        key = re.search(r"config\.json: (\S+?)=(\S*)", str(e))
        return f"refused: `{key[1]}={key[2].rstrip(':')}`" if key[1] == "model_type" else f"refused: `{key[1]}`"
    if train_ctx is not None:
        with pytest.raises(UserError, match="train_ctx"):
            reading.read(folder, 64)
    try:
        reading.read(folder, 2**20, train_ctx)
    except UserError as e:
        text += f" up to `{re.search(r'try (ctx=[0-9]+)', str(e))[1]}`"
    return text


def documented() -> dict[str, str]:
    """Checkpoint -> what the table in docs/huggingface.md says."""
    page = (ROOT / "docs/huggingface.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ((?:accepted|refused)[^|]*) \|$", page, re.M)
    return {name: cell for names, cell in rows for name in names.split(", ")}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_table_of_checkpoints_is_true(name, tmp_path):
    """Accepted: with the logits of transformers. Refused: because of the key in the table."""
    cell = documented()[name]
    if cell.startswith("refused"):
        shutil.copy(CHECKPOINTS[name], tmp_path / "config.json")
        assert outcome(name, tmp_path) == cell
        return
    save_checkpoint(name, tmp_path)
    assert outcome(name, tmp_path) == cell
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    computed = our_logits(tmp_path, TRAIN_CTX.get(name))
    error, largest = difference(computed, expected, 96)
    assert error <= 1e-4 and largest > 0.5, (error, largest)


def test_the_table_has_a_row_for_every_checkpoint():
    assert documented().keys() == CHECKPOINTS.keys()
