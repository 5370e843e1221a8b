"""The evaluation: tasks against a model whose losses are known, and eval.py and compare.py on trained runs."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
from conf.errors import UserError
from conf.registry import choices, yaml_values
from data import corpus as corpora
from data.held_out import long_documents
from engine import checkpoint
from engine.run import Run
from measure import curves, evaluation, tables, tasks
from measure.curves import Curve, Row, read_curve
from measure.positions import position_rows
from measure.statistics import bootstrap, gain
from measure.tasks.matched import Matched
from measure.tasks.prefix import Prefix
from measure.tasks.sliding import Sliding
from model import gpt
from model.scaling import NO_CHANGE, ContextChange, override, resolve
from tests.helpers import ROOT, error_of, eval_settings, run_eval, run_train

OLD_CURVE = ROOT / "tests" / "data" / "curve_format2.jsonl"  # two rows of a curve that an earlier version wrote


def row(nll: list[float], **values: object) -> Row:
    """The first row of the fixture with these losses of each document, 10 tokens of each, and other values."""
    first = {"nll": nll, "tokens": 10 * len(nll), "documents": len(nll)}
    return dataclasses.replace(read_curve(OLD_CURVE).first, **{**first, **values})


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


def test_matched_targets_are_the_same_at_every_length_and_scored_one_time():
    stub = Stub()
    for n in (4, 8, 32):
        got = Matched(4).score(stub, TEXT, n)
        assert torch.allclose(got, TEXT[:, -4:] / 100)  # 0.29 .. 0.32 and 1.29 .. 1.32, by hand
        x, targets = stub.seen[-1]
        assert x.shape == (2, n) and torch.equal(targets, TEXT[:, -4:])
        assert torch.equal(x[:, -3:], TEXT[:, -4:-1])  # each target right after its own context
        assert x[0, 0] == 32 - n


def test_context_shows_and_nothing_else_does():
    """With a model that needs 6 tokens: at n=4 all four targets pay, at n=8 the first (5 before it), at 16 none."""
    plain = TEXT[:, -4:] / 100
    paid = [(Matched(4).score(Stub(6), TEXT, n) - plain).sum().item() for n in (4, 8, 16)]
    assert paid == pytest.approx([8, 2, 0], abs=1e-4)


@pytest.mark.parametrize("n, stride", [(8, 4), (8, 3), (8, 8), (8, 100), (32, 4), (31, 4), (5, 1), (1, 1)])
def test_sliding_windows_score_every_token_one_time_with_the_context_they_promise(n, stride):
    stub = Stub()
    assert torch.allclose(Sliding(stride).score(stub, TEXT, n), TEXT[:, 1:] / 100)  # in order, each one time
    first, *others = stub.seen
    step = min(stride, n)
    assert 0 < first[0].shape[1] <= n and first[0].shape == first[1].shape
    for x, targets in others:
        assert x.shape[1] == n and targets.shape[1] == step  # so n - step tokens at least before each target
        assert torch.equal(x[:, -1] + 1, targets[:, -1])
    # by hand: 8 wide by 4, a model that needs 6: only the first 5 tokens and none after pay
    if (n, stride) == (8, 4):
        paid = Sliding(stride).score(Stub(6), TEXT, n) - TEXT[:, 1:] / 100
        # the first window is 8 wide: 5 pay; each later one scores tokens with 5, 6, 7, 8 before them: one pays
        assert paid.sum(dim=1).tolist() == pytest.approx([5 + 6] * 2, abs=1e-4)


def test_stride_one_is_every_token_given_the_n_before_it():
    """Against one forward pass for each token."""
    got = Sliding(1).score(Stub(6), TEXT, 6)
    for t in range(1, 33):
        single = Stub(6)(TEXT[:, max(0, t - 6) : t], TEXT[:, t : t + 1])
        assert torch.equal(got[:, t - 1 : t], single)


def test_the_end_of_sliding_windows_is_the_matched_targets():
    matched = Matched(4).score(Stub(6), TEXT, 8)
    for stride in (4, 5, 8):  # the last window holds all four
        assert torch.equal(Sliding(stride).score(Stub(6), TEXT, 8)[:, -4:], matched)
    assert not torch.equal(Sliding(2).score(Stub(6), TEXT, 8)[:, -4:], matched)


def test_prefix_scores_the_first_n_and_dilutes():
    assert torch.allclose(Prefix().score(Stub(), TEXT, 5), TEXT[:, 1:6] / 100)
    means = [(Prefix().score(Stub(6), TEXT, n) - TEXT[:, 1 : n + 1] / 100).mean().item() for n in (5, 10, 32)]
    assert means == pytest.approx([1, 0.5, 5 / 32], abs=1e-4)


def test_targets_and_cost_by_hand():
    for task, n, scored, processed in ((Matched(4), 8, 4, 8), (Sliding(4), 8, 32, 8 + 6 * 8), (Prefix(), 8, 8, 8)):
        assert task.targets(TEXT, n).shape == (2, scored)
        assert task.cost(TEXT, n) == 2 * processed


@pytest.mark.parametrize("name", choices("task"))
def test_every_task_keeps_the_contract(name):
    """Of its yaml: it scores tokens of the text, says what, and its attributes say the truth."""
    task = tasks.build(yaml_values("task", name))
    text = torch.arange(129).repeat(3, 1) + torch.tensor([[0], [1000], [2000]])  # 3 documents, ctx 128
    assert task.label and task.describe(128) and task.shortest >= 1
    for n in (64, 128):
        targets = task.targets(text, n)
        assert targets.shape[0] == 3 and torch.allclose(task.score(Stub(), text, n), targets / 100)
        assert all(set(row.tolist()) <= set(document.tolist()) for row, document in zip(targets, text, strict=True))
        assert task.cost(text, n) > 0
    assert torch.equal(task.targets(text, 64)[:, -1], task.targets(text, 128)[:, -1]) == task.same_targets


def test_what_a_copy_saves():
    """A model that pays 1 for each token that it has not seen in its window."""

    def needs_to_have_seen(x, targets):
        new = [[t not in row[: i + 1].tolist() for i, t in enumerate(ts)] for row, ts in zip(x, targets, strict=True)]
        return torch.tensor(new).float()

    saved = evaluation.Repetition().score(needs_to_have_seen, TEXT, 16)
    assert saved.shape == (2, 7) and torch.equal(saved, torch.ones(2, 7))
    assert torch.equal(evaluation.Repetition().score(Stub(), TEXT, 16), torch.zeros(2, 7))


def test_headroom_says_when_there_is_little():
    def curve(half, full):
        return Curve([row([half] * 30, n=128, tokens=30), row([full] * 30, n=256, tokens=30)])

    much, little = torch.full((30, 7), 2.0), torch.full((30, 7), 0.01)
    assert "this run can show which methods break" not in tables.headroom(curve(3.0, 2.9), much)
    assert "farther half of L saves +0.100" in tables.headroom(curve(3.0, 2.9), much)
    assert "this run can show which methods break" in tables.headroom(curve(3.0, 2.99), much)
    assert "this run can show which methods break" in tables.headroom(curve(3.0, 2.9), little)


def test_loss_by_position_is_the_mean_of_each_bucket():
    nats = torch.arange(200.0).expand(3, -1)
    rows = position_rows(nats)
    assert [(r["from"], r["to"]) for r in rows] == [(0, 63), (64, 127), (128, 199)]
    assert [r["loss"] for r in rows] == [31.5, 95.5, 163.5]


def test_lengths():
    assert evaluation.evaluated_lengths(1024, 64, (256,)) == [64, 128, 256, 512, 1024]
    assert evaluation.evaluated_lengths(1000, 64, (100, 200)) == [64, 100, 128, 200, 256, 512, 1000]
    assert evaluation.evaluated_lengths([512, 100, 100], 64, (256,)) == [100, 512]
    assert evaluation.evaluated_lengths(64, 64, (256,)) == [64]


def test_bootstrap_is_paired_and_weights_tokens():
    rng = np.random.default_rng(1)
    hard = rng.normal(30, 10, size=40)  # documents differ a lot
    method, window = row((hard - 2 + rng.normal(0, 0.5, 40)).tolist()), row(hard.tolist())
    mean, low, high = gain(method, window)
    assert mean == pytest.approx(np.mean(np.array(window.nll) - np.array(method.nll)) / 10)
    assert low < mean < high and high - low < 0.05  # unpaired it would be about 0.9
    # the interval of a mean, against the textbook's
    low, high = bootstrap(hard, 40)
    half = 1.96 * hard.std(ddof=1) / math.sqrt(40)
    assert (low, high) == pytest.approx((hard.mean() - half, hard.mean() + half), rel=0.03)
    assert gain(window, window) == (0, 0, 0)


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

    state = checkpoint.load(Path("runs/rope"))
    corpus = corpora.prepare(state["cfg"].data, ".cache")
    model = gpt.build(state["cfg"], corpus.vocab_size)
    model.load_state_dict(state["model"])
    _, targets = long_documents(corpus, 256, 6)
    for name, change in (
        ("none", NO_CHANGE),
        ("window", ContextChange(window=64)),
        ("pi", ContextChange(inv_freq=model.pos.inv_freq / 4)),
    ):
        row = read_curve(files[name]).rows[-1]
        assert row.n == 256 and row.documents == 6 and row.tokens == 6 * 64 and row.task == "matched"
        total, n_bytes = 0.0, 0
        for doc in targets:
            logits = model(doc[None, :-1], change=change)[0, -64:].log_softmax(-1)
            total -= logits[torch.arange(64), doc[-64:]].sum().item()
            n_bytes += len(corpus.encoding.decode(doc[-64:].tolist()).encode(errors="surrogateescape"))
        assert row.loss == pytest.approx(total / (6 * 64), rel=1e-4)
        assert row.ppl == pytest.approx(math.exp(total / (6 * 64)), rel=1e-3)
        assert row.bits_per_byte == pytest.approx(total / math.log(2) / row.bytes, rel=1e-4)
        assert row.low < row.loss < row.high
        assert row.bytes == pytest.approx(n_bytes, abs=12)  # a cut character decodes to a replacement


def test_inside_the_trained_context_all_three_curves_are_one(runs):
    run_eval("run=rope", "ctx=128", "scaling=yarn")
    found = {c.label: c for c in map(read_curve, Path("runs/rope/eval").glob("*-ctx128-*.jsonl"))}
    for i, row in enumerate(found["none"].rows):
        same = row.n <= 64
        for label in ("window", "yarn"):
            assert (found[label].rows[i].nll == row.nll) == same


def test_curves_are_reused_and_measured_again_when_asked(runs, capsys, monkeypatch):
    run_eval("run=rope", "ctx=128", "scaling=ntk")
    measured, write_jsonl = [], evaluation.write_jsonl

    def noted(file, rows):
        measured.append(rows[0].label)
        write_jsonl(file, rows)

    monkeypatch.setattr(evaluation, "write_jsonl", noted)
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
    rows = read_curve(next(Path("runs/rope/eval").glob("pi-factor=fixed-ctx256-*.jsonl"))).rows
    assert [row.factor for row in rows] == [4, 4, 4]
    run_eval("run=rope", "ctx=256", "scaling=pi")
    assert "tax inside the trained context (n=64, factor 1): 0, nothing is changed there" in capsys.readouterr().out


def test_the_newest_run_that_fits_is_evaluated_and_named(runs, capsys):
    run_eval("ctx=128", "scaling=none", "documents=4")
    assert "run: alibi (the newest that fits)" in capsys.readouterr().out
    run_eval("ctx=128", "scaling=ntk", "documents=4")
    out = capsys.readouterr().out
    assert "run: rope (the newest that fits; skipped alibi: scaling=ntk is not applicable" in out
    run_eval("ctx=64", "trained_with=smoke", "documents=4")
    assert "run: alibi" in capsys.readouterr().out
    for settings, message in [
        (["run=alibi", "ctx=128", "scaling=ntk"], "scaling=ntk is not applicable: .*pos=alibi has none"),
        (["run=learned", "ctx=128"], "pos=learned has 64 positions and cannot be evaluated at ctx=128"),
        (["run=absent", "ctx=128"], "run=absent: no trained run of that name in runs/: there are alibi, rope, learned"),
        (["ctx=128", "trained_with=other"], "no trained run with exp=other in runs/: first: python train.py"),
        (["run=rope", "ctx=1000000"], "ctx=1000000: the longest held-out document of this corpus allows"),
        (["runs=nowhere", "ctx=128"], "no trained run in nowhere/: first: python train.py pos=rope"),
    ]:
        with pytest.raises(UserError, match=message):
            run_eval(*settings)


def test_a_list_of_lengths_and_learned_positions_inside_their_table(runs, capsys):
    run_eval("run=learned", "ctx=[64]", "documents=4")
    assert "\n     64     1" in capsys.readouterr().out


def test_alibi_and_window_controls_at_long_contexts_stay_finite(runs):
    run_eval("run=alibi", "ctx=2048", "documents=2")
    for f in Path("runs/alibi/eval").glob("*-ctx2048-*.jsonl"):
        assert all(math.isfinite(row.loss) for row in read_curve(f).rows)


def test_compare_lays_runs_over_each_other(runs, capsys, monkeypatch):
    for run, scaling in (("rope", "ntk"), ("alibi", "none")):
        run_eval(f"run={run}", "ctx=512", f"scaling={scaling}", "documents=7")
    run_eval("run=rope", "ctx=128", "scaling=ntk", "documents=5", "task.scored_tokens=32")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["compare.py", "rope", "alibi"])
    compare.main()
    out = capsys.readouterr().out
    assert "rope  ntk" in out and "alibi  none" in out and "left out" in out
    assert Path("runs/compare.png").stat().st_size > 10_000
    assert "absent: no such run in runs/" in error_of(compare.main, ["absent"], monkeypatch)
    only = error_of(compare.main, ["rope", "--only", "yarn9"], monkeypatch)
    assert "--only yarn9: no curve is labelled yarn9; there are " in only


def test_labels_say_what_differs():
    def label(*settings):
        return evaluation.requested_method(eval_settings(*settings)).label

    assert label("scaling=yarn", "scaling.beta_fast=4.0", "scaling.factor=fixed") == "yarn factor=fixed beta_fast=4.0"
    assert label("scaling=window") == "window" and label("scaling=rerope_leaky") == "rerope_leaky"
    assert label("scaling=ntk", "plus=[logn]") == "ntk + logn"
    assert evaluation.requested_method(eval_settings("scaling=none")) == evaluation.NONE
    assert evaluation.requested_method(eval_settings("scaling=window")) == evaluation.WINDOW


# ---- curve files ----


def old_format(path: Path) -> list[dict]:
    """The rows of a curve file as earlier versions wrote them: the task's label as `protocol`, and `score`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["protocol"], row["score"] = row.pop("task"), 64
    return rows


def test_curves_of_an_earlier_version_are_found_under_their_names(runs, capsys):
    """eval reads them instead of evaluating again: a number that is changed on disk comes out changed."""
    settings = ("run=rope", "ctx=128", "scaling=pi", "documents=5")
    run_eval(*settings)
    (file,) = (f for f in Path("runs/rope/eval").glob("pi-ctx128-*.jsonl") if read_curve(f).first.documents == 5)
    capsys.readouterr()
    curves.write_jsonl(file, [{**row, "ppl": 12345.0} for row in old_format(file)])
    run_eval(*settings)
    assert capsys.readouterr().out.count("12345.00") == 2  # n = 64 and 128
    assert {row.task for row in read_curve(file).rows} == {"matched"}
    file.unlink()


def test_a_row_of_an_earlier_version():
    curve = read_curve(OLD_CURVE)
    assert [row.n for row in curve.rows] == [128, 256] and curve.run == "rope-s0" and curve.label == "none"
    assert {row.task for row in curve.rows} == {"matched"} and curve.first.loss == 2.556608046606897
    assert len(curve.first.nll) == curve.first.documents == 32 and curve.written > 0


def test_a_written_curve_is_read_back(tmp_path):
    rows = read_curve(OLD_CURVE).rows
    curves.write_jsonl(tmp_path / "new" / "curve.jsonl", rows)
    back = read_curve(tmp_path / "new" / "curve.jsonl")
    assert back.rows == rows and back.by_length() == {128: rows[0], 256: rows[1]}
    assert "protocol" not in (tmp_path / "new" / "curve.jsonl").read_text()
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["curve.jsonl"]


def without(key: str) -> str:
    """The first row of the fixture without this key."""
    row = json.loads(OLD_CURVE.read_text().splitlines()[0])
    return json.dumps({k: v for k, v in row.items() if k != key})


def changed(**values: object) -> str:
    return json.dumps({**json.loads(OLD_CURVE.read_text().splitlines()[0]), **values})


@pytest.mark.parametrize(
    "text",
    [
        "", '{"n": 64', "{}", "[1]", "3", "null", "\x00\x01", without("n"), without("nll"), without("protocol"),
        changed(n="64"), changed(n=True), changed(loss="low"), changed(loss=None), changed(nll=3.0),
        changed(scaling="none"), changed(run=7), changed(window="all"), changed(unknown=1),
        OLD_CURVE.read_text()[:-40],
    ],
)  # fmt: skip
def test_damaged_and_reshaped_curves_are_one_clear_line(text, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=r"broken\.jsonl: not a curve that eval\.py wrote: delete it and evaluate") as e:
        read_curve(file)
    assert "\n" not in str(e.value)


def test_a_damaged_curve_of_a_run_is_named_by_compare(runs, monkeypatch):
    run_eval("run=rope", "ctx=128", "documents=4")
    bad = Path("runs/rope/eval/broken.jsonl")
    bad.write_text('{"n": 64')
    assert "runs/rope/eval/broken.jsonl: not a curve that eval.py wrote" in error_of(compare.main, [], monkeypatch)
    bad.unlink()


# ---- a run as one object ----


def test_run_open_equals_its_parts(runs):
    run = Run.open("rope", runs="runs", cache=".cache")
    state = checkpoint.load(Path("runs/rope"))
    assert run.name == "rope" and run.reason == "as named" and run.folder == Path("runs/rope")
    assert run.cfg == state["cfg"] and run.step == state["step"] == 60
    assert run.digest == checkpoint.digest(Path("runs/rope")) and run.validation == state["validation"]
    assert run.corpus.key == corpora.prepare(run.cfg.data, ".cache").key == state["corpus"]
    assert not run.model.training and run.context.pos == "rope"
    weights = run.model.state_dict()
    assert weights.keys() == state["model"].keys()
    assert all(torch.equal(weights[name], state["model"][name]) for name in weights)
    assert run.context.train_ctx == run.context.longest_trained_ctx == 64
    assert torch.equal(run.context.inv_freq, run.model.pos.inv_freq)
    assert run.trained_scaling(640) == NO_CHANGE
    pi, logn = yaml_values("scaling", "pi"), yaml_values("scaling", "logn")
    change = run.change([pi, logn], 128, 256)
    expected = override(NO_CHANGE, resolve(pi, run.context, 128, 256, [logn]))
    assert torch.equal(change.inv_freq, expected.inv_freq) and torch.equal(change.inv_freq, run.context.inv_freq / 2)
    assert (change.factor, change.logn) == (expected.factor, expected.logn) == (2, 64)


def test_run_open_refuses_what_does_not_fit(runs):
    def opened(name=None, **settings):
        return Run.open(name, runs="runs", cache=".cache", **settings)

    ntk = [yaml_values("scaling", "ntk")]
    assert opened().name == "alibi" and opened(scalings=ntk, ctx=128).name == "rope"  # the newest that fits
    with pytest.raises(UserError, match="scaling=ntk is not applicable"):
        opened("alibi", scalings=ntk)
    with pytest.raises(UserError, match="pos=learned has 64 positions"):
        opened("learned", ctx=65)
    with pytest.raises(UserError, match="run=absent: no trained run of that name"):
        opened("absent")
