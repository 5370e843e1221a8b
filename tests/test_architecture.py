"""Imports run one way: commands, studies -> measure, hf -> engine -> model, data -> kernels, conf.

A room is a folder of code. The tests read every import of every file, also those inside functions, and start processes
to see what an import really loads.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import ROOT

COMMANDS = {"train", "eval", "sample", "compare", "export"}
BELOW_ENGINE = {"model", "data", "kernels", "conf"}
BELOW_COMMANDS = {"measure", "hf", "engine", *BELOW_ENGINE}
# What a room may import beside itself; a command does not import another command
ALLOWED = {
    "kernels": set(),
    "conf": set(),
    "data": {"conf"},
    "model": {"kernels", "conf"},
    "engine": BELOW_ENGINE,
    "measure": {"engine", *BELOW_ENGINE},
    "hf": {"engine", *BELOW_ENGINE},
    "open_run": BELOW_COMMANDS,
    **{command: {"open_run", *BELOW_COMMANDS} for command in COMMANDS},
    "studies": BELOW_COMMANDS,
    "bench": {"engine", *BELOW_ENGINE},
}
ROOMS = {*ALLOWED, "tests"}

# Heavy packages: who may import them when the module is loaded, and not only inside a function
AT_LOAD = {
    # These are themselves loaded inside functions: DRAWING, LOGGING
    "matplotlib": {"measure/plots.py", "measure/plots_of_runs.py", "studies/figures.py", "studies/figure_parts.py"},
    "wandb": {"engine/wandb_runs.py", "engine/wandb_training.py", "measure/wandb_curves.py"},
    "transformers": set(),
    "triton": {"kernels/rope_triton.py", "bench/"},
    "torch.distributed": {"engine/ddp_fsdp.py", "engine/shards.py"},
}
DRAWING = {"measure.plots", "measure.plots_of_runs", "studies.figures", "studies.figure_parts"}
LOGGING = {"engine.wandb_runs", "engine.wandb_training", "measure.wandb_curves"}


@dataclass(frozen=True)
class Import:
    target: str  # the module, dotted; with the imported name where that may be a submodule
    at_load: bool  # runs when the module is loaded, not inside a function


def imports_of(source: str, package: str = "") -> list[Import]:
    """Every import in a file's source. package: the package of the file, for relative imports."""
    found = []

    def visit(node: ast.AST, at_load: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.extend(Import(f"{module}.{alias.name}", at_load) for alias in node.names)
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, at_load and not function)

    visit(ast.parse(source), True)
    return found


def room_of(path: str) -> str:
    """measure/curves.py -> measure, eval.py -> eval"""
    return path.split("/")[0].removesuffix(".py")


def module_of(path: str) -> str:
    """model/pos/__init__.py -> model.pos"""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def package_of(path: str) -> str:
    return ".".join(Path(path).parent.parts)


def violations(path: str, source: str) -> list[str]:
    """What the file at path (relative to the repo) imports and must not."""
    found, room = [], room_of(path)
    for item in imports_of(source, package_of(path)):
        target = item.target.split(".")[0]
        if room != "tests" and target in ROOMS and target != room and target not in ALLOWED[room]:
            found.append(f"{path}: {room} imports {item.target}")
        if room == "tests" and item.target.startswith("tests.test_"):
            found.append(f"{path}: a test imports the tests {item.target}")
        if item.at_load and room != "tests":
            for package, allowed in AT_LOAD.items():
                if f"{item.target}.".startswith(f"{package}.") and not path.startswith(tuple(allowed)):
                    found.append(f"{path}: imports {item.target} when it is loaded")
            for modules, package in ((DRAWING, "matplotlib"), (LOGGING, "wandb")):
                if any(f"{item.target}.".startswith(f"{m}.") for m in modules) and module_of(path) not in modules:
                    found.append(f"{path}: imports {item.target}, hence {package}, when it is loaded")
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle, in order; empty if there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for target in sorted(edges.get(node, ())):
            if found := walk(target, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def resolved(target: str, modules: Iterable[str]) -> str | None:
    """The module of ours that an import loads: `model.pos.Encoding` -> model.pos; None for other packages."""
    return next((name for name in (target, target.rpartition(".")[0]) if name in modules), None)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Every .py file of the repo, by its path."""
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {path: (ROOT / path).read_text() for path in sorted(set(listed)) if (ROOT / path).exists()}


def test_every_file_belongs_to_a_room(sources):
    assert len(sources) > 90
    assert {room_of(path) for path in sources} == ROOMS


def test_imports_run_one_way(sources):
    assert [line for path, source in sources.items() for line in violations(path, source)] == []


def test_rooms_have_no_circle(sources):
    edges: dict[str, set[str]] = {}
    for path, source in sources.items():
        targets = {item.target.split(".")[0] for item in imports_of(source, package_of(path))} & ROOMS
        edges.setdefault(room_of(path), set()).update(targets - {room_of(path)})
    assert circle(edges) == []
    assert edges["engine"] >= {"model", "data", "conf"}  # the imports were found


def test_modules_have_no_circle_when_they_are_loaded(sources):
    modules = {module_of(path) for path in sources}
    edges = {
        module_of(path): {
            target
            for item in imports_of(source, package_of(path))
            if item.at_load and (target := resolved(item.target, modules)) and target != module_of(path)
        }
        for path, source in sources.items()
    }
    assert circle(edges) == []
    assert "model.pos" in edges["model.gpt"] and "engine.run" in edges["measure.evaluation"]


@pytest.mark.parametrize(
    "path, source, right",
    [
        ("kernels/rope.py", "from conf.errors import UserError", "kernels imports conf.errors.UserError"),
        ("kernels/rope.py", "import model.gpt", "kernels imports model.gpt"),
        ("conf/schema.py", "def f():\n    from data import corpus", "conf imports data.corpus"),
        ("data/corpus.py", "from model.gpt import GPT", "data imports model"),
        ("model/gpt.py", "from data.corpus import Corpus", "model imports data"),
        ("model/pos/rope.py", "if True:\n    import engine.device as d", "model imports engine.device"),
        ("engine/run.py", "from measure import curves", "engine imports measure.curves"),
        ("measure/plots.py", "from hf.read import open_hf", "measure imports hf"),
        ("hf/read.py", "import measure", "hf imports measure"),
        ("measure/tasks/matched.py", "import eval", "measure imports eval"),
        ("eval.py", "from train import main", "eval imports train.main"),
        ("compare.py", "from studies import rows", "compare imports studies.rows"),
        ("open_run.py", "import sample", "open_run imports sample"),
        ("studies/matrix.py", "import train", "studies imports train"),
        ("studies/matrix.py", "from open_run import open_run", "studies imports open_run"),
        ("bench/rope.py", "from tests.helpers import ROOT", "bench imports tests"),
        ("bench/step.py", "class A:\n    def f(self):\n        import measure.curves", "bench imports measure"),
        ("train.py", "from bench import step", "train imports bench.step"),
        ("tests/test_x.py", "from tests.test_pos import SHAPE", "a test imports the tests"),
        ("train.py", "import wandb", "wandb when it is loaded"),
        ("hf/read.py", "from transformers import AutoModel", "transformers.AutoModel when it is loaded"),
        ("kernels/rope.py", "try:\n    import triton.language as tl\nexcept ImportError:\n    pass", "triton.language"),
        ("engine/device.py", "from torch import distributed", "torch.distributed when it is loaded"),
        ("measure/tables.py", "import matplotlib.pyplot as plt", "matplotlib.pyplot when it is loaded"),
        ("eval.py", "from measure import plots", "measure.plots, hence matplotlib, when it is loaded"),
        ("eval.py", "from measure.wandb_curves import log_curves", "hence wandb, when it is loaded"),
    ],
)  # fmt: skip
def test_a_forbidden_import_is_found(path, source, right):
    (line,) = violations(path, source)
    assert line.startswith(f"{path}: ") and right in line


def test_what_is_allowed_is_not_reported():
    for path, source in [
        ("engine/run.py", "from model import gpt\nfrom data.corpus import HeldOut\nimport torch, conf.schema"),
        ("engine/ddp_fsdp.py", "import torch.distributed as dist"),
        ("eval.py", "def draw():\n    from measure import plots\n    import wandb"),
        ("eval.py", "from open_run import open_run"),
        ("model/pos/xpos.py", "from model.pos.rope import Rope\nfrom . import Encoding"),
        ("tests/test_x.py", "import train\nfrom tests.helpers import ROOT\nimport transformers"),
        ("bench/tile_copy.py", "import triton"),
    ]:
        assert violations(path, source) == []


def test_circles_are_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert imports_of("from . import b\nfrom ..x import y", "model.pos") == [
        Import("model.pos.b", True),
        Import("model.x.y", True),
    ]


@pytest.mark.parametrize("command", ["train", "sample"])
@pytest.mark.process
def test_a_command_loads_only_what_it_needs(command):
    unwanted = [
        "matplotlib",
        "wandb",
        "transformers",
        "triton",
        "kernels.rope_triton",
        "engine.ddp_fsdp",
        "engine.shards",
    ]
    unwanted += ["hf", "studies", "bench", "tests", *({"measure"} if command == "train" else ())]
    code = f"import {command}, json, sys; print(json.dumps([m for m in {unwanted} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
