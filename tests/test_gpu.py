"""What training and evaluation do on a GPU: tested with the meta device in its place, and on a GPU (marker gpu)."""

import contextlib
import functools
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.errors import UserError
from engine import compile as compiling, device as devices
from model import attention, gpt
from model.decode import Cache
from model.scaling import NO_CHANGE, ContextChange, resolve
from tests.helpers import SMALL, choices, more_positions, random_tokens, scaling_knobs, train_settings

CHANGES = ["none", "window", "yarn", "rerope"]


def change_of(name: str, model: gpt.GPT, settings, n: int = 48) -> ContextChange:
    """The change of a scaling method at n tokens; skips where it does not apply to the model's encoding."""
    context = gpt.trained_context(settings, model.pos)
    try:
        return resolve(scaling_knobs(name, 8), context, n, n)
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


def test_commands_with_many_lengths_do_not_use_cudnns_attention():
    try:
        for many_lengths in (True, False):
            devices.start("cpu", "auto", many_lengths)
            assert torch.backends.cuda.cudnn_sdp_enabled() != many_lengths
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("gigabytes, blocks", [(141, 1), (80, 2), (24, 5)])
def test_the_loss_of_gpt2_is_in_as_few_blocks_as_a_gpus_memory_allows(gigabytes, blocks, monkeypatch):
    memory = types.SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    rows = gpt.loss_block(torch.device("cuda")) // 50304
    assert -(-32768 // rows) == blocks
    assert gpt.loss_block(torch.device("cpu")) == 2**25


def test_a_failed_compilation_is_one_line_for_each_thing_and_training_continues(monkeypatch, capsys):
    def fails(graph, inputs):
        raise RuntimeError("no compiler here")

    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    x = random_tokens()
    want = model.losses(x[:, :-1], x[:, 1:])
    monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend=fails))
    monkeypatch.setattr(attention, "attend_blockwise", attention.attend_blockwise)
    compiling.compile_blocks(model)
    for _ in range(2):
        assert torch.equal(model.losses(x[:, :-1], x[:, 1:]), want)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("no compiler here" in line for line in lines)
    assert all(
        line.startswith(f"warning: torch.compile of {name} failed, it continues uncompiled: ")
        for name, line in zip(("a block", "the loss"), lines, strict=True)
    )
