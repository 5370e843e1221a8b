"""Linear attention against its quadratic form, and with rotary positions in a model."""

import pytest
import torch
import torch.nn.functional as F

from conf.registry import yaml_values
from model import attention, linear_attention
from model.scaling import NO_CHANGE, TrainedContext, resolve
from tests.helpers import compile_for, encoding_of, model_of, random_tokens


@pytest.mark.parametrize("window", [None, 1, 37, 300])
@pytest.mark.parametrize("T", [1, 100, 128, 300])
def test_linear_attention_equals_its_masked_quadratic_form(T, window):
    torch.manual_seed(0)
    q = torch.randn(2, T, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, T, 2, 16, dtype=torch.float64).unbind()
    rope = encoding_of("rope")
    prepared = rope.prepare(torch.arange(T), NO_CHANGE)

    def rotate(a, b):
        return rope.rotate(a, b, prepared)

    got = linear_attention.linear_attention(q, k, v, rotate, window)
    fq, fk = F.elu(q) + 1, (F.elu(k) + 1).repeat_interleave(2, dim=2)
    rq, rk = rotate(fq, fk)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    seen = (distance >= 0) & (distance < (window or T))
    numerator = torch.einsum("bqhd,bkhd->bhqk", rq, rk) * seen  # rotated
    denominator = (torch.einsum("bqhd,bkhd->bhqk", fq, fk) * seen).sum(-1, keepdim=True)  # not rotated
    want = torch.einsum("bhqk,bkhd->bqhd", numerator / denominator, v.repeat_interleave(2, dim=2))
    assert (got - want).abs().max() < 1e-9


def test_linear_attention_is_causal_and_sees_the_rotation():
    model, x = model_of("rope", "attention=linear"), random_tokens(1, 24)
    other = x.clone()
    other[0, 20:] = (other[0, 20:] + 1) % 50
    assert torch.equal(model(x)[:, :20], model(other)[:, :20])
    assert (model(x, torch.arange(24) + 5) - model(x)).abs().max() < 1e-5
    assert (model(x, torch.arange(24) * 2) - model(x)).abs().max() > 1e-2
    pi = resolve(yaml_values("scaling", "pi"), TrainedContext("rope", 8, model.pos.inv_freq, "linear"), 24, 24)
    assert (model(x, change=pi) - model(x)).abs().max() > 1e-3


def test_linear_attention_is_not_compiled(monkeypatch):
    """Compiled by Inductor for a CPU, its gradients in bfloat16 are NaN (results/log.md, 2026-11-26)."""
    model, x, compiling = model_of("rope", "attention=linear"), random_tokens(1, 25), []

    def spy(*args):
        compiling.append(torch.compiler.is_compiling())
        return linear_attention.linear_attention(*args)

    monkeypatch.setattr(attention, "linear_attention", spy)
    compile_for(monkeypatch, model, "aot_eager")
    model.losses(x[:, :-1], x[:, 1:])
    assert compiling == [False] * len(model.blocks)
