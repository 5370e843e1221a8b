"""The evaluation: tasks and controls against stand-ins whose losses are known, eval.py and compare.py on trained runs.

Tasks with an answer are in test_tasks.py, gains by groups of targets in test_groups.py.
"""

import dataclasses
import itertools
import math
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import compare
from conf.errors import UserError
from conf.registry import choices, yaml_values
from data import corpus as corpora
from data.corpus import Corpus
from data.held_out import find_copies
from measure import curves, tasks
from measure.curves import Curve, Row, losses_file, read_curve, select_shared
from measure.evaluation import NONE, WINDOW, Evaluation, Method, requested_method
from measure.gain import better_controls, controls, gain
from measure.intervals import interval_text, mean_interval
from measure.report import Losses, print_table
from measure.tasks import Piece, Task
from measure.tasks.matched import NEAR, Matched
from measure.tasks.sliding import Sliding
from model import spectrum
from model.regions import Clipped
from model.scaling import NO_CHANGE, ContextChange, TrainedContext
from tests import helpers
from tests.helpers import StubModel, any_task_corpus, curve_of, eval_settings, held_out, run_eval, stub_evaluation

A_CURVE = helpers.ROOT / "tests/data/rope-s0/eval/curve.jsonl"  # of two rows
OWN = spectrum.frequencies(16, 10000.0)  # of model_of("rope")


def row(nll: list[float], windows: tuple[int, ...] = (0,), **values: object) -> Row:
    """The first row of the fixture with these losses of each window (of 10 tokens), and other values."""
    about = {"nll": nll, "scored_windows": list(windows)}
    about |= {"tokens": 10 * len(nll), "documents": len(nll) // len(windows)}
    return dataclasses.replace(read_curve(A_CURVE).first, **{**about, **values})


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


@pytest.mark.parametrize("n, stride", [(8, 4), (8, 3), (8, 8), (8, 100), (32, 4), (31, 4), (5, 1), (1, 1)])
def test_sliding_windows_score_every_token_one_time_with_the_context_they_promise(n, stride):
    task, step = Sliding(TWO, 32, 2, stride), min(stride, n)
    assert torch.allclose(scored(task, n), TEXT[:, 1:] / 100)  # in order, each one time
    assert Sliding(TWO, 16, 2, stride).texts() != task.texts()  # other tokens of the same documents
    first, *others = task.pieces(n)
    assert 0 < first.tokens.shape[1] <= n and first.tokens.shape == first.targets.shape
    for piece in others:
        assert piece.tokens.shape[1] == n and piece.targets.shape[1] == step  # n - step tokens at least before each
        assert torch.equal(piece.tokens[:, -1] + 1, piece.targets[:, -1])


def built(name: str, corpus: corpora.HeldOut, ctx: int, documents: int = 3) -> Task:
    return tasks.build(yaml_values("task", name), corpus, ctx, documents)


@pytest.mark.parametrize("name", choices("task"))
def test_every_task_keeps_the_contract(name):
    """Of its yaml: it scores tokens right after their context, says what, and its attributes say the truth."""
    task = built(name, any_task_corpus(), 512)
    assert task.label.split()[0] == name and task.describe() and 1 <= task.minimum <= task.shortest <= 512
    assert len(set(task.names)) == 3 and task.accuracy == (task.threshold > 0) and 0 <= task.chance < 1
    for n in (task.minimum, 256, 512):
        windows, pieces = task.windows(n), task.pieces(n)
        assert windows == sorted(set(windows)) and set(windows) <= set(task.windows(task.minimum))
        for piece in pieces:
            (B, T), S = piece.tokens.shape, piece.targets.shape[1]
            assert B == 3 * len(windows) == len(piece.targets) and 1 <= S <= T <= n
            assert piece.tokens.dtype == piece.targets.dtype == torch.int64
            assert torch.equal(piece.tokens[:, T - S + 1 :], piece.targets[:, :-1])
            assert piece.scored_targets().shape == (B, mask(piece).sum()) and mask(piece).any()
        distances = [piece.distance for piece in pieces]
        assert distances == [None] * len(pieces) or (task.accuracy and len(set(distances)) == len(distances))


@pytest.mark.parametrize("name", choices("task"))
def test_what_a_task_scores_and_gives_as_input_is_in_its_identity(name):
    """Other documents, fewer of them, and every number among the knobs that changes a piece."""
    corpus, knobs = any_task_corpus(), yaml_values("task", name)
    task = built(name, corpus, 512)
    assert built(name, corpus, 512).identity() == task.identity() != built(name, corpus, 512, documents=2).identity()
    renamed = [dataclasses.replace(document, name=f"{document.name} b") for document in corpus.held_out]
    assert built(name, dataclasses.replace(corpus, held_out=renamed), 512).identity() != task.identity()

    def content(task: Task) -> list:
        return [(p.tokens.tolist(), p.scored_targets().tolist()) for p in task.pieces(512)]

    for knob in (knob for knob, value in knobs.items() if isinstance(value, int)):
        changed = {**knobs, knob: knobs[knob] - 1 if knobs[knob] > 1 else knobs[knob] + 1}
        other = tasks.build(changed, corpus, 512, 3)
        assert other.identity() != task.identity() or content(other) == content(task), knob


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
    task, shorter = (Matched(long_text(40_000, 12_000), ctx, 2, 64, 8, far_windows) for ctx in (8192, 4096))
    assert (task.ends == shorter.ends).all() and task.windows(4096) == task.windows(8192)  # as a control needs
    near, far = task.windows(256), task.windows(8192)
    assert task.windows(NEAR) == near == list(range(8)) and len(task.windows(NEAR + 1)) == far_windows
    assert len(far) == far_windows and set(far) < set(near) and (task.ends[:, far] > 8192).all()
    short, long = (task.pieces(n)[0] for n in (256, 8192))
    rows = [8 * document + window for document in range(2) for window in far]
    assert torch.equal(short.targets[rows], long.targets)
    assert torch.equal(short.tokens[rows], long.tokens[:, -256:]) and long.tokens.shape == (2 * far_windows, 8192)


def test_windows_without_enough_text_before_them_in_every_document_are_left_out():
    task = Matched(long_text(9000, 3000), 2500, 2, scored_tokens=64, windows=8, far_windows=8)
    far = task.windows(2500)
    for n, windows in ((NEAR, task.near), (2500, far)):
        assert windows == [w for w in range(8) if (task.ends[:, w] > n).all()]
    assert len(far) < len(task.near) < 8 and far[-1] == 7
    assert f"{len(task.near)} of 8 planned windows ({len(far)} at n=2500)" in task.describe()
    short = Matched(long_text(17_000, 17_000), 16_384, 2, 64, 8, far_windows=1)  # so the gain at 16,384 has truncation
    assert short.windows(4096) == short.windows(16_384) == [7]


@pytest.mark.parametrize("length, want", [(1000, 7), (600, 4), (200, 1)])
def test_windows_do_not_overlap_in_a_short_document(length, want):
    task = Matched(long_text(length, 9000), 64, 2, scored_tokens=64, windows=8, far_windows=2)
    assert task.planned == want and (np.diff(task.ends, axis=1) >= 64).all()


def test_one_document_gives_no_interval_and_no_verdict():
    a, b = row([20.0, 10.0], windows=(0, 1)), row([10.0, 10.0], windows=(0, 1))
    mean, low, high = gain(b, a)
    assert a.documents == 1 and mean == 0.5 and math.isnan(low) and math.isnan(high)
    assert Losses().verdict(b, a).startswith("no verdict") and interval_text(mean, low, high) == "+0.500"


def with_training_text(corpus: corpora.HeldOut, train: np.ndarray) -> Corpus:
    """The same documents, of a corpus with this training stream."""
    values = {field.name: getattr(corpus, field.name) for field in dataclasses.fields(corpus)}
    copied = find_copies(train, [document.tokens for document in corpus.held_out])
    values["held_out"] = [dataclasses.replace(d, copied=c) for d, c in zip(corpus.held_out, copied, strict=True)]
    return Corpus(**values, train=train)


def planned_ends(corpus: corpora.HeldOut, ctx: int) -> np.ndarray:
    """Where the four windows of a document end."""
    return Matched(corpus, ctx, 2, scored_tokens=64, windows=4, far_windows=1).ends


def test_windows_are_moved_away_from_near_copies_of_training_text():
    """The second window of document 0 lies in a copy of 200 tokens, the third in one of 39: 32 of its 64 targets end
    a copied 8-gram, which is not more than half."""
    plain = long_text(10_000, 8_000)
    tokens, planned = plain.held_out[0].tokens, planned_ends(plain, 256)
    second, third = planned[0, 1], planned[0, 2]
    copies = [tokens[second - 180 : second + 20], tokens[third - 39 : third]]
    train = np.concatenate([np.full(50, 20_000), copies[0], np.full(9, 20_001), copies[1], np.full(9, 20_002)])
    ends = planned_ends(with_training_text(plain, train), 256)
    # 173 of the 180 tokens end a copied 8-gram: after two moves 45 of the 64 do, after three none
    assert (ends - planned).tolist() == [[0, -192, 0, 0], [0, 0, 0, 0]]
    one_more = with_training_text(plain, np.concatenate([train, tokens[third - 40 : third]]))
    assert planned_ends(one_more, 256)[0, 2] == third - 64


@pytest.mark.parametrize("ctx", [256, 4096])
def test_a_document_of_near_copies_keeps_its_length_and_its_windows_apart(ctx):
    """All of document 0, or all between its first two windows: no place is left for the second one."""
    plain = long_text(10_000, 8_000)
    planned, tokens = planned_ends(plain, ctx), plain.held_out[0].tokens
    for train in (tokens, tokens[planned[0, 0] : planned[0, 1]]):
        ends = planned_ends(with_training_text(plain, train), ctx)
        assert (ends[1] == planned[1]).all() and ends[0, 1] < planned[0, 1]
        assert (np.diff([0, *ends[0]]) >= 64).all()  # no target is scored two times
        assert ((ends[0] > ctx) == (planned[0] > ctx)).all()


# ---- rows, intervals and controls ----


@pytest.mark.parametrize(
    "overrides, lengths",
    [
        (("ctx=1000",), [64, 128, 256, 512, 1000]),
        (("ctx=[256,128,128]",), [64, 128, 256]),  # and L, at which truncation is measured
        (("ctx=[32,256]", "task.scored_tokens=16"), [32, 64, 256]),
        (("ctx=[128,256]", "task=recall"), [128, 256]),  # the texts of this task are longer than L
    ],
)
def test_evaluated_lengths_of_a_run(overrides, lengths, tmp_path):
    assert stub_evaluation(StubModel(), any_task_corpus(), tmp_path, *overrides, "documents=2").lengths == lengths


def test_the_interval_is_paired_and_weights_tokens():
    rng = np.random.default_rng(1)
    hard = rng.normal(30, 10, size=40)  # documents differ a lot
    method, window = row((hard - 2 + rng.normal(0, 0.5, 40)).tolist()), row(hard.tolist())
    mean, low, high = gain(method, window)
    assert mean == pytest.approx(np.mean(np.array(window.nll) - np.array(method.nll)) / 10)
    assert low < mean < high and high - low < 0.05  # unpaired it would be about 0.9
    want = stats.t.interval(0.95, 39, hard.mean(), stats.sem(hard))
    assert mean_interval(hard[None])[1:] == pytest.approx(want)
    assert gain(window, window) == (0, 0, 0)


def test_gains_are_of_the_windows_that_both_rows_have():
    control = row([10.0, 90.0, 30.0, 20.0, 90.0, 50.0], (0, 3, 7))  # two documents; window 3 is hard
    method = row([5.0, 20.0, 10.0, 40.0], (0, 7))
    mean, low, high = gain(method, control)
    assert mean == pytest.approx(((10 - 5 + 30 - 20) + (20 - 10 + 50 - 40)) / 40)
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 1, 0.875, 0.125))  # 15 / 20 and 20 / 20


@pytest.mark.parametrize(
    "of_window, of_truncation, truncated_is_better",
    [
        ({}, {}, True),
        ({"window": 16}, {}, True),  # all layers have windows of 16, and the model was trained at 64
        ({}, {"nll": [0.0, 40.0, 0.0, 40.0]}, False),  # its loss is lower on other windows only
        ({}, {"n": 32}, False),
        ({}, {"scored_windows": [0, 5]}, False),
        ({}, {"tokens": 80}, False),
        ({}, {"texts": "others"}, False),
        ({"n": 64, "window": None}, {}, False),  # there the two are the same
        ({"nll": [math.nan, math.nan]}, {}, False),
        ({"hits": [1.0, 0.0]}, {}, False),
    ],
)
def test_the_better_control_has_the_lower_loss_on_common_windows(of_window, of_truncation, truncated_is_better):
    window = row([30.0, 30.0], (7,), n=8192, window=64, longest_trained_ctx=64, label="window")
    truncated = row([90.0, 20.0, 90.0, 20.0], (0, 7), n=64, window=None)
    window, truncated = dataclasses.replace(window, **of_window), dataclasses.replace(truncated, **of_truncation)
    (bar,) = better_controls([window], {window.run: {truncated.n: truncated}})
    assert bar is (truncated if truncated_is_better else window)


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


# ---- curves in files ----


def test_longer_evaluations_measure_only_the_new_lengths(tmp_path):
    model = StubModel()
    short, longer = (stub_evaluation(model, CORPUS, tmp_path, f"ctx={ctx}", *SMALL) for ctx in (128, 256))
    (first,) = measured(short, NONE)
    assert longer.texts == short.texts and len({*short.target_keys.values(), *longer.target_keys.values()}) == 1
    assert longer.curve_file(NONE) == short.curve_file(NONE) and longer.missing_lengths(NONE) == [256]
    (second,) = measured(longer, NONE)
    assert model.seen == [64, 128, 256] and second.rows[:2] == first.rows
    assert longer.missing_lengths(NONE) == [] and longer.missing_lengths(NONE, fresh=True) == [64, 128, 256]
    # other targets in the same file: neither replaces the other
    other = stub_evaluation(model, CORPUS, tmp_path, "ctx=128", *SMALL[:1], "task.windows=3")
    assert other.curve_file(NONE) == longer.curve_file(NONE) and other.missing_lengths(NONE) == [64, 128]
    (third,) = measured(other, NONE)
    found = read_curve(other.curve_file(NONE))
    assert found.rows == sorted([*second.rows, *third.rows], key=lambda r: r.n)
    assert [c.rows for c in select_shared([found], longer.texts)] == [second.rows]


def test_methods_that_change_nothing_at_a_length_are_not_measured_there(tmp_path):
    """PI has factor 1 up to L, and the window hides nothing there: their losses are those without scaling."""
    pi, model = Method("pi", [yaml_values("scaling", "pi")]), StubModel()
    found = stub_evaluation(model, CORPUS, tmp_path, "ctx=256", *SMALL)
    none = measured(found, NONE)[0].rows[0]
    for method in (pi, WINDOW):
        model.seen.clear()
        (curve,) = measured(found, method)
        assert model.seen == [128, 256]  # L is 64
        assert curve.rows[0].nll == none.nll and curve.rows[0].label == method.label
        assert not losses_file(found.curve_file(method), curve.rows[0]).exists()  # those without scaling
        assert (curve.rows[0].factor, curve.rows[0].window) == (1.0, 64 if method is WINDOW else None)
    # Without the rows of no scaling they are measured
    for method in (NONE, pi):
        found.curve_file(method).unlink()
    model.seen.clear()
    measured(found, pi)
    assert model.seen == [64, 128, 256]


@pytest.mark.parametrize(
    "a, b, n, equal",
    [
        ({}, {"window": 64}, 64, True),
        ({}, {"window": 64}, 65, False),
        ({}, {"window": 64, "always_visible": 4}, 64, True),
        ({}, {"position_map": Clipped(64, 2.0)}, 64, True),
        ({}, {"position_map": Clipped(64)}, 66, False),
        ({}, {"logn": 64}, 64, True),
        ({}, {"logn": 64}, 65, False),
        ({}, {"attention_factor": 1.1}, 8, False),
        ({}, {"factor": 2.0}, 8, True),
        ({}, {"inv_freq": OWN}, 8, True),
        ({}, {"inv_freq": OWN / 2}, 8, False),
        ({"window": 9}, {"window": 9, "always_visible": 1}, 16, False),
        ({"position_map": Clipped(9)}, {"position_map": Clipped(9, 3.0)}, 16, False),
    ],
)
def test_two_changes_have_the_same_effect_where_the_logits_are_equal(a, b, n, equal):
    """The rule against the model itself."""
    changes = [ContextChange(**a), ContextChange(**b)]
    first, second = (change.effect(n, TrainedContext("rope", 64, OWN)) for change in changes)
    assert (first == second) == equal
    model, tokens = helpers.model_of("rope"), helpers.random_tokens(1, n)
    with torch.no_grad():
        assert torch.allclose(*(model(tokens, change=change) for change in changes), atol=1e-12, rtol=0) == equal


def test_the_factor_fixed_to_ctx_has_a_file_for_each_ctx(tmp_path):
    fixed = Method("pi factor=fixed", [{**yaml_values("scaling", "pi"), "factor": "fixed"}])
    found = [stub_evaluation(StubModel(), CORPUS, tmp_path, f"ctx={ctx}", *SMALL) for ctx in (128, 256)]
    assert found[0].curve_file(fixed) != found[1].curve_file(fixed)
    assert found[0].curve_file(NONE) == found[1].curve_file(NONE)


def test_an_interrupted_evaluation_keeps_its_finished_lengths(tmp_path):
    class Interrupted(StubModel):
        def losses(self, tokens: torch.Tensor, targets: torch.Tensor, change: ContextChange) -> torch.Tensor:
            if tokens.shape[1] == 128:
                signal.raise_signal(signal.SIGTERM)
            return super().losses(tokens, targets, change)

    stopped = stub_evaluation(Interrupted(), CORPUS, tmp_path, "ctx=256", *SMALL)
    with pytest.raises(SystemExit) as end:
        measured(stopped)
    assert end.value.code == 128 + signal.SIGTERM
    resumed = stub_evaluation(model := StubModel(), CORPUS, tmp_path, "ctx=256", *SMALL)
    assert [r.n for r in measured(resumed, NONE)[0].rows] == [64, 128, 256] and model.seen == [128, 256]


# ---- trained runs ----


def test_lengths_that_score_fewer_windows_are_shown_on_the_level_of_all_windows():
    """Two documents of two windows, 10 tokens each: window 1 costs 2 nats per token more than window 0."""
    about = {"label": "none", "longest_trained_ctx": 256}
    near = row([10, 30, 20, 40], (0, 1), n=256, loss=2.5, bytes=80, **about)
    far = row([35, 45], (1,), n=4096, loss=4.0, low=3.0, high=5.0, **about)
    (aligned,) = curves.align([Curve([near, far])])
    assert aligned.first == near  # nothing changes where all windows are scored
    got = aligned.rows[1]
    assert got.loss == pytest.approx(2.5 + 0.5)  # 0.5 nats per token worse on the window that both have
    assert (got.low, got.high) == pytest.approx((2.0, 4.0)) and got.nll == far.nll
    assert got.ppl == pytest.approx(math.exp(3)) and got.bits_per_byte == pytest.approx(3 * 40 / 80 / math.log(2))
    assert curves.align([Curve([far])]) == [Curve([far])]  # no row at L to compare with


def test_selected_are_the_rows_on_the_most_common_targets_and_of_the_newest_weights():
    def curve(label: str, written: float, **values: object) -> Curve:
        rows = [row([10.0, 20.0], label=label, n=n, **values) for n in (128, 256)]
        return Curve(rows, written)

    old, new, again = curve("ntk", 1.0, weights="old"), curve("pi", 2.0), curve("pi", 3.0)
    none, others = curve("none", 2.5), curve("window", 2.0, targets="others")
    texts = none.first.texts
    assert select_shared([old, new, again, none, others], texts) == [none, again]
    assert select_shared([new, none], "other texts") == []


@pytest.fixture(scope="module")
def trained(tmp_path_factory, cache):
    """Three smoke runs: rope (trained long enough to beat a unigram model), alibi and learned."""
    rope = ("pos=rope", "name=rope", "steps=60", "optim.lr=5e-3", "optim.warmup=5")
    others = [(f"pos={pos}", f"name={pos}", "steps=2") for pos in ("learned", "alibi")]
    return helpers.train_smoke_runs(tmp_path_factory.mktemp("trained"), cache, others[0], rope, others[1])


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
    found, run = curves_of("rope", n=256, documents=6), helpers.opened("rope")
    corpus, model = corpora.prepare(run.cfg.data, ".cache"), run.model
    ends = Matched(corpus, 256, 6, scored_tokens=64, windows=3, far_windows=1).ends
    pairs = zip(np.repeat(corpus.held_out[:6], 3), ends.ravel(), strict=True)
    cuts = [torch.from_numpy(document.tokens[end - 257 : end].astype(np.int64)) for document, end in pairs]
    changes = {"none": NO_CHANGE, "window": ContextChange(window=64)}
    changes["pi"] = ContextChange(inv_freq=model.pos.inv_freq / 4)
    for name, change in changes.items():
        (row,) = found[name].rows
        assert (row.documents, row.scored_windows, row.tokens, row.task) == (6, [0, 1, 2], 18 * 64, "matched")
        nll, n_bytes = [], 0
        for cut in cuts:
            logits = model(cut[None, :-1], change=change)[0, -64:].log_softmax(-1)
            nll.append(-logits[torch.arange(64), cut[-64:]].sum().item())
            n_bytes += len(corpus.encoding.decode(cut[-64:].tolist()).encode(errors="surrogateescape"))
        loss = sum(nll) / row.tokens
        assert row.nll == pytest.approx(nll, rel=1e-4) and row.loss == pytest.approx(loss, rel=1e-4)
        assert row.ppl == pytest.approx(math.exp(loss), rel=1e-3) and row.low < row.loss < row.high
        assert re.search(rf"\n +256 +4 .*{row.ppl:.2f}", out)
        assert row.bits_per_byte == pytest.approx(sum(nll) / math.log(2) / row.bytes, rel=1e-4)
        assert row.bytes == pytest.approx(n_bytes, abs=36)  # a cut character decodes to a replacement


@pytest.mark.parametrize("name", [name for name in choices("task") if "threshold" in yaml_values("task", name)])
def test_the_accuracy_is_what_the_model_says(name, runs):
    """Computed here text by text, of a model with a window."""
    run_eval("run=rope", "ctx=[128]", f"task={name}", "documents=2", "dtype=float32")
    run = helpers.opened("rope")
    task = built(name, run.corpus, 128, 2)
    rows = {r.distance: r for r in curves_of("rope", task=task.label)["window"].rows}
    assert list(rows) == [None, *task.distances(128)]
    for piece in task.pieces(128):
        logits = run.model(piece.tokens, change=ContextChange(window=64))[:, -piece.targets.shape[1] :]
        right = (logits.argmax(-1) == piece.targets)[:, piece.scored].float()
        r = rows[piece.distance]
        assert r.hits == pytest.approx(right.mean(dim=1).tolist(), abs=1e-4)
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), piece.targets, reduction="none")
        assert r.loss == pytest.approx(nats[:, piece.scored].mean().item(), rel=1e-4)
    parts = [rows[d] for d in task.distances(128)]
    assert rows[None].hits == pytest.approx(np.mean([r.hits for r in parts], axis=0), abs=1e-4)
    assert rows[None].tokens == sum(r.tokens for r in parts)


def test_curves_are_reused_and_measured_again_when_asked(runs, monkeypatch):
    done, measure_length = [], Evaluation.measure_length

    def noted(self, method, n):
        done.append((method.label, n))
        return measure_length(self, method, n)

    run_eval("run=rope", "ctx=128", "scaling=ntk", *SMALL)
    monkeypatch.setattr(Evaluation, "measure_length", noted)
    run_eval("run=rope", "ctx=128", "scaling=dynamic_ntk", *SMALL)
    assert done == [("dynamic_ntk", 64), ("dynamic_ntk", 128)]  # the controls are there
    done.clear()
    run_eval("run=rope", "ctx=[128]", "fresh=true", *SMALL)
    assert done == [(label, n) for label in ("none", "window") for n in (64, 128)]


def test_fixed_factor_shows_its_cost(runs, capsys):
    """As the gain at L, where both controls are the model as it was trained."""
    run_eval("run=rope", "ctx=256", "scaling=pi", "scaling.factor=fixed", *SMALL)
    curves = curves_of("rope", texts=curves_of("rope")["pi factor=fixed"].first.texts)
    fixed, none = (curves[label].by_length()[64] for label in ("pi factor=fixed", "none"))
    assert [row.factor for row in curves["pi factor=fixed"].rows] == [4, 4, 4]
    cost = re.search(r"\n  64    1 .* ([+-]\d\.\d+) \[", capsys.readouterr().out)
    assert cost and float(cost[1]) == pytest.approx(none.loss - fixed.loss, abs=6e-4) != 0


def test_what_an_evaluation_prints_fits_80_columns_in_one_table(capsys):
    losses = {n: 3.0 + 8 * (n > 64) for n in (8, 64, 128, 512, 8192, 65536)}
    none, window, longer = (curve_of("x", x, losses) for x in ("none", "window", "yarn beta_fast=4.0 + logn"))
    Losses().print_evaluation([none, window], longer)
    lines = capsys.readouterr().out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if "  method  " in line)
    assert max(map(len, lines)) <= 80 and " 59874 " in lines[head + 3]
    assert [int(line.split()[0]) for line in lines[head + 1 : head + 7]] == list(losses)


def test_columns_that_do_not_fit_are_printed_below(capsys):
    print_table({"name": dict.fromkeys(range(10), "123456789")})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert [int(x) for line in lines[::2] for x in line.split()] == list(range(10))


def test_the_newest_run_that_fits_is_evaluated_and_named(runs, capsys):
    run_eval("ctx=128", "scaling=ntk", *SMALL)
    out = capsys.readouterr().out
    assert "run: rope (the newest that fits; skipped alibi: scaling=ntk is not applicable" in out
    for settings, message in [
        (["run=alibi", "ctx=128", "scaling=ntk"], "scaling=ntk is not applicable: .*pos=alibi has none"),
        (["run=learned", "ctx=128"], "pos=learned has 64 positions and cannot be evaluated at ctx=128"),
        (["run=rope", "ctx=1000000"], "ctx=1000000: the longest held-out document of this corpus allows"),
        (["run=rope", "ctx=[64]", "task=recall"], r"ctx=\[64\]: must be at least 128 with task=recall"),
    ]:
        with pytest.raises(UserError, match=message):
            run_eval(*settings)


def test_compare_lays_runs_over_each_other(runs, monkeypatch):
    """And names a curve that cannot be read."""
    for run, scaling in (("rope", "ntk"), ("alibi", "none")):
        run_eval(f"run={run}", "ctx=256", f"scaling={scaling}", "documents=4", "task.windows=2")
    run_eval("run=rope", "ctx=[128]", "documents=2", "task=recall", "scaling=ntk")
    bad = Path("runs/rope/eval/broken.jsonl")
    bad.write_text("[1]")
    _, out, err = helpers.run_command(compare.main, ["rope", "alibi", "--gain"], monkeypatch)
    bad.unlink()
    assert "rope  ntk" in out and "alibi  none" in out and "gain over the better control" in out
    assert re.search(r"\nleft out.*\n(  .*\n)*  rope: task recall", out)
    assert "left out: runs/rope/eval/broken.jsonl: not a curve" in err
    answers = ["--task", "recall", "--threshold", "0.5", "--out", "acc.png"]
    _, out, _ = helpers.run_command(compare.main, answers, monkeypatch)
    assert "  50 %" in out and "ntk" in out and "bits/byte" not in out
    assert Path("runs/compare.png").exists() and Path("runs/acc.png").exists()
    for argv, message in (
        (["absent"], "absent: no evaluated run of this name in runs/"),
        (["rope", "--only", "yarn9"], "--only yarn9: no curve is labelled yarn9; there are "),
        (["rope", "--task", "sliding"], "--task sliding: no curve of this task"),
    ):
        assert message in helpers.error_of(compare.main, argv, monkeypatch)


def test_labels_say_what_differs():
    assert requested_method(eval_settings("scaling=ntk", "plus=[logn]")).label == "ntk + logn"
    assert [requested_method(eval_settings(f"scaling={name}")) for name in ("none", "window")] == [NONE, WINDOW]


# ---- curve files ----


@pytest.mark.parametrize("text", ["", "[1]", "\x00\x01", "[" * 100_000, A_CURVE.read_text()[:-40], '{"run": "a"}'])
def test_damaged_curves_and_those_of_earlier_versions_are_one_clear_line(text, tmp_path):
    file = tmp_path / "broken.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=r"broken\.jsonl: not a curve that .* wrote \(.*\): move it"):
        read_curve(file)
    file.unlink()
    file.mkdir()
    assert "broken.jsonl: not a curve" in helpers.line_of(read_curve, file)
