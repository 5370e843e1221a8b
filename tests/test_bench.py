"""The benchmark of training steps with several encodings."""

import json
import sys

import pytest

from bench import encodings, step
from conf.errors import UserError


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
    from bench.step_parts import part_of

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
    assert {name: part_of(name) for name in names} == names
