"""What to say where the machine fails: no memory, no space on the disk. Imported when something has failed."""

import errno
import os
import sys
import time

from conf.errors import OneRankError, UserError, rank
from conf.torchrun import check_numbers

# What torch says, as a RuntimeError, when memory is short or a size does not fit into 64 bits
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
NO_SPACE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "it is read-only"}


def is_out_of_memory(e: BaseException) -> bool:
    """Whether an exception says that a device, or this machine, has not enough memory."""
    text = isinstance(e, RuntimeError) and any(x in str(e) for x in NO_MEMORY)
    return text or isinstance(e, MemoryError) or type(e).__name__ == "OutOfMemoryError"


def of_the_machine(e: Exception) -> Exception:
    """A UserError in place of an exception that is not our bug but a limit of the machine; any other as it is."""
    if is_out_of_memory(e):
        first = str(e).strip().splitlines()[0][:120] if str(e).strip() else type(e).__name__
        return OneRankError(f"not enough memory ({first}): try a smaller ctx, batch, micro_tokens or model")
    if isinstance(e, OSError) and e.errno in NO_SPACE:
        return OneRankError(f"{e.filename or 'writing'}: {NO_SPACE[e.errno]}")
    return e


def exit_with(e: Exception) -> None:
    """End the process with one line for a user error; return for a bug of ours, or with HYDRA_FULL_ERROR=1.

    If every process of a torchrun job has the error, rank 0 prints it, and the others wait until torchrun ends them.
    """
    try:
        check_numbers()
    except UserError as wrong:  # without them no rank is known
        sys.exit(f"error: {wrong}")
    error = of_the_machine(e)
    if not isinstance(error, UserError) or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return
    if rank() > 0 and not isinstance(error, OneRankError):
        time.sleep(2)  # give torchrun time to kill this rank, so that the message is printed once
    sys.exit(f"error: {error}" if rank() == 0 else f"error: rank {rank()}: {error}")


def os_error(e: BaseException) -> OSError | None:
    """The OSError behind an exception; torch.save turns some into RuntimeErrors."""
    seen: BaseException | None = e
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen


def reason(e: BaseException) -> str:
    """Why a file could not be read or written, in a few words."""
    error = os_error(e)
    if error is not None and error.errno is not None:
        return NO_SPACE.get(error.errno, error.strerror or str(error))
    return " ".join(str(e).split())[:100] or type(e).__name__
