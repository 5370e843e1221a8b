"""init=RUN with another encoding, base or layer schedule: what is kept, new frequencies, what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from engine.run import Run
from model import spectrum
from model.layer_schedule import ScheduledEncodings
from tests.helpers import line_of, opened, run_eval, run_train, train_smoke_runs

pytestmark = pytest.mark.process

FROZEN = ("steps=1", "optim=adamw", "optim.lr=1e-12", "optim.warmup=0")  # keeps the weights


@pytest.fixture(scope="module")
def parents(tmp_path_factory, cache):
    """Runs of one step each: four encodings, and rope with a layer schedule."""
    settings = {"rope": "pos=rope", "t5": "pos=t5_bias", "olmo3": "layers=olmo3", "learned": "pos=learned"}
    settings |= {"fope": "pos=fope"}
    runs = [("steps=1", f"name={name}", setting) for name, setting in settings.items()]
    return train_smoke_runs(tmp_path_factory.mktemp("parents"), cache, *runs)


@pytest.fixture
def there(parents, monkeypatch) -> Path:
    monkeypatch.chdir(parents)
    monkeypatch.setattr("sys.argv", ["test"])
    return parents


@pytest.fixture
def changed(there, capsys):
    """Trains with these overrides for one step that keeps the weights -> the run, and what train.py printed."""

    def train(*overrides: str, name: str = "new") -> tuple[Run, str]:
        run_train(*overrides, *FROZEN, f"name={name}", "fresh=true")
        return opened(name), capsys.readouterr().out

    return train


def same_weights(a: Run, b: Run) -> bool:
    """But for those of the encoding."""
    weights, others = a.model.state_dict(), b.model.state_dict()
    return all(torch.allclose(weights[key], others[key]) for key in weights if not key.startswith("pos."))


def test_drope_keeps_all_weights_and_drops_the_rotation(changed, capsys):
    (run, out), parent, tokens = changed("init=rope", "pos=none", name="drope"), opened("rope"), torch.arange(40)[None]
    count = len(parent.model.state_dict())
    assert f"pos=rope -> pos=none: kept {count} tensors; dropped: nothing; newly initialised: nothing" in out
    assert "from rope: pre-trained with pos=rope; this run: ctx 64, scaling=none" in out
    assert same_weights(run, parent) and run.context.frequencies is None
    with torch.no_grad():
        logits = run.model(tokens)
        assert (parent.model(tokens) - logits).abs().max() > 1e-5
        # The same network as the parent's without a rotation
        parent.model.pos.inv_freq = torch.zeros_like(parent.model.pos.inv_freq)
        assert torch.allclose(parent.model(tokens), logits, atol=1e-5)
    run_eval("run=drope", "ctx=128", "documents=3")
    assert "pre-trained with pos=rope, then trained at ctx 64" in capsys.readouterr().out


def test_a_larger_base_in_continued_training(changed):
    """ABF. The new frequencies are trained at the new context, so factors of scaling methods refer to that."""
    run, out = changed("init=rope", "pos.base=500000", "ctx=128", name="abf")
    assert "pos=rope -> pos=rope base=500000: kept" in out
    assert torch.equal(run.context.inv_freq, spectrum.frequencies(32, 500000))
    assert (run.context.train_ctx, run.context.longest_trained_ctx) == (128, 128)
    assert run.change([{"kind": "pi", "factor": "auto"}], 256, 256).factor == 2
    # A run that continues this one as it is keeps this context
    run, out = changed("init=abf", "ctx=256", "scaling=pi", name="longer")
    assert "scaling=pi (factor 2)" in out and "encoding" not in run.cfg.pretrained
    run, _ = changed("init=longer", "ctx=128")  # which has seen 256 tokens, too, and keeps its scaling
    assert (run.context.train_ctx, run.context.longest_trained_ctx, run.cfg.scaling["kind"]) == (128, 256, "pi")
    assert changed("init=longer", "ctx=128", "++scaling.factor=3")[0].cfg.scaling == {"kind": "pi", "factor": 3}
    assert changed("init=longer", "ctx=128", "scaling=none")[0].cfg.scaling["kind"] == "none"
    # One at the parent's base keeps that of the parent, also where another encoding has the same frequencies
    for pos, ctx in (([], 64), (["pos=ssmax"], 64), (["pos=rope_resonance"], 128)):
        assert changed("init=rope", *pos, "ctx=128")[0].context.train_ctx == ctx


def test_coefficients_that_are_not_trained_are_those_of_the_settings(changed):
    of_parent = opened("fope").model.pos.sums
    assert not torch.equal(changed("init=fope", "++pos.context=20")[0].model.pos.sums, of_parent)
    run, _ = changed("init=fope", "layers=olmo3", "seed=1")
    assert torch.equal(run.model.pos.encodings[0].sums, of_parent)


def test_rope_to_swan_keeps_the_frequencies_of_the_window_layers(changed):
    run, out = changed("init=rope", "layers=swan", "layers.L.window=16", "ctx=128", name="swan")
    assert "pos=rope -> pos=rope, layers=swan (GL) G.pos=none, L.window=16, L.scaled=False: kept" in out
    assert isinstance(run.model.pos, ScheduledEncodings) and same_weights(run, opened("rope"))
    assert (run.context.train_ctx, run.context.longest_trained_ctx) == (64, 128)
    assert run.context.by_type[0].frequencies is None and run.context.by_type[1].frequencies is not None
    # And without windows again
    run, _ = changed("init=swan", "layers=uniform")
    assert run.cfg.layers is None and same_weights(run, opened("rope"))
    # A schedule is kept, with its windows in tokens, where it is not changed
    run, _ = changed("init=olmo3", "ctx=128")
    assert run.cfg.layers == opened("olmo3").cfg.layers and run.cfg.layers.types["L"].window == 32


def test_a_setting_of_the_parents_schedule_or_encoding_is_changed_alone(changed):
    before = opened("olmo3").cfg.layers.types
    run, out = changed("init=olmo3", "layers=olmo3", "layers.L.window=16")
    assert run.cfg.layers.types == {**before, "L": replace(before["L"], window=16)}
    assert "layers=olmo3 (LG) L.window=16, L.scaled=False: kept" in out and same_weights(run, opened("olmo3"))
    run, _ = changed("init=t5", "++pos.buckets=8")
    assert run.cfg.pos == {**opened("t5").cfg.pos, "buckets": 8}
    assert changed("init=olmo3", "layers=uniform")[0].cfg.layers is None


@pytest.mark.parametrize(
    "overrides, kept",
    [
        (["init=t5", "pos=rope"], "dropped: pos.table.weight; newly initialised: nothing"),
        (["init=rope", "pos=t5_bias"], "dropped: nothing; newly initialised: pos.table.weight"),
        # A schedule has the encoding of pos= among others: its parameters are the parent's
        (["init=t5", "layers=olmo3"], "dropped: nothing; newly initialised: nothing"),
        # Of another shape
        (["init=t5", "pos=t5_bias", "pos.buckets=8"], "dropped: pos.table.weight; newly initialised: pos.table.weight"),
    ],
)
def test_parameters_of_an_encoding_are_dropped_kept_or_new(changed, overrides, kept):
    run, out = changed(*overrides)
    assert re.search(r"-> .*: kept \d+ tensors; (.*)", out)[1] == kept
    if "layers=olmo3" in overrides:
        bias = run.model.state_dict()["pos.encodings.0.table.weight"]
        assert torch.allclose(bias, opened("t5").model.state_dict()["pos.table.weight"])


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["init=rope", "pos=rope_interleaved"], r"pos=rope_interleaved does not fit the weights of rope: other dim"),
        (["init=olmo3", "++layers.L.base=500"], r"layers\.pattern=: must be made of the letters of layers=NAME: L"),
        (["init=t5", "pos.base=500000"], r"pos: got an unexpected keyword argument 'base'; there are buckets"),
        (["init=rope", "~pos.base"], r"pos\.base"),
        (["init=rope", "++pos.a.b=1"], r"pos: got an unexpected keyword argument 'a\.b'"),
        (["init=rope", "model.width=32"], r"init=rope: model\.width=32 cannot be chosen, it comes from that run"),
        (["init=rope", "pos=none", "scaling=yarn"], r"scaling=yarn is not applicable: .*pos=none has none"),
        (["init=rope", "layers=gpt_oss"], r"layers=gpt_oss: its pos=sink_logits must be chosen"),
        (["init=learned", "ctx=128"], r"pos\.max_positions=64: must be at least ctx=128"),
    ],
)
def test_what_is_refused(there, overrides, message):
    with pytest.raises(UserError, match=message):
        run_train(*overrides, "name=refused")
    assert "name=rope: must be another name" in line_of(run_train, "init=rope", "name=rope")
    assert not Path("runs/refused").exists()
