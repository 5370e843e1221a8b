"""Corpora, tokenizers, the cache and batches."""

import inspect
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from conf.errors import UserError
from conf.registry import choices, load_kind, yaml_values
from data import batches, corpus as corpora, preparation, tokenizer
from data.batches import batch
from data.corpora import sympy
from data.held_out import long_documents, validation_windows
from tests.helpers import train_settings

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


def test_sympy_is_154_long_files():
    found = list(sympy.documents())
    assert len(found) == 154 and sum(len(text.encode()) for _, text in found) == 10_137_147
    assert not any("tests/" in name or "_antlr" in name for name, _ in found)
    assert all(len(text.encode()) >= 28_672 for _, text in found)


def test_sympy_says_what_to_install_when_it_differs(monkeypatch):
    monkeypatch.setattr(sympy, "SHA256", "0" * 64)
    with pytest.raises(UserError, match=r"pip install -I sympy==1\.14\.0"):
        list(sympy.documents())


def test_split_holds_out_whole_documents_from_the_longest_down():
    documents = [(f"d{i}", "x" * (i + 1)) for i in range(10)]
    train, held_out = preparation.split(documents, 3)
    assert [name for name, _ in held_out] == ["d9", "d6", "d3"]
    assert sorted(train + held_out) == sorted(documents)
    assert len(preparation.split(documents, 100)[1]) == 4


def test_a_corpus_says_which_tokens_repeat_training_text(docs):
    corpus = corpora.prepare(TEXT, ".cache")
    train = corpus.train.tolist()
    grams = {tuple(train[i : i + 8]) for i in range(len(train) - 7)}
    for document in corpus.held_out:
        tokens = document.tokens.tolist()
        assert document.copied.tolist() == [tuple(tokens[max(0, i - 7) : i + 1]) in grams for i in range(len(tokens))]
    assert any(document.copied.any() for document in corpus.held_out)


def test_default_corpus_has_room_for_long_contexts(here):
    corpus = corpora.prepare(train_settings().data, ".cache")
    lengths = [len(d.tokens) for d in corpus.held_out]
    assert len(lengths) == 32 and sum(n > 8192 for n in lengths) == 32
    assert sum(n > 16384 for n in lengths) >= 24 and sum(n > 32768 for n in lengths) >= 6
    n_bytes = sum(corpus.token_bytes[d.tokens].sum() for d in corpus.held_out)
    assert n_bytes / sum(lengths) > 2.5  # bytes per token


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
    assert corpus.token_bytes[end] == 0
    assert corpus.vocab_size % 64 == 0 and corpus.encoding.n_vocab == 300


def test_the_vocabulary_is_trained_on_training_documents_only(docs):
    longest = max(docs.glob("*.txt"), key=lambda p: p.stat().st_size)
    longest.write_text("zqzqzqzq " * 5000)  # held out; would be the first merge of all
    corpus = corpora.prepare(TEXT, ".cache")
    assert corpus.encoding.decode(corpus.held_out[0].tokens.tolist()).startswith("zqzq")
    assert b"zq" not in corpus.encoding._mergeable_ranks


def test_cache_is_reused_keyed_and_rebuilt_when_damaged(docs, capsys):
    """In its own cache: other tests read the shared one at the same time."""
    first = corpora.prepare(TEXT, "mine")
    assert "preparing" not in capsys.readouterr().err
    again = corpora.prepare(TEXT, "mine")
    assert again.key == first.key and capsys.readouterr().err == ""
    folder = next(Path("mine").glob(f"*{first.key}"))
    for name, content in (
        ("val.bin", b"\0" * 10),
        ("train.bin", None),
        ("meta.json", b"{"),
        ("ranks.tiktoken", b"nonsense"),
    ):
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        rebuilt = corpora.prepare(TEXT, "mine")
        assert "damaged" in capsys.readouterr().err
        assert np.array_equal(rebuilt.train, first.train)
    others = [{**TEXT, "vocab_size": 301}, {**TEXT, "tokenizer": "bytes"}, {**TEXT, "holdout": 1}]
    assert len({corpora.prepare(cfg, "mine").key for cfg in [TEXT, *others]}) == 4
    (docs / "0.txt").write_text("changed")
    assert corpora.prepare(TEXT, "mine").key != first.key
    assert not [p for p in Path("mine").iterdir() if "." in p.name]  # no temporary folder is left


def test_a_cache_that_cannot_be_written_is_one_clear_error(docs):
    Path("blocked").write_text("a file where the cache folder should be")
    with pytest.raises(UserError, match=r"cache=blocked: text-bpe-.*: Not a directory"):
        corpora.prepare(TEXT, "blocked")


def test_bytes_and_bpe_round_trip_any_text(docs):
    text = "def f(x):\n    return 'ünï' + x  # 1234567\t\r\n\n\n"
    for kind in ("bytes", "bpe"):
        encoding = corpora.prepare({**TEXT, "tokenizer": kind}, ".cache").encoding
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    byte_tokens = corpora.prepare({**TEXT, "tokenizer": "bytes"}, ".cache").encoding.encode_ordinary(text)
    assert byte_tokens == list(text.encode())


@pytest.mark.parametrize("name", choices("data"))
def test_every_corpus_takes_the_settings_of_its_yaml(name):
    """Without reading a document: fingerprint and documents take the same knobs, which the yaml has."""
    settings = yaml_values("data", name)
    assert set(corpora.TOKENIZER_SETTINGS) <= settings.keys()
    knobs = {k: v for k, v in settings.items() if k not in (*corpora.TOKENIZER_SETTINGS, "kind")}
    for function in ("fingerprint", "documents"):
        inspect.signature(load_kind("data.corpora", settings["kind"], function)).bind(**knobs)


@pytest.mark.parametrize(
    "files, content, message",
    [
        ("nothing/*.txt", None, r"data\.files=nothing/\*\.txt: matches no file"),
        ("docs/1.txt", None, "matches one file; at least 2"),
        ("docs/*", b"\xff\xfe\x00abc", r"docs/bad is not UTF-8 text \(byte 0\)"),
        ("docs/*", b"abc\0def", "docs/bad holds NUL bytes"),
        (None, None, r"data=text needs data\.files"),
    ],
)
def test_bad_globs_and_files(docs, files, content, message):
    if content is not None:
        (docs / "bad").write_bytes(content)
    with pytest.raises(UserError, match=message):
        corpora.prepare({**TEXT, "files": files}, ".cache")
    assert not list(Path(".cache").glob("text-bpe-*.*"))


def test_documents_tokenised_in_parts_give_the_same_corpus(docs, monkeypatch):
    at_once = corpora.prepare(TEXT, "one").train
    monkeypatch.setattr(preparation, "DOCUMENTS_AT_ONCE", 3)
    in_parts = corpora.prepare(TEXT, "two").train
    assert len(at_once) > 100 and np.array_equal(at_once, in_parts)


# ---- batches and targets ----


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
    with pytest.raises(UserError, match="ctx=16: the training split has 30 tokens and must have more than 32"):
        batch(np.arange(30), 0, seed=0, size=1, ctx=16)
    corpus = corpora.prepare(TEXT, ".cache")
    longest = max(len(d.tokens) for d in corpus.held_out)
    assert [len(d.tokens) for d in long_documents(corpus, longest - 1, 9)] == [longest]
    assert [d.name for d in long_documents(corpus, 1, 1)] == [corpus.held_out[0].name]
    with pytest.raises(
        UserError, match=f"ctx={longest}: the longest held-out document of this corpus allows {longest - 1}"
    ):
        long_documents(corpus, longest, 9)
    with pytest.raises(UserError, match="longest held-out document"):
        validation_windows(corpus, 10**6, 4)


def test_validation_windows_are_held_out_text_and_never_cross_documents(docs):
    corpus = corpora.prepare(TEXT, ".cache")
    windows = validation_windows(corpus, 20, 10)
    documents = [d.tokens.tolist() for d in corpus.held_out]
    for w in windows.tolist():
        assert any(w == d[i : i + 21] for d in documents for i in range(len(d)))
    assert len({tuple(w) for w in windows.tolist()}) == 10
