"""torchrun with 2 gloo processes on the CPU: the same run as with one, stopped, killed, resumed at another number."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from engine import checkpoint, distributed
from engine.compile import compile_blocks, recompute_blocks
from engine.files import locked
from model import attention, gpt
from tests.helpers import ROOT, SMALL, line_of, run_command, run_eval, run_train, start, train_settings, wait_until

STEPS = 60
# Both kinds of layers, and every kind of parameter that autocast leaves in float32
SETTINGS = "exp=smoke pos=fox layers=swan model.qk_norm=true model.qk_norm_weight=true micro_tokens=128 dtype=float32"
SETTINGS = (*SETTINGS.split(), f"steps={STEPS}", "optim=adamw", "save_every=10", "val_every=30", "log_every=1")


def torchrun(script: str, *args: str, **env: str) -> subprocess.Popen:
    """Two processes."""
    options = ("--standalone", "--nproc_per_node=2", str(ROOT / script))
    return start("-m=torch.distributed.run", *options, *args, OMP_NUM_THREADS="1", **env)


def finish(process: subprocess.Popen, code: int | None = 0, seconds: float = 120) -> tuple[str, str]:
    """stdout and stderr. code: the exit code that is expected; None: any other than 0."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == code if code is not None else process.returncode != 0, err
    return out, err


def last_loss(err: str) -> float:
    """The training loss in the last line of a progress bar: of the batch of all processes."""
    return float(re.findall(rf"step {STEPS} of {STEPS}, .*loss ([\d.]+)", err)[-1])


def largest_difference(a: dict, b: dict) -> float:
    """The largest difference between the weights, or the moments, of two checkpoints."""
    assert a["model"].keys() == b["model"].keys()
    pairs = [(a["model"][k], b["model"][k]) for k in a["model"]]
    sa, sb = a["optimizer"]["state"], b["optimizer"]["state"]
    pairs += [(sa[i][k], sb[i][k]) for i in sa for k in sa[i]]
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    return max((x - y).abs().max().item() for x, y in pairs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache) -> Path:
    """A folder with runs/alone, trained by one process, what it wrote to stderr, and runs/begun, its first 10 steps."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / ".cache").symlink_to(cache)
    save = checkpoint.save

    def save_and_keep_the_first(run: Path, state: dict) -> None:
        save(run, state)
        if state["step"] == 10:
            shutil.copytree(run, "runs/begun")

    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_keep_the_first)
        _, _, err = run_command(train.main, [*SETTINGS, "name=alone"], patch)
    (folder / "stderr").write_text(err)
    return folder


def assert_same_run(folder: str, alone: Path) -> None:
    ours, reference = checkpoint.load(Path(folder)), checkpoint.load(alone / "runs" / "alone")
    assert ours["step"] == STEPS and largest_difference(ours, reference) < 1e-5
    assert ours["validation"]["loss"] == pytest.approx(reference["validation"]["loss"], abs=1e-5)


@pytest.mark.distributed
def test_two_processes_train_as_one_does(here, alone):
    """With accumulation: each adds up 2 micro-batches of 2 rows, where one process has 4. Both refuse a locked run."""
    with locked(Path("runs/7")):
        out, err = finish(torchrun("train.py", "-m", *SETTINGS, "seed=7,0", "name=${seed}"), code=None)
    assert_same_run("runs/0", alone)
    assert last_loss(err) == pytest.approx(last_loss((alone / "stderr").read_text()), abs=0.0011)  # of 3 decimals
    assert out.count("trained runs/0") == 1 and "on cpu, 2 processes" in out


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_with_muon_as_one_does_and_resume_to_the_bit(here):
    """Its products are in bfloat16, so rounding differs more than with AdamW."""
    run_train(*SETTINGS[1:], "optim=muon", "name=one")
    one = checkpoint.load(Path("runs/one"))
    for name, more in (("two", ()), ("shards", ("shard=true",))):
        finish(torchrun("train.py", *SETTINGS, "optim=muon", f"name={name}", *more))
        other, stopped = checkpoint.load(Path("runs") / name), Path(f"runs/{name}-stopped/ckpt.pt")
        process = torchrun("train.py", *SETTINGS, "optim=muon", f"name={name}-stopped", *more)
        wait_until(stopped.exists)
        process.send_signal(signal.SIGTERM)
        finish(process, code=None)
        assert checkpoint.load(stopped.parent)["step"] < STEPS
        finish(torchrun("train.py", *SETTINGS, "optim=muon", f"name={name}-stopped", *more))
        assert largest_difference(other, checkpoint.load(stopped.parent)) == 0
        assert other["validation"]["loss"] == pytest.approx(one["validation"]["loss"], abs=1e-3)
        assert largest_difference(other, one) < 5e-3


@pytest.mark.distributed
def test_a_sharded_run_is_the_same_run_in_one_portable_file(here, alone):
    """Begun by one process, continued by two until SIGTERM, and ended by one.

    At SIGTERM to torchrun all processes stop after the same step.
    """
    shutil.copytree(alone / "runs/begun", "runs/x")
    begun = Path("runs/x/ckpt.pt").stat().st_mtime_ns
    process = torchrun("train.py", *SETTINGS, "name=x", "shard=true", "recompute=true")
    wait_until(lambda: Path("runs/x/ckpt.pt").stat().st_mtime_ns > begun)
    process.send_signal(signal.SIGTERM)
    out, _ = finish(process, code=None)
    step = checkpoint.load(Path("runs/x"))["step"]
    assert "resumed at step 10" in out and f"stopped: runs/x is saved at step {step} of {STEPS}" in out
    assert 20 <= step < STEPS
    run_train(*SETTINGS[1:], "name=x")
    assert_same_run("runs/x", alone)


@pytest.mark.distributed
def test_an_evaluation_is_the_same_to_the_bit(here, alone):
    """9 documents, which 2 processes cannot halve, and at the longer lengths several passes, so that both have some."""
    settings = ("run=alone", "ctx=512", "documents=9", "scaling=logn", "task=sliding")
    (here / "runs").symlink_to(alone / "runs")

    def measured() -> list[dict]:
        rows = [json.loads(line) for f in here.glob("runs/alone/eval/**/*.jsonl") for line in f.open()]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    run_eval(*settings)
    one = measured()
    finish(torchrun("eval.py", *settings, "fresh=true"))
    assert len(one) > 10 and measured() == one


def differences(a: str, b: str) -> tuple[float, float]:
    """Between two runs: of the held-out loss, and the largest one of a weight matrix, relative to its norm."""
    one, two = (checkpoint.load(Path("runs") / name) for name in (a, b))
    pairs = [(x, two["model"][k]) for k, x in one["model"].items() if x.dim() == 2]
    weights = [((x - y).norm() / x.norm()).item() for x, y in pairs]
    return abs(one["validation"]["loss"] - two["validation"]["loss"]), max(weights)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("dtype, loss, weight", [("float32", 2e-6, 5e-6), ("bfloat16", 8e-4, 0.02)])
@pytest.mark.parametrize("more", ["", "shard=true recompute=true"])
def test_two_processes_that_compile_train_as_one_that_does_not(more, dtype, loss, weight, here):
    """As exp=gpt2 does on GPUs. Each process compiles a block and the loss."""
    settings = (f"dtype={dtype}", "optim.lr=5e-3", "optim.warmup=2")
    run_train(*settings, "name=one", "compile=false")
    settings += ("name=two", "compile=true", "micro_tokens=128", *more.split())
    _, err = finish(torchrun("train.py", "exp=smoke", *settings, TORCH_LOGS="graph_code"), seconds=400)
    assert "warning" not in err and err.count("TRACED GRAPH") == 2 * 2, err
    difference = differences("one", "two")
    assert difference[0] < loss and difference[1] < weight


@pytest.fixture
def one_rank(tmp_path) -> Iterator[None]:
    """Rank 0 of 1, in a process group of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_linear_layers_of_blocks_are_gathered_in_bfloat16(one_rank):
    """Norms and FoX's gates are gathered in float32. Gradients are summed in float32, once for two micro-batches."""
    norms = ("model.qk_norm=true", "model.qk_norm_weight=true")
    cfg = train_settings("exp=smoke", "dtype=bfloat16", "pos=fox", *norms)
    model, tokens, gathered = gpt.build(cfg, 64), torch.arange(48).view(2, 24), {}
    distributed.shard_model(model, torch.device("cpu"), bfloat16=True)
    assert model.head.weight is model.tokens.weight
    block = model.blocks[0]  # while its MLP is computed, the parameters are gathered
    block.mlp.register_forward_pre_hook(lambda *_: gathered.update((k, p.dtype) for k, p in block.named_parameters()))
    for row, more in zip(tokens, (True, False), strict=True):
        with distributed.no_sync(model.losses, more), torch.autocast("cpu", torch.bfloat16):
            model.losses(row[None, :-1], row[None, 1:]).mean().backward()
        assert (block.mlp.up.weight.grad is None) == more
    low = {"attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"}
    assert len(gathered) > 8 and {k for k, dtype in gathered.items() if dtype == torch.bfloat16} == low
    for p in model.parameters():
        gradient = distributed.full_tensor(p.grad)
        assert p.dtype == gradient.dtype == torch.float32 and (gradient != gradient.bfloat16()).any()


# ---- recomputed and compiled blocks ----

TOKENS = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))


def gradients(model: gpt.GPT) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(model.losses(TOKENS[:, :-1], TOKENS[:, 1:]).mean(), list(model.parameters()))


@pytest.mark.parametrize("settings", [("pos=rope",), ("pos=fox", "layers=swan")])
def test_recomputed_blocks_give_the_same_gradients_with_less_memory(settings):
    found, kept = [], [0, 0]
    for recompute in (False, True):
        model = gpt.build(train_settings(*settings, *SMALL), 50)
        names = list(model.state_dict())
        if recompute:
            recompute_blocks(model)

        def count(tensor: torch.Tensor, recompute: bool = recompute) -> torch.Tensor:
            kept[recompute] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            found.append(gradients(model))
        assert list(model.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("recompute", [False, True])
def test_the_code_that_is_compiled_is_inside_of_the_checkpoint(recompute, monkeypatch):
    """What runs compiled: each block, the loss, and with recompute=true each block again in the backward pass."""
    ran = []
    monkeypatch.setattr(torch, "compile", lambda plain, **_: lambda *args: ran.append(plain) or plain(*args))
    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)
    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    blocks, loss = [block.forward for block in model.blocks], model._block_losses
    if recompute:
        recompute_blocks(model)
    compile_blocks(model)
    gradients(model)
    assert ran == [*blocks, loss, *(reversed(blocks) if recompute else ())]


# ---- what each process does, without the others ----


def test_rows_and_passes_are_split_over_the_ranks(monkeypatch):
    """Every row and every pass belongs to one rank; all ranks have the same number of passes."""
    for world in (1, 2, 3, 4):
        rows, passes = [], []
        for rank in range(world):
            monkeypatch.setenv("WORLD_SIZE", str(world))
            monkeypatch.setenv("RANK", str(rank))
            rows += range(12)[distributed.local_rows(12 * 64, 64)]
            passes.append(list(distributed.shard_work(7)))
        assert rows == list(range(12)) and len({len(p) for p in passes}) == 1
        assert sorted(i for p in passes for i, counts in p if counts) == list(range(7))
    assert line_of(distributed.local_rows, 10 * 64, 64).startswith("batch_tokens=640: must be a multiple of ")


def test_processes_that_see_different_runs_get_an_error(monkeypatch):
    monkeypatch.setattr(distributed, "interleave", lambda items: [*items, 20])  # of the other rank
    distributed.assert_same("the step that runs/x was saved at", 20)
    error = line_of(distributed.assert_same, "the step that runs/x was saved at", None)
    assert "differs between the processes ([None, 20])" in error


def test_one_process_joins_nothing(monkeypatch):
    """Without torchrun nothing is set up, whatever else is in the environment."""
    monkeypatch.setenv("WORLD_SIZE", "8")  # a leftover
    monkeypatch.delenv("RANK", raising=False)
    distributed.join(torch.device("cpu"))
    assert distributed.world() == 1 and not torch.distributed.is_initialized()
    assert distributed.interleave([1]) == [1] and distributed.any_rank(True)
