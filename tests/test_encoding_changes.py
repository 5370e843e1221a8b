"""init=RUN with another encoding, base or layer schedule: what is kept, new frequencies, what is refused."""

import re
from pathlib import Path

import pytest
import torch

from conf.errors import UserError
from conf.help import wrong_setting
from conf.hydra_patches import init_keeps_groups
from conf.layer_schedule import change_schedule
from engine import checkpoint
from engine.run import Run
from model import spectrum
from model.layers import LayerSchedule
from tests.helpers import command, run_eval, run_train, train_settings, train_smoke_runs

FROZEN = ("steps=1", "optim.lr=1e-12", "optim.warmup=0")  # keeps the weights


@pytest.fixture(scope="module")
def parents(tmp_path_factory, cache):
    """Runs of one step each: rope in both layouts, t5 and rope with a layer schedule."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        runs = [("pos=rope", "name=rope"), ("pos=t5_bias", "name=t5"), ("layers=olmo3", "name=olmo3"),
                ("pos=rope_interleaved", "name=interleaved")]  # fmt: skip
        return train_smoke_runs(tmp_path_factory.mktemp("parents"), cache, *[("steps=1", *run) for run in runs])


@pytest.fixture
def there(parents, monkeypatch) -> Path:
    monkeypatch.chdir(parents)
    monkeypatch.setattr("sys.argv", ["test"])
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return parents


def trained(name: str) -> Run:
    return Run.open(name, runs="runs", cache=".cache")


def same_weights(child: str, parent: str, but: str = "pos.") -> bool:
    a, b = (checkpoint.load(Path("runs", name))["model"] for name in (child, parent))
    return all(torch.allclose(a[key], b[key]) for key in a if not key.startswith(but))


def test_drope_keeps_all_weights_and_drops_the_rotation(there, capsys):
    run_train("init=rope", "pos=none", *FROZEN, "name=drope")
    out = capsys.readouterr().out
    count = len(checkpoint.load(Path("runs/rope"))["model"])
    assert f"pos=rope -> pos=none: kept {count} tensors; dropped: nothing; newly initialised: nothing" in out
    assert "from runs/rope: pre-trained with pos=rope on 512 tokens; this run: ctx 64, scaling=none" in out
    assert same_weights("drope", "rope")
    run, parent, tokens = trained("drope"), trained("rope"), torch.arange(40)[None]
    assert run.context.frequencies is None
    with torch.no_grad():
        logits = run.model(tokens)
        # The same network as the parent's without a rotation, and not the parent's with it
        parent.model.pos.inv_freq = torch.zeros_like(parent.model.pos.inv_freq)
        assert torch.allclose(parent.model(tokens), logits, atol=1e-5)
    assert (trained("rope").model(tokens) - logits).abs().max() > 1e-5
    run_train("init=rope", "pos=none", *FROZEN, "name=drope")
    assert "already trained" in capsys.readouterr().out
    run_eval("run=drope", "ctx=128", "documents=3")
    assert "pre-trained as rope, with pos=rope; then changed and trained at ctx 64" in capsys.readouterr().out


def test_a_larger_base_in_continued_training(there, capsys):
    """ABF. The new frequencies are trained at the new context, so factors of scaling methods refer to that."""
    run_train("init=rope", "pos.base=500000", "ctx=128", *FROZEN, "name=abf")
    assert "pos=rope -> pos=rope base=500000: kept" in capsys.readouterr().out
    run = trained("abf")
    assert torch.equal(run.context.inv_freq, spectrum.frequencies(32, 500000))
    assert (run.context.train_ctx, run.context.longest_trained_ctx) == (128, 128)
    assert run.change([{"kind": "pi", "factor": "auto"}], 256, 256).factor == 2
    # A run that continues this one as it is keeps this context, and one at the parent's base that of the parent
    run_train("init=abf", "ctx=256", "scaling=pi", *FROZEN, "name=abf2")
    assert "scaling=pi (factor 2)" in capsys.readouterr().out and "encoding" not in trained("abf2").cfg.pretrained
    run_train("init=rope", "ctx=128", *FROZEN, "name=longer")
    assert trained("longer").context.train_ctx == 64
    # Nor is the context another one where another encoding has the same frequencies
    run_train("init=rope", "pos=ssmax", "ctx=128", *FROZEN, "name=ssmax")
    assert trained("ssmax").context.train_ctx == 64


def test_rope_to_swan_keeps_the_frequencies_of_the_window_layers(there, capsys):
    run_train("init=rope", "layers=swan", "layers.L.window=16", "ctx=128", *FROZEN, "name=swan")
    assert "pos=rope -> pos=rope, layers=swan (GL) L.window=16: kept" in capsys.readouterr().out
    run = trained("swan")
    assert isinstance(run.model.pos, LayerSchedule) and same_weights("swan", "rope")
    assert (run.context.train_ctx, run.context.longest_trained_ctx) == (64, 128)
    assert run.context.kinds[0].frequencies is None and run.context.kinds[1].frequencies is not None
    # And without windows again
    run_train("init=swan", "layers=uniform", *FROZEN, "name=back")
    assert trained("back").cfg.layers == {} and same_weights("back", "rope")
    # A schedule is kept, with its windows in tokens, where it is not changed
    run_train("init=olmo3", "ctx=128", *FROZEN, "name=olmo3-longer")
    assert trained("olmo3-longer").cfg.layers == trained("olmo3").cfg.layers
    assert trained("olmo3").cfg.layers["L"]["window"] == 32
    capsys.readouterr()


def test_a_setting_of_the_parents_schedule_or_encoding_is_changed_alone(there, monkeypatch, capsys):
    """As typed: the default choices have no such setting."""
    before = trained("olmo3").cfg.layers

    def changed(*overrides: str) -> Run:
        monkeypatch.setattr("sys.argv", ["train.py", *overrides])
        typed = [init_keeps_groups(argument) for argument in overrides]
        assert wrong_setting("train") is None
        run_train(*typed, *FROZEN, "name=new", "fresh=true")
        return trained("new")

    run = changed("init=olmo3", "layers.L.window=16")
    assert run.cfg.layers == {**before, "L": {**before["L"], "window": 16}}
    assert "layers=olmo3 (LG) L.window=16: kept" in capsys.readouterr().out and same_weights("new", "olmo3")
    run = changed("init=olmo3", "layers.L.base=500", "layers.L.sinks=2")
    kinds = {letter: run.cfg.layers[letter] for letter in "LG"}
    assert "layers=olmo3 (LG) L.pos=rope base=500, L.sinks=2: kept" in capsys.readouterr().out
    assert kinds["L"] == {**before["L"], "pos": {**run.cfg.pos, "base": 500.0}, "sinks": 2}
    assert kinds["G"] == before["G"]
    assert changed("init=olmo3", "layers.G.pos=none").cfg.layers["G"] == {**before["G"], "pos": {"kind": "none"}}
    assert changed("init=t5", "pos.buckets=8").cfg.pos == {**trained("t5").cfg.pos, "buckets": 8}


def test_the_command_changes_a_setting_of_the_parents_schedule(there):
    settings = ("exp=smoke", "init=olmo3", "layers.L.window=16", *FROZEN, "name=typed")
    done = command("train.py", *settings, cwd=there)
    assert done.returncode == 0 and "layers=olmo3 (LG) L.window=16: kept" in done.stdout, done.stderr
    assert trained("typed").cfg.layers["L"]["window"] == 16


def test_settings_of_a_choice_on_the_command_line_are_not_those_of_the_parent(monkeypatch):
    """Hydra must refuse a knob that pos=NAME lacks, and a misspelt one is answered with the most similar one."""
    monkeypatch.setattr("sys.argv", ["train.py", "init=rope", "pos=rope", "pos.bsae=1", "layers.L.window=16"])
    assert init_keeps_groups("pos.bsae=1") == "pos.bsae=1"
    assert init_keeps_groups("layers.L.window=16") == "++layers.L.window=16"
    assert "pos.bsae: no such setting of train.py: did you mean pos.base?" in (wrong_setting("train") or "")


def test_what_a_change_of_one_kind_of_layer_keeps():
    cfg = train_settings("layers=gemma3")
    assert cfg.layers["L"]["pos"]["base"] == 10000 != cfg.layers["G"]["pos"]["base"]
    assert change_schedule(cfg.layers, {"L": {"window": 16}}, cfg)["L"] == {**cfg.layers["L"], "window": 16}
    changed = change_schedule(cfg.layers, {"L": {"pos": None, "base": 500}, "G": {"pos": None}}, cfg)
    assert changed["L"]["pos"] == {**cfg.pos, "base": 500} and changed["G"]["pos"] is None
    cfg = train_settings("layers=swan")  # its G has pos=none
    assert change_schedule(cfg.layers, {"G": {"base": None}}, cfg)["G"] == cfg.layers["G"]
    assert change_schedule(cfg.layers, {"G": {"pos": None, "base": 500}}, cfg)["G"]["pos"]["base"] == 500
    with pytest.raises(UserError, match="pos=none has no base"):
        change_schedule(cfg.layers, {"G": {"base": 500}}, cfg)


def test_parameters_of_an_encoding_are_dropped_kept_or_new(there, capsys):
    def changed(*overrides: str) -> str:
        run_train(*overrides, *FROZEN, "name=new", "fresh=true")
        return re.search(r"-> .*: kept \d+ tensors; (.*)", capsys.readouterr().out)[1]

    assert changed("init=t5", "pos=rope") == "dropped: pos.table.weight; newly initialised: nothing"
    assert changed("init=rope", "pos=t5_bias") == "dropped: nothing; newly initialised: pos.table.weight"
    # A schedule has the encoding of pos= among others: its parameters are the parent's
    assert changed("init=t5", "layers=olmo3") == "dropped: nothing; newly initialised: nothing"
    bias = checkpoint.load(Path("runs/new"))["model"]["pos.encodings.0.table.weight"]
    assert torch.allclose(bias, checkpoint.load(Path("runs/t5"))["model"]["pos.table.weight"])
    # Of another shape
    assert (
        changed("init=t5", "pos=t5_bias", "pos.buckets=8")
        == "dropped: pos.table.weight; newly initialised: pos.table.weight"
    )


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["init=rope", "pos=rope_interleaved"], r"pos=rope_interleaved does not fit the weights of rope: other dim"),
        (["init=rope", "pos=rope_partial"], r"init=rope: pos=rope_partial does not fit the weights of rope: other dim"),
        (["init=interleaved", "pos=ssmax"], r"pos=ssmax does not fit the weights of rope_interleaved: other dim"),
        (["init=rope", "++layers.L.base=500"], r"layers\.L\.base: needs layers=NAME beside it: rope has no layer sch"),
        (["init=olmo3", "++layers.S.window=5"], r"layers\.S=.*: must be left out: the layers are L and G, and another"),
        (["init=olmo3", "++layers.pattern=L"], r"layers\.pattern=L: must be left out: the layers are L and G, and"),
        (["init=olmo3", "++layers.L=5"], r"layers\.L=5: must be settings: pos, base, window, sinks, scaled"),
        (["init=olmo3", "++layers.L.windwo=5"], r"layers\.L\.windwo=5: must be left out: a kind of layer has pos, ba"),
        (["init=olmo3", "++layers.G.sinks=5"], r"layers\.G\.sinks=5: must be 0 without a window"),
        (["init=t5", "pos.base=500000"], r"pos\.base=500000: must be left out: pos=t5_bias of t5 has no base"),
        (["init=rope", "layers=olmo3", "layers.L.pos=xpos", "layers.L.window=-1"], r"layers\.L\.window=-1: must be"),
        (["init=rope", "model.width=32"], r"init=rope: model\.width=32 cannot be chosen, it comes from that run"),
        (["init=rope", "attention=linear"], r"init=rope: attention=linear cannot be chosen"),
        (["init=rope", "pos=none", "scaling=yarn"], r"scaling=yarn is not applicable: .*pos=none has none"),
    ],
)
def test_what_is_refused(there, overrides, message):
    with pytest.raises(UserError, match=message):
        run_train(*overrides, "name=refused")
    assert not Path("runs/refused").exists()


def test_names_say_what_was_changed():
    assert train_settings("init=rope", "pos=none").name == "rope-to-none"
    assert train_settings("init=rope", "layers=swan").name == "rope-swan"
    assert train_settings("init=rope", "pos.base=500000").name == "rope-base500000"
    for change in ("pos.base=500000", "++pos.base=500000"):  # as init_keeps_groups writes it
        assert train_settings("init=rope", change, "ctx=128").name == "rope-ctx128-base500000"
