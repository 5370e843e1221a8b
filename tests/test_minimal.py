"""minimal.py computes what train.py and eval.py compute, in float32 on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

import minimal
from data.held_out import validation_windows
from engine.run import Run
from measure.curves import read_curve
from tests.helpers import opened, run_eval, train_smoke_runs

pytestmark = pytest.mark.process

CONFIG = minimal.Config(n_layers=2, n_heads=2, width=64, ctx=64, steps=20, warmup=5)  # exp=smoke, longer


RUN = ("pos=rope", "name=x", "steps=20", "optim.warmup=5", "dtype=float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache) -> Path:
    """runs/x of train.py, at smoke size, and in runs/x/eval the curves of eval.py.

    Its attention is made sharper after the training, or positions would hardly matter to such a model.
    """
    folder = train_smoke_runs(tmp_path_factory.mktemp("minimal"), cache, RUN)
    state = torch.load(folder / "runs/x/ckpt.pt", weights_only=True)
    for name in (name for name in state["model"] if "qkv" in name):
        state["model"][name] *= 4
    torch.save(state, folder / "runs/x/ckpt.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for method in minimal.METHODS:
            run_eval("run=x", "ctx=512", "documents=6", "dtype=float32", f"scaling={method}")
    return folder


@pytest.fixture
def run(folder, cache, monkeypatch) -> Run:
    monkeypatch.setattr(minimal, "DEVICE", "cpu")
    monkeypatch.setattr(minimal, "BFLOAT16", False)
    return opened("x", runs=str(folder / "runs"), cache=cache)


def test_the_curves_of_a_run_are_those_of_eval(run, monkeypatch):
    """The loss of each document at each length with each method, within 5e-5 nats per token."""
    monkeypatch.setattr(minimal, "DOCUMENTS", 6)
    model = minimal.GPT(CONFIG, run.corpus.vocab_size)
    weights = run.model.state_dict().items()
    model.load_state_dict({name.replace("attention.", "").replace("mlp.", ""): value for name, value in weights})
    texts = minimal.scored_texts(run.corpus, 512)
    rows = [row for file in (run.folder / "eval").glob("*.jsonl") for row in read_curve(file).rows]
    expected = {(row.label, row.n): np.reshape(row.nll, (6, -1)).sum(1) / (row.tokens / 6) for row in rows}
    assert {label for label, _ in expected} == {"none", "window", *minimal.METHODS}
    assert {n for _, n in expected} >= {64, 128, 256, 512}
    for (label, n), losses in expected.items():
        got = minimal.measure(model, texts, n, label)
        assert len(got) == 6 and np.abs(got - losses).max() < 5e-5, (label, n)
    for label in ("window", *minimal.METHODS):  # differences that the tolerance would not hide
        assert np.abs(expected[label, 512] - expected["none", 512]).max() > 2e-3, label


def test_a_trained_model_is_that_of_train(run):
    """The same initial weights, batches, optimizers and schedule: after 20 steps the same loss of held-out windows, but
    for Muon's products where they are in bfloat16: other weights of the same model by 1e-7 then change it by 6e-4."""
    model = minimal.train(CONFIG, run.corpus)
    with torch.no_grad():
        loss = model.losses(validation_windows(run.corpus, CONFIG.ctx, run.cfg.val_windows), CONFIG.ctx).mean().item()
    assert run.validation["loss"] == pytest.approx(loss, abs=2e-3)
