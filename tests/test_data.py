"""Corpora, tokenizers, the cache, batches and training positions."""

import hashlib
import inspect
import multiprocessing
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import train
from conf.registry import choices, load_kind, yaml_values
from data import batches, corpus as corpora, tokenizer
from data.batches import PARTS, batch, training_positions
from data.corpora import python, sympy
from data.held_out import find_copies, long_documents, validation_windows
from model.scaling import NO_CHANGE, TrainedContext
from tests.helpers import (
    attention_output,
    dense,
    line_of,
    model_of,
    random_tokens,
    rotated_scores,
    train_settings,
    wait_until,
)

TEXT = {"kind": "text", "files": "docs/*.txt", "tokenizer": "bpe", "vocab_size": 300, "holdout": 2}


@pytest.fixture
def docs(here) -> Path:
    """Six documents of real words, of different lengths."""
    words = (tokenizer.__doc__ + corpora.__doc__ + sympy.__doc__).split()
    (here / "docs").mkdir()
    for i in range(6):
        text = " ".join(words[(7 * i + j * (i + 1)) % len(words)] for j in range(100 + 60 * i)) + f" Ω{i}\n"
        (here / "docs" / f"{i}.txt").write_text(text)
    return here / "docs"


def test_sympy_says_what_to_install_when_it_differs(monkeypatch):
    monkeypatch.setattr(sympy, "SHA256", "0" * 64)
    assert line_of(sympy.documents).endswith("pip install -I sympy==1.14.0")


def test_split_holds_out_whole_documents_from_the_longest_down():
    documents = [(f"d{i}", "x" * (i + 1)) for i in range(10)]
    train, held_out = corpora.split(documents, 3)
    assert [name for name, _ in held_out] == ["d9", "d6", "d3"]
    assert sorted(train + held_out) == sorted(documents)
    assert len(corpora.split(documents, 100)[1]) == 4


def test_prepared_tokens_decode_to_the_documents(docs):
    corpus = corpora.prepare(TEXT, ".cache")
    texts = {p.read_text() for p in docs.glob("*.txt")}
    held_out = {corpus.encoding.decode(d.tokens.tolist()) for d in corpus.held_out}
    end = corpus.encoding.eot_token
    cuts = np.flatnonzero(corpus.train == end)
    train = {
        corpus.encoding.decode(part[part != end].tolist()) for part in np.split(corpus.train, cuts + 1) if len(part)
    }
    assert held_out | train == texts and len(held_out) == 2 and len(train) == 4
    for d in corpus.held_out:
        assert corpus.token_bytes[d.tokens].sum() == len(corpus.encoding.decode(d.tokens.tolist()).encode())
        assert d.copied.any() and np.array_equal(d.copied, *find_copies(corpus.train, [d.tokens]))
    assert corpus.token_bytes[end] == 0
    assert corpus.vocab_size % 64 == 0 and corpus.encoding.n_vocab == 300


def test_the_vocabulary_is_trained_on_training_documents_only(docs):
    longest = max(docs.glob("*.txt"), key=lambda p: p.stat().st_size)
    longest.write_text("zqzqzqzq " * 5000)  # held out; would be the first merge of all
    corpus = corpora.prepare(TEXT, ".cache")
    assert corpus.encoding.decode(corpus.held_out[0].tokens.tolist()).startswith("zqzq")
    assert b"zq" not in corpus.encoding._mergeable_ranks


def only_folder() -> Path:
    (folder,) = (path for path in Path("mine").iterdir() if "." not in path.name)  # a dot: of a temporary folder
    return folder


def test_the_cache_is_reused_and_keyed(docs, capsys):
    first = corpora.prepare(TEXT, "mine")
    assert "training documents" in capsys.readouterr().err
    assert corpora.prepare(TEXT, "mine").key == first.key and capsys.readouterr().err == ""
    others = [{**TEXT, "vocab_size": 301}, {**TEXT, "tokenizer": "bytes"}, {**TEXT, "holdout": 1}]
    assert len({corpora.prepare(cfg, "mine").key for cfg in [TEXT, *others]}) == 4
    (docs / "0.txt").write_text("changed")
    assert corpora.prepare(TEXT, "mine").key != first.key
    assert not list(Path("mine").glob("[!.]*.*"))  # no temporary folder is left


@pytest.mark.process
def test_the_default_corpus_is_the_one_that_published_runs_name_and_has_room_for_long_contexts(here):
    corpus = corpora.prepare(train_settings().data, "mine")
    assert corpus.key == "d34c79c19cbbafbd" and only_folder().name == "sympy-bpe-d34c79c19cbbafbd"
    assert hashlib.sha256(corpus.train.tobytes()).hexdigest().startswith("6a50fb9552b2c1af")
    lengths = [len(d.tokens) for d in corpus.held_out]
    assert [sum(n > limit for n in lengths) for limit in (8192, 16384, 32768)] == [32, 27, 7] and len(lengths) == 32
    assert sum(corpus.token_bytes[d.tokens].sum() for d in corpus.held_out) / sum(lengths) > 2.5  # bytes per token


@pytest.mark.process
def test_of_three_processes_one_prepares_the_cache_though_the_first_is_killed(docs, capfd):
    fork, write = multiprocessing.get_context("fork"), corpora._write
    cfg = {**TEXT, "tokenizer": "bytes"}  # bpe is trained by threads, which a forked process lacks

    def write_for_ever(*args) -> None:
        write(*args)
        time.sleep(60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "_write", write_for_ever)
        first = fork.Process(target=corpora.prepare, args=(cfg, "mine"))
        first.start()
    wait_until(lambda: list(Path("mine").glob("*/meta.json")), 30)
    others = [fork.Process(target=corpora.prepare, args=(cfg, "mine")) for _ in range(2)]
    for process in others:
        process.start()
    first.kill()
    for process in (first, *others):
        process.join(60)
    assert [process.exitcode for process in others] == [0, 0]
    assert capfd.readouterr().err.count("training documents") == 2  # by the first, and by one of the others
    assert {path.name for path in Path("mine").iterdir()} == {".lock", only_folder().name}
    assert len(corpora.prepare(cfg, "mine").held_out) == 2


def test_a_cache_that_cannot_be_written_is_one_clear_error(docs):
    Path("blocked").write_text("a file where the cache folder should be")
    assert line_of(corpora.prepare, TEXT, "blocked").startswith("cache=blocked: ")


def test_bytes_and_bpe_round_trip_any_text(docs):
    text = "def f(x):\n    return 'ünï' + x  # 1234567\t\r\n\n\n"
    for kind in ("bpe", "bytes"):
        encoding = corpora.prepare({**TEXT, "tokenizer": kind}, ".cache").encoding
        tokens = encoding.encode_ordinary(text)
        assert encoding.decode(tokens) == text
    assert tokens == list(text.encode())  # of the bytes


@pytest.mark.parametrize("name", choices("data"))
def test_every_corpus_takes_the_settings_of_its_yaml(name):
    """Without reading a document: fingerprint and documents take the same knobs, which the yaml has."""
    settings = yaml_values("data", name)
    assert set(corpora.TOKENIZER_SETTINGS) <= settings.keys()
    knobs = {k: v for k, v in settings.items() if k not in (*corpora.TOKENIZER_SETTINGS, "kind")}
    for function in ("fingerprint", "documents"):
        inspect.signature(load_kind("data.corpora", settings["kind"], function, "data")).bind(**knobs)


def test_packages_that_are_missing_or_others_are_one_line_with_the_command_that_gets_them(here):
    cfg = yaml_values("data", "python") | {"folder": "packages"}
    install = "pip install --no-deps --upgrade --target packages dask==2026.8.0 "
    assert f"data.folder=packages: dask is not there: {install}" in line_of(corpora.prepare, cfg, ".cache")
    for requirement in python.REQUIREMENTS:
        Path("packages", requirement.partition("==")[0]).mkdir(parents=True)
    Path("packages/jax/long.py").write_text("pass\n" * 10_000)
    assert f"files are not those that are expected: {install}" in line_of(corpora.prepare, cfg, ".cache")
    assert not Path(".cache").exists() or not list(Path(".cache").glob("python-*"))


@pytest.mark.parametrize(
    "files, content, named",
    [
        ("nothing/*.txt", b"", "data.files=nothing/*.txt: "),  # matches no file
        ("docs/1.txt", b"", "data.files=docs/1.txt: "),  # one file: none could be held out
        ("docs/*", b"\xff\xfe\x00abc", "data.files: docs/bad is not UTF-8 text (byte 0)"),
        (None, b"", "data.files=None: "),
    ],
)
def test_bad_globs_and_files(docs, files, content, named):
    (docs / "bad").write_bytes(content)
    assert line_of(corpora.prepare, {**TEXT, "files": files}, ".cache").startswith(named)
    assert not list(Path(".cache").glob("text-bpe-*.*"))


def test_gpt2_tokenizer_without_network_is_one_line(docs, monkeypatch):
    """For real: a proxy that refuses stands for a machine with no network."""
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "empty")
    assert line_of(corpora.prepare, {**TEXT, "tokenizer": "gpt2"}, ".cache").startswith("data.tokenizer=gpt2: ")
    assert not list(Path(".cache").glob("text-gpt2*"))


def write_tokenizer(docs: Path, kind: str, path: str = "own.json") -> Tokenizer:
    """A tokenizer.json of the tokenizers package, trained on the documents."""
    texts = [p.read_text() for p in docs.glob("*.txt")]
    if kind == "byte-level":
        own = Tokenizer(models.BPE())
        own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        own.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    else:  # no byte fallback: Ω is unknown, and spaces are lost
        own = Tokenizer(models.WordLevel(unk_token="[UNK]"))
        own.pre_tokenizer = pre_tokenizers.Whitespace()
        own.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[UNK]"]))
    own.save(path)
    return own


def test_a_tokenizer_of_ones_own_counts_the_bytes_of_the_text(docs):
    """Also when its file has gone, as after a run was moved."""
    own, cfg = write_tokenizer(docs, "byte-level"), {**TEXT, "tokenizer": "own.json"}
    corpus, content = corpora.prepare(cfg, "mine"), Path("own.json").read_text()
    for d in corpus.held_out:
        text = Path(d.name).read_text()
        assert d.tokens.tolist() == own.encode(text).ids and corpus.encoding.decode(d.tokens.tolist()) == text
        assert corpus.token_bytes[d.tokens].sum() == len(text.encode())
    end = corpus.encoding.eot_token  # none in the file, so it is one more
    assert end == own.get_vocab_size() == corpus.vocab_size - 1 and (corpus.train == end).sum() == 4
    assert corpus.token_bytes[end] == 0 and corpus.train.dtype == np.uint16
    Path("own.json").unlink()
    assert corpora.prepare(cfg, "mine", content).key == corpus.key


@pytest.mark.parametrize("file", ["missing.json", "words.json", "none.json"])
def test_a_tokenizer_that_is_none_or_changes_the_text_is_one_line(file, docs):
    write_tokenizer(docs, "words", "words.json")
    Path("none.json").write_bytes(b"\xff{}")
    assert line_of(corpora.prepare, {**TEXT, "tokenizer": file}, "mine").startswith("data.tokenizer")
    assert not list(Path("mine").glob("text-*"))


def test_documents_tokenised_in_parts_give_the_same_corpus(docs, monkeypatch):
    at_once = corpora.prepare(TEXT, "one").train
    monkeypatch.setattr(corpora, "DOCUMENTS_AT_ONCE", 3)
    in_parts = corpora.prepare(TEXT, "two").train
    assert len(at_once) > 100 and np.array_equal(at_once, in_parts)


# ---- batches and windows ----


def test_batch_is_a_pure_function_of_seed_and_step():
    stream = np.arange(10_000, dtype=np.uint16)
    later, first = (batch(stream, step, seed=3, size=4, ctx=16) for step in (7, 0))
    batches._epoch.cache_clear()
    assert torch.equal(batch(stream, 0, seed=3, size=4, ctx=16), first)
    assert torch.equal(batch(stream, 7, seed=3, size=4, ctx=16), later)
    assert not torch.equal(first, later)
    assert not torch.equal(batch(stream, 0, seed=4, size=4, ctx=16), first)
    assert first.shape == (4, 17) and first.dtype == torch.int64
    assert bool((first.diff(dim=1) == 1).all())  # windows of the stream as it is


def test_an_epoch_visits_every_window_one_time():
    stream = np.arange(1000, dtype=np.uint16)
    per_epoch = (1000 - 1) // 16 - 1
    rows = torch.cat([batch(stream, step, seed=0, size=1, ctx=16) for step in range(2 * per_epoch)])
    first, second = rows[:per_epoch, :-1].flatten().tolist(), rows[per_epoch:, :-1].flatten().tolist()
    assert max(Counter(first).values()) == max(Counter(second).values()) == 1
    assert len(set(first) | set(second)) > 960 and first != second


def test_streams_and_documents_that_are_too_short_are_refused(docs):
    assert line_of(lambda: batch(np.arange(30), 0, seed=0, size=1, ctx=16)).startswith("ctx=16: the training split")
    corpus = corpora.prepare(TEXT, ".cache")
    longest = max(len(d.tokens) for d in corpus.held_out)
    assert [len(d.tokens) for d in long_documents(corpus, longest - 1, 9)] == [longest]
    assert [d.name for d in long_documents(corpus, 1, 1)] == [corpus.held_out[0].name]
    for use in (long_documents, validation_windows):
        assert line_of(use, corpus, longest, 9).startswith(f"ctx={longest}: the longest held-out document")


def test_validation_windows_are_held_out_text_and_never_cross_documents(docs):
    corpus = corpora.prepare(TEXT, ".cache")
    windows = validation_windows(corpus, 20, 10)
    documents = [d.tokens.tolist() for d in corpus.held_out]
    for w in windows.tolist():
        assert any(w == d[i : i + 21] for d in documents for i in range(len(d)))
    assert len({tuple(w) for w in windows.tolist()}) == 10


# ---- micro-batches ----

CORPUS = SimpleNamespace(train=np.arange(10_000, dtype=np.uint16))


def test_the_batch_of_a_step_is_split_into_equal_micro_batches():
    cfg = train_settings("ctx=64", "batch_tokens=512", "micro_tokens=128")
    batches = train.training_batches(cfg, CORPUS, 3, slice(0, 8), torch.device("cpu"))
    assert [(tuple(x.shape), positions) for x, positions in batches] == [((2, 65), None)] * 4
    assert torch.equal(torch.cat([x for x, _ in batches]), batch(CORPUS.train, 3, seed=0, size=8, ctx=64))


# ---- positions= ----


@pytest.mark.parametrize("kind", ["random", "pose"])
def test_drawn_positions_rise_within_their_range_and_reach_far(kind):
    def sample(step, seed=0):
        return training_positions(kind, step, seed=seed, rows=8, ctx=32, longest=256)

    p = torch.stack([sample(step) for step in range(50)])
    assert p.shape == (50, 8, 32) and p.dtype == torch.int64 and p.min() >= 0 and p.max() < 256
    steps = p.diff(dim=-1)
    assert bool((steps >= 1).all()) and p.max() > 240
    if kind == "pose":  # one skip at most
        assert bool(((steps > 1).sum(-1) <= 1).all()) and bool((p[..., 0] == 0).float().mean() > 0.9)
    assert torch.equal(p[7], sample(7))  # pure in (seed, step)
    assert not torch.equal(p[7], sample(7, seed=1))


def test_float_positions_are_sorted_uniform_reals():
    def sample(step: int) -> torch.Tensor:
        p = training_positions("random_float", step, seed=0, rows=8, ctx=32, longest=32)
        assert p.dtype == torch.int64 and bool((p.diff(dim=-1) >= 0).all()) and p.min() >= 0
        return p / PARTS

    p = torch.stack([sample(step) for step in range(200)])
    assert torch.equal(p[7], sample(7)) and p.max() < 32 and (p % 1 != 0).double().mean() > 0.99
    # Order statistics of uniform numbers: the i-th of 32 has the mean 32 i / 33, and gaps are as of a Poisson process
    assert (p.mean(dim=(0, 1)) - 32 * torch.arange(1, 33) / 33).abs().max() < 0.4
    assert (p.diff(dim=-1) > 1).double().mean() == pytest.approx((1 - 1 / 32) ** 32, abs=0.02)


def test_a_step_at_float_positions_rotates_by_real_distances():
    """Against a dense attention over distances in float64; with and without a change of the frequencies by PI."""
    cfg, model, tokens = train_settings("positions=random_float"), model_of("rope"), random_tokens(1, 24)
    positions = training_positions("random_float", 0, seed=0, rows=1, ctx=24, longest=256)
    real, inv_freq = positions[0].double() / PARTS, model.pos.inv_freq
    for change, s in ((NO_CHANGE, 1), (replace(NO_CHANGE, inv_freq=inv_freq / 4), 4)):
        change = train.change_of_steps(cfg, change, TrainedContext("rope", 32, inv_freq))
        want = dense(model, tokens, rotated_scores(inv_freq / s, real[:, None] - real))
        assert (attention_output(model, tokens, change, positions) - want).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["ordered", "random", "random_float", "pose"])
def test_a_batch_has_the_drawn_positions_of_its_rows_or_none(kind):
    """As a second rank of two gets it, in two micro-batches: its half of the same global batch."""
    cfg = train_settings("exp=smoke", f"positions={kind}")
    half, cpu = slice(4, 8), torch.device("cpu")
    (all_windows, all_positions), *others = train.training_batches(cfg, CORPUS, 3, slice(0, 8), cpu)
    parts = train.training_batches(replace(cfg, micro_tokens=2 * 64), CORPUS, 3, half, cpu)
    assert not others and [len(windows) for windows, _ in parts] == [2, 2]
    assert torch.equal(torch.cat([windows for windows, _ in parts]), all_windows[half])
    if kind == "ordered":
        assert all_positions is None and all(positions is None for _, positions in parts)
    else:
        drawn = training_positions(kind, 3, seed=cfg.seed, rows=8, ctx=64, longest=cfg.longest)
        assert torch.equal(all_positions, drawn) and cfg.longest == 512
        assert torch.equal(torch.cat([positions for _, positions in parts]), drawn[half])
