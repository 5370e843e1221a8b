"""The benchmarks of training steps, and what their rows say about where they come from."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from bench import encodings, gpu_step, nanogpt, rope, rows, step, step_parts
from conf.errors import UserError
from engine.code_version import commit


def test_the_speed_of_encodings_is_measured_in_turns_and_relative_to_rope(tmp_path, monkeypatch, capsys):
    """At a tiny size: models with a schedule, with parameters in each layer, and with several settings are trained."""
    sizes = "exp=smoke model.width=32 ctx=16 batch_tokens=32 micro_tokens=32"
    names = ["pos=fox", "layers=swan", "pos=rope pos.base=500"]
    argv = ["encodings", *names, "--common", sizes, "--rounds", "2", "--steps", "1", "--out", str(tmp_path / "rows")]
    monkeypatch.setattr(step, "VOCAB", 64)
    monkeypatch.setattr(sys, "argv", argv)
    for _ in range(2):
        encodings.main()
    first, second = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert list(first["relative"]) == list(first["tokens_per_s"]) == ["pos=rope", *names]
    assert first["relative"]["pos=rope"] == 1 and (first["ctx"], first["width"], first["layers"]) == (16, 32, 2)
    for name, value in second["relative"].items():
        assert value == pytest.approx(second["tokens_per_s"][name] / second["tokens_per_s"]["pos=rope"], rel=0.05)
    assert "'pos=rope pos.base=500'" in first["command"] and "layers=swan" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*argv, "--rounds", "0"])
    with pytest.raises(UserError, match="--rounds=0: must be at least 1"):
        encodings.main()


def test_steps_run_in_turns_and_their_medians_are_compared(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(step.time, "perf_counter", lambda: clock[0])

    def takes(name: str, seconds: list[float]):
        def run() -> None:
            order.append(name)
            clock[0] += seconds[order.count(name) - 1]

        return run

    steps = {"a": takes("a", [9, 9, 9, 1, 2, 3, 100]), "b": takes("b", [9, 9, 9, 5, 5, 7, 7])}
    assert step.interleaved(steps, rounds=2, count=2) == {"a": 2.5, "b": 6.0}
    assert "".join(order) == "aaabbb" + "aabb" * 2


def test_kernels_belong_to_the_part_that_they_are_of():
    names = {
        "aten::mm": "matrix products",
        "aten::bmm": "attention",
        "graph_0_cpp_fused__softmax_backward_data_mul_view_4": "attention",
        "graph_0_cpp_fused__to_copy__unsafe_view_gelu_gelu_backward_view_1": "gelu",
        "graph_0_cpp_fused__unsafe_view_add_mul_sigmoid_5": "gelu",
        "graph_0_cpp_fused__to_copy_add_mean_mul_pow_rsqrt_t_0": "other kernels",
        "graph_1_cpp_fused__log_softmax__to_copy_nll_loss_forward_1": "loss",
        "aten::_fused_adamw_": "optimizer",
        "aten::mul_": "optimizer",
        "CompiledFunctionBackward": None,
    }
    assert {name: step_parts.part_of(name) for name in names} == names


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


def cut(table: Path, rows: int) -> None:
    """Leave the header and so many rows."""
    table.write_text("".join(table.read_text().splitlines(keepends=True)[: 1 + rows]))


def column(table: Path, name: str) -> list[str]:
    with table.open() as file:
        return [row[name] for row in csv.DictReader(file)]


def test_a_table_of_the_rotary_op_gets_only_the_rows_that_it_lacks(tmp_path, monkeypatch, capsys):
    """Nor are errors measured without need. Rows of another commit are others."""
    table, measured, rotate = tmp_path / "rows.csv", [], lambda q, k: (q + 1, k + 1)
    monkeypatch.setattr(rope, "peers", lambda *args: {"a": rotate, "b": rotate})
    monkeypatch.setattr(rope, "errors", lambda name, *rest: measured.append(name) or (0.0, 0.0, 0.0))

    def call() -> str:
        measured.clear()
        rope.gpu(device="cpu", out=str(table))
        return capsys.readouterr().out.splitlines()[-1]

    assert call() == f"15 rows appended to {table}" and measured == ["a", "b"]
    assert call() == f"0 rows appended to {table}" and measured == []
    whole = column(table, "what")
    cut(table, 8)  # in the midst of b
    assert call() == f"7 rows appended to {table}" and measured == ["b"]
    assert column(table, "what") == whole == ["device copy", *6 * "a", *6 * "b", *2 * ["ours, rope_packed"]]
    monkeypatch.setattr(rows, "commit", lambda: "another")
    assert call() == f"15 rows appended to {table}"


def test_a_table_of_training_steps_gets_only_the_rows_that_it_lacks(tmp_path, monkeypatch):
    """The first row comes after the profile, and again if the profile is not there."""
    table, profile = tmp_path / "rows.csv", tmp_path / "profile.txt"
    monkeypatch.setattr(gpu_step, "our_step", lambda *args: (lambda: torch.ones(2) + 1, 64, 1000))
    monkeypatch.setattr(gpu_step, "nanogpt_step", gpu_step.our_step)
    monkeypatch.setattr(sys, "argv", ["gpu_step", "--device", "cpu", "--out", str(table), "--profile", str(profile)])
    names = ["ours, kernel=torch", "nanoGPT, 2 rows"]
    for kept in (None, 2, 1):
        if kept:
            cut(table, kept)
        gpu_step.main()
        assert column(table, "what") == names and "aten::add" in profile.read_text()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        table.unlink()
        profile.unlink()
        patch.setattr(gpu_step.torch.profiler, "profile", interrupted)
        gpu_step.main()
    assert not table.exists()
    gpu_step.main()
    assert column(table, "what") == names and profile.exists()
    profile.unlink()  # as after a first call without --profile
    gpu_step.main()
    assert column(table, "what") == [*names, names[0]] and profile.exists()


def interrupted() -> None:
    raise KeyboardInterrupt


def test_parts_of_a_step_whose_compilation_failed_are_no_row(tmp_path, monkeypatch):
    def compile_fails(function, **options):
        def call(*args, **kwargs):
            raise TorchDynamoException("no compiler")

        return call

    monkeypatch.setattr(torch, "compile", compile_fails)
    for module, name, value in (
        (step, "VOCAB", 64), (step_parts, "VOCAB", 64), (step_parts, "STEPS", 1), (step_parts, "ROOT", tmp_path),
        (step_parts, "ceilings", lambda dtype: {"tflop_per_s": 1.0, "copy_gb_per_s": 1.0}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    sizes = ["exp=smoke", "model.width=32", "ctx=16", "batch_tokens=32", "micro_tokens=32"]
    monkeypatch.setattr(sys, "argv", ["step_parts", *sizes])
    with pytest.raises(TorchDynamoException, match="no compiler"):
        step_parts.main()
    assert not list(tmp_path.iterdir())


def test_the_row_beside_nanogpt_has_the_whole_command(tmp_path, monkeypatch):
    (tmp_path / "configurator.py").touch()
    out = tmp_path / "rows.jsonl"
    argv = ["nanogpt", str(tmp_path), "ctx=128", "--steps", "6", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(nanogpt, "write_data", lambda *args: None)
    monkeypatch.setattr(nanogpt, "nanogpt", lambda *args, **options: 100.0)
    monkeypatch.setattr(nanogpt, "ours", lambda *args: 150.0)
    nanogpt.main()
    row = json.loads(out.read_text())
    assert row["command"] == "python -m bench.nanogpt NANOGPT ctx=128 --steps 6 --rounds 1"
    assert row["ratio"] == {"nanoGPT": 1.5, "nanoGPT, compiled": 1.5} and row["ctx"] == 128
