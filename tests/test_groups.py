"""Gains by groups of targets: near-copies and antecedents against plain loops, and what eval.py writes."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from scipy import stats

from conf.errors import UserError
from conf.registry import yaml_values
from data.held_out import NGRAM, find_copies
from measure import breakdowns
from measure.breakdowns import Groups, antecedent_groups, antecedents, group_rows, requested_groups, show_groups
from measure.curves import Curve
from measure.evaluation import NONE, WINDOW, Evaluation, Method
from measure.gain import controls, gain
from measure.intervals import ratio_interval
from model.scaling import ContextChange
from tests.helpers import StubModel, eval_settings, held_out, line_of, stub_evaluation

# ---- n-grams ----


def random_text(seed: int, length: int = 600, kinds: int = 4) -> np.ndarray:
    """Few kinds of tokens, so that n-grams repeat."""
    return np.random.default_rng(seed).integers(kinds, size=length).astype(np.uint16)


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("length", [0, 3, 600])
def test_antecedents_are_those_of_a_plain_search(n, length):
    tokens = random_text(n, length)
    want = []
    for end in range(len(tokens)):
        gram = tokens[end - n + 1 : end + 1].tolist()
        earlier = [d for d in range(1, end - n + 2) if tokens[end - n + 1 - d : end + 1 - d].tolist() == gram]
        want.append(earlier[0] if earlier and end >= n - 1 else 0)
    assert antecedents(tokens, n).tolist() == want and (any(want) or length < 600)


@pytest.mark.parametrize("chunk", [2**24, 50])
def test_copies_are_those_of_a_set_of_n_grams(chunk, monkeypatch):
    """Also where the training stream is compared in parts: no n-gram across two parts is lost."""
    monkeypatch.setattr("data.held_out.CHUNK", chunk)
    train = random_text(0, 900, kinds=3)
    documents = [random_text(1, 500, kinds=3), random_text(2, 7), random_text(3, 0), train[40:60].astype(np.int64)]
    known = {tuple(train[i : i + NGRAM].tolist()) for i in range(len(train) - NGRAM + 1)}
    for tokens, flags in zip(documents, find_copies(train, documents), strict=True):
        want = [i >= NGRAM - 1 and tuple(tokens[i - NGRAM + 1 : i + 1].tolist()) in known for i in range(len(tokens))]
        assert flags.dtype == bool and flags.tolist() == want


# ---- groups of targets ----

SETTINGS = ("ctx=256", "documents=3", "task.windows=2")


class Uneven(StubModel):
    """A model whose losses differ between targets, and fall with the number of tokens that it sees."""

    def __init__(self, slope: float = 1.0):
        super().__init__()
        self.slope = slope

    def losses(self, tokens: torch.Tensor, targets: torch.Tensor, change: ContextChange) -> torch.Tensor:
        T, S = tokens.shape[1], targets.shape[1]
        sees = torch.arange(T - S + 1, T + 1).clamp(max=change.window or T)
        return (targets % 7) / 7 + 122 + (targets % 5) * self.slope * 30 / sees


class Harmed(Uneven):
    """And a window costs more."""

    def losses(self, tokens: torch.Tensor, targets: torch.Tensor, change: ContextChange) -> torch.Tensor:
        return super().losses(tokens, targets, change) + (5 if change.window and change.window < tokens.shape[1] else 0)


TEXTS = [random_text(seed, 900, kinds=6) for seed in (1, 2, 3)]  # five tokens of six kinds: many come again


def test_groups_by_antecedent_partition_the_targets(tmp_path):
    found = stub_evaluation(Uneven(), held_out(TEXTS), tmp_path, *SETTINGS)
    groups = antecedent_groups(found.task, found.ctx)
    assert groups.names == ["none", "< 64", "< 256", ">= 256"] and groups.group.shape == (3, 2, 64)
    for document, ends in enumerate(found.task.ends):
        distances = antecedents(TEXTS[document])
        for window, end in enumerate(ends):
            for i, distance in enumerate(distances[end - 64 : end]):
                want = "none" if not distance else "< 64" if distance < 64 else "< 256" if distance < 256 else ">= 256"
                assert groups.names[groups.group[document, window, i]] == want
    assert set(np.unique(groups.group)) == {0, 1, 2, 3}


@pytest.mark.parametrize("period, name", [(63, "< 64"), (64, "< 256"), (255, "< 256"), (256, ">= 256")])
def test_a_group_begins_with_its_lower_edge(period, name, tmp_path):
    found = stub_evaluation(Uneven(), held_out([np.arange(900) % period] * 2), tmp_path, *SETTINGS)
    groups = antecedent_groups(found.task, found.ctx)
    assert {groups.names[i] for i in groups.group.ravel()} == {name}


def curves_of(found: Evaluation, *methods: Method) -> dict[str, Curve]:
    """label -> curve of no scaling, the window control and these methods."""
    with found.running([]):
        return {m.label: found.curve(m) for m in (NONE, WINDOW, *methods)}


@pytest.mark.parametrize("slope", [1.0, -1.0])
def test_gains_of_groups_add_up_to_the_gain_over_all_targets(slope, tmp_path):
    """With either control as the better one: more context helps the model, or harms it."""
    found = stub_evaluation(Uneven(slope), held_out(TEXTS), tmp_path, *SETTINGS)
    curves, groups = curves_of(found), antecedent_groups(found.task, found.ctx)
    rows, bars = group_rows(found, curves, NONE, groups), controls(curves.values())["stub"]
    assert {row["n"] for row in rows} == {128, 256}  # not within the trained context
    for n in (128, 256):
        parts = [row for row in rows if row["n"] == n]
        assert [row["group"] for row in parts] == groups.names
        assert sum(row["targets"] for row in parts) == 3 * 2 * 64
        assert sum(row["share"] for row in parts) == pytest.approx(1, abs=1e-3)
        own, bar = curves["none"].by_length()[n], bars[n]
        for key, want in (("gain", gain(own, bar)[0]), ("loss", own.loss), ("control", bar.loss)):
            mean = sum(row["targets"] * row[key] for row in parts) / (3 * 2 * 64)
            assert mean == pytest.approx(want, abs=1e-4), key
    one = Groups(["all", "empty"], [0, 1], np.zeros((3, 2, 64), dtype=np.int64))
    (all_of_them, empty) = [row for row in group_rows(found, curves, NONE, one) if row["n"] == 256]
    want = gain(curves["none"].by_length()[256], bars[256])
    assert (all_of_them["gain"], all_of_them["low"], all_of_them["high"]) == pytest.approx(want, abs=1e-4)
    assert empty["targets"] == 0 and empty["gain"] is None


def test_far_lengths_use_the_groups_of_their_windows(tmp_path):
    texts = [random_text(seed, 6000, kinds=6) for seed in (1, 2)]
    settings = ("ctx=[64,2304]", "documents=2", "task.windows=3", "task.far_windows=1")
    found = stub_evaluation(Harmed(), held_out(texts), tmp_path, *settings)
    groups, curves = antecedent_groups(found.task, found.ctx), curves_of(found)
    (far,) = found.task.windows(2304)
    rows = group_rows(found, curves, NONE, groups)
    place = found.task.near.index(far)
    assert [r["targets"] for r in rows] == [int((groups.group[:, place] == i).sum()) for i in range(len(groups.names))]
    bar = controls(curves.values())["stub"][2304]
    assert bar.label == "none" and len(bar.scored_windows) == 3  # truncation, of which one window counts
    mean = sum(r["targets"] * r["gain"] for r in rows if r["targets"]) / (2 * 64)
    assert mean == pytest.approx(gain(curves["none"].by_length()[2304], bar)[0], abs=1e-4)


def test_ratio_weights_documents_by_their_targets():
    rng = np.random.default_rng(0)
    sums, counts, D = rng.normal(2, 1, 12), rng.integers(0, 9, 12), 12
    weights = 1 + 1e-6 * np.vstack((np.zeros(D), np.eye(D)))  # the infinitesimal jackknife
    mean, *shifted = (weights @ sums) / (weights @ counts)
    square = (1e6 * (np.array(shifted) - mean)) ** 2  # its effective number of documents: the degrees of freedom
    want = stats.t.interval(0.95, square.sum() ** 2 / (square**2).sum(), mean, (square.sum() * D / (D - 1)) ** 0.5)
    assert ratio_interval(sums, counts) == pytest.approx((mean, *want), rel=1e-4)
    assert ratio_interval(4 * sums, 4 * counts) == pytest.approx((mean, *want), rel=1e-4)


@pytest.mark.parametrize(
    "settings, message",
    [
        ("by_antecedent=true task=sliding", "is for task=matched only, and this is task=sliding"),
        ("by_antecedent=true ctx=[64]", "ctx=64: must be above the trained context 64"),
    ],
)
def test_what_has_no_groups_is_refused(settings, message, tmp_path):
    asked = [x for x in SETTINGS if "task=sliding" not in settings or "task." not in x] + settings.split()
    found = stub_evaluation(Uneven(), held_out(TEXTS), tmp_path, *asked)
    assert message in line_of(requested_groups, found, eval_settings(*asked))


def test_targets_without_losses_are_one_line(tmp_path):
    found = stub_evaluation(Uneven(), held_out(TEXTS), tmp_path, *SETTINGS)
    row, file = curves_of(found)["none"].rows[0], found.curve_file(NONE)
    assert breakdowns.target_losses(file, row).sum(axis=2).ravel() == pytest.approx(np.array(row.nll), abs=1e-3)
    for path in file.parent.rglob("*.np*"):
        path.unlink()
    with pytest.raises(UserError, match="no losses of single targets: evaluate again with fresh=true"):
        breakdowns.target_losses(file, row)


# ---- what eval.py prints and writes ----


def test_groups_are_printed_and_written(tmp_path, capsys):
    pi, asked = Method("pi", [yaml_values("scaling", "pi")]), (*SETTINGS, "by_antecedent=true")
    found = stub_evaluation(Uneven(), held_out(TEXTS), tmp_path, *asked)
    show_groups(found, curves_of(found, pi), pi, requested_groups(found, eval_settings(*asked)))
    (file,) = tmp_path.glob(f"runs/stub/eval/groups/antecedent-pi-*-ctx256-{found.texts}.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert "gain of pi over the better control by antecedent, nats/token [95 %]" in capsys.readouterr().out
    assert {row["n"] for row in rows} == {128, 256} and {row["run"] for row in rows} == {"stub"}
    assert sum(row["targets"] for row in rows) == 2 * 3 * 2 * 64


def test_a_window_that_changes_nothing_has_the_losses_without_scaling(tmp_path):
    pi, asked = Method("pi", [yaml_values("scaling", "pi")]), (*SETTINGS, "by_antecedent=true")
    found = stub_evaluation(Uneven(), held_out(TEXTS), tmp_path, *asked)
    curves = curves_of(found, pi)
    curves["window"] = Curve([dataclasses.replace(row, label="window") for row in curves["none"].rows])
    for path in found.curve_file(WINDOW).parent.glob("losses/window*"):
        path.unlink()
    rows = group_rows(found, curves, pi, antecedent_groups(found.task, found.ctx))
    assert {row["gain"] for row in rows} == {0.0}  # Uneven does not change with PI
