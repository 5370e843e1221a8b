"""Temporary files of killed processes, and a look at a file before the work that it is for. Imported where needed."""

import contextlib
import os
from pathlib import Path

from conf.errors import UserError


def remove_leftovers(files: list[Path]) -> None:
    """Delete those of these temporary files .NAME.PID whose process was killed before it could rename them."""
    for leftover in files:
        pid = leftover.suffix[1:]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and not _runs(int(pid)):
                leftover.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return pid != os.getpid()  # this process has no temporary file open: it is that of an earlier one of this number


def check_writable(setting: str, path: Path) -> None:
    """UserError unless a file can be written at path, whose folders need not exist. To call before the work."""
    above = next(folder for folder in path.parents if folder.exists())
    if path.is_dir():
        raise UserError(f"{setting} {path}: is a folder, and a file is to be written there")
    if not above.is_dir() or not os.access(above, os.W_OK):
        what = "read-only" if above.is_dir() else "a file"
        raise UserError(f"{setting} {path}: cannot be written, {above} is {what}")
