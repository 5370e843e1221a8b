"""The real model's study: orders of methods, and the command on a tiny GGUF file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from studies import real
from studies.rows import RESULTS, Rows, read_rows
from tests.helpers import study_row, write_documents

# The winners in the real model on code and on books, and in the small one -> what is said about them
VERDICTS = """aaa the same | a?a the same | bba reversed | aba code and books differ | ??a undecided in the real
    aa? undecided in the small | ??? undecided in both"""


def test_an_order_is_compared_only_where_both_decide_it():
    for line in VERDICTS.replace("\n", "|").split("|"):
        (code, books, small), _, want = line.strip().partition(" ")
        assert real.verdict_of([code, books], small) == want, line
    assert real.verdict_of(["a", ""], "a") == real.verdict_of(["a", "a"], "") == ""


def test_the_order_of_two_methods_is_paired_by_document_and_seed():
    """Documents and seeds differ by whole nats, the two methods by 0.1: only the paired difference decides."""
    rng = np.random.default_rng(0)
    level, noise = 20 + 3 * rng.normal(size=(3, 12)), 0.02 * rng.normal(size=(3, 12))

    def order(of_pi: np.ndarray, a: str, b: str) -> str:
        rows = [study_row("rope", "none", 256, 0, level[0].tolist())]
        rows += [study_row("rope", "pi", 512, s, of_pi[s].tolist()) for s in (0, 1, 2)]
        rows += [study_row("rope", "yarn", 512, s, (level + noise - 0.1)[s].tolist()) for s in (2, 1)]
        return real.order(Rows(rows), "rope", a, b, 2.0)[0]

    assert (order(level, "yarn", "pi"), order(level, "pi", "yarn"), order(level, "yarn", "ntk")) == ("a", "b", "")
    assert order(level[:, ::-1], "yarn", "pi") == "?"


def test_real_md_has_the_numbers_of_its_rows():
    """Its perplexities, gains and orders; the gains by distance have no rows."""
    rows = {corpus: read_rows(RESULTS / "real.jsonl", corpus) for corpus in real.CORPORA}
    made = [line for of_corpus in rows.values() for line in real.gain_table(of_corpus)]
    made += real.compare_orders(rows, read_rows(RESULTS / "rope.jsonl"))
    published = (RESULTS / "real.md").read_text().splitlines()
    assert len(made) > 40 and [line for line in made if line not in published] == []


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
