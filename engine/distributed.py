"""One process or several (torchrun --nproc_per_node=N train.py) behind one set of calls.

With one process a call returns its argument. With several, all ranks make the same calls in the same order: they draw
the same global batch and keep their rows of it; gradients are averaged (DDP), and shard=true splits parameters,
gradients and the optimizer's state as well (FSDP2). Rank 0 alone writes and prints. If a process dies, torchrun ends
the others.
"""

import atexit
import math
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from conf.errors import UserError, check
from model.gpt import GPT, linear_layers

TIMEOUT = timedelta(hours=3)  # of a collective: rank 0 may be preparing a large corpus


def rank() -> int:
    """The number of this process in a torchrun job, 0 .. WORLD_SIZE - 1; 0 without torchrun."""
    return int(os.environ.get("RANK", 0)) if "WORLD_SIZE" in os.environ else 0


def world() -> int:
    """The number of processes of this job: torchrun sets WORLD_SIZE, RANK and LOCAL_RANK."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1


def join(device: torch.device) -> None:
    """Join the other processes of a torchrun job. The jobs of a sweep share one process group."""
    if world() > 1 and not dist.is_initialized():
        # gloo beside nccl: what the ranks exchange on the CPU never waits for the GPU
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
        atexit.register(leave)


def leave() -> None:
    """Leave the process group, and let gloo's threads finish.

    They free the tensors of an exchange after it has ended, for which they need the interpreter. One that does so while
    Python ends aborts the process: "terminate called without an active exception".
    """
    dist.destroy_process_group()
    time.sleep(0.5)


def local_rows(batch_tokens: int, ctx: int) -> slice:
    """This rank's rows of each global batch of batch_tokens / ctx rows. UserError if they cannot be split evenly."""
    n, rows = world(), batch_tokens // ctx
    check(rows % n == 0, "batch_tokens", batch_tokens, f"a multiple of ctx x WORLD_SIZE = {ctx} x {n} = {ctx * n}")
    return slice(rank() * rows // n, (rank() + 1) * rows // n)


# ---- what rank 0 does ----


def say(line: str) -> None:
    """Print a line, on rank 0 only."""
    if rank() == 0:
        print(line)


@contextmanager
def rank0_first() -> Generator[None]:
    """Rank 0 runs the body first, the others after it. A UserError of rank 0 is raised on every rank."""
    error = None
    if rank() == 0:
        try:
            yield
        except UserError as e:
            error = e
    if error := interleave([error])[0]:
        raise error
    if rank() > 0:
        yield


def on_rank0(work: Callable[[], Any]) -> None:
    """Rank 0 calls work while the others wait."""
    with rank0_first():
        if rank() == 0:
            work()


# ---- values of all ranks ----


def interleave(items: list) -> list:
    """The items of all ranks, in the order first item of rank 0, of rank 1, ..., second item of rank 0, ...

    The inverse of distributing items by items[rank::world]. Items must be picklable; every rank gets all of them. They
    go through the CPU (gloo), so tensors need not have the same shape on all ranks, and nothing waits for a GPU.
    """
    if not dist.is_initialized():
        return items
    parts: list[list] = [[]] * world()
    dist.all_gather_object(parts, items)
    return [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]


def assert_same(name: str, value: Any) -> None:
    """UserError unless the value is the same on all ranks (a folder that only some machines see)."""
    values = interleave([value])
    if len(set(values)) > 1:
        raise UserError(f"{name} differs between the processes ({values}): all must see the same runs and cache")


def shard_work(n: int) -> Iterator[tuple[int, bool]]:
    """(index, counts) for this rank's part of n items.

    Every rank gets the same number of items, because FSDP ranks must call the model together; padding items, which
    repeat items from the start, have counts=False.
    """
    return ((i % n, i < n) for i in range(rank(), math.ceil(n / world()) * world(), world()))


def any_rank(flag: bool) -> bool:
    """Whether the flag is set on any rank."""
    if not dist.is_initialized():
        return flag
    flags = torch.tensor(int(flag))  # on the CPU, for gloo: it is asked at every step, which must not wait for the GPU
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def mean(x: Tensor) -> float:
    """The mean of a scalar over all ranks. It waits for the GPU."""
    return sum(interleave([x.item()])) / world()


def state_dicts() -> ModuleType:
    """The module torch.distributed.checkpoint.state_dict, whose import takes 0.6 s."""
    from torch.distributed.checkpoint import state_dict

    return state_dict


def full_tensor(x: Tensor) -> Tensor:
    """The full tensor of a DTensor; other tensors unchanged."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # ty: ignore[not-callable] (DTensor's)


def gather_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """{"model": weights, "optimizer": the optimizers' state by parameter names}, for a checkpoint; also if sharded.

    All ranks call it. The result of rank 0 is complete and on the CPU; that of the others may be empty.
    """
    options = state_dicts().StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = state_dicts().get_state_dict(model, optimizers, options=options)
    return {"model": weights, "optimizer": moments}


def scatter_state(model: nn.Module, optimizers: list[Optimizer], state: dict[str, Any]) -> None:
    """Load what `gather_state` returned, in place. All ranks call it; the values are those of rank 0."""
    options = state_dicts().StateDictOptions(full_state_dict=True, broadcast_from_rank0=world() > 1)
    weights, moments = (state["model"], state["optimizer"]) if rank() == 0 else ({}, {})
    state_dicts().set_model_state_dict(model, weights, options=options)
    state_dicts().set_optimizer_state_dict(model, optimizers, moments, options=options)


# ---- the model ----


class Losses(nn.Module):
    """model.losses as a forward pass, which is where DDP has its hooks. The parameter names do not change."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        return self.model.losses(*args)


def wrap_model(model: GPT, device: torch.device, shard: bool, bfloat16: bool) -> Callable[..., Tensor]:
    """Move a model that was built on the CPU to its device or devices. Returns the model.losses to train with.

    bfloat16: whether autocast casts the weights of linear layers to bfloat16.
    """
    if not dist.is_initialized():
        model.to(device)
        return model.losses
    # Blocks are compiled separately, so there is no graph to be cut where DDP communicates
    torch._dynamo.config.optimize_ddp = False
    if not shard:
        ids = [device.index] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(Losses(model.to(device)), device_ids=ids)
    shard_model(model, device, bfloat16)
    return model.losses


def shard_model(model: GPT, device: torch.device, bfloat16: bool) -> None:
    """Split the parameters over the processes (FSDP2), in place. Their values are those of rank 0.

    With bfloat16 the linear layers of blocks are gathered in bfloat16, as autocast would cast them, and gradients are
    summed in float32. What autocast leaves in float32 is gathered in float32: the embeddings, norms, and encodings.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    weights, tied = model.state_dict() if rank() == 0 else {}, model.head.weight is model.tokens.weight

    def tie() -> None:  # moving parameters between devices separates the two
        if tied:
            model.head.weight = model.tokens.weight

    model.to("meta")
    tie()
    mesh, low = init_device_mesh(device.type, (world(),)), MixedPrecisionPolicy()
    if bfloat16:
        low = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    linear = set(linear_layers(model))
    others = [m for m in model.blocks.modules() if m not in linear and list(m.parameters(recurse=False))]
    in_float32 = nn.ModuleList(others)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=low, ignored_params=set(in_float32.parameters()))
    # fully_shard(model) does not look into sharded blocks, so it finds their float32 parameters only under another
    # name. It gathers them once, together with the embeddings.
    model.in_float32 = in_float32
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy())
    del model.in_float32
    model.to_empty(device=device)
    tie()
    options = state_dicts().StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dicts().set_model_state_dict(model, weights, options=options)
    register_fsdp_forward_method(model, "losses")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")  # which is only read


def no_sync(losses: Callable, more: bool) -> AbstractContextManager:
    """Around a forward and backward pass: gradients are not exchanged while more passes of the same step follow."""
    if isinstance(losses, nn.parallel.DistributedDataParallel):
        return losses.no_sync() if more else nullcontext()
    if dist.is_initialized():
        losses.__self__.set_requires_gradient_sync(not more)  # ty: ignore[missing-attribute] (of a method of FSDP's)
    return nullcontext()
