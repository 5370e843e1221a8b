"""The source code of sixteen Python packages: 1,526 long files, 101 MB, ten times the text of data=sympy.

They need not work, so they are put into a folder without their dependencies, and none of their code is ever run:

    pip install --no-deps --upgrade --target .cache/python PACKAGE==VERSION ...

Only files of the length of SymPy's are used, for the same reason: data/corpora/sympy.py.
"""

import re
from pathlib import Path

from conf.errors import UserError
from data.corpora import checked
from data.corpora.sympy import MIN_BYTES

REQUIREMENTS = (
    *("dask==2026.8.0", "django==5.2.19", "jax==0.10.2", "keras==3.15.1", "litellm==1.91.5", "mlflow==3.18.0"),
    *("music21==10.5.1", "mypy==2.4.1", "networkx==3.6.1", "nltk==3.10.4", "pennylane==0.45.1", "sqlalchemy==2.1.9"),
    *("sympy==1.14.0", "transformers==5.23.0", "twisted==26.10.0", "xarray==2026.9.0"),
)
SHA256 = "01eadc4c4a273d39e1e09b99144c227492646ed564ae27524d2728f3e7ee2106"
# Files that a program wrote contain this, among them models of transformers, which repeat one another
GENERATED = "automatically generated"
# Tests, and tables of data
LEFT_OUT = re.compile(
    r"(^|/)(tests?|benchmarks|_vendor|corpus)/|test[^/]*\.py$|_test\.py$|_antlr|_pb2|^sympy/matrices/common"
)


def fingerprint(folder: str) -> dict:
    return {"corpus": "python", "sha256": SHA256}


def documents(folder: str) -> list[tuple[str, str]]:
    """(name, text) of each source file of at least MIN_BYTES bytes. folder: where the packages are."""
    root, install = Path(folder), f"pip install --no-deps --upgrade --target {folder} {' '.join(REQUIREMENTS)}"
    packages = [requirement.partition("==")[0] for requirement in REQUIREMENTS]
    if missing := [package for package in packages if not (root / package).is_dir()]:
        raise UserError(f"data.folder={folder}: {missing[0]} is not there: {install}")
    paths = {path.relative_to(root).as_posix(): path for package in packages for path in (root / package).rglob("*.py")}
    long = {name: path for name, path in sorted(paths.items()) if path.stat().st_size >= MIN_BYTES}
    found = [(name, path.read_bytes().decode()) for name, path in long.items() if not LEFT_OUT.search(name)]
    return checked([(name, text) for name, text in found if GENERATED not in text[:1000]], SHA256, install)
