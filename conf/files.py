"""Locks of folders that several processes write to."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from conf.errors import file_errors


@contextmanager
def locked(folder: Path, wait: bool = False) -> Generator[None]:
    """Context manager: only one process of this machine at a time is inside it for the same folder, which it creates.

    If another process is: wait until it has left, or with wait=False raise a UserError that names it. The lock is one
    of the operating system, which ends with its process, however that ends: no file can be left behind.
    """
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        from conf.waiting import wait_or_refuse

        wait_or_refuse(folder, descriptor, e, wait)
    try:
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # it stayed empty, such as that of a run whose settings were refused
            folder.rmdir()
            folder.parent.rmdir()
