"""bench/gpu_check.sh, the command for a machine with a GPU, and the plugin of pytest that it uses."""

import csv
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.helpers import ROOT


def gpu_check(here: Path, stage: str, **env: str) -> subprocess.CompletedProcess:
    """Run a stage at toy size, with its files in `here/the state`."""
    full = {**os.environ, "TOY": "1", "STATE": str(here / "the state"), "CORPUS": str(here / ".cache"), **env}
    full = {name: value for name, value in full.items() if value}
    return subprocess.run(["bash", str(ROOT / "bench/gpu_check.sh"), stage], env=full, capture_output=True, text=True)


def stand_in(here: Path, case: str = "") -> str:
    """A stand-in for Python that writes its arguments to here/calls; case: branches of a `case` of them."""
    python = here / "python"
    python.write_text(f"""#!/bin/bash
echo "$*" >> {here}/calls
for argument; do
    case $option in --out | --ceilings) echo row >> "$argument" ;; esac
    option=$argument
done
case "$*" in
    {case}
    "- "*|*"import hydra"*) ;; # what is installed?
    *) echo hello ;;
esac
""")
    python.chmod(0o755)
    return str(python)


def steps(done: subprocess.CompletedProcess, verdict: str) -> list[str]:
    """The names of the steps that have this verdict."""
    return [line.split()[0] for line in done.stdout.splitlines() if line[15:].startswith(verdict)]


STAGES = {
    "a": ["environment", "ceilings", "rope-0", "rope-1", "rope-3", "training", "evaluation", "tiles", "tests"],
    "b": ["steps", "text", "gpt2-triton", "gpt2-torch"],
    "c": ["rope-2", "rope-4", "rope-5", "rope-6", "eval-32768", "eval-131072"],
    "d": ["study"],
}
TOY_STAGES = {
    "a": ["environment", "ceilings", "rope-0", "training", "evaluation", "tiles", "tests"],
    "b": ["steps", "text", "gpt2-torch"],
    "c": ["rope-2", "eval-128"],
    "d": ["study"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["a", "bc", "d"])
def test_the_stages_for_a_gpu_are_rehearsed_on_a_cpu(stages, here):
    """Also on an image without wandb: importing it fails here. Nothing is written to the checkout."""
    (here / "absent").mkdir()
    (here / "absent/wandb.py").write_text("raise ImportError('there is no wandb')")
    before = files_of_the_checkout()
    for stage in stages:  # c evaluates the model that b trains
        done = gpu_check(here, stage, PYTHON=sys.executable, PYTHONPATH=str(here / "absent"))
        logs = "".join(log.read_text()[-2000:] for log in (here / "the state").glob("*.log"))
        assert done.returncode == 0 and steps(done, "ok") == TOY_STAGES[stage], done.stdout + done.stderr + logs
        table = here / "the state" / {"b": "gpu_step.csv", "d": "matrix-h200.jsonl"}.get(stage, "rope_kernel.csv")
        assert len(table.read_text().splitlines()) >= 3 and not done.stderr
    assert files_of_the_checkout() == before


def files_of_the_checkout() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*") if "__pycache__" not in path.parts and ".git" not in path.parts)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_starts_its_steps_in_order_and_copies_the_results(stage, here):
    """With a stand-in for Python."""
    done = gpu_check(here, stage, PYTHON=stand_in(here), TOY="", COPY_TO=str(here / "copies"))
    assert done.returncode == 0 and steps(done, "ok") == STAGES[stage], done.stdout + done.stderr
    copied = {path.name: path.read_text() for path in (here / "copies").iterdir()}
    tables = {"a": ["gpu_ceilings.csv", "rope_kernel.csv", "rope_tiles.csv"], "b": ["gpu_step.csv"]}
    tables |= {"c": ["rope_kernel.csv"], "d": ["matrix-h200.jsonl"]}
    assert sorted(copied) == sorted([*tables[stage], "steps.txt"]) and len(copied) <= 8
    assert copied["steps.txt"].startswith(done.stdout)  # the verdicts, then the logs
    assert all(f"==== {name}\nhello\n" in copied["steps.txt"] for name in STAGES[stage])
    assert all(f"cache={here}/.cache" in call for call in calls(here) if call.startswith(("train.py", "eval.py")))
    assert stage != "d" or f"--cache {here}/.cache" in calls(here)[-1]
    if stage == "a":  # the tests of the kernel begin
        assert " -m gpu -p no:cacheprovider -p bench.passed_tests tests/test_rope.py " in calls(here)[-1]


def calls(here: Path) -> list[str]:
    """What the stand-in was called with, but for the checks of what is installed."""
    return [
        call for call in (here / "calls").read_text().splitlines() if not call.startswith(("- ", "-c import hydra"))
    ]


def test_a_stage_repeats_only_what_failed_and_ends_in_time(here):
    """Evaluation and benchmark fail the first time. A step's limit is at most the time that is left."""
    python = stand_in(here, f"*eval.py*|*'rope gpu'*) echo tried; [ -e {here}/second ] || exit 3 ;;")
    first = gpu_check(here, "a", PYTHON=python)
    assert first.returncode == 1 and steps(first, "FAILED 3") == ["rope-0", "evaluation"]
    (here / "calls").unlink()
    (here / "second").touch()
    second = gpu_check(here, "a", PYTHON=python)
    assert second.returncode == 0 and len(steps(second, "done before")) == 5 and len(calls(here)) == 2, second.stdout
    assert (here / "the state/evaluation.log").read_text() == "tried\ntried\n"
    (here / "timeout").write_text(f"#!/bin/bash\necho $3 >> {here}/limits\n")
    (here / "timeout").chmod(0o755)
    environment = {"PYTHON": python, "STATE": str(here / "short"), "PATH": f"{here}:{os.environ['PATH']}"}
    gpu_check(here, "d", STAGE_SECONDS="1000", **environment)
    (here / "short/done/study").unlink()
    gpu_check(here, "d", STAGE_SECONDS="100", **environment)
    limits = [int(limit) for limit in (here / "limits").read_text().split()]
    assert limits[0] == 540 and 50 < limits[1] <= 100 and len(limits) == 2
    late = gpu_check(here, "a", PYTHON=python, STATE=str(here / "late"), STAGE_SECONDS="3")
    assert late.returncode == 1 and steps(late, "no time left: run this stage again") == TOY_STAGES["a"]


def test_a_stage_that_is_ended_stops_its_step_and_copies_what_there_is(here):
    """The step, too, writes what it has: train.py saves."""
    saves = f"trap 'sleep 1; echo saved >> {here}/state/rope_kernel.csv; exit 143' TERM"
    python = stand_in(here, f"*train.py*) {saves}; echo $$ began; sleep 60 & wait ;;")
    env = {**os.environ, "TOY": "1", "PYTHON": python, "STATE": str(here / "state")}
    command = ["bash", str(ROOT / "bench/gpu_check.sh"), "a"]
    with subprocess.Popen(command, env={**env, "COPY_TO": str(here / "copies")}) as stage:
        log = here / "state/training.log"
        wait_for(lambda: log.exists() and "began" in log.read_text())
        assert (here / "copies/rope_kernel.csv").read_text() == "row\n"  # of the steps before
        stage.terminate()
        assert stage.wait(10) == 143
    process = log.read_text().split()[0]
    assert not Path("/proc", process).exists()
    assert f"==== training\n{process} began\n" in (here / "copies/steps.txt").read_text()
    assert (here / "copies/rope_kernel.csv").read_text() == "row\nsaved\n"


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.process
def test_missing_packages_are_installed_from_the_folder_of_wheels(here):
    """Of those that are installed, only another version of a pinned one; and again nothing the second time."""
    pinned = ("antlr4_python3_runtime", "0.1")
    for name, version in (("ropewalk_dummy", "1.0"), ("tqdm", "0.1"), ("sympy", "1.14.0"), pinned):
        with zipfile.ZipFile(here / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            info = f"{name}-{version}.dist-info"
            wheel.writestr(f"{name}.py", "")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    site = here / "site"
    settings = {"PYTHON": sys.executable, "WHEELS": str(here), "SITE": str(site), "STAGE_SECONDS": "3"}
    for _ in range(2):
        done = gpu_check(here, "d", **settings)
        assert steps(done, "no time left: run this stage again") == ["study"], done.stdout + done.stderr
        assert sorted(path.name for path in site.glob("*.py")) == ["antlr4_python3_runtime.py", "ropewalk_dummy.py"]
        for name in ("ropewalk_dummy-1.0", "antlr4_python3_runtime-0.1"):
            (here / f"{name}-py3-none-any.whl").write_text("not to be opened again")
    python = stand_in(here, "*'import hydra'*) exit 1 ;;")
    missing = gpu_check(here, "a", PYTHON=python)
    assert missing.returncode == 1 and missing.stdout.startswith("error: packages are missing: first, with a network")


def test_tests_marked_gpu_and_slow_run_with_the_tests_marked_gpu():
    """And neither runs without -m."""

    def selected(named: str) -> list[str]:
        markers = ["", "gpu", "slow", "gpu slow", "slow gpu"]
        items = [SimpleNamespace(name=m, get_closest_marker=m.split().count) for m in markers]
        hook = SimpleNamespace(pytest_deselected=lambda items: None)
        conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: named, hook=hook), items)
        return [item.name for item in items if item.name]

    assert selected("gpu") == ["gpu", "gpu slow", "slow gpu"] and selected("slow") == ["slow"] and selected("") == []


@pytest.mark.process
def test_tests_that_have_passed_are_left_out_when_the_command_is_repeated(here):
    """The first three calls are killed by a test, which comes last in the second and third. The fifth has none left."""
    (here / "test_five.py").write_text("""
import os, pytest
def test_passes(): pass
def test_is_skipped(): pytest.skip("reason")
def test_kills(): assert os.environ["CALL"] > "2" or os._exit(9)
def test_fails_first(): assert os.environ["CALL"] > "1"
def test_comes_last(): pass
""")
    options = ["-q", "-p", "no:cacheprovider", "-p", "bench.passed_tests", "test_five.py"]
    command = [sys.executable, "-m", "pytest", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PASSED_TESTS": "tests.passed"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing them takes most of the time
    codes, passed = [], []
    for call in "01234":
        done = subprocess.run(command, env={**env, "CALL": call}, capture_output=True, text=True)
        codes.append(done.returncode)
        passed.append(len(Path("tests.passed").read_text().splitlines()))
    assert codes == [9, 9, 9, 0, 0] and passed == [2, 3, 4, 5, 5]


@pytest.mark.process
def test_other_tiles_are_compiled_without_a_gpu_each_only_once(here):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = """
from pathlib import Path
from bench.rope import sweep
for _ in range(2):
    sweep(warps="8", heads="16", out="tiles.csv")
table = Path("tiles.csv")
table.write_text("".join(table.read_text().splitlines(keepends=True)[:2]))
sweep(warps="8", heads="16", out="tiles.csv")
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if "FileNotFoundError" in done.stderr and "cuobjdump" in done.stderr:
        pytest.skip("this triton has no cuobjdump")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.endswith(" rows appended to tiles.csv")]
    assert [line.split()[0] for line in said] == ["2", "0", "1"]
    with Path("tiles.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["warps"], row["heads"], row["us"]) for row in rows] == [("8", "16", "")] * 2
    assert int(rows[1]["tokens"]) == 2 * int(rows[0]["tokens"]) and int(rows[1]["registers"]) > 32
