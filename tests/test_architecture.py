"""Imports run one way: commands, studies -> measure, hf -> engine -> model, data -> kernels, conf. A room is a folder.

The tests read every import of every file, also those inside functions.
"""

import pytest

from tests.source import circle, edges, imports_of, module_of, python_files, room_of

COMMANDS = {"train", "eval", "sample", "compare", "export", "recommend"}
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
    **dict.fromkeys(COMMANDS, BELOW_COMMANDS),
    "minimal": {"engine", "data", "conf"},  # of engine the optimizer
    "studies": BELOW_COMMANDS,
    "bench": {"engine", *BELOW_ENGINE},
}
ROOMS = {*ALLOWED, "tests"}
# Packages that are optional or take long to import: a command imports them inside the functions that need them
HEAVY = {"datasets", "gguf", "matplotlib", "plotly", "transformers", "triton", "wandb"}


def violations(path: str, source: str) -> list[str]:
    """What the file at path (relative to the repo) imports and must not."""
    found, room = [], room_of(path)
    for item in imports_of(path, source):
        target = item.target.split(".")[0]
        if room != "tests" and target in ROOMS - {room, *ALLOWED[room]}:
            found.append(f"{path}: {room} imports {item.target}")
        if room == "tests" and item.target.startswith("tests.test_"):
            found.append(f"{path}: a test imports the tests {item.target}")
    return found


def loaded_by_commands(sources: dict[str, str]) -> set[str]:
    """The modules of ours that are loaded when the commands are."""
    imported, loaded, waiting = edges(sources, only_at_load=True), set(), [*COMMANDS & {*map(module_of, sources)}]
    while waiting:
        if (module := waiting.pop()) not in loaded:
            loaded.add(module)
            waiting += imported[module]
    return loaded


def heavy_imports(sources: dict[str, str]) -> list[str]:
    """The heavy packages that are imported when a command is loaded."""
    loaded = loaded_by_commands(sources)
    items = [(path, i) for path, s in sources.items() if module_of(path) in loaded for i in imports_of(path, s)]
    return [f"{path}: {i.target}" for path, i in items if not i.function and i.target.split(".")[0] in HEAVY]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return python_files()


def test_every_file_belongs_to_a_room(sources):
    assert {room_of(path) for path in sources} == ROOMS


def test_imports_run_one_way(sources):
    assert [line for path, source in sources.items() for line in violations(path, source)] == []


def test_files_and_rooms_have_no_circle(sources):
    between_files = edges(sources)
    assert circle(between_files) == []
    assert "model.pos" in between_files["model.gpt"] and "engine.run" in between_files["measure.evaluation"]
    rooms: dict[str, set[str]] = {}
    for module, targets in between_files.items():
        rooms.setdefault(room_of(module.replace(".", "/")), set()).update(t.split(".")[0] for t in targets)
    assert circle({room: targets - {room} for room, targets in rooms.items()}) == []


def test_commands_load_no_heavy_package(sources):
    assert heavy_imports(sources) == []
    assert {"engine.run", "measure.evaluation", "conf.schema"} <= loaded_by_commands(sources)
