"""Your own text files: `data=text data.files='docs/**/*.txt'`. One file is one document."""

import glob
import hashlib
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UserError


def _paths(files: str | None) -> list[Path]:
    """The files that the glob matches, sorted. UserError for fewer than two, because complete files are held out."""
    if not files:
        raise UserError("data=text needs data.files='GLOB', for example data.files='docs/**/*.txt'")
    paths = sorted(Path(p) for p in glob.glob(files, recursive=True) if Path(p).is_file())  # noqa: PTH207 (absolute globs)
    if not paths:
        raise UserError(f"data.files={files}: matches no file (seen from {Path.cwd()})")
    if len(paths) == 1:
        raise UserError(f"data.files={files}: matches one file; at least 2 are needed, since whole files are held out")
    return paths


def fingerprint(files: str | None) -> dict:
    """Depends on the content of the files and their order, not on their names. files: a glob, ** for subfolders."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _paths(files)]
    return {"corpus": "text", "sha256": hashlib.sha256("".join(digests).encode()).hexdigest()}


def documents(files: str | None) -> Iterator[tuple[str, str]]:
    """(path, text) of each file; empty files are left out. UserError for a file that is not UTF-8 text."""
    for path in _paths(files):
        raw = path.read_bytes()
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise UserError(f"data.files: {path} is not UTF-8 text (byte {e.start}): exclude or convert it") from None
        if "\0" in text:
            raise UserError(f"data.files: {path} holds NUL bytes, so it is binary: exclude it")
        if text.strip():
            yield path.as_posix(), text
