"""The Python files of the repo, their code lines and their imports, for the tests of architecture and size."""

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Import:
    target: str  # the module, dotted; with the imported name where that may be a submodule
    function: str = ""  # in which it stands, as "line name"; empty: it runs when the module is loaded


def python_files() -> dict[str, str]:
    """path -> source of every .py file of the repo that git tracks or would track."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", ":!results"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {path: (ROOT / path).read_text() for path in sorted(set(listed)) if (ROOT / path).exists()}


def room_of(path: str) -> str:
    """measure/curves.py -> measure, eval.py -> eval"""
    return path.split("/")[0].removesuffix(".py")


def module_of(path: str) -> str:
    """model/pos/__init__.py -> model.pos"""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports_of(path: str, source: str) -> list[Import]:
    """Every import in a file, also relative ones and those inside functions."""
    found, package = [], Path(path).parent.parts

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, function) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.extend(Import(f"{module}.{alias.name}", function) for alias in node.names)
        elif isinstance(node, FUNCTION):
            function = f"{node.lineno} {getattr(node, 'name', 'lambda')}"
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(source), "")
    return found


def edges(sources: dict[str, str], only_at_load: bool = False) -> dict[str, set[str]]:
    """module -> the modules of ours that it imports."""
    modules, found = {module_of(path) for path in sources}, {}
    for path, source in sources.items():
        targets = [item.target for item in imports_of(path, source) if not (only_at_load and item.function)]
        named = {next((m for m in (t, t.rpartition(".")[0]) if m in modules), None) for t in targets}
        found[module_of(path)] = named - {None, module_of(path)}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle, in order; empty if there is none."""
    done: set[str] = set()

    def walk(node: str, way: list[str]) -> list[str]:
        if node in way:
            return way[way.index(node) :]
        if node in done:
            return []
        found = next((c for target in sorted(edges.get(node, ())) if (c := walk(target, [*way, node]))), [])
        done.add(node)
        return found

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def code_lines(source: str) -> int:
    """Lines that are neither blank nor a comment nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_one and ast.get_docstring(node, clean=False):
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(x.strip()) and not x.strip().startswith("#") and i not in docstrings for i, x in lines)


def functions(source: str) -> dict[str, int]:
    """name -> lines of every function, with its docstring."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in nodes}
