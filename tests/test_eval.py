"""The measurement: against a model whose losses are known, and as a whole on a trained run."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
import eval as evaluation
import report
from data import tokens
from model import protocols
from model.scaling import UNSCALED
from tests.conftest import eval_settings, run_eval, run_train


class Stub:
    """Token t costs t / 100 nats, plus 1 if fewer than `needs` tokens come before it in the window."""

    def __init__(self, needs: int = 0):
        self.needs, self.seen = needs, []

    def __call__(self, x, targets):
        self.seen.append((x.clone(), targets.clone()))
        S = targets.shape[1]
        before = torch.arange(x.shape[1] - S + 1, x.shape[1] + 1)
        return targets / 100 + (before < self.needs).float()


TEXT = torch.arange(33).repeat(2, 1) + torch.tensor([[0], [100]])  # two documents of 33 tokens, ctx 32


def test_matched_targets_are_the_same_at_every_length_and_scored_once():
    stub = Stub()
    for n in (4, 8, 32):
        got = protocols.matched(stub, TEXT, n, score=4)
        assert torch.allclose(got, TEXT[:, -4:] / 100)  # 0.29 .. 0.32 and 1.29 .. 1.32, by hand
        x, targets = stub.seen[-1]
        assert x.shape == (2, n) and torch.equal(targets, TEXT[:, -4:])
        assert torch.equal(x[:, -3:], TEXT[:, -4:-1])  # each target right after its own context
        assert x[0, 0] == 32 - n


def test_context_shows_and_nothing_else_does():
    """With a model that needs 6 tokens: at n=4 all four targets pay, at n=8 the first (5 before it), at 16 none."""
    plain = TEXT[:, -4:] / 100
    paid = [(protocols.matched(Stub(6), TEXT, n, 4) - plain).sum().item() for n in (4, 8, 16)]
    assert paid == pytest.approx([8, 2, 0], abs=1e-4)


@pytest.mark.parametrize("n, stride", [(8, 4), (8, 3), (8, 8), (8, 100), (32, 4), (31, 4), (5, 1), (1, 1)])
def test_sliding_windows_score_every_token_once_and_give_it_what_they_promise(n, stride):
    stub = Stub()
    assert torch.allclose(protocols.sliding(stub, TEXT, n, stride), TEXT[:, 1:] / 100)  # in order, each once
    first, *others = stub.seen
    step = min(stride, n)
    assert 0 < first[0].shape[1] <= n and first[0].shape == first[1].shape
    for x, targets in others:
        assert x.shape[1] == n and targets.shape[1] == step  # so n - step tokens at least before each target
        assert torch.equal(x[:, -1] + 1, targets[:, -1])
    # by hand: 8 wide by 4, a model that needs 6: only the first 5 tokens and none after pay
    if (n, stride) == (8, 4):
        paid = protocols.sliding(Stub(6), TEXT, n, stride) - TEXT[:, 1:] / 100
        # the first window is 8 wide: 5 pay; each later one scores tokens with 5, 6, 7, 8 before them: one pays
        assert paid.sum(dim=1).tolist() == pytest.approx([5 + 6] * 2, abs=1e-4)


def test_stride_one_is_every_token_given_the_n_before_it():
    """Against one forward pass for each token."""
    got = protocols.sliding(Stub(6), TEXT, 6, 1)
    for t in range(1, 33):
        alone = Stub(6)(TEXT[:, max(0, t - 6) : t], TEXT[:, t : t + 1])
        assert torch.equal(got[:, t - 1 : t], alone)


def test_the_end_of_sliding_windows_is_the_matched_targets():
    matched = protocols.matched(Stub(6), TEXT, 8, 4)
    for stride in (4, 5, 8):  # the last window holds all four
        assert torch.equal(protocols.sliding(Stub(6), TEXT, 8, stride)[:, -4:], matched)
    assert not torch.equal(protocols.sliding(Stub(6), TEXT, 8, 2)[:, -4:], matched)


def test_prefix_scores_the_first_n_and_dilutes():
    assert torch.allclose(protocols.prefix(Stub(), TEXT, 5), TEXT[:, 1:6] / 100)
    means = [(protocols.prefix(Stub(6), TEXT, n) - TEXT[:, 1 : n + 1] / 100).mean().item() for n in (5, 10, 32)]
    assert means == pytest.approx([1, 0.5, 5 / 32], abs=1e-4)


def test_targets_and_cost_are_what_a_protocol_reads():
    for name, n, want, read in (("matched", 8, 4, 8), ("sliding", 8, 32, 8 + 6 * 8), ("prefix", 8, 8, 8)):
        protocol = protocols.protocol(name, score=4, stride=4)
        assert protocols.targets(protocol, TEXT, n).shape == (2, want)
        assert protocols.cost(protocol, TEXT, n) == 2 * read


def test_what_a_copy_saves():
    """A model that pays 1 for each token that it has not seen in its window."""

    def needs_to_have_seen(x, targets):
        new = [[t not in row[: i + 1].tolist() for i, t in enumerate(ts)] for row, ts in zip(x, targets, strict=True)]
        return torch.tensor(new).float()

    saved = protocols.copied(needs_to_have_seen, TEXT, 16)
    assert saved.shape == (2, 7) and torch.equal(saved, torch.ones(2, 7))
    assert torch.equal(protocols.copied(Stub(), TEXT, 16), torch.zeros(2, 7))


def test_headroom_says_when_there_is_little():
    def curve(half, whole):
        return [{"n": 128, "nll": [half] * 30, "tokens": 30}, {"n": 256, "nll": [whole] * 30, "tokens": 30}]

    much, little = torch.full((30, 7), 2.0), torch.full((30, 7), 0.01)
    assert "this run can show what breaks" not in report.headroom(curve(3.0, 2.9), much, 256)
    assert "farther half of L saves +0.100" in report.headroom(curve(3.0, 2.9), much, 256)
    assert "this run can show what breaks" in report.headroom(curve(3.0, 2.99), much, 256)
    assert "this run can show what breaks" in report.headroom(curve(3.0, 2.9), little, 256)


def test_loss_by_position_is_the_mean_of_each_bucket():
    nats = torch.arange(200.0).expand(3, -1)
    rows = report.position_rows(nats)
    assert [(r["from"], r["to"]) for r in rows] == [(0, 63), (64, 127), (128, 199)]
    assert [r["loss"] for r in rows] == [31.5, 95.5, 163.5]


def test_lengths():
    assert evaluation.lengths(1024, 64, (256,)) == [64, 128, 256, 512, 1024]
    assert evaluation.lengths(1000, 64, (100, 200)) == [64, 100, 128, 200, 256, 512, 1000]
    assert evaluation.lengths([512, 100, 100], 64, (256,)) == [100, 512]
    assert evaluation.lengths(64, 64, (256,)) == [64]


def rows(nll: list[float], n: int = 512, label: str = "ntk") -> dict:
    return {"nll": nll, "tokens": 10 * len(nll), "n": n, "label": label}


def test_bootstrap_is_paired_and_weights_tokens():
    rng = np.random.default_rng(1)
    hard = rng.normal(30, 10, size=40)  # documents differ a lot
    method, window = rows((hard - 2 + rng.normal(0, 0.5, 40)).tolist()), rows(hard.tolist())
    mean, low, high = report.gain(method, window)
    assert mean == pytest.approx(np.mean(np.array(window["nll"]) - np.array(method["nll"])) / 10)
    assert low < mean < high and high - low < 0.05  # unpaired it would be about 0.9
    # the interval of a mean, against the textbook's
    low, high = report.bootstrap(hard, 40)
    half = 1.96 * hard.std(ddof=1) / math.sqrt(40)
    assert (low, high) == pytest.approx((hard.mean() - half, hard.mean() + half), rel=0.03)
    assert report.gain(window, window) == (0, 0, 0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """Three smoke runs: rope (trained long enough to beat a unigram model), alibi and learned."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / ".cache").symlink_to(cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["test"])
        run_train("pos=learned", "name=learned", "steps=2")
        run_train("pos=rope", "name=rope", "steps=60", "optim.lr=5e-3", "optim.warmup=5")
        run_train("pos=alibi", "name=alibi", "steps=2")
    return folder


@pytest.fixture
def runs(trained, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "argv", ["test"])
    return trained


def test_eval_measures_what_the_model_says(runs, capsys):
    """One length recomputed here, plainly, in float32 and document by document."""
    run_eval("run=rope", "ctx=256", "scaling=pi", "dtype=float32", "documents=6")
    out = capsys.readouterr().out
    assert "run: rope (as named)" in out and "only 6 held-out documents" in out
    files = {f.name.split("-ctx")[0]: f for f in Path("runs/rope/eval").glob("*-ctx256-*.jsonl")}
    assert set(files) >= {"none", "window", "pi"}
    assert Path("runs/rope/eval/ctx256.png").read_bytes().startswith(b"\x89PNG")

    from model import checkpoint, gpt
    from model.scaling import Scaled

    state = checkpoint.load(Path("runs/rope"))
    corpus = tokens.prepare(state["cfg"].data, ".cache")
    model = gpt.build(state["cfg"], corpus.vocab_size)
    model.load_state_dict(state["model"])
    _, targets = tokens.long_documents(corpus, 256, 6)
    for name, scaled in (
        ("none", UNSCALED),
        ("window", Scaled(window=64)),
        ("pi", Scaled(inv_freq=model.pos.inv_freq / 4)),
    ):
        row = compare.read(files[name])[-1]
        assert row["n"] == 256 and row["documents"] == 6 and row["tokens"] == 6 * 64
        total, n_bytes = 0.0, 0
        for doc in targets:
            logits = model(doc[None, :-1], scaled=scaled)[0, -64:].log_softmax(-1)
            total -= logits[torch.arange(64), doc[-64:]].sum().item()
            n_bytes += len(corpus.encoding.decode(doc[-64:].tolist()).encode(errors="surrogateescape"))
        assert row["loss"] == pytest.approx(total / (6 * 64), rel=1e-4)
        assert row["ppl"] == pytest.approx(math.exp(total / (6 * 64)), rel=1e-3)
        assert row["bits_per_byte"] == pytest.approx(total / math.log(2) / row["bytes"], rel=1e-4)
        assert row["low"] < row["loss"] < row["high"]
        assert row["bytes"] == pytest.approx(n_bytes, abs=12)  # a cut character decodes to a replacement


def test_inside_the_trained_context_all_three_curves_are_one(runs):
    run_eval("run=rope", "ctx=128", "scaling=yarn")
    curves = {c[0]["label"]: c for c in map(compare.read, Path("runs/rope/eval").glob("*-ctx128-*.jsonl"))}
    for i, row in enumerate(curves["none"]):
        same = row["n"] <= 64
        for label in ("window", "yarn"):
            assert (curves[label][i]["nll"] == row["nll"]) == same


def test_curves_are_reused_and_measured_again_when_asked(runs, capsys, monkeypatch):
    run_eval("run=rope", "ctx=128", "scaling=ntk")
    measured = []
    real = evaluation.write_rows
    monkeypatch.setattr(evaluation, "write_rows", lambda f, rows: measured.append(rows[0]["label"]) or real(f, rows))
    capsys.readouterr()
    run_eval("run=rope", "ctx=128", "scaling=ntk")
    assert measured == [] and "gain over window" in capsys.readouterr().out
    run_eval("run=rope", "ctx=128", "scaling=dynamic_ntk")
    assert measured == ["dynamic_ntk"]  # the controls are there
    run_eval("run=rope", "ctx=128", "scaling=ntk", "fresh=true")
    assert measured == ["dynamic_ntk", "none", "window", "ntk"]


def test_fixed_factor_shows_its_tax(runs, capsys):
    run_eval("run=rope", "ctx=256", "scaling=pi", "scaling.factor=fixed")
    out = capsys.readouterr().out
    assert "tax inside the trained context (n=64, factor 4): " in out and "nats/token [" in out
    rows = compare.read(next(Path("runs/rope/eval").glob("pi-factor=fixed-ctx256-*.jsonl")))
    assert [row["factor"] for row in rows] == [4, 4, 4]
    run_eval("run=rope", "ctx=256", "scaling=pi")
    assert "tax inside the trained context (n=64, factor 1): 0, nothing is changed there" in capsys.readouterr().out


def test_the_newest_run_that_fits_is_taken_and_said(runs, capsys):
    run_eval("ctx=128", "scaling=none", "documents=4")
    assert "run: alibi (the newest that fits)" in capsys.readouterr().out
    run_eval("ctx=128", "scaling=ntk", "documents=4")
    out = capsys.readouterr().out
    assert "run: rope (the newest that fits; passed over alibi: scaling=ntk does not fit" in out
    run_eval("ctx=64", "trained_with=smoke", "documents=4")
    assert "run: alibi" in capsys.readouterr().out
    for settings, message in [
        (["run=alibi", "ctx=128", "scaling=ntk"], "scaling=ntk does not fit: .*pos=alibi has none"),
        (["run=learned", "ctx=128"], "pos=learned has 64 positions and cannot be read at ctx=128"),
        (["run=absent", "ctx=128"], "run=absent: no trained run of that name in runs/: there are alibi, rope, learned"),
        (["ctx=128", "trained_with=other"], "no trained run with exp=other in runs/: first: python train.py"),
        (["run=rope", "ctx=1000000"], "ctx=1000000: the longest held-out document of this corpus allows"),
        (["runs=nowhere", "ctx=128"], "no trained run in nowhere/: first: python train.py pos=rope"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_eval(*settings)


def test_a_list_of_lengths_and_learned_positions_inside_their_table(runs, capsys):
    run_eval("run=learned", "ctx=[64]", "documents=4")
    assert "\n     64     1" in capsys.readouterr().out


def test_alibi_and_window_controls_at_long_contexts_stay_finite(runs):
    run_eval("run=alibi", "ctx=2048", "documents=2")
    for f in Path("runs/alibi/eval").glob("*-ctx2048-*.jsonl"):
        assert all(math.isfinite(row["loss"]) for row in compare.read(f))


def test_compare_lays_runs_over_each_other(runs, capsys, monkeypatch):
    for run, scaling in (("rope", "ntk"), ("alibi", "none")):
        run_eval(f"run={run}", "ctx=512", f"scaling={scaling}", "documents=7")
    run_eval("run=rope", "ctx=128", "scaling=ntk", "documents=5", "score=32")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["compare.py", "rope", "alibi"])
    compare.main()
    out = capsys.readouterr().out
    assert "rope  ntk" in out and "alibi  none" in out and "left out" in out
    assert Path("runs/compare.png").stat().st_size > 10_000
    monkeypatch.setattr(sys, "argv", ["compare.py", "absent"])
    with pytest.raises(ValueError, match="absent: no such run in runs/"):
        compare.main()


def test_labels_say_what_differs():
    cfg = eval_settings("scaling=yarn", "scaling.beta_fast=4.0", "scaling.factor=fixed")
    assert evaluation.label("yarn", cfg.scaling) == "yarn factor=fixed beta_fast=4.0"
    assert evaluation.label("window", eval_settings("scaling=window").scaling) == "window"


def test_a_damaged_curve_is_named(runs):
    bad = Path("runs/rope/eval/broken.jsonl")
    bad.write_text('{"n": 64')
    with pytest.raises(ValueError, match=r"broken\.jsonl: not a curve that eval\.py wrote"):
        compare.read(bad)
    bad.unlink()
    assert json.loads(Path("runs/rope/config.json").read_text())["pos"]["kind"] == "rope"
