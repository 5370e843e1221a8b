"""Tokens/s of train.py beside nanoGPT's own train.py, on a CPU: python -m bench.nanogpt NANOGPT

NANOGPT is a checkout of github.com/karpathy/nanoGPT. Both train the default run's layers, width, context, vocabulary,
batch and text, in alternating child processes: nanoGPT by the recipe of its README for a CPU (float32, --compile=False)
and also with --compile=True; ours as `train.py pos=rope` runs after its tenth step. Compared are medians over rounds of
the tokens/s of the last half of each run, which leaves compilation, validation and checkpoints out. The row is appended
to results/nanogpt.jsonl.
"""

import argparse
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.rows import append_json
from bench.step import origin
from conf.compose import train_settings
from conf.errors import UserError, user_errors_in_one_line
from conf.registry import ROOT
from conf.schema import TrainConfig
from data import corpus as corpora
from engine.code_version import commit


def run(argv: list[str], cwd: Path) -> str:
    """What a script prints on stdout and stderr. UserError with its last line if it fails."""
    env = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": ""}
    child = subprocess.run([sys.executable, *argv], cwd=cwd, env=env, capture_output=True, text=True)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["it prints no error"]
        raise UserError(f"`python {' '.join(argv)}` failed: {lines[-1]}")
    return child.stdout + child.stderr


def write_data(cfg: TrainConfig, folder: Path) -> None:
    """The tokens of our corpus in the form in which nanoGPT reads them: train.bin, val.bin and the vocabulary."""
    corpus = corpora.prepare(cfg.data, cfg.cache)
    corpus.train.tofile(folder / "train.bin")
    corpus.train[: 10 * cfg.ctx].tofile(folder / "val.bin")  # nanoGPT evaluates before its first step
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.vocab_size}))


def nanogpt(checkout: Path, cfg: TrainConfig, data: Path, steps: int, compiled: bool) -> float:
    """Tokens/s of nanoGPT's train.py over the last half of its steps."""
    m = cfg.model
    settings = {
        "dataset": data, "out_dir": data / "out", "device": "cpu", "dtype": "float32", "compile": compiled,
        "n_layer": m.n_layers, "n_head": m.n_heads, "n_embd": m.width, "block_size": cfg.ctx,
        "batch_size": cfg.batch_tokens // cfg.ctx, "gradient_accumulation_steps": 1, "eval_iters": 1,
        "log_interval": 1, "max_iters": steps, "always_save_checkpoint": False,
    }  # fmt: skip
    output = run(["train.py", *(f"--{key}={value}" for key, value in settings.items())], checkout)
    times = [float(ms) for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", output, re.MULTILINE)]
    assert len(times) == steps + 1, output
    last = times[-(steps // 2) :]
    return 1000 * cfg.batch_tokens * len(last) / sum(last)


def ours(cfg: TrainConfig, overrides: list[str], folder: Path, steps: int) -> float:
    """Tokens/s of our train.py over the last half of its steps."""
    settings = ["name=x", f"runs={folder}", f"cache={Path(cfg.cache).absolute()}", "fresh=true", "compile=true",
                f"steps={steps}", f"log_every={steps // 2}", f"val_every={steps}", f"save_every={steps}",
                "val_windows=1"]  # fmt: skip
    output = run([str(ROOT / "train.py"), *overrides, *settings], folder)
    assert "torch.compile of" not in output, output  # it failed, and the run continued uncompiled
    speeds = re.findall(rf"step {steps} of {steps}, .* ([\d,]+) tokens/s", output)
    assert speeds, output
    return float(speeds[-1].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("overrides", nargs="*", help="settings as train.py accepts them")
    parser.add_argument("--steps", type=int, default=200, help="an even number; the last half is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results/nanogpt.jsonl", help="the row is appended to it")
    args = parser.parse_intermixed_args()
    checkout: Path = args.nanogpt.absolute()
    if not (checkout / "configurator.py").is_file():
        raise UserError(f"{args.nanogpt}: is not a checkout of github.com/karpathy/nanoGPT")
    cfg = train_settings(*args.overrides)
    speeds: dict[str, list[float]] = {"nanoGPT": [], "nanoGPT, compiled": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(cfg, folder)
        for _ in range(args.rounds):
            speeds["nanoGPT"].append(nanogpt(checkout, cfg, folder, args.steps, compiled=False))
            speeds["nanoGPT, compiled"].append(nanogpt(checkout, cfg, folder, args.steps, compiled=True))
            speeds["ours"].append(ours(cfg, args.overrides, folder, args.steps))
            print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
    medians = {name: round(median(values)) for name, values in speeds.items()}
    row = {
        "command": shlex.join([
            "python", "-m", "bench.nanogpt", "NANOGPT", *args.overrides,
            "--steps", str(args.steps), "--rounds", str(args.rounds),
        ]),
        "steps": args.steps, "rounds": args.rounds, "tokens_per_s": medians,
        "ratio": {name: round(medians["ours"] / medians[name], 2) for name in list(medians)[:2]},
        "all": {name: [round(v) for v in values] for name, values in speeds.items()},
        **origin(cfg), "nanogpt_commit": commit(checkout),
    }  # fmt: skip
    append_json(args.out, row)
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    user_errors_in_one_line(main)()
