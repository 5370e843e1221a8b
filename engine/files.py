"""Files that survive a kill: written atomically, by one process at a time; and which code wrote them."""

import os
import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from conf.errors import UserError, file_errors
from conf.registry import ROOT


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call write(file) on a temporary file, then rename it: path is the old file or the new one, never a part of one.

    What a killed process left under the temporary name is overwritten. UserError if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as f:
                write(f)
                f.flush()
                os.fsync(f.fileno())
            temporary.replace(path)
        except RuntimeError as e:  # torch.save turns an OSError of the file into one
            raise OSError(str(e).partition("\n")[0]) from e
        finally:
            temporary.unlink(missing_ok=True)  # so that a full disk is not kept full


@contextmanager
def locked(folder: Path, wait: bool = False) -> Generator[None]:
    """Context manager: only one process at a time is inside it for the same folder, which it creates.

    If another one is: wait until it has left, or with wait=False raise a UserError. The lock is one of the operating
    system on the file .lock there, so it ends with its process, however that ends.
    """
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(folder / ".lock", timeout=-1 if wait else 0).acquire()
        except Timeout:
            raise UserError(f"{folder}: another process trains this run: wait for its end or choose name=NEW") from None
    with lock:
        yield


def output_of(*command: str) -> str:
    """What a command prints; "unknown" where it does not exist, fails, or takes more than 10 s."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def commit(checkout: Path = ROOT) -> str:
    """The short hash of a checkout's commit, followed by + if its code differs from it; "unknown" without git.

    Results and texts may differ: they do not change a number.
    """
    git = ("git", "-C", str(checkout))
    changed = output_of(*git, "diff", "HEAD", "--name-only", "--", ".", ":!results", ":!*.md")
    return output_of(*git, "rev-parse", "--short", "HEAD") + "+" * (changed not in ("", "unknown"))
