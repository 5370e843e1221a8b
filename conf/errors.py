"""User errors: one clear line and exit code 1. Every other exception is a bug of ours and keeps its traceback."""

import functools
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NoReturn


class UserError(ValueError):
    """The user is wrong: a setting, a file or the environment. The message names it, its value and what is right."""

    on_all_ranks = True  # under torchrun every process meets it, so one line is enough


class OneRankError(UserError):
    """A user error that a single process of a torchrun job can meet: a full disk, a file that others can read."""

    on_all_ranks = False


def check(ok: bool, setting: str, value: Any, right: str) -> None:
    """UserError `setting=value: must be right` unless ok."""
    if not ok:
        raise UserError(f"{setting}={value}: must be {right}")


@contextmanager
def file_errors(path: Any) -> Generator[None]:
    """Inside, an operating system's error (no permission, no space) is a user error that names path."""
    try:
        yield
    except OSError as e:
        raise OneRankError(f"{path}: {e.strerror or e}") from None


def rank() -> int:
    """Which of torchrun's processes this is; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def exit_with(line: str, on_all_ranks: bool = True) -> NoReturn:
    """Exit with this line and code 1. on_all_ranks: every process of a torchrun job calls this with the same line."""
    if rank() > 0 and on_all_ranks:
        time.sleep(2)  # give torchrun time to kill this rank, so that the message is printed once
    sys.exit(f"error: {line}" if rank() == 0 else f"error: rank {rank()}: {line}")


def user_errors_in_one_line(function: Callable) -> Callable:
    """Decorate a command's main function: a UserError becomes one line. HYDRA_FULL_ERROR=1 shows the traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as e:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            exit_with(str(e), e.on_all_ranks)
        except KeyboardInterrupt:
            sys.exit(130)

    return wrapped
