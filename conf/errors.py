"""User errors: one clear line and exit code 1. Every other exception is a bug of ours and keeps its traceback."""

import functools
import io
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any


class UserError(ValueError):
    """A mistake of the user: a setting, a file or the environment.

    The message names it, its value and what is right.
    """


def ensure(ok: Any, message: str) -> None:
    """Raise UserError(message) unless ok."""
    if not ok:
        raise UserError(message)


def check(ok: Any, setting: str, value: Any, right: str) -> None:
    """Raise UserError("SETTING=VALUE: must be RIGHT") unless ok. right: what a valid value is, such as "at least 1"."""
    ensure(ok, f"{setting}={str(value)[:100]}: must be {right}")


@contextmanager
def file_errors(path: Any) -> Generator[None]:
    """Context manager: an OSError inside it (no permission, no space) becomes a user error that names path.

    path: a Path, or any text that tells the user which setting or file is concerned.
    """
    try:
        yield
    except OSError as e:
        raise UserError(f"{path}: {e.strerror or e}") from None


def user_errors(main: Callable[[], Any]) -> Callable[[], Any]:
    """Decorate the main function of any command: a UserError becomes one line and exit code 1, Ctrl-C exit code 130."""

    @functools.wraps(main)
    def wrapped() -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a ? for what its encoding lacks, as that of Windows does
        try:
            return main()
        except UserError as e:
            report(str(e))
            sys.exit(1)
        except KeyboardInterrupt:
            sys.exit(130)

    return wrapped


def report(message: str) -> None:
    """Print a user error. Where all processes of a torchrun job have it, torchrun ends the others while they wait."""
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(2)
    print(f"error: {message}", file=sys.stderr)
