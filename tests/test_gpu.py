"""What training and evaluation do on a GPU: tested with the meta device in its place, and on a GPU (marker gpu)."""

import contextlib
import csv
import functools
import importlib
import os
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conf.errors import UserError
from engine import checkpoint, compile as compiling, device as devices, distributed
from engine.optimizer import make_optimizer
from kernels import choice
from model import attention, gpt
from model.decode import Cache
from model.scaling import NO_CHANGE, ContextChange, resolve
from tests.helpers import ROOT, SMALL, choices, more_positions, random_tokens, run_train, scaling_knobs, train_settings

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


@pytest.mark.parametrize("name, function", [("eval", "evaluate"), ("sample", "sample")])
def test_evaluation_and_decoding_are_such_commands(name, function, monkeypatch):
    class Started(Exception):
        pass

    def start(device, kernel, many_lengths=False):
        assert many_lengths
        raise Started

    command = importlib.import_module(name)
    monkeypatch.setattr(command.devices, "start", start)
    with pytest.raises(Started):  # the first thing that they do
        getattr(command, function)(types.SimpleNamespace(device="cpu", kernel="auto"))


@pytest.mark.parametrize("gigabytes, blocks", [(141, 1), (80, 2), (24, 5)])
def test_the_loss_of_gpt2_is_in_as_few_blocks_as_a_gpus_memory_allows(gigabytes, blocks, monkeypatch):
    memory = types.SimpleNamespace(total_memory=gigabytes * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    rows = gpt.loss_block(torch.device("cuda")) // 50304
    assert -(-32768 // rows) == blocks
    assert gpt.loss_block(torch.device("cpu")) == 2**25


def test_a_failed_compilation_is_one_line_for_each_thing_and_training_continues(monkeypatch, capsys):
    tried = []

    def fails(graph, inputs):
        tried.append(graph)
        raise RuntimeError("no compiler here")

    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    x = random_tokens()
    want = model.losses(x[:, :-1], x[:, 1:])
    monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend=fails))
    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)
    compiling.compile_blocks(model)
    for _ in range(2):
        assert torch.equal(model.losses(x[:, :-1], x[:, 1:]), want)
    assert len(tried) == 2  # a block and the loss, each of which is then left uncompiled
    lines = capsys.readouterr().err.splitlines()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    compiling.compile_blocks(model)
    assert torch.equal(model.losses(x[:, :-1], x[:, 1:]), want) and len(tried) > 2
    assert capsys.readouterr().err.splitlines() == [line.replace("warning:", "warning: rank 1:") for line in lines]
    assert len(lines) == 2 and all("no compiler here" in line for line in lines)
    assert all(
        line.startswith(f"warning: torch.compile of {name} failed, it continues uncompiled: ")
        for name, line in zip(("a block", "the loss"), lines, strict=True)
    )


def test_a_backward_pass_that_does_not_compile_is_one_line_too(monkeypatch, capsys):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def fails(graph, inputs):
        raise RuntimeError("no backward compiler")

    backend = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph), bw_compiler=fails)
    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    x = random_tokens()
    want = model.losses(x[:, :-1], x[:, 1:])
    monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)
    compiling.compile_blocks(model)
    losses = model.losses(x[:, :-1], x[:, 1:])
    losses.mean().backward()
    assert torch.equal(losses, want) and all(p.grad is not None for p in model.parameters())
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("no backward compiler") for line in lines] == [1, 1]


# ---- on a GPU; `pytest -m gpu` on a machine without one runs the same on its CPU, which rehearses them ----

GPU = "cuda" if torch.cuda.is_available() else "cpu"


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


def compile_for(monkeypatch, model: gpt.GPT) -> None:
    """Compile as training does. On a CPU, where a compiler takes a minute, only what precedes it is rehearsed."""
    if GPU == "cpu":
        monkeypatch.setattr(compiling.torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)
    compiling.compile_blocks(model)


def close(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float = 1e-3) -> bool:
    pairs = zip(a, b, strict=True)
    return all((x - y).abs().max() <= tolerance * (1 + y.abs().max()) for x, y in pairs)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 2], ids=["mha", "gqa"])
@pytest.mark.parametrize("scaling", CHANGES)
@pytest.mark.parametrize("pos", choices("pos"))
def test_on_cuda_as_on_a_cpu_and_compiled_as_eager(pos, scaling, heads, kernel_by_device, monkeypatch):
    """In float32: losses and gradients. In bfloat16: the losses, roughly."""
    model, change = model_and_change(pos, scaling, f"model.n_kv_heads={heads}")
    tokens = random_tokens(2, 49)
    want = losses_and_gradients(model, tokens, change)
    model, tokens = model.to(GPU), tokens.to(GPU)
    assert close(losses_and_gradients(model, tokens, change), want)
    with torch.autocast(GPU, torch.bfloat16):
        assert close(losses_and_gradients(model, tokens, change)[:1], want[:1], 0.05)
    if heads == 4 and GPU == "cuda":
        compile_for(monkeypatch, model)
        assert close(losses_and_gradients(model, tokens, change), want)
        assert not compiling.failed


@pytest.mark.gpu
@pytest.mark.parametrize("layers", ["swan", "gemma3"])
def test_a_layer_schedule_on_cuda_as_on_a_cpu_and_compiled_as_eager(layers, kernel_by_device, monkeypatch):
    """Two kinds of layers, of which one has a window."""
    model, _ = model_and_change("rope", "none", f"layers={layers}", "layers.pattern=LG")
    tokens = random_tokens(2, 49)
    want = losses_and_gradients(model, tokens, NO_CHANGE)
    model, tokens = model.to(GPU), tokens.to(GPU)
    assert close(losses_and_gradients(model, tokens, NO_CHANGE), want)
    compile_for(monkeypatch, model)
    assert close(losses_and_gradients(model, tokens, NO_CHANGE), want)
    assert not compiling.failed


@pytest.mark.gpu
@pytest.mark.parametrize("pos", ["rope", "fox", "t5_bias"])
def test_gradients_in_bfloat16_are_those_of_float32_to_rounding(pos, kernel_by_device, monkeypatch):
    """Relative to the norm of each: those of FoX's gates and T5's table are sums over all queries and keys."""
    model, _ = model_and_change(pos, "none")
    tokens = random_tokens(2, 49)
    want = losses_and_gradients(model, tokens, NO_CHANGE)
    model, tokens = model.to(GPU), tokens.to(GPU)

    def errors() -> list[float]:
        with torch.autocast(GPU, torch.bfloat16):
            got = losses_and_gradients(model, tokens, NO_CHANGE)
        return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]

    eager = errors()
    compile_for(monkeypatch, model)
    compiled = errors()
    print(f"{pos}: bfloat16 differs by {max(eager):.1e}, compiled by {max(compiled):.1e}")
    assert 0 < max(eager) < 0.05 and 0 < max(compiled) < 0.05 and not compiling.failed


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_run_on_a_gpu_resumes_to_the_same_weights_and_can_be_sampled(
    compiled, here, monkeypatch, capsys, kernel_by_device
):
    """Stopped after 15 of 20 steps by a copy of the checkpoint; compiled from the tenth step on."""
    import sample
    import train

    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)
    settings = ("steps=20", "save_every=15", f"device={GPU}", "dtype=float32", f"compile={compiled}")
    run_train(*settings, "name=whole")
    saved, plain = [], train.resume.save

    def stop_at_15(folder, values, *rest, **options):
        plain(folder, values, *rest, **options)
        saved.append(values["step"])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train.resume, "save", stop_at_15)
        run_train(*settings, "name=halves")
    run_train(*settings, "name=halves")
    assert saved == [15]
    whole, halves = (checkpoint.load(Path("runs") / name)["model"] for name in ("whole", "halves"))
    assert all(torch.allclose(whole[name], halves[name], atol=1e-5) for name in whole)
    monkeypatch.setattr(
        "sys.argv", ["sample.py", "run=whole", "tokens=8", f"device={GPU}", "scaling=ntk", "prompt=def"]
    )
    sample.main()
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
        from engine.ddp_fsdp import ManyProcesses

        ranks = object.__new__(ManyProcesses)  # which has joined the group
        losses = ranks.wrap_model(model, torch.device(GPU, 0) if GPU == "cuda" else torch.device(GPU), train_settings())
        losses(tokens[:, :-1], tokens[:, 1:], None, NO_CHANGE).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert close([p.grad.cpu() for p in model.parameters()], alone[1:], 1e-5)


@pytest.mark.gpu
def test_a_step_of_training_on_a_gpu_synchronises_nothing(here, kernel_by_device):
    """CUDA reports every wait as an error; the first step makes what later ones use again."""
    import train

    cfg = train_settings("exp=smoke", "pos=rope", "dtype=bfloat16", "positions=random")
    with distributed.ranks().rank0_first():
        corpus = train.corpora.prepare(cfg.data, ".cache", None)
    model = gpt.build(cfg, corpus.vocab_size).to(GPU)
    optimizer, device = make_optimizer(model, cfg.optim), torch.device(GPU)
    try:
        for step in range(3):
            batches = train.training_batches(cfg, corpus, step, slice(0, 8), device)
            train.optimizer_step(cfg, model, model.losses, optimizer, batches, 1e-3, NO_CHANGE)
            if GPU == "cuda":
                torch.cuda.set_sync_debug_mode("error")
    finally:
        if GPU == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# ---- bench/gpu_check.sh, the command for a machine with a GPU ----


def gpu_check(here: Path, stage: str, **env: str) -> subprocess.CompletedProcess:
    """Run a stage at toy size, with its files in here/state."""
    full = {**os.environ, "TOY": "1", "STATE": str(here / "state"), "CORPUS": str(here / ".cache"), **env}
    full = {name: value for name, value in full.items() if value}
    return subprocess.run(["bash", str(ROOT / "bench/gpu_check.sh"), stage], env=full, capture_output=True, text=True)


def stand_in(here: Path, case: str = "") -> str:
    """A stand-in for Python that writes its arguments to here/calls; case: branches of a `case` of them."""
    python = here / "python"
    python.write_text(f"""#!/bin/bash
echo "$*" >> {here}/calls
out=$(sed -n 's/.*--out //p; s/.*--ceilings //p' <<< "$*" | cut -d ' ' -f 1)
[ -z "$out" ] || echo row >> "$out"
case "$*" in
    {case}
    "- "*|*"import hydra"*) ;; # what is installed?
    *) echo hello ;;
esac
""")
    python.chmod(0o755)
    return str(python)


def steps(done: subprocess.CompletedProcess, verdict: str) -> list[str]:
    """The names of the steps that have this verdict."""
    return [line.split()[0] for line in done.stdout.splitlines() if line[15:].startswith(verdict)]


STAGES = {
    "a": ["environment", "ceilings", "rope-0", "rope-1", "rope-3", "training", "evaluation", "tiles", "tests-0",
          "tests-1"],
    "b": ["steps", "text", "gpt2-triton", "gpt2-torch"],
    "c": ["rope-2", "rope-4", "rope-5", "rope-6", "eval-32768", "eval-131072"],
    "d": ["study"],
}  # fmt: skip
TOY_STAGES = {
    "a": ["environment", "ceilings", "rope-0", "training", "evaluation", "tiles", "tests-0"],
    "b": ["steps", "text", "gpt2-torch"],
    "c": ["rope-2", "eval-128"],
    "d": ["study"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["a", "bc", "d"])
def test_the_stages_for_a_gpu_are_rehearsed_on_a_cpu(stages, here):
    """Also on an image without wandb: importing it fails here. Nothing is written to the checkout."""
    (here / "absent").mkdir()
    (here / "absent/wandb.py").write_text("raise ImportError('there is no wandb')")
    before = files_of_the_checkout()
    for stage in stages:  # c evaluates the model that b trains
        done = gpu_check(here, stage, PYTHON=sys.executable, PYTHONPATH=str(here / "absent"))
        logs = "".join(log.read_text()[-2000:] for log in (here / "state").glob("*.log"))
        assert done.returncode == 0 and steps(done, "ok") == TOY_STAGES[stage], done.stdout + done.stderr + logs
        table = here / "state" / {"b": "gpu_step.csv", "d": "matrix-h200.jsonl"}.get(stage, "rope_kernel.csv")
        assert len(table.read_text().splitlines()) >= 3 and not done.stderr
    assert files_of_the_checkout() == before


def files_of_the_checkout() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*") if "__pycache__" not in path.parts and ".git" not in path.parts)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_starts_its_steps_in_order_and_copies_the_results(stage, here):
    """With a stand-in for Python."""
    done = gpu_check(here, stage, PYTHON=stand_in(here), TOY="", COPY_TO=str(here / "copies"))
    assert done.returncode == 0 and steps(done, "ok") == STAGES[stage], done.stdout + done.stderr
    copied = {path.name: path.read_text() for path in (here / "copies").iterdir()}
    tables = {"a": ["gpu_ceilings.csv", "rope_kernel.csv", "rope_tiles.csv"], "b": ["gpu_step.csv"]}
    tables |= {"c": ["rope_kernel.csv"], "d": ["matrix-h200.jsonl"]}
    assert sorted(copied) == sorted([*tables[stage], "steps.txt"]) and len(copied) <= 8
    assert copied["steps.txt"].startswith(done.stdout)  # the verdicts, then the logs
    assert all(f"==== {name}\nhello\n" in copied["steps.txt"] for name in STAGES[stage])
    assert all(f"cache={here}/.cache" in call for call in calls(here) if call.startswith(("train.py", "eval.py")))
    assert stage != "d" or f"--cache {here}/.cache" in calls(here)[-1]


def calls(here: Path) -> list[str]:
    """What the stand-in was called with, but for the checks of what is installed."""
    return [
        call for call in (here / "calls").read_text().splitlines() if not call.startswith(("- ", "-c import hydra"))
    ]


def test_a_stage_repeats_only_what_failed_and_ends_in_time(here):
    """Evaluation and benchmark fail the first time."""
    python = stand_in(here, f"*eval.py*|*'rope gpu'*) [ -e {here}/second ] || exit 3 ;;")
    first = gpu_check(here, "a", PYTHON=python)
    assert first.returncode == 1 and steps(first, "FAILED 3") == ["rope-0", "evaluation"]
    (here / "calls").unlink()
    (here / "second").touch()
    second = gpu_check(here, "a", PYTHON=python)
    assert second.returncode == 0 and len(steps(second, "done before")) == 5 and len(calls(here)) == 2, second.stdout
    late = gpu_check(here, "a", PYTHON=python, STATE=str(here / "late"), STAGE_SECONDS="3")
    assert late.returncode == 1 and steps(late, "no time left: run this stage again") == TOY_STAGES["a"]


def test_a_stage_that_is_ended_stops_its_step_and_copies_what_there_is(here):
    python = stand_in(here, "*train.py*) echo $$ began; exec sleep 60 ;;")
    env = {**os.environ, "TOY": "1", "PYTHON": python, "STATE": str(here / "state")}
    command = ["bash", str(ROOT / "bench/gpu_check.sh"), "a"]
    with subprocess.Popen(command, env={**env, "COPY_TO": str(here / "copies")}) as stage:
        log = here / "state/training.log"
        wait_for(lambda: log.exists() and "began" in log.read_text())
        (here / "state/rope_kernel.csv").write_text("row\nrow of an unfinished step\n")
        stage.terminate()
        assert stage.wait(10) == 143
    process = log.read_text().split()[0]
    wait_for(lambda: not Path("/proc", process).exists())
    assert f"==== training\n{process} began\n" in (here / "copies/steps.txt").read_text()
    assert "unfinished" in (here / "copies/rope_kernel.csv").read_text()


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.process
def test_missing_packages_are_installed_from_the_folder_of_wheels(here):
    """Not those that are installed; and again nothing the second time."""
    for name, version in (("ropewalk_dummy", "1.0"), ("tqdm", "0.1"), ("sympy", "1.14.0")):
        with zipfile.ZipFile(here / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    site = here / "site"
    settings = {"PYTHON": sys.executable, "WHEELS": str(here), "SITE": str(site), "STAGE_SECONDS": "3"}
    for _ in range(2):
        done = gpu_check(here, "d", **settings)
        assert steps(done, "no time left: run this stage again") == ["study"], done.stdout + done.stderr
        assert [path.name for path in site.glob("*.py")] == ["ropewalk_dummy.py"]
        (here / "ropewalk_dummy-1.0-py3-none-any.whl").write_text("not to be opened again")
    python = stand_in(here, "*'import hydra'*) exit 1 ;;")
    missing = gpu_check(here, "a", PYTHON=python)
    assert missing.returncode == 1 and missing.stdout.startswith("error: packages are missing: first, with a network")


@pytest.mark.process
def test_every_gpu_test_is_in_one_selection_of_the_command(here, gpu_tests):
    """Those that this run of pytest has collected: in CI all."""
    selections = gpu_check(here, "selections").stdout.splitlines()
    code = """ # one process for both, since importing torch takes the longest
import shlex, sys, pytest
class Print:
    def pytest_collection_finish(self, session):
        print(*(item.nodeid for item in session.items), sep="\\n")
for line in sys.stdin.read().splitlines():
    pytest.main(["-qq", "-n0", "-mgpu", "--collect-only", *shlex.split(line)], plugins=[Print()])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(selections), cwd=ROOT, capture_output=True, text=True
    )
    selected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(selected) == len(set(selected)) and len(selections) == 2, done.stderr
    assert {*gpu_tests} <= {*selected} and len(selected) > 100


@pytest.mark.process
def test_tests_that_have_passed_are_left_out_when_the_command_is_repeated(here):
    """The first run is killed in its fourth test, and the third has none left."""
    (here / "test_four.py").write_text("""
import os, pytest
def test_passes(): pass
def test_is_skipped(): pytest.skip("reason")
def test_fails(): assert "AGAIN" in os.environ
def test_kills(): assert "AGAIN" in os.environ or os._exit(9)
""")
    options = ["-q", "-p", "no:cacheprovider", "-p", "bench.passed_tests", "test_four.py"]
    command = [sys.executable, "-m", "pytest", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PASSED_TESTS": "passed"}
    codes, counts = [], []
    for again in ({}, {"AGAIN": "1"}, {}):
        done = subprocess.run(command, env={**env, **again}, capture_output=True, text=True)
        codes.append(done.returncode)
        counts.append(len(Path("passed").read_text().splitlines()))
    assert codes == [9, 0, 0] and counts == [2, 4, 4]


@pytest.mark.process
def test_other_tiles_are_compiled_without_a_gpu(here):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.rope", "sweep", "--warps", "8", "--heads", "16", "--out", "tiles.csv"]
    done = subprocess.run(command, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if "FileNotFoundError" in done.stderr and "cuobjdump" in done.stderr:
        pytest.skip("this triton has no cuobjdump")
    assert done.returncode == 0, done.stderr
    with Path("tiles.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["warps"], row["heads"], row["us"]) for row in rows] == [("8", "16", "")] * 2
    assert int(rows[1]["tokens"]) == 2 * int(rows[0]["tokens"]) and int(rows[1]["registers"]) > 32
