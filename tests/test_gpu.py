"""What training and evaluation do on a GPU: tested with the meta device in its place, and on a GPU (marker gpu)."""

import contextlib
import functools
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from conf.errors import UserError
from engine import checkpoint, device as devices, distributed
from eval import evaluate
from kernels import rope as choice
from model import attention, gpt
from model.attention import Cache
from model.scaling import NO_CHANGE, ContextChange, resolve
from sample import main as sample_command, sample
from tests import helpers
from tests.helpers import SMALL, choices, compile_for, more_positions, random_tokens, train_settings

CHANGES = ["none", "window", "yarn", "rerope"]


def change_of(name: str, model: gpt.GPT, settings, n: int = 48) -> ContextChange:
    """The change of a scaling method at n tokens; skips where it does not apply to the model's encoding."""
    context = gpt.trained_context(settings, model.pos)
    try:
        return resolve(helpers.scaling_knobs(name, 8), context, n, n)
    except UserError as e:
        pytest.skip(str(e))


def on_meta(*overrides: str) -> gpt.GPT:
    """A model on the meta device, whose tensors have no values: like a GPU, it is not a CPU."""
    settings = train_settings(*SMALL, *overrides)
    with torch.device("meta"):
        return gpt.GPT(settings.model, gpt.build_encoding(settings), 50)


class NoWaiting(TorchDispatchMode):
    """Fails on what would wait for a GPU: a value that the host reads, and a copy between host and device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a value"
        result = func(*args, **(kwargs or {}))
        before, after = (
            {x.device.type for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.dim()}
            for tree in ((args, kwargs), result)
        )
        assert not before or not after or before == after, f"{func}: copied from {before} to {after}"
        return result


@pytest.mark.process
@pytest.mark.parametrize("scaling", CHANGES)
@pytest.mark.parametrize("pos", choices("pos"))
def test_a_training_step_does_not_wait_for_the_gpu(pos, scaling, monkeypatch):
    """From the second step on: the first one computes the phases, and copies them."""
    settings = train_settings(f"pos={pos}", *SMALL, *more_positions(pos, 64))
    model = on_meta(f"pos={pos}", *more_positions(pos, 64))
    change = change_of(scaling, model, settings)
    tokens = torch.zeros(2, 49, dtype=torch.int64, device="meta")
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
    for mode in (torch.no_grad(), NoWaiting()):
        with mode:
            if isinstance(mode, NoWaiting):
                monkeypatch.setattr(torch, "tensor", None)  # which would copy from the host
            loss = model.losses(tokens[:, :-1], tokens[:, 1:], None, change).mean()
            if loss.requires_grad:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def sdpa_calls(monkeypatch) -> list[dict]:
    """The arguments of all calls of SDPA from now on."""
    plain, calls = torch.nn.functional.scaled_dot_product_attention, []

    def recorded(q, k, v, attn_mask=None, **options):
        calls.append({"q": q, "k": k, "mask": attn_mask, **options})
        return plain(q, k, v, attn_mask, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", recorded)
    return calls


def test_key_heads_are_not_copied_where_one_kernel_shares_them(monkeypatch):
    """Without a mask; with one, no fused kernel of CUDA shares them."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
    calls, model = sdpa_calls(monkeypatch), on_meta("model.n_kv_heads=2")
    tokens = torch.zeros(2, 24, dtype=torch.int64, device="meta")
    for change, heads in ((NO_CHANGE, 2), (ContextChange(window=8), 4)):
        model(tokens, change=change)
        last = calls[-1]
        assert last["k"].shape[1] == heads and last["q"].shape[1] == 4
        assert last["enable_gqa"] == (heads == 2) and (last["mask"] is None) == (heads == 2)
        if heads == 2:  # views: of k of [B, T, G, D] with heads before tokens
            assert last["k"].stride() == (24 * 2 * 16, 16, 2 * 16, 1)


def test_a_new_token_is_decoded_without_a_mask(monkeypatch):
    """cuDNN would search a plan for every new length of a mask. The logits are those of the whole text."""
    calls = sdpa_calls(monkeypatch)
    model = gpt.build(train_settings("pos=rope", "model.n_kv_heads=2", *SMALL), 50).eval()
    tokens = random_tokens(1, 24)
    with torch.inference_mode():
        want = model(tokens)[:, -1]
        calls.clear()
        cache = Cache()
        model.last_logits(tokens[:, :20], 1, NO_CHANGE, cache)
        calls.clear()
        for i in range(20, 24):
            got = model.last_logits(tokens[:, i : i + 1], 1, NO_CHANGE, cache)[:, 0]
    assert len(calls) == 4 * 2 and all(call["mask"] is None and not call["is_causal"] for call in calls)
    assert torch.allclose(got, want, atol=1e-5)


def test_evaluation_and_decoding_have_many_lengths_and_do_not_use_cudnns_attention(monkeypatch):
    try:
        for many_lengths in (True, False):
            devices.start("cpu", "auto", many_lengths)
            assert torch.backends.cuda.cudnn_sdp_enabled() != many_lengths
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    start = Mock(side_effect=KeyboardInterrupt)  # the first thing that they do
    monkeypatch.setattr(devices, "start", start)
    for command in (evaluate, sample):
        with pytest.raises(KeyboardInterrupt):
            command(types.SimpleNamespace(device="cpu", kernel="auto"))
    assert [call.kwargs for call in start.call_args_list] == [{"many_lengths": True}] * 2


@pytest.mark.parametrize("gigabytes, blocks", [(141, 1), (80, 2), (24, 5)])
def test_the_loss_of_gpt2_is_in_as_few_blocks_as_a_gpus_memory_allows(gigabytes, blocks, monkeypatch):
    memory = types.SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    rows = gpt.loss_block(torch.device("cuda")) // 50304
    assert -(-32768 // rows) == blocks
    assert gpt.loss_block(torch.device("cpu")) == 2**25


@pytest.mark.parametrize("forward", [True, False])
def test_a_compilation_that_fails_is_one_line_and_training_continues(forward, monkeypatch, capsys):
    """Of the forward pass, or only of the backward pass."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def fails(graph, inputs):
        raise RuntimeError("no compiler here")

    boxed = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=fails)
    model, x = gpt.build(train_settings("pos=rope", *SMALL), 50), random_tokens()
    want = model.losses(x[:, :-1], x[:, 1:])
    compile_for(monkeypatch, model, fails if forward else boxed, fallback=True)
    for _ in range(2):
        losses = model.losses(x[:, :-1], x[:, 1:])
        losses.mean().backward()
        assert torch.equal(losses, want) and all(p.grad is not None for p in model.parameters())
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "no compiler here" in line)
    assert line.startswith("warning: torch.compile failed, it continues uncompiled: ")


# ---- on a GPU; `pytest -m gpu` on a machine without one runs the same on its CPU, which rehearses them ----

GPU = "cuda" if torch.cuda.is_available() else "cpu"
COMPILER = "inductor" if GPU == "cuda" else "aot_eager"  # for a CPU Inductor takes a minute


@pytest.fixture
def kernel_by_device(monkeypatch):
    """The kernel on CUDA, plain torch on a CPU, whatever other tests have chosen."""
    monkeypatch.setattr(choice, "kernel", "auto")


def model_and_change(pos: str, scaling: str, *overrides: str) -> tuple[gpt.GPT, ContextChange]:
    """A small float32 model on the CPU with weights so large that positions matter, and a change of its context."""
    settings = train_settings(f"pos={pos}", *SMALL, *more_positions(pos, 64), *overrides)
    model = gpt.build(settings, 50)
    torch.manual_seed(1)
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.normal_(p, std=0.1)
    return model, change_of(scaling, model, settings)


def losses_and_gradients(model: gpt.GPT, tokens: torch.Tensor, change: ContextChange) -> list[torch.Tensor]:
    """The losses, and the gradients of their sum, on the CPU."""
    losses = model.losses(tokens[:, :-1], tokens[:, 1:], None, change)
    gradients = torch.autograd.grad(losses.sum(), list(model.parameters()), allow_unused=True)
    return [x.detach().cpu() for x in (losses, *gradients) if x is not None]


def close(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-3) -> bool:
    pairs = zip(a, b, strict=True)
    return all((x - y).abs().max() <= tolerance * (1 + y.abs().max()) for x, y in pairs)


HEADS = [f"model.n_kv_heads={heads}" for heads in (4, 2)]  # 2: queries share keys
ON_A_GPU = [(pos, scaling, [heads]) for pos in choices("pos") for scaling in CHANGES for heads in HEADS]
ON_A_GPU += [("rope", "none", [f"layers={layers}", "layers.pattern=LG"]) for layers in ("swan", "gemma3")]


@pytest.mark.gpu
@pytest.mark.parametrize("pos, scaling, settings", ON_A_GPU)
def test_on_cuda_as_on_a_cpu_and_compiled_as_eager(pos, scaling, settings, kernel_by_device, monkeypatch):
    """In float32: losses and gradients. In bfloat16: the losses, roughly. Also with two kinds of layers."""
    model, change = model_and_change(pos, scaling, *settings)
    tokens = random_tokens(2, 49)
    want = losses_and_gradients(model, tokens, change)
    model, tokens = model.to(GPU), tokens.to(GPU)
    assert close(losses_and_gradients(model, tokens, change), want)
    with torch.autocast(GPU, torch.bfloat16):
        assert close(losses_and_gradients(model, tokens, change)[:1], want[:1], 0.05)
    if len(settings) > 1 or (settings == HEADS[:1] and GPU == "cuda"):
        compile_for(monkeypatch, model, COMPILER)
        assert close(losses_and_gradients(model, tokens, change), want)


@pytest.mark.gpu
@pytest.mark.parametrize("pos", ["rope", "fox", "t5_bias"])
def test_gradients_in_bfloat16_are_those_of_float32_to_rounding(pos, kernel_by_device, monkeypatch):
    """Relative to the norm of each: those of FoX's gates and T5's table are sums over all queries and keys.

    A fused backward pass takes a query's mean gradient from its output in bfloat16; FoX's gates sum what that leaves.
    """
    model, _ = model_and_change(pos, "none")
    tokens, limit = random_tokens(2, 49), 0.2 if pos == "fox" else 0.05
    want = losses_and_gradients(model, tokens, NO_CHANGE)
    model, tokens = model.to(GPU), tokens.to(GPU)

    def errors() -> list[float]:
        with torch.autocast(GPU, torch.bfloat16):
            got = losses_and_gradients(model, tokens, NO_CHANGE)
        return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]

    eager = errors()
    compile_for(monkeypatch, model, COMPILER)
    compiled = errors()
    assert 0 < max(eager) < limit and 0 < max(compiled) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_run_on_a_gpu_resumes_and_can_be_sampled(compiled, here, monkeypatch, capsys, kernel_by_device):
    """Interrupted after the checkpoint of step 15 of 20. With compile=true, compiled from step 10 on."""
    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)  # which compile_blocks replaces
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=COMPILER))
    compilations = Mock(wraps=functools.partial(train.compile_blocks, fallback=False))
    steps, step = Mock(return_value=None), train.Training.step
    monkeypatch.setattr(train, "compile_blocks", compilations)
    monkeypatch.setattr(train.Training, "step", lambda training, bar: steps() or step(training, bar))
    settings = ("steps=20", "save_every=15", f"device={GPU}", "dtype=float32", f"compile={compiled}")
    helpers.run_train(*settings, "name=whole")
    saved, plain = [], train.checkpoint.save

    def stop_at_15(folder, values, *rest, **options):
        plain(folder, values, *rest, **options)
        saved.append(values["step"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train.checkpoint, "save", stop_at_15)
        helpers.run_train(*settings, "name=halves")
    helpers.run_train(*settings, "name=halves")
    assert saved == [15] and steps.call_count == 20 + 15 + 5
    assert compilations.call_count == (3 if compiled == "true" else 0)
    whole, halves = (checkpoint.load(Path("runs") / name)["model"] for name in ("whole", "halves"))
    assert all(torch.allclose(whole[name], halves[name], atol=1e-5) for name in whole)
    argv = ["sample.py", "run=whole", "tokens=8", f"device={GPU}", "scaling=ntk", "prompt=def"]
    monkeypatch.setattr("sys.argv", argv)
    sample_command()
    assert "tokens, " in capsys.readouterr().err


@pytest.mark.gpu
def test_one_step_of_ddp_on_one_device_is_the_step_without_it(tmp_path, kernel_by_device):
    model, _ = model_and_change("rope", "none")
    tokens = random_tokens(2, 33).to(GPU)
    alone = losses_and_gradients(model.to(GPU), tokens, NO_CHANGE)
    torch.distributed.init_process_group(
        "nccl" if GPU == "cuda" else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        device = torch.device(GPU, 0) if GPU == "cuda" else torch.device(GPU)
        losses = distributed.wrap_model(model, device, shard=False, bfloat16=False)
        losses(tokens[:, :-1], tokens[:, 1:], None, NO_CHANGE).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert close([p.grad.cpu() for p in model.parameters()], alone[1:], 1e-5)


@pytest.mark.gpu
def test_a_step_of_training_on_a_gpu_synchronises_nothing(here, kernel_by_device):
    """CUDA reports every wait as an error; the first step makes what later ones use again."""
    cfg = train_settings("exp=smoke", "pos=rope", "dtype=bfloat16", "positions=random")
    training = train.Training(cfg, Path("runs/x"), torch.device(GPU), None, None)
    try:
        for _ in range(3):
            training.step(Mock())
            if GPU == "cuda":
                torch.cuda.set_sync_debug_mode("error")
    finally:
        if GPU == "cuda":
            torch.cuda.set_sync_debug_mode("default")
