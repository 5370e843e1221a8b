"""Seconds to nanoGPT's loss: python -m bench.nanogpt NANOGPT [SETTINGS] --to-loss N --steps N

NANOGPT is a checkout of github.com/karpathy/nanoGPT. Both train the default run's layers, width, context, vocabulary,
batch and text, or those of SETTINGS, in alternating child processes: nanoGPT --to-loss steps by its README's recipe for
a CPU, ours --steps steps with the optimizer of SETTINGS. Compared are the seconds of all steps, with our compilation,
and the loss at the end on our held-out windows. Ours is as good if its loss is no higher. The row is appended to
results/nanogpt.jsonl.
"""

import os
import pickle
import re
import sys
import tempfile
from pathlib import Path
from statistics import median
from subprocess import PIPE, STDOUT, run

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


def nanogpt(checkout: Path, cfg: TrainConfig, data: Path, steps: int) -> dict[str, float]:
    """The seconds of the steps of nanoGPT's train.py, and its loss. In its first step it also evaluates."""
    m, device = cfg.model, pick_device(cfg.device).type
    settings = f"""
        --n_layer={m.n_layers} --n_head={m.n_heads} --n_embd={m.width} --block_size={cfg.ctx} --compile=False
        --device={device} --dtype={"bfloat16" if device == "cuda" else "float32"} --dataset={data} --out_dir={data}
        --batch_size={cfg.batch_tokens // cfg.ctx} --gradient_accumulation_steps=1 --max_iters={steps}
        --log_interval=1 --eval_iters=1 --eval_interval={steps} --lr_decay_iters={steps} {RECIPE}"""
    printed = output(checkout, "train.py", *settings.split())
    times = [float(ms) for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", printed, re.MULTILINE)]
    assert len(times) == steps + 1, printed
    loss = float(output(checkout, "-c", SCORE, str(data)).split()[-1])
    return {"seconds": sum(times[1:]) / 1000, "loss": loss}


def ours(cfg: TrainConfig, overrides: list[str], folder: Path, steps: int) -> dict[str, float]:
    """The seconds of our train.py, and its loss."""
    settings = ["name=x", "fresh=true", f"runs={folder}", f"cache={Path(cfg.cache).absolute()}", f"steps={steps}"]
    output(folder, str(ROOT / "train.py"), *overrides, *settings, f"val_every={steps}", f"save_every={steps}")
    state = checkpoint.load(folder / "x")
    return {"seconds": state["seconds"], "loss": state["validation"]["loss"]}


@user_errors
def main() -> None:
    command = parser(__doc__, "nanogpt.jsonl")
    command.add_argument("nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    command.add_argument("overrides", nargs="*", help="settings as train.py accepts them")
    command.add_argument("--steps", type=int, default=800, help="of ours")
    command.add_argument("--to-loss", type=int, default=2000, help="steps of nanoGPT, to whose loss ours is timed")
    command.add_argument("--rounds", type=int, default=3)
    args = command.parse_intermixed_args()
    cfg, checkout = train_settings(*args.overrides), args.nanogpt.absolute()
    done: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder, corpus = Path(temporary), corpora.prepare(cfg.data, cfg.cache)
        corpus.train.tofile(folder / "train.bin")  # the form in which nanoGPT reads tokens
        corpus.train[: 10 * cfg.ctx].tofile(folder / "val.bin")  # it evaluates before its first step
        (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": corpus.vocab_size}))
        np.save(folder / "windows.npy", validation_windows(corpus, cfg.ctx, cfg.val_windows).numpy())
        for _ in range(args.rounds):
            theirs = nanogpt(checkout, cfg, folder, args.to_loss)
            done.append({"nanoGPT": theirs, "ours": ours(cfg, args.overrides, folder, args.steps)})
    seconds = {name: median(x[name]["seconds"] for x in done) for name in done[0]}
    ratio = {name: round(x / seconds["nanoGPT"], 3) for name, x in seconds.items()}
    about = {"steps": args.steps, "nanogpt_commit": commit(checkout), "nanogpt_steps": args.to_loss}
    append(args.out, {**sizes(cfg), **about, "seconds": seconds, "all": done, "ratio": ratio})


if __name__ == "__main__":
    main()
