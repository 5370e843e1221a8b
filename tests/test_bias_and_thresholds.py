"""Biases that bfloat16 would round, an encoding's own learning rate, and thresholds that suit another context."""

import math

import pytest
import torch

from engine.optimizer import Muon, make_optimizers
from model import attention, gpt, spectrum
from model.masks import query_blocks, sees
from model.pos.alibi import slopes
from model.scaling import NO_CHANGE, ContextChange, TrainedContext
from tests.helpers import SMALL, encoding_of, rope_context as rope, train_settings

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# ---- the bias is exact to float32, also in bfloat16 ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("T, S, window", [(512, 512, None), (1024, 1024, None), (1024, 1024, 700), (600, 1, None)])
@pytest.mark.parametrize("pos", ["alibi", "t5_bias"])
def test_a_bias_is_added_in_float32_under_autocast(pos, T, S, window, grad, device):
    """The score of each key for the last query is minus its bias, rounded to bfloat16, so what is left of their sum is
    that rounding. A bias in bfloat16 would leave 0 for all keys, which is off by up to a quarter of the output."""
    D, encoding, p = 64, encoding_of(pos).to(device), torch.arange(T, device=device)
    for table in encoding.parameters():  # T5's: biases of more than 8 bits, as ALiBi's are at long distances
        torch.nn.init.uniform_(table, -128, -64)
    q, k, v = torch.zeros(3, 1, 4, T, D, dtype=torch.bfloat16, device=device).unbind()
    bias = encoding.bias(p[-1:], p)[:, 0].detach()  # float32 [H, T]
    q[..., 0], k[0, :, :, 0], v[..., p, p % D] = D**0.5, -bias, 1
    q, k, v = (x.requires_grad_(grad) for x in (q, k, v))
    heads, change = attention.Heads(q[:, :, -S:], k, v), ContextChange(window=window)
    with torch.set_grad_enabled(grad), torch.autocast(device, torch.bfloat16):
        got = attention.attend(heads, encoding, p, change)[0, :, -1]
    scores = k[0, :, :, 0].double() + bias.double()
    weights = scores.masked_fill(T - 1 - p >= (window or T), -math.inf).softmax(-1)
    want = (weights.unsqueeze(1) @ v[0].double())[:, 0]  # [H, D]
    assert ((got.double() - want).abs() / want.amax(-1, keepdim=True)).max() < 0.01
    if grad:
        for gradient in torch.autograd.grad(got.float().square().sum(), [q, k, v, *encoding.parameters()]):
            assert gradient.isfinite().all()


def test_alibis_mask_is_slope_times_distance_to_the_last_bit():
    q, p, encoding = torch.zeros(1, 4, 1024, 16, dtype=torch.bfloat16), torch.arange(1024), encoding_of("alibi")
    for block in query_blocks(q, q, NO_CHANGE, prepended=0):
        distance = p[list(block.queries), None] - p[list(block.near)]
        seen = distance >= 0
        for mask, slope in zip(block.mask(q, encoding, p, NO_CHANGE, 0)[0], slopes(4), strict=True):
            assert (
                torch.equal(-mask[seen].double(), slope * distance[seen].double()) and mask[~seen].eq(-math.inf).all()
            )
    (block,) = query_blocks(*[q[:, :, :9]] * 2, ContextChange(window=5), prepended=0)
    assert (
        block.mask(q, encoding_of("rope"), p[:9], ContextChange(window=5), 0).dtype == q.dtype
    )  # without a bias attention stays in bfloat16


# ---- an encoding's own learning rate ----


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_the_parameters_of_an_encoding_move_at_their_own_rate(factor):
    """With a constant gradient Adam moves every parameter by its learning rate. Three steps: nothing compounds."""
    model, lr = gpt.build(train_settings("pos=t5_bias", *SMALL, f"pos.lr_factor={factor}"), 50), 1e-3
    (optimizer,) = make_optimizers(model, train_settings("optim=adamw", "optim.weight_decay=0", f"optim.lr={lr}").optim)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for group in optimizer.param_groups:  # as train.py does
        group["lr"] = group["peak"]
    for _ in range(3):
        optimizer.step()
    for name, p in model.named_parameters():
        rate = lr * factor if name.startswith("pos.") else lr
        assert torch.allclose(before[name] - p, torch.tensor(3 * rate), rtol=1e-3), name


@pytest.mark.parametrize("pos", ["t5_bias", "cope", "learned"])
def test_muon_moves_the_matrices_of_the_blocks_which_alone_decay_and_adamw_everything_else(pos):
    model = gpt.build(train_settings(f"pos={pos}", *SMALL, "model.mlp_bias=true"), 50)
    model.pos.lr_scale = 2.0
    names = {id(p): name for name, p in model.named_parameters()}
    for choice in ("muon", "adamw"):
        optim = train_settings(f"optim={choice}", "optim.lr=0.03", "optim.beta2=0.7").optim
        adamw, *muon = make_optimizers(model, optim)
        groups = [group for optimizer in (adamw, *muon) for group in optimizer.param_groups]
        assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())
        (decaying,) = (group for group in groups if group["weight_decay"])
        kinds = {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}
        assert {names[id(p)].split(".", 2)[2].removesuffix(".weight") for p in decaying["params"]} == kinds
        assert decaying["weight_decay"] == optim.weight_decay and decaying["peak"] == 2 * (optim.matrix_lr or 0.03)
        assert [m.param_groups[0] for m in muon] == ([decaying] if choice == "muon" else [])
        assert adamw.param_groups[0]["peak"] == 0.06 and adamw.param_groups[0]["betas"] == (0.9, 0.7)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.0), (torch.float32, 1e-3)])
def test_muon_is_torchs_and_in_float32_the_same_but_for_rounding(dtype, tolerance):
    options: dict = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "ns_steps": 3}
    ours, theirs = ([torch.arange(384.0).sin().view(shape) for shape in ((8, 48), (48, 8))] for _ in range(2))
    muon, torchs = Muon(ours, dtype, **options), torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options)
    for step in range(3):
        for p in (*ours, *theirs):
            p.grad = torch.arange(384.0).add(step).square().cos().view_as(p)
        muon.step()
        torchs.step()
    assert all((a - b).abs().max() <= tolerance for a, b in zip(ours, theirs, strict=True))


def test_a_window_wider_than_int32_hides_nothing():
    index = torch.arange(8, dtype=torch.int32)
    assert sees(index[:, None], index, 3_000_000_000, 0).equal(sees(index[:, None], index, None, 0))


# ---- thresholds in rotations ----


@pytest.mark.parametrize(
    "knobs, trained, right",
    [
        ({"beta_fast": 32.0}, rope(), "would be 2.2"),
        ({"beta": 32.0}, rope(L=128), "scaling.beta=32 is extreme here; like Llama 2's"),
        ({"high_freq_factor": 4.0}, rope(L=32), "like Llama 3's"),
        ({"high_freq_factor": 0.001}, rope(), "high_freq_factor=0.001 is extreme"),
        ({"beta_fast": 32.0}, rope(D=2), "beta_fast=32"),
        # In their own models, and of methods without one
        ({"beta_fast": 32.0}, rope(4096, 128), ""),
        ({"high_freq_factor": 4.0}, rope(8192, 128, 500_000.0), ""),
        ({"factor": 2.0}, rope(), ""),
        ({"beta": 32.0}, TrainedContext("alibi", 128, None), ""),
    ],
)
def test_a_threshold_with_nearly_all_pairs_on_one_side_is_a_warning(knobs, trained, right):
    line = spectrum.warning(knobs, trained)
    assert (line.startswith("warning: scaling.") and right in line and "\n" not in line) if right else line == ""
    if right and len(trained.inv_freq) > 1:  # what it recommends
        assert spectrum.warning(dict.fromkeys(knobs, float(line.split()[-1])), trained) == ""
