"""One process or several (torchrun --nproc_per_node=N train.py), behind one set of calls.

`ranks()` is a OneProcess, whose methods do nothing, or, under torchrun, the ManyProcesses of engine/ddp_fsdp.py, which
is imported only there. All ranks draw the same global batch and keep their rows of it. Rank 0 alone writes and prints.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from conf.errors import check, rank
from conf.schema import TrainConfig
from model.gpt import GPT


def world() -> int:
    """The number of processes of this job: torchrun sets WORLD_SIZE, RANK and LOCAL_RANK."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ and "WORLD_SIZE" in os.environ else 1


def local_rows(batch_tokens: int, ctx: int) -> slice:
    """This rank's rows of each global batch of batch_tokens / ctx rows. UserError if they cannot be split evenly."""
    n, rows = world(), batch_tokens // ctx
    check(rows % n == 0, "batch_tokens", batch_tokens, f"a multiple of ctx x WORLD_SIZE = {ctx} x {n} = {ctx * n}")
    return slice(rank() * rows // n, (rank() + 1) * rows // n)


class OneProcess:
    """The calls of training and evaluation to the other ranks, for a job of one process."""

    def rank0_first(self) -> AbstractContextManager:
        """Rank 0 runs the body first, the others after it. A UserError of rank 0 is raised on every rank."""
        return nullcontext()

    def on_rank0(self, work: Callable[[], Any]) -> None:
        """Rank 0 calls work while the others wait."""
        with self.rank0_first():
            if rank() == 0:
                work()

    def exit_if_a_rank_dies(self, stop: Any) -> AbstractContextManager:
        """If another rank dies, exit with a one-line error instead of hanging in a collective.

        stop: true when this rank has seen a signal.
        """
        return nullcontext()

    def assert_same(self, name: str, value: Any) -> None:
        """UserError unless the value is the same on all ranks (a folder that only some machines see)."""

    def interleave(self, items: list) -> list:
        """The items of all ranks, in the order first item of rank 0, of rank 1, ..., second item of rank 0, ...

        The inverse of distributing items by items[rank::world]. Items must be picklable; every rank gets all of them.
        """
        return items

    def shard_work(self, n: int) -> Iterator[tuple[int, bool]]:
        """(index, counts) for this rank's part of n items.

        Every rank gets the same number of items, because FSDP ranks must call the model together; padding items have
        counts=False.
        """
        return ((i, True) for i in range(n))

    def total(self, value: float) -> float:
        """The sum over all ranks."""
        return value

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def mean(self, x: Tensor) -> Tensor:
        """The mean of a scalar over all ranks."""
        return x

    def full_tensor(self, x: Tensor) -> Tensor:
        """The full tensor of a DTensor; other tensors unchanged."""
        return x

    def wrap_model(self, model: GPT, device: torch.device, cfg: TrainConfig) -> Callable[..., Tensor]:
        """Move a model that was built on the CPU to its device or devices. Returns the model.losses to train with."""
        model.to(device)
        return model.losses

    def no_sync(self, losses: Callable, more: bool) -> AbstractContextManager:
        """Around a forward and backward pass: gradients are not exchanged while more passes of the same step follow."""
        return nullcontext()


_ranks = OneProcess()


def ranks() -> OneProcess:
    """The calls to the other ranks of this job; ManyProcesses after `join` under torchrun."""
    return _ranks


def join(device: torch.device) -> OneProcess:
    """Join the other processes of a torchrun job; afterwards ranks above 0 print nothing.

    The jobs of a sweep share one process group, so later calls change nothing.
    """
    global _ranks
    if world() > 1 and type(_ranks) is OneProcess:
        from engine.ddp_fsdp import ManyProcesses

        _ranks = ManyProcesses(device)
    return _ranks
