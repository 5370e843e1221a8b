"""Your own text files: `data=text data.files='docs/**/*.txt'`. One file is one document."""

import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UserError, check


def _paths(files: str | None) -> list[Path]:
    """The files that the glob matches, sorted."""
    found = glob.glob(files or "", recursive=True)  # noqa: PTH207 (absolute globs)
    paths = sorted(Path(p) for p in found if Path(p).is_file())
    right = f"a glob such as 'docs/**/*.txt' that matches at least 2 files; it matches {len(paths)} from {Path.cwd()}"
    check(len(paths) >= 2, "data.files", files, right)  # whole files are held out
    return paths


def fingerprint(files: str | None) -> dict:
    """Depends on the content of the files and their order, not on their names. files: a glob, ** for subfolders."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _paths(files)]
    return {"corpus": "text", "sha256": hashlib.sha256("".join(digests).encode()).hexdigest()}


def documents(files: str | None) -> Iterator[tuple[str, str]]:
    """(path, text) of each file; empty files are left out. UserError for a file that is not UTF-8 text."""
    for path in _paths(files):
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise UserError(f"data.files: {path} is not UTF-8 text (byte {e.start}): exclude or convert it") from None
        check("\0" not in text, "data.files", path, "text: it holds NUL bytes")
        if text.strip():
            yield path.as_posix(), text
