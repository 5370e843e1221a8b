"""The benchmarks at toy size on a CPU: what they run, and the rows that they write."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import nanogpt, rope, step
from engine.files import commit
from kernels import rope as rotary_op
from tests.helpers import ROOT, command

pytestmark = pytest.mark.process

TINY = "exp=smoke model.width=32 ctx=16 batch_tokens=32 micro_tokens=32 device=cpu"


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_steps_are_measured_in_turns_and_relative_to_the_first(tmp_path, monkeypatch):
    """Also a schedule with parameters in each layer; the vocabulary is that of train.py."""
    names = [f"{TINY} {settings}" for settings in ("pos=rope pos.base=500", "pos=fox layers=swan")]
    out = tmp_path / "rows"
    monkeypatch.setattr(sys, "argv", ["step", *names, "--rounds", "1", "--out", str(out)])
    monkeypatch.setattr(step, "peak_flops", lambda *args: 1e12)
    step.main()
    (row,) = rows_of(out)
    assert [row[key] for key in ("layers", "width", "ctx", "batch_tokens", "vocabulary")] == [2, 32, 16, 32, 512]
    assert row["command"] and row["commit"]
    assert list(row["relative"]) == list(row["mfu"]) == names and row["relative"][names[0]] == 1
    for name, value in row["relative"].items():
        assert value == pytest.approx(row["tokens_per_s"][name] / row["tokens_per_s"][names[0]], rel=0.01)


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_every_peer_of_the_rotary_op_is_a_row_and_one_that_fails_is_a_line(tmp_path, monkeypatch, capsys):
    """Without a GPU nothing is timed or compiled. Our results are those of the peers."""
    monkeypatch.setattr(rotary_op, "kernel", "torch")
    monkeypatch.setattr(rope, "microseconds", lambda calls: float(len([call() for call in calls])))
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    peers = rope.peers

    def some_fail(R: int, T: int, device: str):
        return {**peers(R, T, device), "broken": lambda q, k: 1 / 0}

    monkeypatch.setattr(rope, "peers", some_fail)
    rope.measure_shape((1, 16, 2, 2, 16, 16), "cpu", tmp_path / "rows")
    rows = rows_of(tmp_path / "rows")
    names = [row["what"] for row in rows]
    assert {"device copy", "ours", "ours, interleaved", "ours, rope_packed"} <= {*names} and names.count("ours") == 6
    assert all(row["us"] == 2 and row["of_copy"] > 0 for row in rows)
    assert "broken: failed (ZeroDivisionError" in capsys.readouterr().out and "broken" not in names
    q, k = torch.randn(2, 1, 16, 2, 16)
    for name, rotate in peers(16, 16, "cpu").items():
        if "interleaved" not in name and "Liger" not in name:
            y = rotate(q, k)[0]
            right = peers(16, 16, "cpu")["ours"](q, k)[0]
            assert torch.allclose(y if y.shape == right.shape else y.transpose(1, 2), right, atol=0.05), name


def test_the_row_beside_nanogpt(here, monkeypatch):
    """A stand-in for its train.py sees our text and sizes. Ours really trains: too few steps to compile."""
    (here / "nanoGPT").mkdir()
    (here / "nanoGPT/train.py").write_text("""
import pickle, sys
from pathlib import Path
settings = dict(x.removeprefix("--").split("=", 1) for x in sys.argv[1:])
data, steps = Path(settings["dataset"]), int(settings["max_iters"])
assert pickle.loads((data / "meta.pkl").read_bytes()) == {"vocab_size": 512}
assert (data / "train.bin").stat().st_size > 1000 and settings["n_embd"] == "32" and settings["batch_size"] == "2"
for i in range(steps + 1):
    print(f"iter {i}: loss 5.0, time {1000 if i < 3 else 8:.2f}ms, mfu 1%")
""")
    out = here / "rows"
    argv = ["nanogpt", "nanoGPT", *TINY.split(), "--steps", "4", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    nanogpt.main()
    (row,) = rows_of(out)
    speed = row["tokens_per_s"]
    assert speed["nanoGPT"] == speed["nanoGPT, compiled"] == 4000 and speed["ours"] > 0 and row["ctx"] == 16
    assert row["ratio"]["nanoGPT"] == pytest.approx(speed["ours"] / 4000, abs=0.01) and row["ratio"]["ours"] == 1


def test_the_rotary_benchmark_without_a_gpu_says_so():
    done = command("-m=bench.rope", cwd=ROOT)
    if not torch.cuda.is_available():
        assert done.returncode == 1 and done.stderr.startswith("error: bench.rope needs a CUDA GPU")


def test_a_row_names_the_commit_and_whether_the_code_differs_from_it(tmp_path):
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert commit(tmp_path) == "unknown"
    (tmp_path / "results").mkdir()
    for name in ("code.py", "text.md", "results/rows.jsonl"):
        (tmp_path / name).write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "a")
    name = commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{7,}", name)
    (tmp_path / "text.md").write_text("2")
    (tmp_path / "results/rows.jsonl").write_text("2")
    assert commit(tmp_path) == name
    (tmp_path / "code.py").write_text("2")
    assert commit(tmp_path) == name + "+"
