"""Decoding with a cache against full forwards, for every encoding and scaling, across the trained length."""

import functools

import pytest
import torch

import sample
from engine.generate import draw
from model import gpt, scaling
from model.decode import Decoder
from model.scaling import NotApplicable
from tests.helpers import choices, error_of, more_positions, run_command, run_train, scaling_knobs, train_settings

L, V = 8, 64


def build(pos: str, *more: str, layers: int = 2) -> tuple[gpt.GPT, scaling.TrainedContext]:
    settings = f"exp=smoke pos={pos} ctx={L} model.n_layers={layers} model.width=32 model.n_heads=2"
    cfg = train_settings(*settings.split(), *more_positions(pos, 64), *more)
    model = gpt.build(cfg, V).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    return model, gpt.trained_context(cfg, model.pos)


def resolver(name: str, trained: scaling.TrainedContext):
    knobs = scaling_knobs(name, 0 if trained.frequencies is None else len(trained.frequencies))
    return lambda n: scaling.resolve(knobs, trained, n, 4 * L)


def text(n: int) -> torch.Tensor:
    return torch.randint(V, (2, n), generator=torch.Generator().manual_seed(0))


def full(model: gpt.GPT, x: torch.Tensor, change: scaling.ContextChange) -> torch.Tensor:
    with torch.inference_mode():
        return model(x, change=change)[:, -1]


def largest_difference(model: gpt.GPT, resolve) -> float:
    """The largest difference between cached and full logits, token by token from 5 to 3 L."""
    x, decoder = text(3 * L), Decoder(model, resolve)
    lengths = range(5, 3 * L + 1)
    return max((decoder.logits(x[:, :n]) - full(model, x[:, :n], resolve(n))).abs().max().item() for n in lengths)


built = functools.cache(build)  # for tests that leave the model as it is


# Every method with rope, and every encoding with each kind of change: of nothing, the mask, the scores, the frequencies
WITH_ROPE = {("rope", name) for name in choices("scaling")}
WITH_ALL = {(pos, name) for pos in choices("pos") for name in ("none", "window", "logn", "dynamic_ntk")}


@pytest.mark.parametrize("pos, name", sorted(WITH_ROPE | WITH_ALL))
def test_cached_decoding_equals_a_full_forward_at_every_length(pos, name):
    model, trained = built(pos)
    resolve = resolver(name, trained)
    try:
        resolve(2 * L)
    except NotApplicable:
        pytest.skip(f"scaling={name} is not applicable to pos={pos}")
    assert largest_difference(model, resolve) < 1e-3  # of logits of about 10


@pytest.mark.parametrize("name", ["none", "ntk", "window", "dynamic_ntk"])
def test_linear_attention_and_the_variants_of_softmax_attention_decode_alike(name):
    olmo2 = ["model.residual=serial_post", "model.qk_norm=true", "model.qk_norm_all_heads=true", "model.n_kv_heads=1"]
    gemma3 = ["model.residual=serial_both", "model.mlp=geglu", "model.qk_norm=true"]
    caps = ["model.attention_softcap=2", "model.logit_softcap=5", "model.n_kv_heads=1"]
    gate = ["model.attention_gate=element", "model.residual=parallel_shared"]
    for more in (["attention=linear"], gate, ["model.n_kv_heads=1"], ["model.qk_norm=true"], olmo2, gemma3, caps):
        model, trained = build("rope", *more)
        assert largest_difference(model, resolver(name, trained)) < 1e-3


def test_how_many_tokens_each_step_processes():
    model, trained = build("rope", layers=3)
    processed, last_logits = [], model.last_logits

    def counted(new, *rest):
        processed.append(new.shape[1])
        return last_logits(new, *rest)

    model.last_logits = counted
    largest_difference(model, resolver("dynamic_ntk", trained))
    assert processed == [5, *[1] * (L - 5), *range(L + 1, 3 * L + 1)]


def test_draw_takes_the_likeliest_or_among_the_top_k():
    logits, g = torch.tensor([0.0, 3.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    assert draw(logits, 0, None, g) == 1 == draw(logits, 1.0, 1, g)
    drawn = [draw(logits, 1.0, 2, g) for _ in range(2000)]
    assert set(drawn) == {1, 2}
    assert sum(x == 1 for x in drawn) / 2000 == pytest.approx(1 / (1 + 2.718281828**-1), abs=0.04)


def test_the_command_writes_the_same_for_the_same_seed(here, monkeypatch):
    run_train("steps=2", "name=a")

    def drawn(seed: int) -> str:
        """What the command prints."""
        settings = ["prompt='def '", "scaling=ntk", "tokens=90", "run=a", "dtype=float32", f"seed={seed}"]
        code, out, err = run_command(sample.main, settings, monkeypatch)
        assert code == 0 and "run: a" in err and "tokens/s" in err
        return out

    assert drawn(1).startswith("def ") and drawn(1) == drawn(1) != drawn(2)
    run_train("steps=1", "pos=learned", "name=l")
    assert "pos=learned has 64 positions" in error_of(sample.main, ["run=l", "tokens=90"], monkeypatch)


@pytest.mark.parametrize("settings", [("pos=learned", "positions=random", "pos.max_positions=512"), ("scaling=pi",)])
def test_a_training_ends_with_what_sample_py_writes(settings, here, monkeypatch, capsys):
    run_train("steps=3", "name=a", *settings)
    lines = capsys.readouterr().out.splitlines()
    (words,) = (line.removeprefix("it writes: ") for line in lines if line.startswith("it writes: "))
    _, out, _ = run_command(sample.main, ["run=a", "tokens=30"], monkeypatch)
    printable = "".join(c if c.isprintable() else " " for c in out)
    assert words and " ".join(printable.split()).startswith(words) and max(map(len, lines)) <= 80
