"""ctx_start=: the length of the rows as a function of the step, and rows that contain the same tokens."""

from pathlib import Path

import pytest
import torch

import train
from conf.errors import UserError
from data.batches import batch
from data.row_length import cut_rows, row_length
from engine import checkpoint
from engine.signals import StopSignal
from tests.helpers import run_train, train_settings


def test_lengths_grow_linearly_from_the_first_to_all_tokens():
    lengths = [row_length(step, 100, 256, 32, 0.6) for step in range(100)]
    assert lengths[0] == 32 and set(lengths[60:]) == {256} and lengths[59] == 128
    assert lengths == sorted(lengths) and set(lengths) == {32, 64, 128, 256}
    # 32 + 224 step / 60 reaches 64 at step 8.6 and 128 at step 25.7
    assert (lengths.index(64), lengths.index(128), lengths.index(256)) == (9, 26, 60)
    assert {row_length(step, 10, 96, 32, 1.0) for step in range(10)} == {32, 48}  # divisors; ctx after the last step
    assert row_length(0, 10, 64, 32, 0.0) == 64 and row_length(3, 10, 64, 64, 0.5) == 64


def test_pieces_have_the_same_inputs_and_targets_in_the_same_order():
    windows = torch.arange(2 * 13).view(2, 13)  # ctx 12
    pieces = cut_rows(windows, 4)
    assert pieces.tolist()[:3] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]] and len(pieces) == 6
    assert torch.equal(pieces[:, :-1].flatten(), windows[:, :-1].flatten())
    assert torch.equal(pieces[:, 1:].flatten(), windows[:, 1:].flatten())
    assert torch.equal(cut_rows(windows, 12), windows)


class StubCorpus:
    train = torch.arange(5000).numpy().astype("uint16")


def test_batches_of_a_step_are_cut_and_split_into_equal_micro_batches():
    cfg = train_settings("ctx=64", "batch_tokens=512", "micro_tokens=128", "steps=10", "ctx_start=16")
    for step, length in ((0, 16), (3, 32), (6, 64)):
        batches = train.training_batches(cfg, StubCorpus(), step, slice(0, 8), torch.device("cpu"))
        assert {(tuple(windows.shape), positions) for windows, positions in batches} == {
            ((128 // length, length + 1), None)
        }
        whole = batch(StubCorpus.train, step, seed=0, size=8, ctx=64)
        assert torch.equal(torch.cat([windows[:, 1:].flatten() for windows, _ in batches]), whole[:, 1:].flatten())


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(here, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    settings = ("steps=10", "ctx_start=16", "ctx_full_at=0.9")
    run_train(*settings, "name=whole")

    class StopAtFive(StopSignal):
        exit_code = 143

        def __bool__(self):
            return Path("runs/parts/ckpt.pt").exists()

    with monkeypatch.context() as patch:
        patch.setattr(train, "StopSignal", StopAtFive)
        with pytest.raises(SystemExit):
            run_train(*settings, "name=parts")
    assert checkpoint.load(Path("runs/parts"))["step"] < 10
    run_train(*settings, "name=parts")
    run_train("steps=10", "name=without")
    whole, parts, without = (checkpoint.load(Path("runs", n))["model"] for n in ("whole", "parts", "without"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert not all(torch.equal(whole[key], without[key]) for key in whole)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["ctx_start=48"], r"ctx_start=48: must be null or a divisor of ctx=64"),
        (["ctx_start=128"], r"ctx_start=128: must be null or a divisor of ctx=64"),
        (["ctx_start=0"], r"ctx_start=0: must be null or at least 1"),
        (["ctx_start=16", "positions=random"], r"ctx_start=16: must be null with positions=random"),
        (["ctx_start=16", "ctx_full_at=1.5"], r"ctx_full_at=1\.5: must be between 0 and 1"),
    ],
)
def test_wrong_settings_are_named(overrides, message):
    with pytest.raises(UserError, match=message):
        train_settings("exp=smoke", *overrides)
