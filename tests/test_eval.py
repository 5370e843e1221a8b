"""The evaluation: tasks and controls against stand-ins whose losses are known, eval.py and compare.py on trained runs.

Tasks with an answer are in test_tasks.py, gains by groups of targets in test_groups.py.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import compare
from conf.errors import UserError
from conf.registry import choices, yaml_values
from data import corpus as corpora
from data.corpus import Corpus
from data.near_copies import find_copies
from engine import checkpoint
from engine.run import Run
from measure import curves, evaluation, tasks
from measure.comparison import select_shared
from measure.curves import Curve, Row, better_control, controls, losses_file, read_curve
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.losses import print_curves, verdict
from measure.positions import position_rows
from measure.statistics import bootstrap, difference, gain
from measure.tasks import Piece, Task
from measure.tasks.matched import NEAR, Matched
from measure.tasks.prefix import Prefix
from measure.tasks.sliding import Sliding
from model import gpt, spectrum
from model.position_maps import Clipped
from model.scaling import NO_CHANGE, ContextChange, TrainedContext, override, resolve
from tests.helpers import (
    ROOT,
    StubModel,
    any_task_corpus,
    curve_of,
    error_of,
    eval_settings,
    held_out,
    model_of,
    random_tokens,
    run_eval,
    stub_evaluation,
    train_smoke_runs,
)

OLD_CURVE = ROOT / "tests" / "data" / "curve_format2.jsonl"  # two rows of a curve that an earlier version wrote


def row(nll: list[float], windows: tuple[int, ...] = (0,), **values: object) -> Row:
    """The first row of the fixture with these losses of each window (of 10 tokens), and other values."""
    about = {"nll": nll, "windows": list(windows), "tokens": 10 * len(nll), "documents": len(nll) // len(windows)}
    return dataclasses.replace(read_curve(OLD_CURVE).first, **{**about, **values})


# ---- tasks ----

TWO = held_out([range(33), range(100, 133)])  # two documents of 33 tokens, ctx 32
TEXT = torch.stack([torch.arange(33), torch.arange(100, 133)])


def matched(scored_tokens: int = 4, ctx: int = 32) -> Matched:
    """The last tokens of the two documents."""
    return Matched(TWO, ctx, 2, scored_tokens, windows=1, far_windows=1)


def scored(task: Task, n: int, needs: int = 0) -> torch.Tensor:
    """The losses of a stand-in that needs so many tokens, of all targets at length n, [documents, targets]."""
    parts = [StubModel(needs).losses(p.tokens, p.targets, NO_CHANGE)[:, mask(p)] for p in task.pieces(n)]
    return torch.cat(parts, dim=1)


def mask(piece: Piece) -> torch.Tensor:
    return torch.ones(piece.targets.shape[1], dtype=torch.bool) if piece.scored is None else piece.scored


def test_matched_targets_are_the_same_at_every_length_and_scored_one_time():
    for n in (4, 8, 32):
        (piece,) = matched().pieces(n)
        assert torch.allclose(scored(matched(), n), TEXT[:, -4:] / 100)  # 0.29 .. 0.32 and 1.29 .. 1.32, by hand
        assert piece.tokens.shape == (2, n) and torch.equal(piece.targets, TEXT[:, -4:])
        assert torch.equal(piece.tokens[:, -3:], TEXT[:, -4:-1])  # each target right after its own context
        assert piece.tokens[0, 0] == 32 - n


def test_context_shows_and_nothing_else_does():
    """With a model that needs 6 tokens: at n=4 all four targets pay, at n=8 the first (5 before it), at 16 none."""
    paid = [(scored(matched(), n, needs=6) - TEXT[:, -4:] / 100).sum().item() for n in (4, 8, 16)]
    assert paid == pytest.approx([8, 2, 0], abs=1e-4)


@pytest.mark.parametrize("n, stride", [(8, 4), (8, 3), (8, 8), (8, 100), (32, 4), (31, 4), (5, 1), (1, 1)])
def test_sliding_windows_score_every_token_one_time_with_the_context_they_promise(n, stride):
    task = Sliding(TWO, 32, 2, stride)
    assert torch.allclose(scored(task, n), TEXT[:, 1:] / 100)  # in order, each one time
    first, *others = task.pieces(n)
    step = min(stride, n)
    assert 0 < first.tokens.shape[1] <= n and first.tokens.shape == first.targets.shape
    for piece in others:
        assert piece.tokens.shape[1] == n and piece.targets.shape[1] == step  # n - step tokens at least before each
        assert torch.equal(piece.tokens[:, -1] + 1, piece.targets[:, -1])
    # by hand: 8 wide by 4, a model that needs 6: only the first 5 tokens and none after pay
    if (n, stride) == (8, 4):
        paid = scored(task, n, needs=6) - TEXT[:, 1:] / 100
        # the first window is 8 wide: 5 pay; each later one scores tokens with 5, 6, 7, 8 before them: one pays
        assert paid.sum(dim=1).tolist() == pytest.approx([5 + 6] * 2, abs=1e-4)


def test_stride_one_is_every_token_given_the_n_before_it():
    """Against one forward pass for each token."""
    got = scored(Sliding(TWO, 32, 2, stride=1), 6, needs=6)
    for t in range(1, 33):
        single = StubModel(needs=6).losses(TEXT[:, max(0, t - 6) : t], TEXT[:, t : t + 1], NO_CHANGE)
        assert torch.equal(got[:, t - 1 : t], single)


def test_the_end_of_sliding_windows_is_the_matched_targets():
    want = scored(matched(), 8, needs=6)
    for stride in (4, 5, 8):  # the last window holds all four
        assert torch.equal(scored(Sliding(TWO, 32, 2, stride), 8, needs=6)[:, -4:], want)
    assert not torch.equal(scored(Sliding(TWO, 32, 2, stride=2), 8, needs=6)[:, -4:], want)


def test_prefix_scores_the_first_n_and_dilutes():
    task = Prefix(TWO, 32, 2)
    assert torch.allclose(scored(task, 5), TEXT[:, 1:6] / 100)
    means = [(scored(task, n, needs=6) - TEXT[:, 1 : n + 1] / 100).mean().item() for n in (5, 10, 32)]
    assert means == pytest.approx([1, 0.5, 5 / 32], abs=1e-4)


def test_targets_and_cost_by_hand():
    for task, n, targets, processed in (
        (matched(), 8, 4, 8),
        (Sliding(TWO, 32, 2, stride=4), 8, 32, 8 + 6 * 8),
        (Prefix(TWO, 32, 2), 8, 8, 8),
    ):
        assert sum(p.scored_targets().shape[1] for p in task.pieces(n)) == targets
        assert sum(p.tokens.numel() for p in task.pieces(n)) == 2 * processed


def built(name: str, corpus: corpora.HeldOut, ctx: int, documents: int = 3) -> Task:
    return tasks.build(yaml_values("task", name), corpus, ctx, documents)


@pytest.mark.parametrize("name", choices("task"))
def test_every_task_keeps_the_contract(name):
    """Of its yaml: it scores tokens right after their context, says what, and its attributes say the truth."""
    task = built(name, any_task_corpus(), 512)
    assert task.label.split()[0] == name and task.describe() and 1 <= task.minimum <= task.shortest <= 512
    assert len(task.names) == len(set(task.names)) == 3
    assert task.accuracy == (task.threshold > 0) and 0 <= task.chance < 1
    for n in (task.minimum, 256, 512):
        windows, pieces = task.windows(n), task.pieces(n)
        assert windows == sorted(set(windows)) and set(windows) <= set(task.windows(task.minimum))
        assert pieces and all(torch.equal(p.tokens, q.tokens) for p, q in zip(pieces, task.pieces(n), strict=True))
        for piece in pieces:
            (B, T), S = piece.tokens.shape, piece.targets.shape[1]
            assert B == 3 * len(windows) == len(piece.targets) and 1 <= S <= T <= n
            assert piece.tokens.dtype == piece.targets.dtype == torch.int64
            assert torch.equal(piece.tokens[:, T - S + 1 :], piece.targets[:, :-1])
            assert mask(piece).any() and len(mask(piece)) == S
            assert piece.scored_targets().shape == (B, mask(piece).sum())
            assert piece.distance is None or (task.accuracy and 0 < piece.distance < n)
        distances = [piece.distance for piece in pieces]
        assert not task.accuracy or (None not in distances and len(set(distances)) == len(distances))


@pytest.mark.parametrize("name", choices("task"))
def test_what_a_task_scores_and_gives_as_input_is_in_its_identity(name):
    """Other documents, fewer of them, and every number among the knobs that changes a piece."""
    corpus, knobs = any_task_corpus(), yaml_values("task", name)
    task = built(name, corpus, 512)
    assert built(name, corpus, 512).identity() == task.identity()
    assert built(name, corpus, 512, documents=2).identity() != task.identity()
    renamed = [dataclasses.replace(document, name=f"{document.name} b") for document in corpus.held_out]
    assert built(name, dataclasses.replace(corpus, held_out=renamed), 512).identity() != task.identity()
    for knob, value in knobs.items():
        if isinstance(value, int):
            other = tasks.build({**knobs, knob: value - 1 if value > 1 else value + 1}, corpus, 512, 3)
            same = [torch.equal(getattr(p, x), getattr(q, x)) and torch.equal(mask(p), mask(q))
                    for p, q in zip(task.pieces(512), other.pieces(512), strict=False) for x in ("tokens", "targets")
                    if p.targets.shape == q.targets.shape and p.tokens.shape == q.tokens.shape]  # fmt: skip
            unchanged = all(same) and len(same) == 2 * len(task.pieces(512)) == 2 * len(other.pieces(512))
            assert unchanged or other.identity() != task.identity(), knob


# ---- windows of a document ----


def long_text(*lengths: int) -> corpora.HeldOut:
    """Documents of different tokens, with no near-copy."""
    starts = itertools.accumulate(lengths, initial=0)
    return held_out([range(start, start + length) for start, length in zip(starts, lengths, strict=False)])


def test_windows_are_spread_over_a_document_and_do_not_overlap():
    task = Matched(long_text(20_000, 12_000), 1024, 2, scored_tokens=64, windows=8, far_windows=2)
    for ends, N in zip(task.ends, (20_000, 12_000), strict=True):
        assert ends[-1] == N and len(ends) == 8 and ends[0] > NEAR
        assert np.abs(np.diff(ends) - (N - NEAR) / 8).max() <= 1
    (piece,) = task.pieces(256)
    targets = piece.scored_targets()
    assert targets.shape == (16, 64) and len(np.unique(targets)) == 16 * 64
    starts = (0, 20_000)  # the windows of a document together, in their order
    want = [start + end - 1 for start, ends in zip(starts, task.ends, strict=True) for end in ends]
    assert targets[:, -1].tolist() == want


@pytest.mark.parametrize("far_windows", [1, 2, 3])
def test_far_windows_are_among_the_near_ones_and_score_the_same_targets(far_windows):
    task = Matched(long_text(40_000, 12_000), 8192, 2, scored_tokens=64, windows=8, far_windows=far_windows)
    near, far = task.windows(256), task.windows(8192)
    assert task.windows(NEAR) == near == list(range(8)) and len(task.windows(NEAR + 1)) == far_windows
    assert len(far) == far_windows and set(far) < set(near) and (task.ends[:, far] > 8192).all()
    short, long = (task.pieces(n)[0] for n in (256, 8192))
    rows = [8 * document + window for document in range(2) for window in far]
    assert torch.equal(short.targets[rows], long.targets)
    assert torch.equal(short.tokens[rows], long.tokens[:, -256:]) and long.tokens.shape == (2 * far_windows, 8192)


def test_windows_without_enough_text_before_them_in_every_document_are_left_out():
    task = Matched(long_text(9000, 3000), 2500, 2, scored_tokens=64, windows=8, far_windows=8)
    assert task.near == [w for w in range(8) if (task.ends[:, w] > NEAR).all()]
    far = task.windows(2500)
    assert far == [w for w in range(8) if (task.ends[:, w] > 2500).all()] and far[-1] == 7
    assert len(far) < len(task.near) < 8
    assert f"{len(task.near)} of 8 planned windows ({len(far)} at n=2500)" in task.describe()


def test_long_lengths_share_windows_whatever_the_longest_length_is():
    corpus = long_text(40_000, 12_000)
    for windows, far_windows in ((8, 2), (8, 3), (5, 2)):
        tasks = [Matched(corpus, ctx, 2, 64, windows, far_windows) for ctx in (4096, 8192)]
        assert (tasks[0].ends == tasks[1].ends).all() and tasks[0].windows(4096) == tasks[1].windows(4096)
        assert len(tasks[0].windows(4096)) == len(tasks[1].windows(8192)) == far_windows


@pytest.mark.parametrize("length, want", [(1000, 7), (600, 4), (200, 1)])
def test_windows_do_not_overlap_in_a_short_document(length, want):
    task = Matched(long_text(length, 9000), 64, 2, scored_tokens=64, windows=8, far_windows=2)
    assert task.planned == want and (np.diff(task.ends, axis=1) >= 64).all()


def test_one_document_gives_no_interval_and_no_verdict():
    a, b = row([20.0, 10.0], windows=(0, 1)), row([10.0, 10.0], windows=(0, 1))
    assert a.documents == 1
    mean, low, high = gain(b, a)
    assert mean == 0.5 and math.isnan(low) and math.isnan(high)
    assert verdict(b, a).endswith("no different from being given only 128 tokens")
    in_windows = dataclasses.replace(a, window=16)  # all layers have one
    assert verdict(b, in_windows).endswith("no different from being given only 128 tokens")
    assert verdict(b, dataclasses.replace(in_windows, label="window")).endswith("seeing only 16 tokens at a time")


def with_training_text(corpus: corpora.HeldOut, train: np.ndarray) -> Corpus:
    """The same documents, of a corpus with this training stream."""
    values = {field.name: getattr(corpus, field.name) for field in dataclasses.fields(corpus)}
    copied = find_copies(train, [document.tokens for document in corpus.held_out])
    values["held_out"] = [dataclasses.replace(d, copied=c) for d, c in zip(corpus.held_out, copied, strict=True)]
    return Corpus(**values, encoding=None, train=train)


def planned_ends(corpus: corpora.HeldOut, ctx: int) -> np.ndarray:
    """Where the four windows of a document end if nothing is a near-copy."""
    return Matched(corpus, ctx, 2, scored_tokens=64, windows=4, far_windows=1).ends


def test_windows_are_moved_away_from_near_copies_of_training_text():
    """The second window of document 0 lies in a copy of 200 tokens, the third in one of 39: 32 of its 64 targets end
    a copied 8-gram, which is not more than half."""
    plain = long_text(10_000, 8_000)
    tokens, planned = plain.held_out[0].tokens, planned_ends(plain, 256)
    second, third = planned[0, 1], planned[0, 2]
    copies = [tokens[second - 180 : second + 20], tokens[third - 39 : third]]
    train = np.concatenate([np.full(50, 20_000), copies[0], np.full(9, 20_001), copies[1], np.full(9, 20_002)])
    corpus = with_training_text(plain, train)
    ends = Matched(corpus, 256, 2, scored_tokens=64, windows=4, far_windows=1).ends
    # 173 of the 180 tokens end a copied 8-gram: after two moves 45 of the 64 do, after three none
    assert (ends - planned).tolist() == [[0, -192, 0, 0], [0, 0, 0, 0]]
    one_more = with_training_text(plain, np.concatenate([train, tokens[third - 40 : third]]))
    assert Matched(one_more, 256, 2, 64, 4, 1).ends[0, 2] == third - 64
    for found in (corpus, one_more):
        grams = {tuple(found.train[i : i + 8]) for i in range(len(found.train) - 7)}
        task = Matched(found, 256, 2, scored_tokens=64, windows=4, far_windows=1)
        for document, row_of_ends in zip(task.documents, task.ends, strict=True):
            for end in row_of_ends:
                copied = [tuple(document.tokens[i - 7 : i + 1]) in grams for i in range(end - 64, end)]
                assert np.mean(copied) <= 0.5


@pytest.mark.parametrize("ctx", [256, 4096])
def test_a_document_of_near_copies_keeps_its_length_and_its_windows_apart(ctx):
    """All of document 0, or all between its first two windows: no place is left for the second one."""
    plain = long_text(10_000, 8_000)
    planned, tokens = planned_ends(plain, ctx), plain.held_out[0].tokens
    for train in (tokens, tokens[planned[0, 0] : planned[0, 1]]):
        corpus = with_training_text(plain, train)
        ends = Matched(corpus, ctx, 2, scored_tokens=64, windows=4, far_windows=1).ends
        assert (ends[1] == planned[1]).all() and ends[0, 1] < planned[0, 1]
        assert (np.diff([0, *ends[0]]) >= 64).all()  # no target is scored two times
        assert ((ends[0] > ctx) == (planned[0] > ctx)).all()


# ---- rows, intervals and controls ----


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


@pytest.mark.parametrize(
    "overrides, lengths",
    [
        (("ctx=256", "multiples=[1.125,1.5,9]"), [64, 72, 96, 128, 256]),  # L / 2 = 32 is below the shortest
        (("ctx=[256,128]",), [64, 128, 256]),  # and L, at which truncation is measured
        (("ctx=[64]",), [64]),
        (("ctx=[32,256]", "task.scored_tokens=16"), [32, 64, 256]),
        (("ctx=[128,256]", "task=recall"), [128, 256]),  # the texts of this task are longer than L
    ],
)
def test_evaluated_lengths_of_a_run(overrides, lengths, tmp_path):
    assert stub_evaluation(StubModel(), any_task_corpus(), tmp_path, *overrides, "documents=2").lengths == lengths


def test_bootstrap_is_paired_and_weights_tokens():
    rng = np.random.default_rng(1)
    hard = rng.normal(30, 10, size=40)  # documents differ a lot
    method, window = row((hard - 2 + rng.normal(0, 0.5, 40)).tolist()), row(hard.tolist())
    mean, low, high = gain(method, window)
    assert mean == pytest.approx(np.mean(np.array(window.nll) - np.array(method.nll)) / 10)
    assert low < mean < high and high - low < 0.05  # unpaired it would be about 0.9
    # the interval of a mean, against the textbook's
    low, high = bootstrap(hard)
    half = 1.96 * hard.std(ddof=1) / math.sqrt(40)
    assert (low, high) == pytest.approx((hard.mean() - half, hard.mean() + half), rel=0.03)
    assert gain(window, window) == (0, 0, 0)


def test_windows_of_one_document_are_no_independent_sample():
    """Four documents whose eight windows are alike: the interval is that of four values, not of 32."""
    nats = [10.0, 20.0, 30.0, 40.0]
    many = row([x for x in nats for _ in range(8)], tuple(range(8)))
    zero = row([0.0] * 32, tuple(range(8)))
    assert difference(many, zero) == difference(row(nats), row([0.0] * 4))


def test_gains_are_of_the_windows_that_both_rows_have():
    control = row([10.0, 90.0, 30.0, 20.0, 90.0, 50.0], (0, 3, 7))  # two documents; window 3 is hard
    method = row([5.0, 20.0, 10.0, 40.0], (0, 7))
    mean, low, high = gain(method, control)
    assert mean == pytest.approx(((10 - 5 + 30 - 20) + (20 - 10 + 50 - 40)) / 40)
    assert (low, high) == pytest.approx((7.5 / 10, 10 / 10))  # of the two documents: 15 / 20 and 20 / 20


def test_the_better_control_is_the_one_with_the_lower_loss_on_common_windows():
    window = row([30.0, 30.0], (7,), n=8192, window=64, extended_ctx=64, label="window")
    truncated = row([90.0, 20.0, 90.0, 20.0], (0, 7), n=64, window=None)
    assert better_control(window, {64: truncated}) is truncated
    layers = dataclasses.replace(window, window=16)  # all layers have windows of 16, and the model was trained at 64
    too_short = dataclasses.replace(truncated, n=16, nll=[0.0] * 4)
    assert better_control(layers, {16: too_short, 64: truncated}) is truncated
    worse = dataclasses.replace(truncated, nll=[0.0, 40.0, 0.0, 40.0])  # its loss is lower on other windows only
    assert better_control(window, {64: worse}) is window
    assert better_control(window, {}) is window and better_control(window, {32: truncated}) is window
    elsewhere = dataclasses.replace(truncated, windows=[0, 5])
    assert better_control(window, {64: elsewhere}) is window
    more_targets = dataclasses.replace(truncated, tokens=80)
    assert better_control(window, {64: more_targets}) is window
    assert better_control(window, {64: dataclasses.replace(truncated, texts="others")}) is window
    inside = row([30.0, 30.0], (7,), n=64, window=None, extended_ctx=64, label="window")
    assert better_control(inside, {64: truncated}) is inside  # there the two are the same
    diverged = dataclasses.replace(window, nll=[math.nan, math.nan])
    assert better_control(diverged, {64: truncated}) is diverged
    with_answer = dataclasses.replace(window, hits=[1.0, 0.0])
    assert better_control(with_answer, {64: truncated}) is with_answer


def test_the_table_says_how_many_tokens_truncation_gives(capsys):
    """As many as the model was trained on, although the windows of its layers are shorter."""
    none, window = (curve_of("rope", label, {64: 3.0, 128: 3.5}) for label in ("none", "window"))
    layers = [Curve([dataclasses.replace(row, window=16) for row in curve.rows]) for curve in (none, window)]
    print_curves(matched(), *layers)
    assert "\nt: the better control is truncation: only the last 64 tokens are given\n" in capsys.readouterr().out


CORPUS = held_out([(np.arange(700) + shift) % 97 for shift in range(3)])
SMALL = ("documents=3", "task.windows=2")


def measured(found: Evaluation, *methods: Method) -> list[Curve]:
    """The curves of these methods, without scaling and with the window control if none is named."""
    methods = methods or (NONE, WINDOW)
    with found.running([]):
        return [found.curve(method) for method in methods]


@pytest.mark.parametrize("window_costs, better", [(0.5, "none"), (-0.5, "window")])
def test_truncation_is_no_scaling_at_the_trained_context(window_costs, better, tmp_path):
    """A window that costs 0.5 more than the same text without it, and one that costs less."""
    model = StubModel(needs=65, window_costs=window_costs)
    none, window = measured(stub_evaluation(model, CORPUS, tmp_path, "ctx=[128,256]", *SMALL))
    assert [r.n for r in none.rows] == [64, 128, 256]  # with L
    bars = controls([none, window])["stub"]
    assert bars[64].nll == none.rows[0].nll and {bars[n].label for n in (128, 256)} == {better}
    for n, r in none.by_length().items():
        if n > 64:
            assert bars[n] == (none.rows[0] if better == "none" else window.by_length()[n])
            # what no scaling saves by seeing 65 tokens, and what the window costs where it is the bar
            assert gain(r, bars[n])[0] == pytest.approx(1.0 if better == "none" else 0.5)


def test_truncation_is_no_control_of_prefixes(tmp_path):
    """Their targets differ between lengths."""
    model = StubModel(window_costs=5.0)
    settings = ("ctx=[64,128]", "documents=3", "task=prefix")
    none, window = measured(stub_evaluation(model, CORPUS, tmp_path, *settings))
    assert controls([none, window])["stub"] == window.by_length()


@pytest.mark.parametrize("name", choices("task"))
def test_the_controls_of_every_task_are_on_the_targets_of_the_method(name, tmp_path):
    """Of each task: a bar that is not the window control has the same targets, in the windows that both have."""

    class Model(StubModel):
        def last_logits(self, tokens: torch.Tensor, last: int, change: ContextChange) -> torch.Tensor:
            return torch.zeros(len(tokens), last, 1024)

    found = stub_evaluation(Model(window_costs=5.0), any_task_corpus(), tmp_path, "ctx=[128,512]", f"task={name}",
                            "documents=2")  # fmt: skip
    bars = controls(measured(found))["stub"]
    for n, bar in bars.items():
        if bar.label != "window":
            common = [w for w in bar.windows if w in found.task.windows(n)]
            mine, its = ([np.concatenate([p.scored_targets() for p in found.task.pieces(length)], axis=1)
                          .reshape(2, len(windows), -1)[:, [windows.index(w) for w in common]]]
                         for length, windows in ((n, found.task.windows(n)), (bar.n, bar.windows)))  # fmt: skip
            assert np.array_equal(mine, its)


# ---- curves in files ----


def test_longer_evaluations_measure_only_the_new_lengths(tmp_path):
    model = StubModel()
    short = stub_evaluation(model, CORPUS, tmp_path, "ctx=128", *SMALL)
    first = measured(short, NONE)[0]
    assert model.seen == [64, 128]
    longer = stub_evaluation(model, CORPUS, tmp_path, "ctx=256", *SMALL)
    assert {n: longer.targets[n] for n in (64, 128)} == short.targets and longer.texts == short.texts
    assert len({*longer.targets.values()}) == 1 and longer.missing_lengths(NONE) == [256]
    second = measured(longer, NONE)[0]
    assert model.seen == [64, 128, 256] and second.rows[:2] == first.rows
    assert longer.missing_lengths(NONE) == [] and longer.missing_lengths(NONE, fresh=True) == [64, 128, 256]
    assert longer.curve_file(NONE) == short.curve_file(NONE)
    # other targets in the same file: neither replaces the other
    other = stub_evaluation(model, CORPUS, tmp_path, "ctx=128", *SMALL[:1], "task.windows=3")
    assert other.curve_file(NONE) == longer.curve_file(NONE) and other.missing_lengths(NONE) == [64, 128]
    third = measured(other, NONE)[0]
    assert read_curve(other.curve_file(NONE)).rows == sorted([*second.rows, *third.rows], key=lambda r: r.n)
    assert longer.missing_lengths(NONE) == other.missing_lengths(NONE) == []
    assert [c.rows for c in select_shared([read_curve(other.curve_file(NONE))], longer.texts)] == [second.rows]


def test_methods_that_change_nothing_at_a_length_are_not_measured_there(tmp_path):
    """PI has factor 1 up to L, and the window hides nothing there: their losses are those without scaling."""
    pi = Method("pi", [{**yaml_values("scaling", "pi")}])
    model = StubModel()
    found = stub_evaluation(model, CORPUS, tmp_path, "ctx=256", *SMALL)
    measured(found, NONE)
    assert model.seen == [64, 128, 256]
    for method in (pi, WINDOW):
        model.seen.clear()
        (curve,) = measured(found, method)
        assert model.seen == [128, 256]  # L is 64
        none = found.measured_rows(NONE)[64][0]
        assert curve.rows[0].nll == none.nll and curve.rows[0].label == method.label
        assert not losses_file(found.curve_file(method), curve.rows[0]).exists()  # those without scaling
        assert np.load(losses_file(found.curve_file(NONE), none)).shape == (6, 64)
        assert (curve.rows[0].factor, curve.rows[0].window) == (1.0, 64 if method is WINDOW else None)
    # The bar expects only what will be computed
    works = {method.label: [(method, n) for n in (64, 128, 256)] for method in (NONE, WINDOW)}
    totals = {}
    for label, work in works.items():
        with found.running(work):
            totals[label] = found.bar.total
    assert 0 < totals["window"] < totals["none"]
    # Without the rows of no scaling they are measured
    found.curve_file(NONE).unlink()
    model.seen.clear()
    found.curve_file(pi).unlink()
    measured(found, pi)
    assert model.seen == [64, 128, 256]


@pytest.mark.parametrize("a, b, n, equal", [
    ({}, {"window": 64}, 64, True), ({}, {"window": 64}, 65, False), ({}, {"window": 64, "sinks": 4}, 64, True),
    ({}, {"position_map": Clipped(64, 2.0)}, 64, True), ({}, {"position_map": Clipped(64)}, 65, False),
    ({}, {"logn": 64}, 64, True),
    ({}, {"logn": 64}, 65, False), ({}, {"attention_factor": 1.1}, 8, False), ({}, {"factor": 2.0}, 8, True),
    ({"window": 9}, {"window": 9, "sinks": 1}, 16, False),
    ({"position_map": Clipped(9)}, {"position_map": Clipped(9, 3.0)}, 16, False),
])  # fmt: skip
def test_two_changes_have_the_same_effect_where_the_logits_are_equal(a, b, n, equal):
    """The rule against the model itself."""
    own, changes = spectrum.frequencies(8, 10000.0), [ContextChange(**a), ContextChange(**b)]
    run = TrainedContext("rope", 64, own)
    first, second = (change.effect(n, run) for change in changes)
    assert (first == second) == equal
    assert ContextChange(inv_freq=own).effect(n, run) == ContextChange().effect(n, run)
    assert ContextChange(inv_freq=own / 2).effect(n, run) != ContextChange().effect(n, run)
    model, tokens = model_of("rope"), random_tokens(1, n)
    with torch.no_grad():
        same = torch.equal(*(model(tokens, change=change) for change in changes))
    assert same == equal


def test_the_factor_fixed_to_ctx_has_a_file_for_each_ctx(tmp_path):
    fixed = Method("pi factor=fixed", [{**yaml_values("scaling", "pi"), "factor": "fixed"}])
    found = [stub_evaluation(StubModel(), CORPUS, tmp_path, f"ctx={ctx}", *SMALL) for ctx in (128, 256)]
    assert found[0].curve_file(fixed) != found[1].curve_file(fixed)
    assert found[0].curve_file(NONE) == found[1].curve_file(NONE)


def test_an_interrupted_evaluation_keeps_its_finished_lengths(tmp_path, capsys):
    class Interrupted(StubModel):
        def losses(self, tokens: torch.Tensor, targets: torch.Tensor, change: ContextChange) -> torch.Tensor:
            if tokens.shape[1] == 128:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().losses(tokens, targets, change)

    stopped = stub_evaluation(Interrupted(), CORPUS, tmp_path, "ctx=256", *SMALL)
    with pytest.raises(SystemExit) as end:
        measured(stopped)
    assert end.value.code == 128 + signal.SIGTERM and "the lengths that were finished are in" in capsys.readouterr().out
    assert [r.n for r in read_curve(stopped.curve_file(NONE)).rows] == [64]
    model = StubModel()
    resumed = stub_evaluation(model, CORPUS, tmp_path, "ctx=256", *SMALL)
    assert [r.n for r in measured(resumed, NONE)[0].rows] == [64, 128, 256] and model.seen == [128, 256]
    assert sorted(p.suffix for p in (tmp_path / "runs/stub/eval").iterdir() if "tmp" in p.name) == []


def test_the_losses_of_single_targets_stand_beside_the_curve(tmp_path):
    from measure.groups import target_losses

    found = stub_evaluation(StubModel(needs=10), CORPUS, tmp_path, "ctx=[64,128]", *SMALL)
    for r in measured(found, NONE)[0].rows:
        losses = target_losses(found.curve_file(NONE), r)
        assert losses.shape == (3, 2, 64)
        assert losses.sum(axis=2).ravel() == pytest.approx(np.array(r.nll), abs=1e-3)


# ---- trained runs ----


def test_lengths_that_score_fewer_windows_are_shown_on_the_level_of_all_windows():
    """Two documents of two windows, 10 tokens each: window 1 costs 2 nats per token more than window 0."""
    at_L = row([10, 30, 20, 40], n=256, tokens=40, documents=2, windows=[0, 1], label="none", loss=2.5, bytes=80)
    far = row([35, 45], n=4096, tokens=20, documents=2, windows=[1], label="none", loss=4.0, low=3.0, high=5.0)
    none = Curve([dataclasses.replace(x, extended_ctx=256) for x in (at_L, far)])
    (aligned,) = curves.align([none])
    assert aligned.first == none.first  # nothing changes where all windows are scored
    assert aligned.rows[1].loss == pytest.approx(2.5 + 0.5)  # 0.5 nats per token worse on the window that both have
    assert (aligned.rows[1].low, aligned.rows[1].high) == pytest.approx((2.0, 4.0))
    assert aligned.rows[1].ppl == pytest.approx(math.exp(3)) and aligned.rows[1].nll == far.nll
    assert aligned.rows[1].bits_per_byte == pytest.approx(3 * 40 / 80 / math.log(2))
    assert curves.align([Curve(none.rows[1:])]) == [Curve(none.rows[1:])]  # no row at L to compare with


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """Three smoke runs: rope (trained long enough to beat a unigram model), alibi and learned."""
    rope = ("pos=rope", "name=rope", "steps=60", "optim.lr=5e-3", "optim.warmup=5")
    others = [(f"pos={pos}", f"name={pos}", "steps=2") for pos in ("learned", "alibi")]
    return train_smoke_runs(tmp_path_factory.mktemp("trained"), cache, others[0], rope, others[1])


FEW = ("documents=3", "task.windows=2")


@pytest.fixture
def runs(trained, monkeypatch):
    monkeypatch.chdir(trained)
    monkeypatch.setattr(sys, "argv", ["test"])
    return trained


def curves_of(run: str, **values: object) -> dict[str, Curve]:
    """label -> the curve of this run whose rows have these values, from its files."""
    found: dict[str, Curve] = {}
    for file in sorted(Path("runs", run, "eval").glob("*.jsonl")):
        curve = read_curve(file)
        rows = [r for r in curve.rows if all(getattr(r, name) == value for name, value in values.items())]
        if rows:
            found[curve.label] = Curve(rows, curve.written)
    return found


def test_eval_measures_what_the_model_says(runs, capsys):
    """One length recomputed here, plainly, in float32 and window by window."""
    run_eval("run=rope", "ctx=256", "scaling=pi", "dtype=float32", "documents=6", "task.windows=3")
    out = capsys.readouterr().out
    assert "run: rope (as named)" in out and "only 6 documents" in out
    assert "targets: the last 64 tokens of 3 windows of 6 held-out documents" in out
    found = curves_of("rope", n=256, documents=6)
    assert set(found) >= {"none", "window", "pi"}
    assert Path("runs/rope/eval/ctx256.png").read_bytes().startswith(b"\x89PNG")

    state = checkpoint.load(Path("runs/rope"))
    corpus = corpora.prepare(state["cfg"].data, ".cache")
    model = gpt.build(state["cfg"], corpus.vocab_size)
    model.load_state_dict(state["model"])
    ends = Matched(corpus, 256, 6, scored_tokens=64, windows=3, far_windows=1).ends
    cuts = [
        torch.from_numpy(document.tokens[end - 257 : end].astype(np.int64))
        for document, of_document in zip(corpus.held_out, ends, strict=False)
        for end in of_document
    ]
    for name, change in (
        ("none", NO_CHANGE),
        ("window", ContextChange(window=64)),
        ("pi", ContextChange(inv_freq=model.pos.inv_freq / 4)),
    ):
        (row,) = found[name].rows
        assert (row.documents, row.windows, row.tokens, row.task) == (6, [0, 1, 2], 18 * 64, "matched")
        nll, n_bytes = [], 0
        for cut in cuts:
            logits = model(cut[None, :-1], change=change)[0, -64:].log_softmax(-1)
            nll.append(-logits[torch.arange(64), cut[-64:]].sum().item())
            n_bytes += len(corpus.encoding.decode(cut[-64:].tolist()).encode(errors="surrogateescape"))
        assert row.nll == pytest.approx(nll, rel=1e-4)
        assert row.loss == pytest.approx(sum(nll) / row.tokens, rel=1e-4)
        assert row.ppl == pytest.approx(math.exp(sum(nll) / row.tokens), rel=1e-3)
        assert row.bits_per_byte == pytest.approx(sum(nll) / math.log(2) / row.bytes, rel=1e-4)
        assert row.low < row.loss < row.high
        assert row.bytes == pytest.approx(n_bytes, abs=36)  # a cut character decodes to a replacement


def test_inside_the_trained_context_all_three_curves_are_one(runs):
    run_eval("run=rope", "ctx=128", "scaling=yarn", *FEW)
    found = curves_of("rope", documents=3, windows=[0, 1])
    assert [r.n for r in found["none"].rows] == [64, 128]
    for i, row in enumerate(found["none"].rows):
        same = row.n <= 64
        for label in ("window", "yarn"):
            assert (found[label].rows[i].nll == row.nll) == same


def test_curves_are_reused_and_measured_again_when_asked(runs, capsys, monkeypatch):
    run_eval("run=rope", "ctx=128", "scaling=ntk", *FEW)
    done, measure_length = [], Evaluation.measure_length

    def noted(self, method, n):
        done.append((method.label, n))
        return measure_length(self, method, n)

    monkeypatch.setattr(Evaluation, "measure_length", noted)
    capsys.readouterr()
    run_eval("run=rope", "ctx=128", "scaling=ntk", *FEW)
    assert done == [] and "gain over the better control" in capsys.readouterr().out
    run_eval("run=rope", "ctx=128", "scaling=dynamic_ntk", *FEW)
    assert done == [("dynamic_ntk", 64), ("dynamic_ntk", 128)]  # the controls are there
    done.clear()
    run_eval("run=rope", "ctx=256", "scaling=ntk", *FEW)
    assert done == [(label, 256) for label in ("none", "window", "ntk")]
    done.clear()
    run_eval("run=rope", "ctx=128", "scaling=ntk", "fresh=true", *FEW)
    assert done == [(label, n) for label in ("none", "window", "ntk") for n in (64, 128)]


def test_short_and_long_lengths_share_targets_but_far_windows_are_fewer(runs, capsys):
    run_eval("run=rope", "ctx=[64,2304]", "scaling=pi", "documents=2", "task.windows=4", "task.far_windows=1")
    out = capsys.readouterr().out
    assert "of 4 windows (1 at n=2304)" in out and "long lengths score fewer windows" in out
    for label in ("none", "window", "pi"):
        rows = {n: curves_of("rope", n=n, ctx=2304)[label].rows[0] for n in (64, 2304)}
        assert rows[64].windows == [0, 1, 2, 3] and len(rows[2304].windows) == 1
        assert rows[64].texts == rows[2304].texts and rows[64].targets != rows[2304].targets
        assert rows[64].tokens == 4 * rows[2304].tokens == 2 * 4 * 64


def test_fixed_factor_shows_its_tax(runs, capsys):
    run_eval("run=rope", "ctx=256", "scaling=pi", "scaling.factor=fixed", *FEW)
    out = capsys.readouterr().out
    assert "tax inside the trained context (n=64, factor 4): " in out and "nats/token [" in out
    assert [row.factor for row in curves_of("rope")["pi factor=fixed"].rows] == [4, 4, 4]
    run_eval("run=rope", "ctx=256", "scaling=pi", *FEW)
    assert "tax inside the trained context (n=64, factor 1): 0, nothing is changed there" in capsys.readouterr().out


def test_the_newest_run_that_fits_is_evaluated_and_named(runs, capsys):
    run_eval("ctx=128", "scaling=none", *FEW)
    assert "run: alibi (the newest that fits)" in capsys.readouterr().out
    run_eval("ctx=128", "scaling=ntk", *FEW)
    out = capsys.readouterr().out
    assert "run: rope (the newest that fits; skipped alibi: scaling=ntk is not applicable" in out
    run_eval("ctx=64", "trained_with=smoke", *FEW)
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
    run_eval("run=learned", "ctx=[64]", *FEW)
    assert "\n     64      1" in capsys.readouterr().out


def test_alibi_and_window_controls_at_long_contexts_stay_finite(runs):
    run_eval("run=alibi", "ctx=2048", "documents=2", "task.windows=1")
    for curve in curves_of("alibi", ctx=2048).values():
        assert all(math.isfinite(row.loss) for row in curve.rows) and curve.rows[-1].n == 2048


def test_compare_lays_runs_over_each_other(runs, capsys, monkeypatch):
    for run, scaling in (("rope", "ntk"), ("alibi", "none")):
        run_eval(f"run={run}", "ctx=256", f"scaling={scaling}", "documents=4", "task.windows=2")
    run_eval("run=rope", "ctx=128", "scaling=ntk", "documents=5", "task.scored_tokens=32", "task.windows=1")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["compare.py", "rope", "alibi", "--gain"])
    compare.main()
    out = capsys.readouterr().out
    assert "rope  ntk" in out and "alibi  none" in out and "left out" in out
    assert re.search(r"\n  rope: task=\S+.*, \d+ documents or examples: .*none", out)  # which ones
    assert "gain over the better control (window, truncation), nats/token [95 %]" in out
    assert Path("runs/compare.png").stat().st_size > 10_000
    assert "absent: no such run in runs/" in error_of(compare.main, ["absent"], monkeypatch)
    only = error_of(compare.main, ["rope", "--only", "yarn9"], monkeypatch)
    assert "--only yarn9: no curve is labelled yarn9; there are " in only
    assert "--task prefix: no curve of this task" in error_of(compare.main, ["rope", "--task", "prefix"], monkeypatch)


def test_labels_say_what_differs():
    def label(*settings):
        return evaluation.requested_method(eval_settings(*settings)).label

    assert label("scaling=yarn", "scaling.beta_fast=4.0", "scaling.factor=fixed") == "yarn factor=fixed beta_fast=4.0"
    assert label("scaling=window") == "window" and label("scaling=rerope_leaky") == "rerope_leaky"
    assert label("scaling=ntk", "plus=[logn]") == "ntk + logn"
    assert evaluation.requested_method(eval_settings("scaling=none")) == evaluation.NONE
    assert evaluation.requested_method(eval_settings("scaling=window")) == evaluation.WINDOW


# ---- curve files ----


def test_curves_of_an_earlier_version_do_not_get_in_the_way(runs, capsys, monkeypatch):
    """They are other targets: eval.py and compare.py leave them out."""
    run_eval("run=alibi", "ctx=128", *FEW)
    old = Path("runs/alibi/eval/none-ctx256-0123abcd.jsonl")
    old.write_bytes(OLD_CURVE.read_bytes())
    run_eval("run=alibi", "ctx=128", *FEW)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["compare.py", "alibi"])
    compare.main()
    out = capsys.readouterr().out
    shown, left_out = out.split("left out")
    assert "alibi  none" in shown and "rope-s0" not in shown and "rope-s0: task=matched" in left_out
    old.unlink()


def test_a_row_of_an_earlier_version():
    curve = read_curve(OLD_CURVE)
    assert [row.n for row in curve.rows] == [128, 256] and curve.run == "rope-s0" and curve.label == "none"
    assert {row.task for row in curve.rows} == {"matched"} and curve.first.loss == 2.556608046606897
    assert len(curve.first.nll) == curve.first.documents == 32 and curve.written > 0
    assert curve.first.windows == [0] and curve.first.hits == [] and curve.first.distance is None
    assert curve.first.texts == curve.first.targets and curve.overall == curve.rows and curve.first.accuracy is None


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
        changed(windows=0), changed(hits="all"), changed(distance=1.5), changed(low=None), changed(high="0.5"),
        OLD_CURVE.read_text()[:-40],
    ],
)  # fmt: skip
def test_damaged_and_reshaped_curves_are_one_clear_line(text, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=r"broken\.jsonl: not a curve that eval\.py wrote \(.*\): move it") as e:
        read_curve(file)
    assert "\n" not in str(e.value)


def test_a_damaged_curve_of_a_run_is_named_and_does_not_stop_the_others(runs, monkeypatch, capsys):
    run_eval("run=rope", "ctx=128", *FEW)
    for content in ("", '{"n": 64', "[1]"):
        bad = Path("runs/rope/eval/broken.jsonl")
        bad.write_text(content)
        run_eval("run=rope", "ctx=128", *FEW)
        monkeypatch.setattr(sys, "argv", ["compare.py", "rope"])
        compare.main()
        out, err = capsys.readouterr()
        assert "rope  none" in out and "picture: " in out
        assert err.count("left out: runs/rope/eval/broken.jsonl: not a curve that eval.py wrote") == 2
        bad.unlink()
    for file in Path("runs").glob("*/eval/*.jsonl"):
        shutil.copy(file, file.with_suffix(".kept"))
        file.write_text("")
    assert "no curve in runs/ can be read" in error_of(compare.main, [], monkeypatch)
    for file in Path("runs").glob("*/eval/*.kept"):
        file.rename(file.with_suffix(".jsonl"))


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
