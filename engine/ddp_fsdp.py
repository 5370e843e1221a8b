"""The calls of engine/distributed.py for several processes: DDP, or FSDP2. Imported under torchrun only.

Gradients are averaged (DDP); shard=true splits parameters, gradients and the optimizer's state as well (FSDP2).
"""

import atexit
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.errors import UserError
from conf.schema import TrainConfig
from conf.torchrun import check_numbers
from engine.device import linear_layers, uses_bfloat16
from engine.distributed import OneProcess, rank, world
from model.gpt import GPT

PREPARATION_TIMEOUT = timedelta(hours=3)  # rank 0 may be preparing a large corpus; a dead process is noticed earlier
TRAINING_TIMEOUT = timedelta(minutes=10)  # of a collective: longer than compiling or writing a checkpoint takes
SIGNAL_GRACE = 15  # seconds in which the main thread must see a signal; torchrun itself waits for 30
ANOTHER_RANK_DIED = (
    "another process of this job ended, so this one cannot continue; "
    "run the same command again, with any number of processes, to resume from what was saved"
)


def own_gpu() -> str:
    """The name of this process's GPU, the one with the number of its LOCAL_RANK. UserError if there are too few."""
    local, n = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= n:
        raise UserError(f"device=cuda: process {local} finds {n} GPUs on its machine: --nproc_per_node={n} at most")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


class Losses(nn.Module):
    """model.losses as a forward pass, which is where DDP has its hooks. The parameter names do not change."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model.losses(*args)


def say_that_a_rank_died() -> None:
    print(f"error: {f'rank {rank()}: ' if rank() else ''}{ANOTHER_RANK_DIED}", file=sys.stderr, flush=True)


class ManyProcesses(OneProcess):
    """The calls of OneProcess, where they are documented, for the ranks of a torchrun job.

    Creating it joins the job.
    """

    def __init__(self, device: torch.device):
        check_numbers()
        # gloo beside nccl: what the ranks exchange on the CPU never waits for the GPU
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PREPARATION_TIMEOUT)
        atexit.register(dist.destroy_process_group)
        if rank() > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (until the process ends)

    # ---- order and failures ----

    @contextmanager
    def rank0_first(self) -> Generator[None]:
        # Rank 0 broadcasts None after its body, or its error, which the other ranks raise instead of waiting forever
        error: list[str | None] = [None]
        if rank() > 0:
            dist.broadcast_object_list(error)  # waits for rank 0
            if error[0] is not None:
                raise UserError(error[0])
            yield
            return
        try:
            yield
        except UserError as e:
            dist.broadcast_object_list([str(e)])
            raise UserError(str(e)) from None  # the plain class, because now every rank raises it
        except Exception:
            dist.broadcast_object_list(["rank 0 failed: see its traceback"])
            raise
        dist.broadcast_object_list([None])

    @contextmanager
    def exit_if_a_rank_dies(self, stop: Any) -> Generator[None]:
        """See OneProcess. When a rank dies, one of two things happens to the others:

        * The collective they wait in raises a RuntimeError, which ends the process here. The line is printed at once,
          because torchrun's SIGTERM may end the process before it could print it later.
        * The collective never returns. torchrun then sends SIGTERM, but Python runs signal handlers in the main thread,
          which is stuck. So a second thread waits for signals on a pipe, and ends the process if the main thread has
          not seen the signal after SIGNAL_GRACE seconds.
        """
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)  # a signal writes a byte, even while the main thread is in a collective

        def watch() -> None:
            if os.read(read_end, 1):  # nothing is read when write_end is closed
                time.sleep(SIGNAL_GRACE)
                if not stop:
                    say_that_a_rank_died()
                    os._exit(1)
            os.close(read_end)

        threading.Thread(target=watch, daemon=True).start()
        try:
            with collective_timeout(TRAINING_TIMEOUT):
                yield
        except RuntimeError as e:  # gloo raises a plain RuntimeError
            if not (isinstance(e, dist.DistError) or any(x in str(e) for x in ("gloo", "NCCL"))):
                raise
            say_that_a_rank_died()
            sys.exit(1)
        finally:
            signal.set_wakeup_fd(-1)
            os.close(write_end)

    def assert_same(self, name: str, value: Any) -> None:
        values = self.interleave([value])
        if len(set(values)) > 1:
            raise UserError(f"{name} differs between the processes ({values}): all must see the same runs and cache")

    # ---- values of all ranks ----

    def interleave(self, items: list) -> list:
        # The items are pickled and go through the CPU (gloo), so they need not have the same shape on all ranks
        parts: list[list] = [[]] * world()
        dist.all_gather_object(parts, items)
        return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]

    def shard_work(self, n: int) -> Iterator[tuple[int, bool]]:
        # n is rounded up to a multiple of the number of ranks; padding repeats items from the start
        return ((i % n, i < n) for i in range(rank(), math.ceil(n / world()) * world(), world()))

    def total(self, value: float) -> float:
        return math.fsum(self.interleave([value]))

    def any_rank(self, flag: bool) -> bool:
        # A CPU tensor, for gloo: with nccl every step would wait for the GPU
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def mean(self, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / world()

    def full_tensor(self, x: Tensor) -> Tensor:
        return x.full_tensor() if hasattr(x, "full_tensor") else x  # ty: ignore[not-callable] (DTensor's)

    # ---- the model ----

    def wrap_model(self, model: GPT, device: torch.device, cfg: TrainConfig) -> Callable[..., Tensor]:
        # Blocks are compiled separately, so there is no graph to be cut where DDP communicates
        torch._dynamo.config.optimize_ddp = False
        if not cfg.shard:
            ids = [device.index] if device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(Losses(model.to(device)), device_ids=ids)
        shard_model(model, device, cfg)
        return model.losses

    def no_sync(self, losses: Callable, more: bool) -> AbstractContextManager:
        if isinstance(losses, nn.parallel.DistributedDataParallel):
            return losses.no_sync() if more else nullcontext()
        losses.__self__.set_requires_gradient_sync(not more)  # ty: ignore[missing-attribute] (of a method of FSDP's)
        return nullcontext()


def shard_model(model: GPT, device: torch.device, cfg: TrainConfig) -> None:
    """Split the parameters over the processes (FSDP2), in place: no process but rank 0 ever holds all of them.

    With bfloat16 the linear layers of blocks are gathered in bfloat16, as autocast would cast them, and gradients are
    summed in float32. What autocast leaves in float32 is gathered in float32: the embeddings, norms, and encodings.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    def tie() -> None:  # moving parameters between devices separates the two
        if cfg.model.tied_head:
            model.head.weight = model.tokens.weight

    weights = model.state_dict() if rank() == 0 else {}
    model.to("meta")
    tie()
    mesh, low = init_device_mesh(device.type, (world(),)), MixedPrecisionPolicy()
    if uses_bfloat16(device, cfg.dtype):
        low = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    in_bfloat16 = set(linear_layers(model))
    in_float32 = nn.ModuleList(
        m for m in model.blocks.modules() if m not in in_bfloat16 and list(m.parameters(recurse=False))
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=low, ignored_params=set(in_float32.parameters()))
    # fully_shard(model) does not look into sharded blocks, so it finds their float32 parameters only under another
    # name. It gathers them once, together with the embeddings.
    model.in_float32 = in_float32
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    del model.in_float32
    model.to_empty(device=device)
    tie()
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=False)
    )
    register_fsdp_forward_method(model, "losses")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # which is only read


@contextmanager
def collective_timeout(timeout: timedelta) -> Generator[None]:
    """Within it a collective that takes longer than `timeout` fails; after it that of the preparation holds again."""
    group = dist.group.WORLD
    if group is None:
        yield
        return
    group.set_timeout(timeout)
    try:
        yield
    finally:
        group.set_timeout(PREPARATION_TIMEOUT)
