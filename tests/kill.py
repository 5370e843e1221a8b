"""kill -9 at random moments of train.py, eval.py, compare.py and a study: python -m tests.kill --kills 100 --folder DIR

A round starts a command again and again and kills it, with its children, after a random part of its usual time, until
it ends by itself or has been killed a random number of times. Then its result must equal, to the bit, that of a
command that was never killed, and no temporary file may be left. The counts are kept in DIR/kills.json after every
round, so the script can be stopped and started again. Exit code 1 if a round fails; its folder is kept.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conf.registry import ROOT
from engine import checkpoint

CORPUS = ("data=text", "data.files=*.txt", "data.vocab_size=300", "data.holdout=3")
TRAIN = ("train.py", "exp=smoke", *CORPUS, "steps=120", "save_every=1", "val_every=60", "compile=false", "name=x")
EVAL = ("eval.py", "run=x", "ctx=256", "documents=3", "scaling=ntk")
STUDY = ("-m", "studies.matrix", "smoke", "--seeds", "0", "--only", "rope-s0", "--runs", "runs", "--out", "rows.jsonl")


@dataclass(frozen=True)
class Kind:
    """A command, and what it leaves: equal results mean an equal value."""

    argv: tuple[str, ...]
    needs: str  # the folder with which it starts: inputs, trained or evaluated
    result: Callable[[Path], Any]


def weights(folder: Path) -> Any:
    """The bytes of all tensors of the checkpoint, and the step."""
    state = checkpoint.load(folder / "runs/x")
    moments = [t for p in state["optimizer"]["state"].values() for t in p.values() if isinstance(t, torch.Tensor)]
    return state["step"], [t.numpy().tobytes() for t in (*state["model"].values(), *moments)]


def rows(pattern: str) -> Callable[[Path], Any]:
    """The rows in all files of this pattern, without what differs between two equal commands."""

    def read(folder: Path) -> Any:
        lines = [line for file in sorted(folder.glob(pattern)) for line in file.read_text().splitlines()]
        return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "commit")} for line in lines]

    return read


KINDS = {
    "train": Kind(TRAIN, "inputs", weights),
    "eval": Kind(EVAL, "trained", rows("runs/x/eval/*.jsonl")),
    "compare": Kind(("compare.py",), "evaluated", lambda folder: (folder / "runs/compare.png").read_bytes()),
    "study": Kind(STUDY, "inputs", rows("rows.jsonl")),
}
SHARES = {"train": 0.4, "eval": 0.3, "compare": 0.1, "study": 0.2}


def start(kind: Kind, folder: Path) -> subprocess.Popen:
    """The command in folder, in a process group of its own, with its output in folder/output.log."""
    script = kind.argv if kind.argv[0] == "-m" else (str(ROOT / kind.argv[0]), *kind.argv[1:])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    with (folder / "output.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *script], cwd=folder, env=env, stdout=output, stderr=output, start_new_session=True
        )


def run(kind: Kind, folder: Path) -> float:
    """Run the command to its end; returns the seconds. RuntimeError if it fails."""
    began = time.monotonic()
    process = start(kind, folder)
    if process.wait(1800):
        raise RuntimeError(f"{kind.argv}: exit code {process.returncode}: {folder}/output.log")
    return time.monotonic() - began


def leftovers(folder: Path) -> list[str]:
    """Files and folders that only a killed process leaves: temporary names."""
    found = [p for part in ("runs", ".cache") for p in (folder / part).rglob("*")]
    temporary = [p for p in found if p.name.startswith(".") or (p.parent.name == ".cache" and "." in p.name)]
    return [str(p.relative_to(folder)) for p in temporary]


def prepare(folder: Path) -> dict[str, dict[str, Any]]:
    """inputs, trained and evaluated in folder, and for each kind the usual seconds. Done one time."""
    file = folder / "seconds.json"
    if not file.exists():
        shutil.rmtree(folder, ignore_errors=True)
        inputs = folder / "inputs"
        inputs.mkdir(parents=True)
        rng = random.Random(0)
        words = ["".join(rng.choices("bcdfghjk", k=4)) for _ in range(300)]
        for i in range(9):
            (inputs / f"{i}.txt").write_text(" ".join(rng.choices(words, k=2500 + i)))
        seconds = {}
        for name, before, after in (("train", "inputs", "trained"), ("eval", "trained", "evaluated")):
            shutil.copytree(folder / before, folder / after)
            seconds[name] = run(KINDS[name], folder / after)
        for name in ("compare", "study"):
            shutil.copytree(folder / KINDS[name].needs, folder / name)
            seconds[name] = run(KINDS[name], folder / name)
        file.write_text(json.dumps(seconds))
    return json.loads(file.read_text())


def one_round(name: str, folder: Path, seconds: float, most: int, rng: random.Random) -> int:
    """Kill the command up to `most` times, then let it end, and check the result. Returns the number of kills."""
    kind, reference = KINDS[name], folder / {"train": "trained", "eval": "evaluated"}.get(name, name)
    work = folder / f"round-{name}"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / kind.needs, work)
    kills = 0
    while kills < most:
        process = start(kind, work)
        try:
            process.wait(rng.uniform(0, 2 * seconds / (most + 1)))  # the kills of a round cover the usual time
            break  # it was faster
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
    run(kind, work)
    if kind.result(work) != kind.result(reference):
        raise RuntimeError(f"{work}: its result differs from that in {reference}")
    if found := sorted({*leftovers(work)} - {*leftovers(reference)}):  # a sweep leaves runs/.multirun
        raise RuntimeError(f"{work}: left over: {', '.join(found)}")
    shutil.rmtree(work)
    return kills


def main() -> None:
    """Kill until there are enough, and print the counts after every round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=Path("build/kill"), help="for the runs and the counts")
    args = parser.parse_args()
    folder: Path = args.folder.resolve()
    seconds = prepare(folder)
    file = folder / "kills.json"
    done = json.loads(file.read_text()) if file.exists() else dict.fromkeys(KINDS, 0)
    rounds = 0
    while sum(done.values()) < args.kills:
        name = min(KINDS, key=lambda name: done[name] / SHARES[name])
        rng = random.Random(f"{name} {done[name]} {time.time()}")
        most = min(rng.randint(3, 6), args.kills - sum(done.values()))
        done[name] += one_round(name, folder, seconds[name], most, rng)
        rounds += 1
        file.write_text(json.dumps(done))
        print(f"{sum(done.values())} of {args.kills} kills: {done}; every result is equal, nothing is left", flush=True)
    print(f"{sum(done.values())} kills: {done}; all resumed results equal to the bit, no leftovers")


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as e:
        sys.exit(f"error: {e}")
