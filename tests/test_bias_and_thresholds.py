"""Biases that bfloat16 would round, an encoding's own learning rate, and thresholds that suit another context."""

import math

import pytest
import torch

from conf.errors import UserError
from engine.checkpoint import load
from engine.optimizer import make_optimizer
from engine.restore import restore
from model import attention, gpt, spectrum, thresholds
from model.pos import Encoding
from model.pos.alibi import slopes
from model.scaling import ContextChange, TrainedContext, resolve
from tests.helpers import SMALL, choices, encoding_of, run_train, scaling_knobs, train_settings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# ---- the bias is exact to float32, also in bfloat16 ----


def long_biases(pos: str) -> Encoding:
    """An encoding of 4 heads whose biases have more than 8 bits: at long distances, or with these T5 tables."""
    encoding = encoding_of(pos)
    for p in encoding.parameters():
        torch.nn.init.uniform_(p, -128, -64, generator=torch.Generator().manual_seed(0))
    return encoding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("T, S, window", [(512, 512, None), (1024, 1024, None), (1024, 1024, 700), (600, 1, None)])
@pytest.mark.parametrize("pos", ["alibi", "t5_bias"])
def test_a_bias_is_added_in_float32_under_autocast(pos, T, S, window, grad, device):
    """The score of each key for the last query is minus its bias, rounded to bfloat16, so what is left of their sum is
    that rounding. A bias in bfloat16 would leave 0 for all keys, which is off by up to a quarter of the output."""
    D, encoding, p = 64, long_biases(pos), torch.arange(T, device=device)
    encoding.to(device)
    q, k, v = torch.zeros(3, 1, 4, T, D, dtype=torch.bfloat16, device=device).unbind()
    with torch.no_grad():
        bias = encoding.bias(p[-1:], p)
    assert bias is not None
    bias = bias[:, 0]  # float32 [H, T]
    q[..., 0], k[0, :, :, 0], v[..., p, p % D] = D**0.5, -bias, 1
    q, k, v = (x.requires_grad_(grad) for x in (q, k, v))
    with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16):
        got = attention.attend(attention.Heads(q[:, :, -S:], k, v), encoding, p, ContextChange(window=window))[0, :, -1]
    scores = k[0, :, :, 0].double() + bias.double()
    scores = scores.masked_fill(T - 1 - p >= (window or T), -math.inf)
    want = scores.softmax(-1).unsqueeze(1) @ v[0].double()  # [H, 1, D]
    error = ((got.double() - want[:, 0]).abs() / want[:, 0].amax(-1, keepdim=True)).max()
    assert error < 0.01
    if grad:
        got.float().square().sum().backward()
        grads = [x.grad for x in (q, k, v, *encoding.parameters())]
        assert all(g is not None and torch.isfinite(g).all() for g in grads)


def test_alibis_mask_is_slope_times_distance_to_the_last_bit():
    T, encoding = 1024, encoding_of("alibi")
    q = torch.zeros(1, 4, T, 16, dtype=torch.bfloat16)
    p = torch.arange(T)
    for block in attention.query_blocks(attention.Heads(q, q, q), encoding, p, ContextChange(), None):
        distance = p[block.index, None] - p[block.local]
        visible = distance >= 0
        for head, slope in enumerate(slopes(4)):
            assert torch.equal(-block.mask[0, head][visible].double(), slope * distance[visible].double())
            assert block.mask[0, head][~visible].eq(-torch.inf).all()
    (block,) = attention.query_blocks(
        attention.Heads(*q[:, :, :9].expand(3, -1, -1, -1, -1)), encoding_of("rope"), p[:9], ContextChange(), 5
    )
    assert block.mask.dtype == q.dtype  # without a bias attention stays in bfloat16


# ---- an encoding's own learning rate ----


def with_gradients(pos: str, *overrides: str) -> gpt.GPT:
    model = gpt.build(train_settings(f"pos={pos}", *SMALL, *overrides), vocab_size=50)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_the_parameters_of_an_encoding_move_at_their_own_rate(factor):
    """With a constant gradient Adam moves every parameter by its learning rate. Three steps: nothing compounds."""
    model, lr = with_gradients("t5_bias", f"pos.lr_factor={factor}"), 1e-3
    optimizer = make_optimizer(model, train_settings("optim.weight_decay=0").optim)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:  # as train.py does
        group["lr"] = lr
    for _ in range(3):
        optimizer.step()
    for name, p in model.named_parameters():
        rate = lr * factor if name.startswith("pos.") else lr
        assert torch.allclose(before[name] - p, torch.tensor(3 * rate), rtol=1e-3), name


@pytest.mark.parametrize("pos", choices("pos"))
def test_without_a_factor_the_optimizer_has_its_two_groups(pos):
    """In the order of model.parameters(), so that checkpoints of earlier versions resume."""
    model, optim = with_gradients(pos, *(["pos.lr_factor=1"] if pos == "t5_bias" else [])), train_settings().optim
    params = list(model.parameters())
    decay, rest = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": optim.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), fused=True)
    ours = make_optimizer(model, optim)
    assert model.pos.lr_factor == 1 and ours.state_dict() == plain.state_dict()
    for a, b in zip(ours.param_groups, plain.param_groups, strict=True):
        assert all(x is y for x, y in zip(a["params"], b["params"], strict=True))


def test_t5_runs_of_before_the_factor_are_unchanged():
    """Their settings do not have it."""
    cfg = train_settings("pos=t5_bias", *SMALL)
    assert cfg.pos.pop("lr_factor") != 1
    model = gpt.build(cfg, 50)
    assert model.pos.lr_factor == 1 and len(make_optimizer(model, cfg.optim).param_groups) == 2
    with pytest.raises(UserError, match=r"pos\.lr_factor=0: must be above 0"):
        encoding_of("t5_bias", "pos.lr_factor=0")


def test_a_resumed_run_keeps_the_encodings_rate(here):
    run_train("pos=t5_bias", "steps=4", "name=t5")
    state = load(here / "runs/t5")
    optimizer = make_optimizer(
        model := gpt.build(state["cfg"], len(state["model"]["tokens.weight"])), state["cfg"].optim
    )
    restore(here / "runs/t5", state, model, optimizer)
    for step_lr in (1e-3, 5e-4):
        for group in optimizer.param_groups:
            group["lr"] = step_lr
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert optimizer.param_groups[2]["lr"] == pytest.approx(step_lr * state["cfg"].pos["lr_factor"])
        assert {group["lr"] for group in optimizer.param_groups[:2]} == {step_lr}


# ---- thresholds in rotations ----


def rope(L: int = 256, D: int = 64, base: float = 10000.0) -> TrainedContext:
    return TrainedContext("rope", L, spectrum.frequencies(D, base))


@pytest.mark.parametrize(
    "knobs, trained, right",
    [
        ({"beta_fast": 32.0}, rope(), "beta_fast=32: 1 of 32 pairs rotate more often than that within 256 tokens (in "
         "Llama 2: 21 of 64); comparable: scaling.beta_fast=2.2"),
        ({"beta": 32.0}, rope(L=128), "beta=32: 0 of 32 pairs"),
        ({"high_freq_factor": 4.0}, rope(L=32), "high_freq_factor=4: 1 of 32 pairs rotate more often than that within "
         "32 tokens (in Llama 3: 29 of 64)"),
        ({"high_freq_factor": 0.001}, rope(), "high_freq_factor=0.001: 32 of 32 pairs"),
        ({"beta_fast": 32.0}, rope(D=2), "beta_fast=32: 1 of 1 pairs"),
    ],
)  # fmt: skip
def test_a_threshold_with_nearly_all_pairs_on_one_side_is_a_warning(knobs, trained, right):
    line = thresholds.warning(knobs, trained)
    assert line.startswith("warning: scaling.") and right in line and "\n" not in line
    key, value = line.rsplit("scaling.", 1)[1].split("=")
    if len(trained.inv_freq) > 1:
        assert thresholds.warning({key: float(value)}, trained) == ""  # what it recommends


def test_thresholds_in_their_own_models_are_no_warning():
    assert thresholds.warning({"beta_fast": 32.0}, rope(4096, 128)) == ""
    assert thresholds.warning({"high_freq_factor": 4.0}, rope(8192, 128, 500_000.0)) == ""
    assert thresholds.warning({"factor": 2.0}, rope()) == ""
    assert thresholds.warning({"beta": 32.0}, TrainedContext("alibi", 128, None)) == ""


def test_the_published_counts_are_those_of_the_models():
    for key, L, base in (("beta_fast", 4096, 1e4), ("beta", 4096, 1e4), ("high_freq_factor", 8192, 5e5)):
        default = {"beta_fast": 32, "beta": 32, "high_freq_factor": 4}[key]
        r = spectrum.rotations(spectrum.frequencies(128, base), L)
        assert int((r > default).sum()) == thresholds.PUBLISHED[key][1]


@pytest.mark.parametrize("L", [64, 256, 4096])
def test_yarn_scaled_divides_the_pairs_at_any_context_as_yarn_does_in_llama_2(L):
    def kept_and_interpolated(name: str, trained: TrainedContext) -> tuple[int, int]:
        scaled = resolve({**scaling_knobs(name, 64), "factor": 8.0}, trained, 8 * L, 8 * L).inv_freq
        assert scaled is not None
        ratio = scaled / trained.inv_freq
        return int((ratio == 1).sum()), int((ratio < 1 / 8 + 1e-9).sum())

    assert (
        kept_and_interpolated("yarn_scaled", rope(L, 128)) == (21, 18) == kept_and_interpolated("yarn", rope(4096, 128))
    )
    assert thresholds.warning(scaling_knobs("yarn_scaled", 64), rope(L, 128)) == ""
    if L < 4096:
        assert kept_and_interpolated("yarn", rope(L, 128))[0] < 6


def test_yarn_scaled_refuses_a_context_below_one():
    with pytest.raises(UserError, match=r"scaling\.reference_ctx=0: must be at least 1"):
        resolve({"kind": "yarn_scaled", "factor": 2.0, "reference_ctx": 0}, rope(), 512, 512)
