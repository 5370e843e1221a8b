"""User errors: one clear line and exit code 1. Every other exception is a bug of ours and keeps its traceback."""

import functools
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """A mistake of the user: a setting, a file or the environment.

    The message names it, its value and what is right. Under torchrun every process raises it, so one of them is enough
    to print it.
    """


class OneRankError(UserError):
    """A user error that can occur in a single process of a torchrun job, such as a full disk or missing permissions."""


def check(ok: bool, setting: str, value: Any, right: str) -> None:
    """Raise UserError("SETTING=VALUE: must be RIGHT") unless ok. right: what a valid value is, such as "at least 1"."""
    if not ok:
        raise UserError(f"{setting}={str(value)[:100]}: must be {right}")


@contextmanager
def file_errors(path: Any) -> Generator[None]:
    """Context manager: an OSError inside it (no permission, no space) becomes a user error that names path.

    path: a Path, or any text that tells the user which setting or file is concerned.
    """
    try:
        yield
    except OSError as e:
        raise OneRankError(f"{path}: {e.strerror or e}") from None


def rank() -> int:
    """The number of this process in a torchrun job, 0 .. WORLD_SIZE - 1; 0 without torchrun."""
    return int(os.environ.get("RANK", 0)) if "WORLD_SIZE" in os.environ else 0


def user_errors_in_one_line(function: Callable) -> Callable:
    """Decorate the main function of a command: a UserError is printed as one line, and the exit code is 1.

    A machine without memory or disk space counts as one. With HYDRA_FULL_ERROR=1 in the environment it keeps its
    traceback. Ctrl-C exits with code 130, without a traceback.
    If every process of a torchrun job has the error, rank 0 prints it, and the others wait until torchrun ends them.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if callable(signal.getsignal(signal.SIGINT)):  # the imports are done: see conf/interrupt.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return function(*args, **kwargs)
        except Exception as e:
            from conf.failures import exit_with

            exit_with(e)
            raise  # a bug of ours
        except KeyboardInterrupt:
            sys.exit(130)

    return wrapped
