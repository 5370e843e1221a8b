"""The model: losses of scored tokens, its options and its sizes."""

import pytest
import torch
import torch.nn.functional as F

from conf.schema import ModelConfig
from kernels.gelu import fuses_gelu, gelu
from model import gpt
from tests.helpers import SMALL, model_of, random_tokens, train_settings


def test_losses_score_the_last_tokens_and_blocks_change_nothing(monkeypatch):
    model, x = model_of("rope"), random_tokens(2, 17)
    logits = model(x[:, :-1])
    want = F.cross_entropy(logits[:, -5:].flatten(0, 1), x[:, -5:].flatten(), reduction="none").view(2, 5)
    assert (model.losses(x[:, :-1], x[:, -5:]) - want).abs().max() < 1e-6
    whole = model.losses(x[:, :-1], x[:, 1:]).mean()
    whole.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(gpt, "loss_block", lambda device: 3 * 50)  # three rows of logits at a time
    blocked = model.losses(x[:, :-1], x[:, 1:]).mean()
    blocked.backward()
    assert (whole - blocked).abs() < 1e-6
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad - grad).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [("gelu", True), ("swiglu", True), ("geglu", True), ("gelu", False)])
def test_model_options(shape):
    mlp, tied = shape
    model = gpt.build(train_settings("pos=rope", *SMALL, f"model.mlp={mlp}", f"model.tied_head={tied}"), 64)
    assert (model.head.weight is model.tokens.weight) == tied
    plain = gpt.build(train_settings("pos=rope", *SMALL), 64).n_parameters() + (0 if tied else 64 * 64)
    assert abs(model.n_parameters() / plain - 1) < 0.15  # a gated MLP costs about the same


def test_sizes_are_as_documented():
    sizes = {"nano": (3e6, 4.2e6), "tiny": (10e6, 30e6)}
    for name, (low, high) in sizes.items():
        model = gpt.build(train_settings(f"model={name}"), 2048)
        assert low <= model.n_parameters() <= high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_in_compiled_code_equals_float64(dtype):
    """And its gradient: in float32 up to rounding, in bfloat16 with no larger errors than torch's own."""
    x = torch.linspace(-12, 12, 4001).to(dtype)

    def value_and_gradient(x, function):
        y = function(x.requires_grad_())
        return torch.stack((y.detach(), *torch.autograd.grad(y.sum(), x))).double()

    def torchs(x):
        return torch.nn.functional.gelu(x, approximate="tanh")

    got = value_and_gradient(x, torch.compile(gelu, backend="aot_eager"))
    want, plain = value_and_gradient(x.double(), torchs), value_and_gradient(x, torchs)
    assert not torch.equal(got, plain)  # it is the other formula
    limit = 5e-6 if dtype == torch.float32 else 1.01 * (plain - want).abs().max()
    assert (got - want).abs().max() < limit


@pytest.mark.parametrize("mlp", ["gelu", "gelu_exact"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_gelu_as_one_operation_equal_float64(mlp, bias):
    """Errors of bfloat16 only, and no larger than those of the two operations that training runs."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bfloat16 in oneDNN")
    torch.manual_seed(0)
    layer, x = gpt.MLP(ModelConfig(n_layers=1, n_heads=4, width=64, mlp=mlp, mlp_bias=bias)), torch.randn(2, 30, 64)
    with torch.autocast("cpu", torch.bfloat16):
        two = layer(x).detach().double()
        assert not fuses_gelu(x)
        with torch.inference_mode():
            assert fuses_gelu(x)
            one = layer(x).double()
    with torch.no_grad():
        assert not fuses_gelu(x)  # in float32
        want = layer.double()(x.double())
    assert (one - want).abs().max() <= 1.5 * (two - want).abs().max() and (two - want).abs().max() < 0.01
