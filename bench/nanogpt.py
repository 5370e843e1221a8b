"""Our train.py beside nanoGPT's, tokens/s: python -m bench.nanogpt NANOGPT [SETTINGS]

NANOGPT is a checkout of github.com/karpathy/nanoGPT. Both train the default run's layers, width, context, vocabulary,
batch and text, or those of SETTINGS, in alternating child processes. On a CPU nanoGPT runs by the recipe of its README
(float32, --compile=False) and also with --compile=True; ours as `train.py pos=rope` runs after its tenth step. Compared
are medians over rounds of the tokens/s of the last half of each run, which leaves compilation, validation and
checkpoints out. The row is appended to results/nanogpt.jsonl.
"""

import os
import pickle
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, run
from typing import Any

from bench.rows import append, parser
from bench.step import sizes
from conf.cli import train_settings
from conf.errors import user_errors
from conf.registry import ROOT
from conf.schema import TrainConfig
from data import corpus as corpora
from engine.device import pick_device
from engine.files import commit


def output(cwd: Path, *argv: str) -> str:
    """What a script prints on stdout and stderr. If it fails, this process exits with it."""
    env = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": ""}
    child = run([sys.executable, *argv], cwd=cwd, env=env, stdout=PIPE, stderr=STDOUT, text=True)
    return child.stdout if child.returncode == 0 else sys.exit(child.stdout)


def nanogpt(checkout: Path, cfg: TrainConfig, data: Path, steps: int, compiled: bool) -> float:
    """Tokens/s of nanoGPT's train.py over the last half of its steps."""
    m, device = cfg.model, pick_device(cfg.device).type
    settings = f"""
        --n_layer={m.n_layers} --n_head={m.n_heads} --n_embd={m.width} --block_size={cfg.ctx} --compile={compiled}
        --device={device} --dtype={"bfloat16" if device == "cuda" else "float32"} --dataset={data} --out_dir={data}
        --batch_size={cfg.batch_tokens // cfg.ctx} --gradient_accumulation_steps=1 --max_iters={steps}
        --log_interval=1 --eval_iters=1 --eval_interval={steps}"""
    printed = output(checkout, "train.py", *settings.split())
    times = [float(ms) for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", printed, re.MULTILINE)]
    assert len(times) == steps + 1, printed
    half = steps // 2
    return 1000 * cfg.batch_tokens * half / sum(times[-half:])


def ours(cfg: TrainConfig, overrides: list[str], folder: Path, steps: int) -> float:
    """Tokens/s of our train.py over the last half of its steps."""
    settings = f"""
        name=x fresh=true compile=true runs={folder} cache={Path(cfg.cache).absolute()} val_windows=1
        steps={steps} log_every={steps // 2} val_every={steps} save_every={steps}"""
    printed = output(folder, str(ROOT / "train.py"), *overrides, *settings.split())
    assert "continues uncompiled" not in printed, printed  # it failed, and the run continued uncompiled
    *_, speed = re.findall(rf"step {steps} of {steps}, .* ([\d,]+) tokens/s", printed)
    return float(speed.replace(",", ""))


@user_errors
def main() -> None:
    command = parser(__doc__, "nanogpt.jsonl")
    command.add_argument("nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    command.add_argument("overrides", nargs="*", help="settings as train.py accepts them")
    command.add_argument("--steps", type=int, default=200)
    command.add_argument("--rounds", type=int, default=3)
    args = command.parse_intermixed_args()
    cfg, checkout = train_settings(*args.overrides), args.nanogpt.absolute()
    speeds: dict[str, list[float]] = {"nanoGPT": [], "nanoGPT, compiled": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder, corpus = Path(temporary), corpora.prepare(cfg.data, cfg.cache)
        corpus.train.tofile(folder / "train.bin")  # the form in which nanoGPT reads tokens
        corpus.train[: 10 * cfg.ctx].tofile(folder / "val.bin")  # it evaluates before its first step
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.vocab_size}))
        for _ in range(args.rounds):
            for name, compiled in (("nanoGPT", False), ("nanoGPT, compiled", True)):
                speeds[name].append(nanogpt(checkout, cfg, folder, args.steps, compiled))
            speeds["ours"].append(ours(cfg, args.overrides, folder, args.steps))
    middle = {name: round(median(values)) for name, values in speeds.items()}
    measured: dict[str, Any] = {"steps": args.steps, "nanogpt_commit": commit(checkout)}
    measured["ratio"] = {name: round(middle["ours"] / value, 2) for name, value in middle.items()}
    measured |= {"tokens_per_s": middle, "all": speeds}
    append(args.out, {**sizes(cfg), **measured})


if __name__ == "__main__":
    main()
