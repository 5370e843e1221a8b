"""Corpora: one file each. conf/data/NAME.yaml says `kind: FILE`; FILE.py defines two functions of the yaml's knobs.

    fingerprint(**knobs) -> dict                     what identifies the text; a change prepares the corpus again
    documents(**knobs) -> Iterable[(name, text)]     the whole documents, in a fixed order

The yaml also says tokenizer, vocab_size and holdout (documents held out), which data/corpus.py reads. The functions
here are for corpora that are files of installed packages. requirement: PACKAGE==VERSION.
"""

import hashlib
import importlib.util
from pathlib import Path

from conf.errors import UserError, ensure


def package_folder(requirement: str) -> Path:
    """The folder of a package, which is found and never imported."""
    package = requirement.partition("==")[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"data: {package} is not installed: pip install {requirement}")
    return Path(spec.origin).parent


def checked(documents: list[tuple[str, str]], sha256: str, install: str) -> list[tuple[str, str]]:
    """The documents, if their texts have this checksum when they are joined. install: the command to repair them."""
    found = hashlib.sha256("".join(text for _, text in documents).encode()).hexdigest()
    ensure(found == sha256, f"data: the installed files are not those that are expected: {install}")
    return documents
