"""The standing budgets of size, counted by folder, and the rules of how code is laid out: python -m tests.test_size

Counted are code lines: without blank lines, comments and docstrings. `product` includes minimal.py.
"""

import functools

import pytest

from tests.source import ROOT, code_lines, functions, imports_of, python_files, room_of

# Limits, and where they are above the aim, the aim: a limit rises only with what a new feature needs
BUDGETS = {
    "commands": 537,
    "conf": 550,
    "data": 479,
    "engine": 796,
    "kernels": 338,
    "model": 1536,
    "measure": 1399,
    "hf": 1222,
    "studies": 1731,
    "bench": 277,
    "product": 9000,
    "tests": 8000,
}
AIMS = BUDGETS | {"commands": 450, "conf": 400, "engine": 750}
AIMS |= {"measure": 1100, "hf": 1100, "studies": 1500}
README_LINES, README_WORDS, MINIMAL_LINES = 160, 1700, 200
LONGEST_FUNCTION, SMALLEST_FILE, IMPORTS_IN_FUNCTIONS = 70, 25, 15  # lines, code lines, functions
PLUG_INS = ("model/pos/", "model/scaling/", "data/corpora/", "measure/tasks/")
# Small files that are no plug-ins, and why each is a file of its own
SMALL_FILES = {
    "bench/rows.py": "every benchmark writes its rows by it",
    "engine/optimizer.py": "many readers want to change the optimizer",
    "kernels/gelu.py": "the model only writes act(up(x))",
    "kernels/rope_torch.py": "it runs without Triton, and the kernel is tested against it",
    "model/decode.py": "training does without it",
    "model/spectrum.py": "encodings and studies use it",
}
# Optional packages, and those that take more than 0.3 s: only they may be imported inside a function.
# kernels.rope_triton is written in the language of Triton, which some platforms lack
LATE = (
    *("datasets", "gguf", "matplotlib", "plotly", "scipy", "transformers", "wandb"),
    *("torch._dynamo", "torch._functorch", "torch.distributed", "kernels.rope_triton"),
)

SOURCES = python_files()
PRODUCT = {path: source for path, source in SOURCES.items() if not path.startswith("tests/")}


def folder_of(path: str) -> str:
    return room_of(path) if "/" in path else "minimal.py" if path == "minimal.py" else "commands"


@functools.cache
def sizes() -> dict[str, tuple[int, int]]:
    """folder -> (code lines, files)."""
    files = {folder: [s for p, s in SOURCES.items() if folder_of(p) == folder] for folder in BUDGETS}
    files["product"] = [*PRODUCT.values()]
    return {folder: (sum(map(code_lines, inside)), len(inside)) for folder, inside in files.items()}


def imports_in_functions() -> tuple[set[str], list[str]]:
    """(functions that import allowed packages, other imports inside functions)."""
    allowed, others = set(), []
    for path, source in PRODUCT.items():
        for item in (item for item in imports_of(path, source) if item.function):
            if f"{item.target}.".startswith(tuple(f"{name}." for name in LATE)):
                allowed.add(f"{path} {item.function}")
            else:
                others.append(f"{path} {item.function}: {item.target}")
    return allowed, others


def small_files() -> list[str]:
    """Files that are neither commands, plug-ins nor the __init__.py of a folder, nor have a reason for their size."""
    others = {
        path for path in PRODUCT if not path.startswith(PLUG_INS) and not path.endswith("__init__.py") and "/" in path
    }
    return [path for path in sorted(others - {*SMALL_FILES}) if code_lines(PRODUCT[path]) < SMALLEST_FILE]


def long_functions() -> list[str]:
    named = [(f"{p}: {name}: {n}", n) for p, source in PRODUCT.items() for name, n in functions(source).items()]
    return [line for line, n in named if n > LONGEST_FUNCTION]


@pytest.mark.parametrize("folder", BUDGETS)
def test_a_folder_is_within_its_budget(folder):
    assert sizes()[folder][0] <= BUDGETS[folder]


def test_only_optional_and_slow_packages_are_imported_inside_functions():
    allowed, others = imports_in_functions()
    assert others == [] and len(allowed) <= IMPORTS_IN_FUNCTIONS


def test_the_formatter_formats():
    assert [path for path, source in SOURCES.items() if "fmt: " + "skip" in source or "fmt: " + "off" in source] == []


def test_small_files_have_a_reason():
    assert small_files() == []


def test_no_function_is_longer_than_a_screen():
    assert long_functions() == []


def test_readme_and_minimal_are_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= README_LINES and len(text.split()) <= README_WORDS
    assert len(SOURCES["minimal.py"].splitlines()) <= MINIMAL_LINES


def main() -> None:
    """Print the table: code lines, budget and files of each folder."""
    for folder, (lines, files) in sizes().items():
        over = "  over its limit" if lines > BUDGETS[folder] else ""
        print(f"{folder:<10}{lines:>7,} code lines in {files:>3} files, aim {AIMS[folder]:>6,}{over}")


if __name__ == "__main__":
    main()
