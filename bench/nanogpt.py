"""Our train.py beside nanoGPT's: tokens/s, and seconds to nanoGPT's loss: python -m bench.nanogpt NANOGPT [SETTINGS]

NANOGPT is a checkout of github.com/karpathy/nanoGPT. Both train the default run's layers, width, context, vocabulary,
batch and text, or those of SETTINGS, in alternating child processes. On a CPU nanoGPT runs by the recipe of its README
(float32, --compile=False) and also with --compile=True; ours as `train.py pos=rope` runs after its tenth step. Compared
are medians over rounds of the tokens/s of the last half of each run, which leaves compilation, validation and
checkpoints out.

With --to-loss N nanoGPT trains N steps by its README's recipe for a CPU, and ours --steps steps with the optimizer of
SETTINGS: the seconds of all steps, with our compilation, and the loss at the end on our held-out windows. Ours is as
good if its loss is no higher. The row is appended to results/nanogpt.jsonl.
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

import numpy as np

from bench.rows import append, parser
from bench.step import sizes
from conf.cli import train_settings
from conf.errors import user_errors
from conf.registry import ROOT
from conf.schema import TrainConfig
from data import corpus as corpora
from data.held_out import validation_windows
from engine import checkpoint
from engine.device import pick_device
from engine.files import commit


def output(cwd: Path, *argv: str) -> str:
    """What a script prints on stdout and stderr. If it fails, this process exits with it."""
    env = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": ""}
    child = run([sys.executable, *argv], cwd=cwd, env=env, stdout=PIPE, stderr=STDOUT, text=True)
    return child.stdout if child.returncode == 0 else sys.exit(child.stdout)


def nanogpt(checkout: Path, cfg: TrainConfig, data: Path, steps: int, compiled: bool, *recipe: str) -> list[float]:
    """The milliseconds of each step of nanoGPT's train.py but the first, in which it also evaluates."""
    m, device = cfg.model, pick_device(cfg.device).type
    settings = f"""
        --n_layer={m.n_layers} --n_head={m.n_heads} --n_embd={m.width} --block_size={cfg.ctx} --compile={compiled}
        --device={device} --dtype={"bfloat16" if device == "cuda" else "float32"} --dataset={data} --out_dir={data}
        --batch_size={cfg.batch_tokens // cfg.ctx} --gradient_accumulation_steps=1 --max_iters={steps}
        --log_interval=1 --eval_iters=1 --eval_interval={steps}"""
    printed = output(checkout, "train.py", *settings.split(), *recipe)
    times = [float(ms) for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", printed, re.MULTILINE)]
    assert len(times) == steps + 1, printed
    return times[1:]


def speed(cfg: TrainConfig, times: list[float]) -> float:
    """Tokens/s of the last half of these steps."""
    half = len(times) // 2
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


# ---- seconds to its loss ----

# The file config/train_shakespeare_char.py with --dropout=0.0, which its README gives for a CPU
RECIPE = (
    "--learning_rate=1e-3 --min_lr=1e-4 --warmup_iters=100 --beta2=0.99 --dropout=0.0 --always_save_checkpoint=True"
)
# In the checkout: the loss of its checkpoint on windows int64 [N, ctx + 1]
SCORE = """
import sys, numpy, torch
from model import GPT, GPTConfig
state = torch.load(sys.argv[1] + "/ckpt.pt", weights_only=True)
model = GPT(GPTConfig(**state["model_args"])).eval()
model.load_state_dict(state["model"])
windows = torch.from_numpy(numpy.load(sys.argv[1] + "/windows.npy"))
with torch.inference_mode():
    print("loss", sum(model(w[None, :-1], w[None, 1:])[1].item() for w in windows) / len(windows))
"""


def to_loss(checkout: Path, cfg: TrainConfig, overrides: list[str], folder: Path, steps: int, theirs: int) -> dict:
    """{name: {"seconds", "loss"}} of one training each."""
    times = nanogpt(checkout, cfg, folder, theirs, False, *RECIPE.split(), f"--lr_decay_iters={theirs}")
    loss = float(output(checkout, "-c", SCORE, str(folder)).split()[-1])
    settings = ["name=x", "fresh=true", f"runs={folder}", f"cache={Path(cfg.cache).absolute()}", f"steps={steps}"]
    output(folder, str(ROOT / "train.py"), *overrides, *settings, f"val_every={steps}", f"save_every={steps}")
    state = checkpoint.load(folder / "x")
    return {
        "nanoGPT": {"seconds": theirs * sum(times) / len(times) / 1000, "loss": loss},
        "ours": {"seconds": state["seconds"], "loss": state["validation"]["loss"]},
    }


@user_errors
def main() -> None:
    command = parser(__doc__, "nanogpt.jsonl")
    command.add_argument("nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    command.add_argument("overrides", nargs="*", help="settings as train.py accepts them")
    command.add_argument("--steps", type=int, default=200, help="of ours; of nanoGPT as well without --to-loss")
    command.add_argument("--to-loss", type=int, help="steps of nanoGPT, to whose loss ours is timed")
    command.add_argument("--rounds", type=int, default=3)
    args = command.parse_intermixed_args()
    cfg, checkout, rounds = train_settings(*args.overrides), args.nanogpt.absolute(), range(args.rounds)
    measured: dict[str, Any] = {"steps": args.steps, "nanogpt_commit": commit(checkout)}
    with tempfile.TemporaryDirectory() as temporary:
        folder, corpus = Path(temporary), corpora.prepare(cfg.data, cfg.cache)
        corpus.train.tofile(folder / "train.bin")  # the form in which nanoGPT reads tokens
        corpus.train[: 10 * cfg.ctx].tofile(folder / "val.bin")  # it evaluates before its first step
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.vocab_size}))
        np.save(folder / "windows.npy", validation_windows(corpus, cfg.ctx, cfg.val_windows).numpy())
        if args.to_loss:
            done = [to_loss(checkout, cfg, args.overrides, folder, args.steps, args.to_loss) for _ in rounds]
            middle = {name: median(x[name]["seconds"] for x in done) for name in done[0]}
            measured |= {"nanogpt_steps": args.to_loss, "seconds": middle, "all": done}
            measured["ratio"] = {name: round(seconds / middle["nanoGPT"], 3) for name, seconds in middle.items()}
        else:
            speeds: dict[str, list[float]] = {"nanoGPT": [], "nanoGPT, compiled": [], "ours": []}
            for _ in rounds:
                for name, compiled in (("nanoGPT", False), ("nanoGPT, compiled", True)):
                    speeds[name].append(speed(cfg, nanogpt(checkout, cfg, folder, args.steps, compiled)))
                speeds["ours"].append(ours(cfg, args.overrides, folder, args.steps))
            middle = {name: round(median(values)) for name, values in speeds.items()}
            measured["ratio"] = {name: round(middle["ours"] / value, 2) for name, value in middle.items()}
            measured |= {"tokens_per_s": middle, "all": speeds}
    append(args.out, {**sizes(cfg), **measured})


if __name__ == "__main__":
    main()
