"""The real model's study: its tables, and the command on a tiny GGUF file."""

import json
import sys
from pathlib import Path

import pytest

from studies import real
from studies.rows import RESULTS, read_rows
from tests.helpers import write_documents


def test_real_md_has_the_numbers_of_its_rows():
    """Its perplexities and gains; the gains by distance have no rows."""
    rows = {corpus: read_rows(RESULTS / "real.jsonl", corpus) for corpus in real.CORPORA}
    made = [line for of_corpus in rows.values() for line in real.gain_table(of_corpus)]
    published = (RESULTS / "real.md").read_text().splitlines()
    assert len(made) > 12 and [line for line in made if line not in published] == []


@pytest.mark.slow
def test_the_command_writes_rows_tables_and_figure_and_is_resumable(tmp_path, monkeypatch, capfd):
    pytest.importorskip("gguf")
    from tests.gguf_files import write_gguf

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write_documents(tmp_path)
    write_gguf(tmp_path / "model.gguf", quantisation="Q8_0")
    monkeypatch.setattr(real, "CORPORA", {"text": "code"})
    options = "--run gguf:model.gguf --documents 3 --scored-tokens 32 --tiny none.jsonl --out ."
    argv = ["real", *options.split(), "data.files=docs/*.txt", "data.holdout=4"]
    monkeypatch.setattr(sys, "argv", argv)
    real.main()
    rows = [json.loads(text) for text in Path("real.jsonl").read_text().splitlines()]
    labels = {*real.METHODS, "window"}
    assert {(row["label"], row["n"]) for row in rows} == {(label, n) for label in labels for n in (64, 96, 128)}
    assert len({row["loss"] for row in rows if row["n"] == 64 and row["label"] in ("none", "window", "pi")}) == 1
    text = Path("real.md").read_text()
    assert "## Gain by the distance to the antecedent, code" in text and "| 128 | rerope + logn |" in text
    assert Path("real.png").stat().st_size > 10_000
    capfd.readouterr()
    before = {file: file.stat().st_mtime for file in Path("runs").rglob("eval/*.jsonl")}
    real.main()
    assert {file: file.stat().st_mtime for file in Path("runs").rglob("eval/*.jsonl")} == before  # nothing measured
    monkeypatch.setattr(sys, "argv", [*argv[:1], "--runs", "elsewhere", "--minutes", "0", *argv[1:]])
    with pytest.raises(SystemExit, match="run the same command again to resume"):
        real.main()
