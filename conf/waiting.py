"""What to do where another process holds a lock. Imported then."""

import contextlib
import fcntl
import os
import sys
from pathlib import Path

from conf.errors import UserError


def wait_or_refuse(folder: Path, descriptor: int, e: OSError, wait: bool) -> None:
    """With wait=True wait for the lock of this open folder; otherwise raise a UserError that names its owner.

    e: why the lock could not be taken at once. If the file system has no locks, the process continues without one.
    """
    if not isinstance(e, BlockingIOError):
        return
    holder = owner(descriptor)
    if not wait:
        os.close(descriptor)
        raise UserError(f"{folder}: in use by {holder}: wait for its end or choose name=NEW")
    print(f"{folder}: waiting for {holder}", file=sys.stderr)
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def owner(descriptor: int) -> str:
    """`process 123 (python train.py pos=rope)`, as far as the system tells: only Linux does."""
    inode = os.fstat(descriptor).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 123 08:01:4567 0 EOF
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                with contextlib.suppress(OSError):
                    command = Path(f"/proc/{fields[4]}/cmdline").read_bytes().decode(errors="replace").split("\0")
                    return f"process {fields[4]} ({' '.join(command).strip()[:100]})"
                return f"process {fields[4]}"
    return "another process"
