"""The search for LongRoPE's divisors: what it finds, on which text, by which loss."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conf.errors import UserError
from conf.registry import yaml_values
from studies import divisors
from tests.helpers import opened, run_command, run_eval, run_train

NEVER = time.monotonic() + 1e6


def test_the_search_approaches_the_best_divisors_and_keeps_their_order():
    best = np.linspace(0, 1, 12) ** 2 * np.log(6)

    def distance(x: list[float]) -> float:
        assert x == sorted(x) and x[0] >= 1 and x[-1] <= 5
        return float(((np.log(x) - best) ** 2).sum())

    starts = [[4.0] * 12, np.geomspace(1, 4, 12).tolist()]
    found = divisors.evolve(distance, starts, 5.0, 3, 400, NEVER)
    # The last divisor cannot be 6, so what remains is (ln 6/5)^2 at least
    assert np.log(1.2) ** 2 <= distance(found) < 0.1 < 0.5 < min(map(distance, starts))
    assert divisors.evolve(distance, starts, 5.0, 3, 400, NEVER) == found
    assert divisors.evolve(distance, starts, 5.0, 3, 400, 0) == min(starts, key=distance)


def test_windows_are_training_text_of_single_documents():
    text = np.where(np.isin(range(100), [19, 49, 99]), 0, range(1, 101))
    corpus = SimpleNamespace(train=text, encoding=SimpleNamespace(eot_token=0))
    windows = divisors.training_windows(corpus, 23, 3, 0)
    # Of 24 tokens, in documents of 19, 29 and 49
    assert windows[:, 0].sort().values.tolist() == [21, 51, 75] and (windows.diff(dim=1) == 1).all()
    with pytest.raises(UserError, match="ctx=23"):
        divisors.training_windows(corpus, 23, 4, 0)


@pytest.mark.process
def test_the_command_searches_on_a_run_and_what_it_prints_can_be_pasted(here, monkeypatch):
    run_train("steps=2", "name=x")
    given = ["run=x", "ctx=128", "minutes=9", "tries=6", "out=d.png"]
    printed = [run_command(divisors.main, given, monkeypatch)[:2] for _ in range(2)]
    assert printed[0] == printed[1] and printed[0][0] == 0 and Path("d.png").exists()
    *_, pi, _, _, line = printed[0][1].splitlines()
    run_eval(*line.removeprefix("python eval.py ").split(), "documents=3")
    # The loss of PI on the same texts, from all logits
    run = opened("x")
    texts = divisors.training_windows(run.corpus, 128, 16, 0)[:8]
    with torch.inference_mode():
        logits = run.model(texts[:, :-1], change=run.change([yaml_values("scaling", "pi")], 128, 128))[:, 64:]
    want = F.cross_entropy(logits.flatten(0, 1), texts[:, 65:].flatten()).item()
    assert pi.split()[0] == "pi" and float(pi.split()[1]) == pytest.approx(want, abs=2e-3)  # of about 6
