"""The board: from a command to a folder and the page, what is refused, and docs/board.md is what the folders give."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from conf.errors import user_errors
from measure.curves import write_jsonl
from studies import board
from studies.jobs import Stopped, run_job
from studies.plan import Job, Size
from studies.rows import StudyRow, read_rows
from tests.helpers import ROOT, curve_of, error_of, run_command

RISE = {"alibi": 0.0, "none": 0.19}  # nats per token for each doubling past L; of the others: 0.2


def rows_of(job: Job, **_: object) -> list[StudyRow]:
    """The rows of a job without a training: a curve that rises past L = 64, at another height with each seed."""
    rise = RISE.get(job.name[:-3], 0.2)
    about = {"seed": job.seed, "tokens_per_second": 1000 + job.seed, "in_window": 2.0, "command": f"train {job.name}"}
    rows = []
    for label in ("none", "window"):
        losses = {
            n: 3 + 0.05 * job.seed + (label == "none") * rise * np.log2(n / 64) for n in job.evaluations[0].lengths
        }
        rows += [StudyRow(**asdict(row) | about) for row in curve_of(job.name, label, losses).rows]
    return rows


@pytest.fixture
def here(here, monkeypatch) -> Path:
    """An empty board in an empty working folder; nothing is trained."""
    monkeypatch.setattr(board, "BOARD", here / "board")
    monkeypatch.setattr(board, "PAGE", here / "board.md")
    monkeypatch.setattr(board, "run_job", rows_of)
    return here


def enter(patch: pytest.MonkeyPatch, *argv: str) -> str:
    code, out, err = run_command(user_errors(board.main), [*argv, "--jobs", "1"], patch)
    assert code == 0, err
    return out


def test_entries_become_folders_and_lines_of_the_page(here, monkeypatch):
    for pos in ("rope", "none", "alibi"):
        out = enter(monkeypatch, f"pos={pos}")
    files = {"alibi.py", "alibi.yaml", "settings.json", "rows.jsonl", "verdict.md", "log.txt"}
    assert {file.name for file in Path("board/alibi").iterdir()} == files
    assert Path("board/alibi/alibi.py").read_text() == (ROOT / "model/pos/alibi.py").read_text()
    settings = json.loads(Path("board/alibi/settings.json").read_text())
    assert settings["ctx"] == 64 and settings["evaluation.lengths"] == [64, 128, 256, 512, 1024]
    verdict = Path("board/alibi/verdict.md").read_text()
    assert all(len(x) <= 80 or "/" in x for x in out.splitlines())
    assert verdict.startswith("alibi is better than rope at 8 L: -0.600 [") and "it does not gain" in verdict
    assert verdict.splitlines()[0] in " ".join(out.split())

    text = Path("board.md").read_text()
    better, others = text.split("## Not better than rope")
    assert verdict.splitlines()[-1] in better and "| `alibi` |" not in others and "| `none` |" not in better
    rope, alibi = ([x.strip() for x in line.split("|")[2:-1]] for line in better.splitlines() if line.startswith("| `"))
    assert [x.split()[0] for x in rope[:4]] == ["-0.400", "-0.600", "+0.600", "1"]
    row = read_rows(here / "board/alibi/rows.jsonl").rows[0]
    bits = 3.075 / np.log(2) * row.tokens / row.bytes
    assert [x.split()[0] for x in alibi[:3]] == ["+0.000"] * 3
    assert alibi[3:7] == [">= 16 L", f"{bits:.3f}", "1,002", "4"]
    assert alibi[7].startswith("-0.600 [") and alibi[8] == "<0.001"
    enter(monkeypatch)
    assert Path("board.md").read_text() == text


@pytest.mark.parametrize(
    "argv, message",
    [
        ("pos=mine", "pos=mine: must be an encoding"),
        ("pos=rope", "pos=rope: must be a new name"),
        ("pos=alibi --seeds 1", "--seeds=1: must be at least 4"),
        ("pos=alibi steps=9", "settings=pos=alibi steps=9: must be pos=NAME alone"),
        ("pos=alibi --size default", "rope-default: no entry"),
    ],
)
def test_what_cannot_be_entered_is_refused_before_a_training(argv, message, here, monkeypatch):
    enter(monkeypatch, "pos=rope")
    before = {file: file.stat().st_mtime_ns for file in here.glob("board*/**/*")}
    monkeypatch.setattr(board, "run_job", None)
    assert message in error_of(user_errors(board.main), argv.split(), monkeypatch)
    assert before == {file: file.stat().st_mtime_ns for file in here.glob("board*/**/*")}


def damage(folder: Path, what: str) -> None:
    """An entry as nobody should commit it."""
    settings, rows = json.loads((folder / "settings.json").read_text()), [*read_rows(folder / "rows.jsonl").rows]
    settings |= {"steps": {"steps": 7}, "windows": {"evaluation.windows": 1}, "pos": {"pos": "mine"}}.get(what, {})
    kept = {"seeds": [row for row in rows if row.seed == 0], "length": [row for row in rows if row.n < 1024]}
    write_jsonl(folder / "rows.jsonl", kept.get(what, rows))
    (folder / "settings.json").write_text(json.dumps([] if what == "list" else settings))


@pytest.mark.parametrize(
    "what, message",
    [
        ("steps", "not the settings of the board: steps=500 (it has 7)"),
        ("windows", "evaluation.windows=16 (it has 1)"),
        ("pos", "pos=mine: must be an encoding of conf/pos"),
        ("seeds", "seeds=1: must be at least 4"),
        ("length", "seeds=0: must be at least 4"),
        ("list", "no entry"),
    ],
)
def test_a_folder_that_is_no_entry_of_this_board_is_refused(what, message, here, monkeypatch):
    for pos in ("rope", "alibi"):
        enter(monkeypatch, f"pos={pos}")
    page = Path("board.md").read_text()
    damage(here / "board/alibi", what)
    assert message in error_of(user_errors(board.main), [], monkeypatch)
    assert Path("board.md").read_text() == page


def test_a_stopped_entry_is_not_there_until_the_same_command_has_ended_it(here, monkeypatch):
    started = []

    def stop_at_the_third(job: Job, **_: object) -> list[StudyRow]:
        started.append(job.name)
        if len(started) == 3:
            raise Stopped
        return rows_of(job)

    monkeypatch.setattr(board, "run_job", stop_at_the_third)
    monkeypatch.setattr("sys.argv", ["board", "pos=rope", "--jobs", "1"])
    with pytest.raises(SystemExit, match="run the same command again"):
        board.main()
    assert not Path("board").exists() and not Path("board.md").exists()
    enter(monkeypatch, "pos=rope")
    assert Path("board/rope/rows.jsonl").exists() and not [*Path("runs").rglob("rows.jsonl")]


@pytest.mark.slow
@pytest.mark.process
def test_an_entry_is_trained_and_evaluated(here, monkeypatch):
    """With two seeds, in child processes."""
    size = Size(("exp=smoke", "ctx=32", "steps=1"), documents=2, scored_tokens=16, windows=2)
    monkeypatch.setitem(board.SIZES, "smoke", size)
    monkeypatch.setattr(board, "FEWEST", 2)
    monkeypatch.setattr(board, "run_job", run_job)
    out = enter(monkeypatch, "pos=rope", "--size", "smoke")
    rows = read_rows(here / "board/rope-smoke/rows.jsonl")
    assert {(row.run, row.label, row.n) for row in rows.rows} == {
        (f"rope-s{seed}", label, n) for seed in (0, 1) for label in ("none", "window") for n in (32, 64, 128, 256, 512)
    }
    assert "### Size smoke: L = 32" in Path("board.md").read_text() and f"{here}/board/rope-smoke" in out
    assert not [*Path("board").rglob("*.pt")]


def test_the_page_is_what_the_folders_give():
    assert (ROOT / "docs/board.md").read_text() == board.render()
    for folder in (ROOT / "results/board").iterdir():
        assert (folder / "verdict.md").read_text().splitlines() == board.verdict_lines(folder)
