"""torchrun with 2 gloo processes on the CPU: the same run as with one, stopped, killed, resumed at another number."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

import train
from conf.errors import UserError
from engine import checkpoint, ddp_fsdp, distributed
from engine.ddp_fsdp import ANOTHER_RANK_DIED, ManyProcesses
from engine.recompute import recompute_blocks
from model import gpt
from tests.helpers import ROOT, SMALL, compile_for, run_eval, run_train, train_settings

STEPS = 120
SETTINGS = ("exp=smoke", f"steps={STEPS}", "dtype=float32", "save_every=10", "val_every=40", "log_every=1")


def torchrun(n: int, script: str, *args: str, **env: str) -> subprocess.Popen:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}"]
    full = {**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env}
    return subprocess.Popen(
        [*start, str(ROOT / script), *args], env=full, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen, seconds: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def succeed(process: subprocess.Popen) -> str:
    code, out, err = finish(process)
    assert code == 0, err
    return out


def wait_for(process: subprocess.Popen, pattern: str) -> None:
    until = time.monotonic() + 60
    while not list(Path().glob(pattern)):
        assert time.monotonic() < until and process.poll() is None, process.communicate()
        time.sleep(0.02)


def losses(folder: Path) -> list[float]:
    """train/loss of every step, as wandb has it, from the only run there."""
    (run,) = folder.glob("wandb/offline-run-*")  # a second would be of a rank that must not log
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", str(run), "--json"]
    lines = subprocess.run(inspect, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    rows = [json.loads(line)["history"]["item"] for line in lines if '"type":"history"' in line]
    return [row["train/loss"] for row in rows if "train/loss" in row]


def largest_difference(a: dict, b: dict) -> float:
    """The largest difference between the weights, or the moments, of two portable checkpoints."""
    assert a.keys() == b.keys() and a["model"].keys() == b["model"].keys()
    pairs = [(a["model"][k], b["model"][k]) for k in a["model"]]
    sa, sb = a["optimizer"]["state"], b["optimizer"]["state"]
    pairs += [(sa[i][k], sb[i][k]) for i in sa for k in sa[i]]
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    return max((x - y).abs().max().item() for x, y in pairs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache) -> Path:
    """A folder with runs/alone, trained by one process, and its wandb run."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / ".cache").symlink_to(cache)
    start = [sys.executable, str(ROOT / "train.py"), *SETTINGS, "name=alone"]
    done = subprocess.run(
        start, cwd=folder, env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return folder


def reference(alone: Path) -> dict:
    return checkpoint.load(alone / "runs" / "alone")


@pytest.mark.distributed
def test_two_processes_train_as_one_does(here, alone):
    """Also with accumulation: 4 rows each, 2 at a time, where one process has all 8 at once."""
    out = succeed(torchrun(2, "train.py", *SETTINGS, "name=two", "micro_tokens=128", WANDB_MODE="offline"))
    one, two = losses(alone), losses(here)
    gap = max(abs(a - b) for a, b in zip(one, two, strict=True))
    print(f"largest difference of {STEPS} losses: {gap:.1e}")
    assert len(one) == STEPS and gap < 1e-5 and one[-1] < one[0] - 0.5
    state = checkpoint.load(Path("runs/two"))
    assert largest_difference(state, reference(alone)) < 1e-5
    assert state["validation"]["loss"] == pytest.approx(reference(alone)["validation"]["loss"], abs=1e-5)
    assert out.count("trained runs/two") == 1 and "on cpu, 2 processes" in out


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_resumes_with_another_number_of_processes(here, alone):
    """2 processes until SIGTERM, at which all of them stop after the same step; one process does the rest."""
    process = torchrun(2, "train.py", *SETTINGS, "name=x")
    wait_for(process, "runs/x/ckpt.pt")
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    step = checkpoint.load(Path("runs/x"))["step"]
    assert code != 0 and 10 <= step < STEPS
    assert f"stopped: runs/x is saved at step {step} of {STEPS}; run the same command again to resume" in out
    run_train(*SETTINGS[1:], "name=x")
    assert largest_difference(checkpoint.load(Path("runs/x")), reference(alone)) < 1e-5


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_process_ends_the_job_with_a_clear_line_and_nothing_is_lost(here, alone):
    process = torchrun(2, "train.py", *SETTINGS, "name=x")
    wait_for(process, "runs/x/ckpt.pt")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (second,) = [int(c) for c in children if b"\0RANK=1\0" in Path(f"/proc/{c}/environ").read_bytes()]
    os.kill(second, signal.SIGKILL)
    code, out, err = finish(process)
    assert code != 0 and "trained" not in out
    assert err.count(f"error: {ANOTHER_RANK_DIED}") == 1, err
    state = checkpoint.load(Path("runs/x"))
    assert 10 <= state["step"] < STEPS
    run_train(*SETTINGS[1:], "name=x")
    assert largest_difference(checkpoint.load(Path("runs/x")), reference(alone)) < 1e-5


@pytest.mark.parametrize(
    "rank, line", [("0", f"error: {ANOTHER_RANK_DIED}\n"), ("1", f"error: rank 1: {ANOTHER_RANK_DIED}\n")]
)
def test_a_survivor_prints_its_line_before_it_unwinds(rank, line, monkeypatch, capsys):
    """On a loaded machine torchrun's SIGTERM came before the line that was printed at the end of the command."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    ranks = object.__new__(ManyProcesses)  # joins no process group
    with pytest.raises(SystemExit) as stop, ranks.exit_if_a_rank_dies(True):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    assert stop.value.code == 1 and capsys.readouterr().err == line
    with pytest.raises(RuntimeError, match="a bug"), ranks.exit_if_a_rank_dies(True):
        raise RuntimeError("a bug of ours")


@pytest.fixture
def one_rank(tmp_path) -> Iterator[ManyProcesses]:
    """Rank 0 of 1, in a process group of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield object.__new__(ManyProcesses)
    dist.destroy_process_group()


def test_collectives_are_given_up_sooner_while_a_run_trains(one_rank):
    """Before training a rank may wait for a large corpus; during training a collective returns within minutes."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    with one_rank.exit_if_a_rank_dies(True):
        assert backend.options._timeout == ddp_fsdp.TRAINING_TIMEOUT < ddp_fsdp.PREPARATION_TIMEOUT
    assert backend.options._timeout == ddp_fsdp.PREPARATION_TIMEOUT


def test_only_linear_layers_of_blocks_are_gathered_in_bfloat16(one_rank):
    """Norms and FoX's gates are gathered in float32. All gradients are summed in float32, here of two micro-batches."""
    cfg = train_settings("exp=smoke", "dtype=bfloat16", "pos=fox", "model.qk_norm=true", "model.qk_norm_weight=true")
    model, tokens, gathered = gpt.build(cfg, 64), torch.arange(48).view(2, 24), {}
    ddp_fsdp.shard_model(model, torch.device("cpu"), cfg)
    block = model.blocks[0]  # while its MLP is computed, the parameters are gathered
    block.mlp.register_forward_pre_hook(lambda *_: gathered.update((k, p.dtype) for k, p in block.named_parameters()))
    for row, more in zip(tokens, (True, False), strict=True):
        with one_rank.no_sync(model.losses, more), torch.autocast("cpu", torch.bfloat16):
            model.losses(row[None, :-1], row[None, 1:]).mean().backward()
    low = {"attention.qkv.weight", "attention.out.weight", "mlp.up.weight", "mlp.down.weight"}
    assert len(gathered) > 8 and {k for k, dtype in gathered.items() if dtype == torch.bfloat16} == low
    for p in model.parameters():
        gradient = one_rank.full_tensor(p.grad)
        assert p.dtype == gradient.dtype == torch.float32 and (gradient != gradient.bfloat16()).any()


@pytest.mark.process
def test_a_survivor_whose_collective_never_returns_is_ended(here):
    """A mutex locked twice hangs as a collective does: in C, where no signal handler of Python's can run."""
    code = """
import ctypes
from engine import ddp_fsdp
from engine.signals import StopSignal
ddp_fsdp.SIGNAL_GRACE = 0.5
ranks = object.__new__(ddp_fsdp.ManyProcesses)  # joins no process group
with StopSignal() as stop, ranks.exit_if_a_rank_dies(stop):
    print("hanging", flush=True)
    mutex, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    c.pthread_mutex_lock(mutex), c.pthread_mutex_lock(mutex)
"""
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "hanging\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == (1, "", f"error: {ANOTHER_RANK_DIED}\n")


@pytest.mark.distributed
def test_an_evaluation_is_the_same_to_the_bit(here, alone):
    """9 documents, which 2 processes cannot halve, and at the longer lengths several passes, so that both have some."""
    settings = ("run=alone", "ctx=2048", "documents=9", "scaling=yarn", "by_position=true", "task=sliding")
    (here / "runs").symlink_to(alone / "runs")
    read = {}
    for n in (1, 2):
        if n == 1:
            run_eval(*settings)
        else:
            succeed(torchrun(n, "eval.py", *settings, "fresh=true"))
        rows = [json.loads(line) for f in here.glob("runs/alone/eval/**/*.jsonl") for line in f.open()]
        read[n] = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    assert len(read[1]) > 20 and read[1] == read[2]


@pytest.mark.distributed
def test_a_sharded_run_is_the_same_run_and_ends_in_one_portable_file(here, alone):
    """Stopped and resumed; in between there are shards only."""
    process = torchrun(2, "train.py", *SETTINGS, "name=x", "shard=true")
    wait_for(process, "runs/x/shards/*/plain.pt")
    process.send_signal(signal.SIGTERM)
    code, out, _ = finish(process)
    assert code != 0 and "stopped: runs/x is saved at step" in out and not Path("runs/x/ckpt.pt").exists()
    (shards,) = Path("runs/x/shards").iterdir()  # the newest alone is kept
    assert {f.name for f in shards.iterdir()} == {"0.pt", "1.pt", "plain.pt"}  # both have written
    with pytest.raises(UserError, match=r"shard=True: needs more than one process"):
        run_train(*SETTINGS[1:], "name=x", "shard=true")
    with pytest.raises(UserError, match=r"shard=False: must be true to resume runs/x"):
        run_train(*SETTINGS[1:], "name=x")

    out = succeed(torchrun(2, "train.py", *SETTINGS, "name=x", "shard=true"))
    assert f"resumed at step {shards.name}" in out
    state = checkpoint.load(Path("runs/x"))
    assert largest_difference(state, reference(alone)) < 1e-5 and not Path("runs/x/shards").exists()
    assert state["validation"]["loss"] == pytest.approx(reference(alone)["validation"]["loss"], abs=1e-5)


# Both kinds of layers, and every kind of parameter that autocast leaves in float32
BFLOAT16 = ("exp=smoke", "steps=10", "dtype=bfloat16", "pos=fox", "layers=swan", "model.qk_norm=true",
            "model.qk_norm_weight=true", "log_every=1", "optim.lr=5e-3", "optim.warmup=2")  # fmt: skip


def differences(a: str, b: str) -> tuple[float, float]:
    """Between two runs: of the held-out loss, and the largest one of a weight matrix, relative to its norm."""
    one, two = (checkpoint.load(Path("runs") / name) for name in (a, b))
    pairs = [(x, two["model"][k]) for k, x in one["model"].items() if x.dim() == 2]
    weights = [((x - y).norm() / x.norm()).item() for x, y in pairs]
    loss = abs(one["validation"]["loss"] - two["validation"]["loss"])
    print(f"{a} and {b} differ by {loss:.1e} in the loss, by {max(weights):.1e} in a weight")
    return loss, max(weights)


@pytest.mark.distributed
def test_a_sharded_run_in_bfloat16_is_the_same_run_to_rounding(here):
    """Linear layers are gathered in bfloat16, all else in float32; 2 micro-batches a step, recomputed."""
    run_train(*BFLOAT16[1:], "name=one")
    more = ("micro_tokens=128", "recompute=true")
    succeed(torchrun(2, "train.py", *BFLOAT16, "name=sharded", "shard=true", *more))
    loss, weight = differences("one", "sharded")
    assert loss < 2e-4 and 0 < weight < 0.02


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("dtype, loss, weight", [("float32", 2e-6, 5e-6), ("bfloat16", 8e-4, 0.02)])
@pytest.mark.parametrize("more", ["", "recompute=true", "shard=true", "shard=true recompute=true"])
def test_two_processes_that_compile_train_as_one_that_does_not(more, dtype, loss, weight, here):
    """As exp=gpt2 does on GPUs. Each process compiles a block and the loss."""
    settings = ("exp=smoke", f"dtype={dtype}", "optim.lr=5e-3", "optim.warmup=2")
    run_train(*settings[1:], "name=one", "compile=false")
    more_settings = ("name=two", "compile=true", "micro_tokens=128", *more.split())
    code, _, err = finish(torchrun(2, "train.py", *settings, *more_settings, TORCH_LOGS="graph_code"), 400)
    assert code == 0 and "warning" not in err and err.count("TRACED GRAPH") == 2 * 2, err
    difference = differences("one", "two")
    assert difference[0] < loss and difference[1] < weight


WORKER = """
import sys, time
from datetime import timedelta
import torch
from conf.compose import train_settings
from data.batches import batch
from engine import ddp_fsdp, distributed
from model import gpt
ranks = distributed.join(torch.device("cpu"))
cfg = train_settings("exp=smoke", "dtype=bfloat16", "shard=true", "pos=fox")
with torch.device("meta" if distributed.rank() else "cpu"):
    model = gpt.build(cfg, 64)
whole = {k: v.clone() for k, v in model.state_dict().items()}
assert model.head.weight.is_meta == (distributed.rank() == 1)
losses = ranks.wrap_model(model, torch.device("cpu"), cfg)
assert model.head.weight is model.tokens.weight
sharded = {k: v.full_tensor() for k, v in model.state_dict().items()}  # a collective: all ranks call it
assert not distributed.rank() or all(v.is_meta for v in whole.values())
assert distributed.rank() or all(torch.equal(v, whole[k]) for k, v in sharded.items())
tokens = torch.arange(48).view(2, 24)

exchanged = []
for more in (True, True, False):
    with ranks.no_sync(losses, more), torch.autocast("cpu", torch.bfloat16):
        losses(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    exchanged.append(int(model.blocks[0].mlp.up.weight.grad is not None))  # the sharded sum of all ranks
began, failed = time.monotonic(), False
try:
    with ddp_fsdp.collective_timeout(timedelta(seconds=2)):
        if distributed.rank() == 0:
            ranks.any_rank(True)  # the other rank does not come
        else:
            time.sleep(6)
except RuntimeError as e:
    failed = True
if distributed.rank() == 0:
    print("exchanged", exchanged, "failed", failed, time.monotonic() - began < 5, flush=True)
import os
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_sharding_exchanges_gradients_once_a_step_and_gives_up_in_time(here):
    """Rank 1 builds no weights; the embeddings stay tied; a collective that another rank does not join fails."""
    Path("worker.py").write_text(WORKER)
    code, out, err = finish(torchrun(2, str(here / "worker.py")))
    assert code == 0 and out == "exchanged [0, 0, 1] failed True True\n", (out, err)


@pytest.mark.parametrize("rank, shard, where", [("0", True, "cpu"), ("1", True, "meta"), ("1", False, "cpu")])
def test_only_rank_0_builds_the_weights_of_a_sharded_model(rank, shard, where, here, monkeypatch):
    built = []

    def build(cfg, vocab_size):
        built.append(torch.empty(1).device.type)
        raise UserError("built")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(train.devices, "start", lambda *args: torch.device("cpu"))  # joins no process group
    monkeypatch.setattr(train.gpt, "build", build)
    with pytest.raises(UserError, match="built"):
        train.train(train_settings("exp=smoke", f"shard={shard}"))
    assert built == [where]


@pytest.mark.parametrize("settings", [("pos=rope",), ("pos=fox", "layers=swan")])
def test_recomputed_blocks_give_the_same_gradients_with_less_memory(settings):
    x = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))
    gradients, kept = [], []
    for recompute in (False, True):
        model = gpt.build(train_settings(*settings, *SMALL), 50)
        names = list(model.state_dict())
        if recompute:
            recompute_blocks(model)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=sizes: s.append(t.numel()) or t, lambda t: t):
            loss = model.losses(x[:, :-1], x[:, 1:]).mean()
        kept.append(sum(sizes))
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        assert list(model.state_dict()) == names
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("recompute", [False, True])
def test_the_code_that_is_compiled_is_inside_of_the_checkpoint(recompute, monkeypatch):
    """What runs compiled: each block, the loss, and with recompute=true each block again in the backward pass."""
    from engine.compile import compile_blocks
    from model import attention

    ran = []
    monkeypatch.setattr(torch, "compile", lambda plain, **_: lambda *args: ran.append(plain) or plain(*args))
    monkeypatch.setattr(attention, "attend_blocks", attention.attend_blocks)
    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    blocks, loss = [block.forward for block in model.blocks], model._block_losses
    if recompute:
        recompute_blocks(model)
    compile_blocks(model)
    tokens = torch.arange(24)[None]
    model.losses(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    assert ran == [*blocks, loss, *(reversed(blocks) if recompute else ())]


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_can_be_compiled(recompute, monkeypatch):
    """As on a GPU by default; aot_eager traces as Inductor does, and compiles in a second."""
    x = torch.randint(50, (2, 33), generator=torch.Generator().manual_seed(0))
    model = gpt.build(train_settings("pos=rope", *SMALL), 50)
    want = torch.autograd.grad(model.losses(x[:, :-1], x[:, 1:]).mean(), list(model.parameters()))
    if recompute:
        recompute_blocks(model)
    compile_for(monkeypatch, model, "aot_eager")
    counters.clear()
    got = torch.autograd.grad(model.losses(x[:, :-1], x[:, 1:]).mean(), list(model.parameters()))
    assert counters["stats"]["unique_graphs"] == 2  # of a block and the loss
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(got, want, strict=True))


def test_rows_that_cannot_be_shared_evenly_are_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError) as stop:
        distributed.local_rows(512, 64)
    assert str(stop.value) == "batch_tokens=512: must be a multiple of ctx x WORLD_SIZE = 64 x 3 = 192"
    assert distributed.local_rows(576, 64) == slice(3, 6)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_batch_that_cannot_be_split_is_one_line_and_nothing_is_written(here):
    code, _, err = finish(torchrun(3, "train.py", *SETTINGS, "name=x"))
    ours = [line for line in err.splitlines() if line.startswith("error")]
    assert code != 0 and ours == ["error: batch_tokens=512: must be a multiple of ctx x WORLD_SIZE = 64 x 3 = 192"]
    assert not Path("runs").exists() and 'train.py", line' not in err  # the traceback that follows is torchrun's


@pytest.mark.slow
@pytest.mark.distributed
def test_the_readmes_slurm_script_saves_and_queues_again(here):
    """With stand-ins for SLURM's commands: srun runs its arguments, scontrol records its own."""
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    [script] = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", pages, flags=re.S)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for ours, here_ in (("=8 --rdzv", "=2 --rdzv"), ("29500", str(port)), ("train.py exp=gpt2", f"{ROOT}/train.py")):
        assert ours in script
        script = script.replace(ours, here_)
    script = script.replace("name=gpt2", " ".join([*SETTINGS, "name=x"]))
    Path("bin").mkdir()
    for name, body in {
        "srun": 'exec "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
        "scontrol": f'[ "$1" = show ] && echo localhost || echo "$@" >> {here}/asked',
    }.items():
        Path("bin", name).write_text(f"#!/bin/bash\n{body}\n")
        Path("bin", name).chmod(0o755)
    env = {**os.environ, "PATH": f"{here}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
           "SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}  # fmt: skip
    batch = subprocess.Popen(["bash", "-c", script], env=env, stdout=-1, stderr=-1, text=True)
    wait_for(batch, "runs/x/ckpt.pt")
    batch.send_signal(signal.SIGTERM)
    _, out, err = finish(batch)
    assert "stopped: runs/x is saved at step" in out, err
    assert Path("asked").read_text() == "requeue 7\n"


@pytest.fixture
def two_ranks(monkeypatch) -> ManyProcesses:
    """Rank 0 of 2, without a process group; the other rank answers 20 to everything."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    ranks = object.__new__(ManyProcesses)
    monkeypatch.setattr(ranks, "interleave", lambda items: [*items, 20])
    return ranks


def test_rows_and_passes_are_split_over_the_ranks(monkeypatch):
    """Every row and every pass belongs to one rank; all ranks have the same number of passes."""
    ranks = object.__new__(ManyProcesses)
    for world in (1, 2, 3, 4):
        rows, passes = [], []
        for rank in range(world):
            monkeypatch.setenv("WORLD_SIZE", str(world))
            monkeypatch.setenv("RANK", str(rank))
            rows += range(12)[distributed.local_rows(12 * 64, 64)]
            passes.append(list(ranks.shard_work(7)))
        assert rows == list(range(12)) and len({len(p) for p in passes}) == 1
        assert sorted(i for p in passes for i, counts in p if counts) == list(range(7))


def test_processes_that_see_different_runs_get_an_error(two_ranks):
    two_ranks.assert_same("the step that runs/x was saved at", 20)
    with pytest.raises(
        UserError, match=r"the step that runs/x was saved at differs between the processes \(\[None, 20"
    ):
        two_ranks.assert_same("the step that runs/x was saved at", None)


def test_one_process_joins_nothing(monkeypatch):
    """Without torchrun nothing is set up, whatever else is in the environment."""
    monkeypatch.setenv("WORLD_SIZE", "8")  # a leftover
    monkeypatch.delenv("RANK", raising=False)
    ranks = distributed.join(torch.device("cpu"))
    assert type(ranks) is distributed.OneProcess and ranks is distributed.ranks()
    assert distributed.world() == 1 and not torch.distributed.is_initialized()
    assert ranks.interleave([1]) == [1] and ranks.total(0.1) == 0.1 and ranks.any_rank(True)
    assert list(ranks.shard_work(2)) == [(0, True), (1, True)]
