"""Hugging Face in and out, held to transformers: logits and token ids of tiny random models, family by family."""

import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import export
import train
from conf.errors import UserError
from conf.schema import TrainConfig
from data import corpus as corpora
from data.corpus import held_out_texts
from data.tokenizer import padded
from engine import checkpoint
from model import gpt
from tests import hf_models as reading
from tests.helpers import error_of, run_eval, train_settings, write_documents
from tests.hf_models import CASES, L, edit, our_logits, save_random, transformers, with_tokenizer

pytestmark = pytest.mark.reference


def cases() -> list[tuple[str, str]]:
    few = {family: ["default", "longrope"] for family in CASES if family.startswith(("phi3", *reading.VARIANTS))}
    few |= {family: ["default"] for family in CASES if family.startswith(reading.NO_ROPE_TYPES)}
    most = [name for name in reading.rope_types(1) if not name.startswith("yarn, ")]  # llama has those, too
    few |= {family: most for family in CASES if family != "llama" and family not in few}
    return [(f, r) for f in CASES for r in few.get(f, reading.rope_types(1)) if (f, r) != ("stablelm", "proportional")]


@pytest.mark.parametrize("family, rope_type", cases())
def test_logits_equal_transformers(family, rope_type, tmp_path):
    rope = reading.rope_types(reading.rotary_pairs(family))[rope_type]
    expected = save_random(family, rope, tmp_path)
    train_ctx = L if rope_type == "linear" else None
    cfg = reading.read(tmp_path, 96, train_ctx)[0]
    assert gpt.trained_context(cfg, gpt.build_encoding(cfg)).train_ctx == (96 if family.startswith("gpt2") else L)
    reading.assert_equal(our_logits(tmp_path, train_ctx), expected)


def test_contexts_and_scaling_of_a_config(tmp_path):
    """L, the context it was extended to, and the scaling, as conf/scaling has it."""

    def contexts(train_ctx=None, **rope):
        edit(tmp_path, rope_scaling=rope or None, rope_parameters=None)
        cfg = reading.read(tmp_path, L, train_ctx)[0]
        context = gpt.trained_context(cfg, gpt.build_encoding(cfg))
        return context.train_ctx, context.longest_trained_ctx, cfg.scaling["kind"]

    save_random("llama", {}, tmp_path)
    assert contexts() == (L, L, "none")
    assert contexts(type="dynamic", factor=4.0) == (L, L, "dynamic_hf")
    assert contexts(train_ctx=L, type="linear", factor=4.0) == (L, 4 * L, "pi")
    assert contexts(train_ctx=L // 4, type="linear", factor=4.0) == (L // 4, L, "pi")
    assert contexts(type="yarn", factor=4.0, original_max_position_embeddings=8) == (8, L, "yarn")
    with pytest.raises(ValueError, match=r"train_ctx=8: .* says 32"):
        contexts(train_ctx=8)
    with pytest.raises(ValueError, match=r"rope_scaling=yarn: .* train_ctx="):
        contexts(type="yarn", factor=4.0)
    edit(tmp_path, max_position_embeddings=None)
    assert contexts(train_ctx=8) == (8, 8, "none")
    with pytest.raises(ValueError, match="must be there with a scaling"):
        contexts(train_ctx=8, type="yarn", factor=2.0, original_max_position_embeddings=8)


def test_shards_and_halves(tmp_path):
    """An index over two files, in bfloat16, gives the weights of the one."""
    model = save_random("llama", {}, tmp_path / "one")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "two", max_shard_size="20kB")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 1
    model.float().save_pretrained(tmp_path / "one")
    one, two = (reading.read(tmp_path / name, L)[1] for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_tied_head_in_the_file(tmp_path):
    """A copy of the embeddings under the head's name is accepted, anything else there is refused."""
    save_random("llama, biases, tied", {}, tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    embeddings = saved["model.embed_tokens.weight"]
    save_file({**saved, "lm_head.weight": embeddings.clone()}, file)
    assert torch.equal(reading.read(tmp_path, L)[1]["head.weight"], embeddings)
    save_file({**saved, "lm_head.weight": embeddings + 1}, file)
    with pytest.raises(UserError, match=r"lm_head\.weight differs from the embeddings"):
        reading.read(tmp_path, L)


# ---- through eval.py ----


TEXT = ("data=text", "data.files=docs/*.txt")  # what write_documents writes


@pytest.fixture
def folder(here) -> Path:
    reading.save_complete("llama", here / "model")
    return here / "model"


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_eval_scores_the_held_out_text_as_transformers_does(kind, folder, here, capsys):
    with_tokenizer(folder, kind)
    edit(folder, rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0})
    write_documents(here)
    settings = ("ctx=128", "task.scored_tokens=16", "task.windows=1", "documents=3", "scaling=pi", "dtype=float32")
    run_eval(f"run=hf:{folder}", *TEXT, *settings)
    out = capsys.readouterr().out
    described = f"run: hf-model ({folder}, whose config says scaling=dynamic_hf hf_factor=3.0)"
    assert described in " ".join(out.split())
    assert ("note: its tokenizer puts <eos> at the beginning" in out) == (kind == "sentencepiece")
    files = {f.name.split("-")[0]: f for f in (here / "runs/hf-model/eval").glob("*.jsonl")}
    assert files.keys() == {"none", "window", "pi"} and (here / "runs/hf-model/eval/ctx128.png").exists()
    rows = [json.loads(line) for line in files["none"].read_text().splitlines()]
    assert [row["n"] for row in rows] == [16, 32, 64, 128] and rows[0]["train_ctx"] == L
    # The same by transformers alone: its model and tokenizer, and the corpus's own text
    text = [t for _, t in held_out_texts({"kind": "text", "files": "docs/*.txt", "holdout": 32})[:3]]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = [tokenizer.encode(t, add_special_tokens=False) for t in text]
    ids = torch.tensor([e.ids[-129:] for e in encoded])
    n_bytes = sum(len(t[e.offsets[-16][0] :].encode()) for t, e in zip(text, encoded, strict=True))
    model = reading.load(folder)
    for row in rows:
        window = ids[:, -row["n"] - 1 :]
        with torch.inference_mode():
            logits = model(window[:, :-1]).logits[:, -16:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, -16:].flatten()).item()
        assert row["loss"] == pytest.approx(loss, abs=1e-5)
        assert row["bytes"] == n_bytes and row["tokens"] == 48
        assert row["bits_per_byte"] == pytest.approx(loss * 48 / np.log(2) / n_bytes, abs=1e-5)


def change_norm(x: torch.Tensor | None, name: str = "model.norm.weight") -> None:
    weights = {**load_file("model/model.safetensors"), name: x}
    save_file({name: x for name, x in weights.items() if x is not None}, "model/model.safetensors")


DAMAGES = {
    "checkpoint: it has no config.json": lambda f: (f / "config.json").unlink(),
    "model/config.json: not a JSON object": lambda f: (f / "config.json").write_text("[1, 2"),
    "model/model.safetensors: not a complete": lambda f: os.truncate(f / "model.safetensors", 1000),
    "no model.safetensors there": lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
    "model/tokenizer.json: not a tokenizer": lambda f: (f / "tokenizer.json").write_text("{}"),
    "its weights have no model.norm.weight": lambda f: change_norm(None),
    "sinks has no place in this model": lambda f: change_norm(torch.zeros(4), "sinks"),
    "model.norm.weight is torch.int8": lambda f: change_norm(torch.zeros(32, dtype=torch.int8)),
    "model.norm.weight has values that are not finite": lambda f: change_norm(torch.full((32,), torch.nan)),
    "gate_proj.weight has shape [48, 32], config.json asks for [64, 32]": lambda f: edit(f, intermediate_size=64),
    "config.json: quantization_config={'bits': 4}: not supported": lambda f: edit(f, quantization_config={"bits": 4}),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_what_cannot_be_read_is_one_line_and_nothing_is_written(message, folder, here):
    DAMAGES[message](Path("model"))
    with pytest.raises(UserError, match=re.escape(message)) as error:
        run_eval("run=hf:model", "ctx=128")
    assert "\n" not in str(error.value) and not (here / "runs").exists()


# ---- out ----

BIASES, YARN = "model.qkv_bias=true model.out_bias=true model.mlp_bias=true", "scaling=yarn scaling.beta_fast=4"
# Settings of a run -> the family that it is written in
EXPORTED = {
    f"model.norm=layer model.mlp=gelu {BIASES} layers=window_only layers.L.scaled=true {YARN}": "starcoder2",
    "model.norm=layer model.mlp=gelu_exact model.tied_head=false": "starcoder2",
    f"model.mlp=gelu_exact {BIASES} pos=rope_interleaved": "arcee",
    "model.out_bias=true": "arcee",
    "model=llama model.n_kv_heads=1": "llama",
    "model.mlp=swiglu model.qkv_bias=true pos=rope_interleaved": "llama",
    "model.mlp=geglu": "llama",
    "model=qwen3 model.n_kv_heads=1 pos=rope_interleaved": "qwen3",
    "model=qwen3 model.qkv_bias=true": "qwen3",
    "model.mlp=swiglu model.qk_norm=true": "qwen3",
    "model=qwen3 model.n_kv_heads=1 layers=olmo3": "qwen3",
    "model=olmo3": "olmo2",
    f"model=olmo3 layers=olmo3 {YARN}": "olmo3",
    "model=llama pos=rope_proportional": "llama",
    "model=gemma3": "gemma3_text",
    "model=gemma3 layers=gemma4": "gemma3_text",
    "model=gemma3 layers=gemma3 scaling=ntk model.tied_head=false model.qk_norm_weight=false": "gemma3_text",
    "model=llama model.n_layers=4 layers=smollm3": "smollm3",
    "model=llama pos=none model.n_layers=4": "smollm3",
    "model=llama pos=none model.n_layers=4 layers=swan": "smollm3",
    "model=llama layers=swan pos=rope_interleaved": "smollm3",
    f"model=llama layers=sssl layers.S.scaled=true {YARN}": "smollm3",
    "model=cohere2 layers=swan pos=rope_interleaved": "cohere2",
    f"model=cohere2 layers=swan layers.L.scaled=true {YARN} model.qkv_bias=true model.tied_head=false": "cohere2",
    "scaling=pi": "arcee",
    "scaling=ntk": "arcee",
    "scaling=llama3": "arcee",
    "scaling=ntk_by_parts scaling.beta=5": "arcee",
}


def a_run(here, *overrides: str, ctx: int | None = None) -> tuple[TrainConfig, gpt.GPT, corpora.Corpus]:
    """runs/x with random weights at ctx 64. With a scaling, or a ctx: as fine-tuned at 256, or at that."""
    cfg = train_settings("exp=smoke", "name=x", *overrides)
    if ctx or cfg.scaling["kind"] != "none":
        cfg.init, cfg.ctx = "parent", ctx or 256
        cfg.pretrained = {"ctx": 64, "tokens": 1, "run": "parent", "weights": "0"}
    corpus = corpora.prepare(cfg.data, ".cache")
    model = reading.biases(gpt.build(cfg, corpus.vocab_size))
    state = {"config": asdict(cfg), "model": model.state_dict(), "corpus": corpus.key, "validation": {}}
    checkpoint.start(here / "runs/x", cfg)
    checkpoint.save(here / "runs/x", {**state, "step": 1, "optimizer": {}, "tokenizer": None, "seconds": 1.0})
    return cfg, model, corpus


def run_export(monkeypatch, *argv: str) -> None:
    """`python export.py ARGV` in this process."""
    monkeypatch.setattr("sys.argv", ["export.py", *argv])
    export.main()


@pytest.mark.parametrize("settings", EXPORTED)
def test_exported_logits_equal_transformers(settings, here, monkeypatch):
    cfg, model, corpus = a_run(here, *settings.split())
    run_export(monkeypatch, "run=x", "out=there")
    expected = reading.load(Path("there"))
    assert expected.config.model_type == EXPORTED[settings]
    assert sorted(p.name for p in here.iterdir() if p.name[0] != ".") == ["runs", "there"]
    change = gpt.trained_scaling(cfg, gpt.trained_context(cfg, model.pos))
    V = corpus.encoding.n_vocab
    x = torch.randint(V, (2, 256), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        a, b = model(x, change=change)[..., :V], expected(x).logits
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()
        # it is the scaled model that was written
        assert change.inv_freq is None or (model(x)[..., :V] - b).abs().max() > 1e-2
    back, weights, vocab_size = reading.read(Path("there"), 256, 64 if settings == "scaling=pi" else None)
    assert vocab_size == V and back.ctx == cfg.ctx
    again = gpt.from_weights(back, vocab_size, weights).eval()
    with torch.inference_mode():
        logits = again(x, change=gpt.trained_scaling(back, gpt.trained_context(back, again.pos), 256))
    assert (logits - a).abs().max() <= 1e-4 * b.abs().max()


def test_the_longest_trained_context_is_exported(here, monkeypatch):
    a_run(here, ctx=32)
    run_export(monkeypatch, "run=x", "out=there")
    assert reading.read(Path("there"), 128, None)[0].ctx == 64


def test_the_model_card_has_valid_front_matter_and_a_command_that_reads_the_folder(here, monkeypatch):
    yaml = pytest.importorskip("yaml")
    a_run(here, "scaling=pi")
    run_export(monkeypatch, "run=x", "out=there")
    _, front, body = Path("there/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["tags"] == ["ropewalk", "rope", "pi"]
    assert "`python eval.py run=hf:there ctx=1024 train_ctx=64`" in body
    reading.read(Path("there"), 1024, 64)


# qwen3 is also the name of a tokenizer that transformers would build from config.json alone
@pytest.mark.parametrize("model", ["data.tokenizer=bpe", "data.tokenizer=bytes", "model=qwen3"])
def test_exported_tokens_equal_ours(model, here, monkeypatch):
    write_documents(here)
    _, _, corpus = a_run(here, "data=text", "data.files=docs/*.txt", "data.vocab_size=512", *model.split())
    run_export(monkeypatch, "run=x", "out=there")
    written = transformers.AutoTokenizer.from_pretrained("there")
    texts = [t[:30_000] for _, t in held_out_texts({"kind": "sympy", "holdout": 4})]
    # e and a combining accent are two characters, which Qwen2Tokenizer would make one (NFC)
    odd = "e\u0301 aaaaaaa\taaaa  \r\n\n\n x=1234567; it's IT'S \u00e9\u0301 \u4f60\u597d \U0001f600 \u017f\x00\x7f    "
    for text in [*texts, odd, *(odd[i:] for i in range(1, 40)), ""]:
        expected = corpus.encoding.encode_ordinary(text)
        assert written(text, add_special_tokens=False)["input_ids"] == expected
        assert written(text)["input_ids"] == expected
        assert written.decode(expected) == text
    assert written.eos_token_id == corpus.encoding.eot_token and len(written) == corpus.encoding.n_vocab
    assert padded(50257) == 50304 and padded(2048) == 2048  # GPT-2's
    # 257 tokens are padded to 320 rows for the training; generate() must not draw one of the 63 others
    assert reading.load(Path("there")).get_input_embeddings().num_embeddings == corpus.encoding.n_vocab


# Settings of a run -> why it is not exported
REFUSED = {
    "pos=alibi": "pos.kind=alibi: must be rope, none to be exported",
    "pos=rope_partial": "pos.rotary_fraction=0.25: must be 1.0 to be exported",
    "pos=rope_proportional pos.rotary_fraction=0.2": "pos.rotary_fraction=0.2: must be a whole number of pairs of",
    "pos=rope_proportional scaling=pi": "scaling=pi: must be none with a proportional rotation",
    "attention=linear": "attention=linear: must be softmax to be exported",
    "model.attention_gate=element model=qwen3": "model.attention_gate=element: cannot be exported; the most similar",
    "scaling=ntk plus=logn": "plus=['logn']: must be [] to be exported",
    "model=neox model.n_heads=2": "model.residual=parallel: cannot be exported; the most similar family is starcoder2",
    "model=cohere2": "layers=uniform (it has other layers): cannot be exported; the most similar family is cohere2",
    "model=cohere2 layers=swan model.head_dim=16": "model.head_dim=16: cannot be exported",
    "model=llama layers=swan scaling=logn": "scaling=logn: must be none, pi, yarn",
    "model=llama layers=irope": "pos.kind=none_tempered: must be rope, none to be exported",
    "model=llama layers=olmo3 layers.L.sinks=2": "layers.L.sinks=2: must be 0 to be exported",
    "model=gemma3 layers=gemma3 scaling=yarn scaling.truncate=false": "truncate=False: not supported",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_cannot_be_exported_is_named_and_nothing_is_written(settings, here, monkeypatch):
    a_run(here, *settings.split())
    assert REFUSED[settings] in error_of(export.main, ["run=x", "out=there"], monkeypatch)
    assert not [p for p in here.iterdir() if "there" in p.name]


ARGUMENTS = {
    "eval train_ctx=64": "train_ctx=64: must be left out",
    "eval ignore_keys=[a]": "ignore_keys=['a']: must be left out",
    "train ignore_keys=[a]": "ignore_keys=['a']: must be left out",
    "eval run=hf:model ignore_keys=[a]": "ignore_keys=a: must be keys that model/config.json has and that are refused",
    "train init=hf:model ignore_keys=[a]": "ignore_keys=a: must be keys that model/config.json has",
    "eval run=hf:model train_ctx=64": "config.json says 32",
    "export run=x": "usage: python export.py run=NAME out=DIR",
    "export run=x out=model": "out=model: exists already",
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_do_not_fit_a_checkpoint(arguments, folder, monkeypatch):
    command, *argv = arguments.split()
    main = {"eval": evaluation.main, "train": train.main, "export": export.main}[command]
    assert ARGUMENTS[arguments] in error_of(main, argv, monkeypatch)


def test_a_full_disk_is_one_line_and_leaves_nothing(here, monkeypatch):
    resource = pytest.importorskip("resource")  # not on Windows
    write_documents(here)
    a_run(here, *TEXT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        assert "out=there: cannot be written: " in error_of(export.main, ["run=x", "out=there"], monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in here.iterdir()) == [".cache", "docs", "runs"]
    Path("there.tmp").mkdir()  # of a killed export
    run_export(monkeypatch, "run=x", "out=there")
    assert not Path("there.tmp").exists()
