"""exp=gpt2, FLOPs and MFU: by hand, and at reduced steps and width on local text."""

import math

import pytest
import torch

import train
from engine import checkpoint
from engine.device import peak_flops
from engine.progress import Throughput, flops_per_token
from engine.wandb_log import TrainingLog
from model import gpt
from tests.helpers import train_settings, write_documents


def test_flops_by_hand():
    """GPT-2's shape as nanoGPT has it, without biases: V 50304, C 768, 12 layers, T 1024."""
    cfg = train_settings("exp=gpt2")
    block = 768 * 3 * 768 + 768 * 768 + 2 * 768 * 3072 + 2 * 768  # qkv, out, the MLP's two, two norms
    n = 50304 * 768 + 12 * block + 768
    assert n == 123_587_328
    with torch.device("meta"):
        model = gpt.GPT(cfg.model, gpt.build_encoding(cfg), 50304)
    assert model.n_parameters() == n
    # 6 N for the matrices forward and backward; 12 L H Q T for scores and sums over values, without causality
    assert flops_per_token(n, cfg.model, cfg.ctx) == 6 * 123_587_328 + 12 * 12 * 12 * 64 * 1024 == 854_770_176


PEAKS = {"A100-SXM4-80GB": 312e12, "H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H200": 989e12}
PEAKS |= {"L4": 121e12, "L40S": 362e12} | dict.fromkeys(("L40", "A1000", "A100-SXM4-40GB MIG 1g.5gb", "V100"))


@pytest.mark.parametrize("gpu, peak", PEAKS.items())
def test_peaks_are_known_or_not_guessed(gpu, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {gpu}")
    cuda = torch.device("cuda")
    assert peak_flops(cuda, "bfloat16") == peak
    assert peak_flops(cuda, "float32") is None and peak_flops(torch.device("cpu"), "bfloat16") is None


def test_throughput_knows_the_peak_of_its_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    cuda = torch.device("cuda")
    for settings, peak in (("dtype=bfloat16", 989e12), ("dtype=float32", None), ("attention=linear", None)):
        assert Throughput(train_settings("dtype=bfloat16", settings), 1, cuda).peak == peak


class OfKnownPeak(Throughput):
    def __init__(self, *args):
        super().__init__(*args)
        self.peak = 1e12  # FLOP/s


@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_exp_gpt2_trains_on_local_text(pos, here, monkeypatch, capsys):
    """Its optimiser and its depth, but narrow, short and few steps. MFU as if the peak were 1 TFLOP/s."""
    write_documents(here)
    small = "data=text data.files=docs/*.txt data.vocab_size=300 model.width=48 ctx=64 batch_tokens=256 val_windows=4"
    small = [*small.split(), "log_every=2", "compile=false", "device=cpu", f"pos={pos}", "steps=4", "name=x"]
    logged: list[dict] = []

    class Log(TrainingLog):
        def point(self, step: int, values: dict[str, float]) -> None:
            logged.append(values)

    monkeypatch.setattr(train, "TrainingLog", Log)
    monkeypatch.setattr(train, "Throughput", OfKnownPeak)
    train.train(train_settings("exp=gpt2", *small))
    state, rows = checkpoint.load(here / "runs/x"), [row for row in logged if "loss" in row]
    assert state["step"] == 4 and len(state["model"]) > 12 * 4 and len(rows) == 2
    assert math.isfinite(state["validation"]["loss"])
    n = sum(p.numel() for k, p in state["model"].items() if k != "head.weight")  # tied
    for row in rows:
        assert row["mfu"] == pytest.approx(row["tokens_per_s"] * (6 * n + 12 * 12 * 12 * 4 * 64) / 1e12)
    assert f"MFU {rows[-1]['mfu']:.1%}" in capsys.readouterr().err
