"""A command that is killed before any of its changes to files: the same command again ends with equal results.

Each command runs in a fork of this process. An audit hook there kills it, as kill -9 would, just before its n-th
change: a file opened for writing, a rename, a removal, a folder made or removed.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import compare
import eval as evaluation
import export
import train
from conf.errors import user_errors
from engine import checkpoint
from studies import matrix
from tests.helpers import write_documents

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
# A tokenizer of bytes starts no threads
TEXT = ("data=text", "data.files=docs/*.txt", "data.holdout=2", "data.tokenizer=bytes")
# The main function, its arguments, and the number of kills
COMMANDS: dict[str, tuple[Any, tuple[str, ...], int]] = {
    "train": (train.main, ("exp=smoke", *TEXT, "name=x", "save_every=5", "val_windows=4"), 40),
    "eval": (evaluation.main, ("run=x", "ctx=128", "scaling=ntk", "documents=2", "by_antecedent=true"), 40),
    "compare": (user_errors(compare.main), ("x", "--html"), 10),
    "export": (user_errors(export.main), ("run=x", "out=exported"), 10),
    "study": (user_errors(matrix.main), ("smoke", "--only", "rope-s0", "--out", "study.jsonl"), 5),
}


def run(command: str, kill_at: int = 0) -> tuple[int, int]:
    """(exit code, or -9; the number of its changes below the working folder, if it was not killed)."""
    main, arguments, _ = COMMANDS[command]
    here, (reader, writer), count = Path.cwd(), os.pipe(), 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in CHANGES) or isinstance(args[0], int):
            return
        if Path(here, os.fsdecode(args[0])).is_relative_to(here):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    if (pid := os.fork()) == 0:
        code = 1
        log = here.with_suffix(".log").open("w")
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            sys.argv = ["command.py", *arguments]
            sys.addaudithook(hook)
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
        log.close()
        os.write(writer, str(count).encode())
        os._exit(code)
    os.close(writer)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with os.fdopen(reader) as pipe:
        return code, int(pipe.read() or 0)


def results(folder: Path) -> dict[str, Any]:
    """Path -> content, as far as it does not tell the time; of pictures and pages that they exist."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content: Any = path.read_bytes() if path.suffix in (".npy", ".safetensors", ".bin") else None
        if path.name == "ckpt.pt":
            state = checkpoint.load(path.parent)
            moments = {f"{name}.{k}": x for name, of in state["optimizer"]["state"].items() for k, x in of.items()}
            content = [state["step"], checkpoint.digest(state["model"]), checkpoint.digest(moments)]
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            content = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
        found[str(path.relative_to(folder))] = content
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> dict[str, Path]:
    """For each command a folder in which it has not run yet, but `train` and `eval` before it have."""
    folder, before = tmp_path_factory.mktemp("crashes") / "start", {}
    folder.mkdir()
    write_documents(folder)
    for command in COMMANDS:
        before[command] = folder
        if command in ("train", "eval"):
            folder = Path(shutil.copytree(folder, folder.with_name(f"after-{command}")))
            with contextlib.chdir(folder):
                assert run(command)[0] == 0, folder.with_suffix(".log").read_text()
    return before


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_ends_with_equal_results_when_it_is_run_again(command, prepared, tmp_path):
    def fresh(name: str) -> Path:
        return Path(shutil.copytree(prepared[command], tmp_path / name))

    with contextlib.chdir(fresh("whole")):
        code, changes = run(command)
        want = results(Path.cwd())
        assert code == 0 and changes > 0
    for at in random.Random(command).sample(range(1, changes + 1), min(changes, COMMANDS[command][2])):
        with contextlib.chdir(folder := fresh(f"kill{at}")):
            assert run(command, kill_at=at)[0] == -signal.SIGKILL
            if not Path("exported").exists():  # which is complete, since it was renamed
                assert run(command)[0] == 0, (at, folder.with_suffix(".log").read_text())
            got = results(folder)
        assert got.keys() == want.keys(), (at, got.keys() ^ want.keys())
        assert got == want, at
        shutil.rmtree(folder)
