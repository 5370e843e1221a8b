"""More than one process: torchrun --nproc_per_node=N train.py. With one process every function here does nothing.

All processes draw the same global batch and keep their own rows of it. Gradients are averaged (DDP); shard=true splits
parameters, gradients and the optimizer's state as well (FSDP2). Rank 0 alone writes and speaks.
"""

import atexit
import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conf.errors import check

PATIENCE = timedelta(hours=3)  # rank 0 may be preparing a large corpus; a process that dies is noticed before
GRACE = 15  # seconds in which a signal must be seen; torchrun itself waits for 30
ALONE = (
    "another process of this job ended, so this one cannot go on; "
    "the same command, with any number of processes, goes on from what was saved"
)


def world() -> int:
    """The number of processes of this job: torchrun sets WORLD_SIZE, RANK and LOCAL_RANK."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1


def rank() -> int:
    return int(os.environ["RANK"]) if world() > 1 else 0


def share(batch_tokens: int, ctx: int) -> slice:
    """This process's rows of each batch: all of them in one process."""
    n, rows = world(), batch_tokens // ctx
    check(rows % n == 0, "batch_tokens", batch_tokens, f"a multiple of ctx x WORLD_SIZE = {ctx} x {n} = {ctx * n}")
    return slice(rank() * rows // n, (rank() + 1) * rows // n)


def join(device: torch.device) -> None:
    """Meet the other processes, once for all jobs of a sweep; the ranks after the first fall silent."""
    if world() == 1 or dist.is_initialized():
        return
    # gloo beside nccl: what the processes say to each other on the CPU never waits for the GPU
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    atexit.register(dist.destroy_process_group)
    if rank() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 (until the process ends)


@contextmanager
def survivor(stop: Any) -> Iterator[None]:
    """A process that is left alone by another says so in one line. stop: true once the main thread saw a signal.

    Most often its collective breaks. Where it never returns, the main thread cannot see the SIGTERM by which torchrun
    ends the survivors, and a thread beside it ends the process.
    """
    if world() == 1:
        yield
        return
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)

    def watch() -> None:
        if os.read(told, 1):  # nothing once tell is closed
            time.sleep(GRACE)
            if not stop:
                print(f"error: {ALONE}", file=sys.stderr, flush=True)
                os._exit(1)
        os.close(told)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except RuntimeError as e:  # gloo has no class of its own
        if not (isinstance(e, dist.DistError) or any(x in str(e) for x in ("gloo", "NCCL"))):
            raise
        raise ConnectionError(ALONE) from None
    finally:
        signal.set_wakeup_fd(-1)
        os.close(tell)


def once(work: Callable[[], Any]) -> Any:
    """work() by rank 0 while the others wait; its result, None for them. A user's mistake there is everyone's."""
    if world() == 1:
        return work()
    result, wrong = None, [None]
    if rank() == 0:
        try:
            result = work()
        except (ValueError, OSError) as e:
            wrong = [str(e)]
    dist.broadcast_object_list(wrong)
    if wrong[0] is not None:
        raise ValueError(wrong[0])
    return result


def agree(what: str, value: Any) -> None:
    """ValueError unless every process has the same value: a folder that only some machines see."""
    if world() > 1 and len(set(values := gather([value]))) > 1:
        raise ValueError(f"{what} differs between the processes ({values}): all must see the same runs and cache")


def gather(items: list) -> list:
    """The items of all processes; one from each in turn: rank 0, rank 1, ..., rank 0 again."""
    if world() == 1:
        return items
    everyone: list[list] = [[]] * world()
    dist.all_gather_object(everyone, items)
    return [part[i] for i in range(max(map(len, everyone))) for part in everyone if i < len(part)]


def turns(n: int) -> Iterator[tuple[int, bool]]:
    """(i, whether it counts) for this process's part of n pieces of work.

    Every process has as many, since those of a sharded model must call it together: some do a piece again for nothing.
    """
    for i in range(rank(), math.ceil(n / world()) * world(), world()):
        yield i % n, i < n


def total(value: float) -> float:
    """The sum over all processes."""
    return math.fsum(gather([value])) if world() > 1 else value


def anyone(flag: bool) -> bool:
    """Whether it is set in any process: all of them stop at the same step."""
    if world() == 1:
        return flag
    told = torch.tensor(int(flag))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def mean(x: Tensor) -> Tensor:
    """Of a scalar over all processes."""
    if world() == 1:
        return x
    x = x.clone()
    dist.all_reduce(x)
    return x / world()


class Losses(nn.Module):
    """model.losses as a forward pass, which is where DDP has its hooks. The model's own names stay as they are."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model.losses(*args)


def spread(model: nn.Module, device: torch.device, shard: bool) -> Callable[..., Tensor]:
    """Put a model that was built on the CPU on its device or devices. Returns what training calls for model.losses."""
    if world() == 1:
        model.to(device)
        return model.losses
    # Blocks are compiled each on its own, so there is no graph to be cut where DDP communicates
    torch._dynamo.config.optimize_ddp = False
    if not shard:
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(Losses(model.to(device)), device_ids=ids)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (world(),))
    for part in (*model.blocks, model):  # each moves to the device and is cut up before the next
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model, "losses")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # which nobody writes to
    return model.losses


def holding_back(losses: Callable, more: bool) -> AbstractContextManager:
    """Around a forward and backward pass: DDP need not average the gradient while more passes of the step follow."""
    return losses.no_sync() if more and hasattr(losses, "no_sync") else nullcontext()


def plain(x: Tensor) -> Tensor:
    """The whole of a tensor that is cut up among the processes."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
