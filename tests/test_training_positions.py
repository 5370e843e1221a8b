"""Training positions that are drawn from a longer range than the window."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from data import training_positions
from tests.helpers import train_settings


@pytest.mark.parametrize("kind", ["random", "pose"])
def test_drawn_positions_rise_within_their_range_and_reach_far(kind):
    def sample(step, seed=0):
        return training_positions.sample(kind, step, seed=seed, rows=8, ctx=32, longest=256)

    p = torch.stack([sample(step) for step in range(50)])
    assert p.shape == (50, 8, 32) and p.dtype == torch.int64 and p.min() >= 0 and p.max() < 256
    steps = p.diff(dim=-1)
    assert bool((steps >= 1).all()) and p.max() > 240
    if kind == "pose":  # one skip at most
        assert bool(((steps > 1).sum(-1) <= 1).all()) and bool((p[..., 0] == 0).float().mean() > 0.9)
    assert torch.equal(p[7], sample(7))  # pure in (seed, step)
    assert not torch.equal(p[7], sample(7, seed=1))


@pytest.mark.parametrize("kind", ["ordered", "random", "pose"])
def test_a_batch_has_the_drawn_positions_of_its_rows_or_none(kind):
    """As a second rank of two gets it, in two micro-batches: its half of the same global batch."""
    cfg = train_settings("exp=smoke", f"positions={kind}")
    corpus = SimpleNamespace(train=np.arange(10_000, dtype=np.uint16))
    half, cpu = slice(4, 8), torch.device("cpu")
    (all_windows, all_positions), *others = train.training_batches(cfg, corpus, 3, slice(0, 8), cpu)
    parts = train.training_batches(replace(cfg, micro_tokens=2 * 64), corpus, 3, half, cpu)
    assert not others and [len(windows) for windows, _ in parts] == [2, 2]
    assert torch.equal(torch.cat([windows for windows, _ in parts]), all_windows[half])
    if kind == "ordered":
        assert all_positions is None and all(positions is None for _, positions in parts)
    else:
        drawn = training_positions.sample(kind, 3, seed=cfg.seed, rows=8, ctx=64, longest=cfg.longest)
        assert torch.equal(all_positions, drawn) and cfg.longest == 512
        assert torch.equal(torch.cat([positions for _, positions in parts]), drawn[half])
