"""The files of data=sympy (data/corpora/sympy.py). Imported when the corpus is prepared."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UserError

VERSION = "1.14.0"
MIN_BYTES = 28_672


def read(sha256: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each source file. UserError if the package is missing, or the files have another checksum."""
    spec = importlib.util.find_spec("sympy")  # found, never imported
    if spec is None or spec.origin is None:
        raise UserError(f"data=sympy: sympy is not installed: pip install sympy=={VERSION}")
    root = Path(spec.origin).parent
    found, digest = [], hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).parts):
        name = path.relative_to(root).as_posix()
        left_out = {"tests", "benchmarks"} & set(name.split("/")) or "_antlr" in name
        # matrices/common.py nearly repeats matrices/matrixbase.py, which stays
        if left_out or name == "matrices/common.py" or path.stat().st_size < MIN_BYTES:
            continue
        raw = path.read_bytes()
        digest.update(raw)
        found.append((name, raw.decode()))
    if digest.hexdigest() != sha256:
        raise UserError(
            f"data=sympy: the installed sympy's files differ from those of version {VERSION} "
            f"(sha256 {digest.hexdigest()[:12]}, expected {sha256[:12]}): pip install -I sympy=={VERSION}"
        )
    yield from found
