"""The size budget: code lines that the two main commands import: python -m bench.code_lines

Runs `python train.py pos=rope` and `python eval.py scaling=ntk` at smoke size in a temporary folder, and counts the
code lines of our modules that they import: without blank lines, comments and docstrings. Exit code 1 above a budget.
The corpus is prepared before.
"""

import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUDGETS = {"train.py": 1700, "train.py and eval.py": 2400}
COMMANDS = {
    "train.py": ["pos=rope", "exp=smoke", "steps=1", "name=lines", "fresh=true"],
    "eval.py": ["run=lines", "ctx=128", "scaling=ntk", "documents=2"],
}
# Runs a command as __main__ and then prints the files of all imported modules
LIST_IMPORTS = """
import runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
print(*{m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)}, sep="\\n")
"""


def code_lines(path: Path) -> int:
    """Lines of a Python file that are neither blank nor a comment nor part of a docstring."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(x.strip()) and not x.strip().startswith("#") and i not in docstrings for i, x in lines)


def imported_files(script: str, folder: str) -> set[Path]:
    """Our files that the command imports, the script included."""
    argv = [sys.executable, "-c", LIST_IMPORTS, str(ROOT / script), *COMMANDS[script]]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    files = {Path(line) for line in done.stdout.splitlines() if line.endswith(".py")}
    return {f for f in files if f.is_relative_to(ROOT)} | {ROOT / script}


def measure(cache: str | None = None) -> dict[str, dict[Path, int]]:
    """Budget name -> file -> code lines. cache: a folder of prepared corpora to use."""
    with tempfile.TemporaryDirectory() as folder:
        if cache:
            (Path(folder) / ".cache").symlink_to(Path(cache).resolve())
        imported_files("train.py", folder)  # prepares the corpus: what that needs is loaded one time only
        train, evaluation = (imported_files(script, folder) for script in COMMANDS)
    return {
        name: {f: code_lines(f) for f in files}
        for name, files in zip(BUDGETS, (train, train | evaluation), strict=True)
    }


def main() -> None:
    """Print the code lines of each file and the totals. Exit code 1 if a total is above its budget."""
    sizes = measure(".cache" if Path(".cache").is_dir() else None)
    for path, lines in sorted(sizes["train.py and eval.py"].items()):
        only = "" if path in sizes["train.py"] else "  (eval.py only)"
        print(f"{lines:>6}  {path.relative_to(ROOT)}{only}")
    over = False
    for name, files in sizes.items():
        total = sum(files.values())
        over |= total > BUDGETS[name]
        print(f"{total:>6}  {name}: budget {BUDGETS[name]}")
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
