"""The spectrum card, the decay study and the synthetic probes, against independent values."""

import csv
import math
import random
import re
import sys
from pathlib import Path

import mpmath
import pytest
import torch

from conf.errors import UserError
from data import corpus as corpora
from data.corpora import recall
from model import spectrum
from model.scaling import TrainedContext
from studies import decay, probe, spectrum as spectrum_study
from tests.helpers import eval_settings, run_train, train_settings


def rope(L: int = 256, D: int = 64, base: float = 10000.0) -> TrainedContext:
    return TrainedContext("rope", L, spectrum.frequencies(D, base))


def test_rotations_by_hand():
    r = spectrum.rotations(spectrum.frequencies(64, 10000.0), 256)
    assert r[0].item() == pytest.approx(256 / (2 * math.pi)) and (r < 1).sum() == 19  # 13 of 32 complete one
    assert r[-1].item() == pytest.approx(256 / (2 * math.pi) * 10000 ** (-62 / 64))


@pytest.mark.parametrize("D, L, published", [(128, 1024, 4.3e3), (128, 4096, 2.7e4)])
def test_base_bound_is_the_published_one(D, L, published):
    """Men et al. 2024, table 2; Su, kexue.fm/archives/10122. Both give two digits."""
    assert spectrum.base_bound(D, L) == pytest.approx(published, rel=0.04)


def test_base_bound_is_where_the_sum_of_cosines_becomes_negative():
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


def test_scale_matched_base_of_llama_2_is_10000():
    assert spectrum.scale_matched_base(128, 4096) == pytest.approx(10000, rel=0.01)


def test_card_and_warning():
    card = spectrum.card(rope())
    assert "32 pairs rotate 40.7 .. 0.0054 times within 256 tokens; 19 never complete a rotation" in card
    assert spectrum.card(TrainedContext("alibi", 256, None)) == ""
    assert spectrum.warning({"beta_fast": 32.0}, rope()) == ""  # 256 > 201
    short = spectrum.warning({"beta_fast": 32.0}, rope(L=128))
    assert "scaling.beta_fast=32 rotations is more than any pair makes in 128 tokens (20.4 at most)" in short
    assert "beta=32" in spectrum.warning({"beta": 32.0}, rope(L=128))
    assert spectrum.warning({"beta": 32.0}, TrainedContext("alibi", 128, None)) == ""


def test_train_prints_the_card_for_rope_and_not_for_alibi(here, capsys):
    run_train("steps=1", "name=a")
    assert "never complete a rotation" in capsys.readouterr().out
    run_train("steps=1", "name=b", "pos=alibi")
    assert "never complete a rotation" not in capsys.readouterr().out


def test_spectrum_study_writes_picture_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spectrum", "--ctx", "128", "--rotary-dim", "32", "--out", str(tmp_path / "s")])
    spectrum_study.main()
    out = capsys.readouterr().out
    assert "yarn: warning: scaling.beta_fast=32" in out and (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "s.csv").open()))
    assert len(rows) == 16
    for row in rows:
        assert float(row["pi"]) == pytest.approx(float(row["none"]) / 8, rel=1e-4)
    assert float(rows[0]["ntk"]) == float(rows[0]["none"])
    assert float(rows[-1]["ntk"]) == pytest.approx(float(rows[-1]["pi"]), rel=1e-4)
    monkeypatch.setattr(sys, "argv", ["spectrum", "--ctx", "1"])
    with pytest.raises(UserError, match="--ctx must be at least 2"):
        spectrum_study.main()


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


def test_a_larger_base_weakens_the_decay():
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

    notes = [x for x in note_text().splitlines() if recall.NOTE.fullmatch(x)]
    assert note_text() == note_text() and [x for x in note_text().splitlines() if x not in notes] == LINES * 10
    assert all(len(x.split()) == 1 + key + answer for x in notes) and 0.4 < len(notes) / len(LINES * 10) < 0.6
    again = sum(x in notes[:i] for i, x in enumerate(notes)) / len(notes)
    assert 0.6 < again < 0.95  # most can be known from before, the others are new
    assert recall.fingerprint(key, answer) != recall.fingerprint(key, answer + 1)
    with pytest.raises(UserError, match="must be 1 to 16 and 1 to 64 letters"):
        recall.fingerprint(0, answer)


def test_probe_scores_what_a_model_that_knows_would_get():
    """Half the answers right with probability 0.9, half with 0.1 on the right one."""

    class Stub:
        def last_logits(self, x, last, change):
            p = torch.full((len(x), last, 10), 0.1 / 9)
            p[: len(x) // 2, :, 3], p[len(x) // 2 :, :, 4] = 0.9, 0.9
            return p.log()

    texts = torch.full((4, 9), 3)
    nats, accuracy = probe.score(Stub(), texts, 1, None)
    assert accuracy == 0.5 and nats == pytest.approx(-(math.log(0.9) + math.log(0.1 / 9)) / 2)


def test_probe_of_a_run_by_its_corpus(here, capsys, monkeypatch):
    monkeypatch.setattr(probe, "EXAMPLES", 4)
    run_train("data=recall", "data.vocab_size=512", "steps=2", "name=r")
    probe.probe_run(eval_settings("run=r", "ctx=128", "scaling=pi"))
    out = capsys.readouterr().out
    assert "task: recall 4 letters of a note" in out and "chance 4 %" in out
    assert "n past L" in out and "distance past L" in out
    assert list(Path("runs/r/eval/probe").glob("pi-ctx128.*"))
    run_train("steps=1", "name=text")
    probe.probe_run(eval_settings("run=text", "ctx=128", "scaling=ntk"))
    assert "task: copy 16 tokens of real text" in capsys.readouterr().out


@pytest.mark.parametrize("n, distance", [(128, 64), (300, 200)])
def test_copy_of_text_repeats_its_end_at_its_distance(n, distance, cache):
    corpus = corpora.prepare(train_settings("exp=smoke").data, cache)
    for seed in range(5):
        text = probe.copy_of_text(corpus, n, distance, seed)
        size = probe.CUE + probe.ANSWER
        assert len(text) == n + 1 and text[-size:] == text[-size - distance : -distance]
