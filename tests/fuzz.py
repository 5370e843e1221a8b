"""Random settings and damaged files: python -m tests.fuzz --inputs 2000

Each input is a command with random settings, or a use of a run, a cache or a Hugging Face folder in which one file is
truncated, has flipped bits, or is reshaped. An input passes if the command ends well or with one clear line for the
user; a traceback is a bug of ours. A number that is NaN or infinite must never be accepted, and no input may hang.
The inputs follow from the seed. tests/test_fuzz.py runs some of them in CI.
"""

import argparse
import contextlib
import faulthandler
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hydra.core.global_hydra import GlobalHydra

import compare
import eval as evaluation
import export
import sample
import train
from conf.command_line import answer_early
from conf.compose import eval_settings, train_settings
from conf.errors import UserError
from conf.hydra_patches import exp_selects_runs, exp_sets_evaluation, run_main
from conf.registry import ROOT, choices, yaml_values
from engine.run import Run
from hf.open import open_checkpoint
from hf.read import read_checkpoint

SECONDS = 60  # that one input may take: more is a hang
CORPUS = ("data=text", "data.files=*.txt", "data.tokenizer=bytes", "data.vocab_size=257", "data.holdout=2")
SMALL = ("exp=smoke", *CORPUS, "ctx=16", "batch_tokens=16", "steps=2", "val_windows=1", "model.width=16")
# Commands by the settings that make them short
COMMANDS: dict[str, tuple[Callable[[], None], tuple[str, ...]]] = {
    "train": (lambda: run_main(train.main), (*SMALL, "name=new", "fresh=true")),
    "eval": (
        lambda: run_main(evaluation.main, exp_sets_evaluation),
        ("run=x", "ctx=64", "documents=2", "task.scored_tokens=8", "task.windows=1"),
    ),
    "sample": (lambda: run_main(sample.main, exp_selects_runs, sample.quote_prompt), ("run=x", "tokens=2")),
}
NOT_FINITE = ("nan", "NaN", ".nan", "inf", "-inf", ".inf", "-.inf", "1e999", "-1e999")
VALUES = (
    *NOT_FINITE, "0", "1", "-1", "0.5", "2", "7", "-3.5", "1e-300", "1e300", "1e20", "99999999999999999999",
    "1" + "0" * 400, "''", "null", "true", "false", "[]", "[1]", "[a,b]", "[1,nan]", "{}", "{a:1}", "abc", "auto",
    "fixed", "'a b'", "a/b", "../x", "/", "~", "ü", "'ü/ö'", "日本", "'日本'", "${x}", "${ctx}", "'x=y'", "%s", "\\",
    "'\\'", "a" * 300, "0x10", "1_000", "1e3", "???", "*", "-", "[[nan]]", "{a:nan}", "none", "rope",
)  # fmt: skip
# Settings whose large values only take long or write elsewhere: what they mean is no mistake
LONG = ("steps", "tokens", "documents", "ctx", "batch_tokens", "val_windows", "runs", "cache", "task.windows")


@dataclass
class Outcome:
    """What became of one input."""

    kind: str  # ok, error (one line), traceback, hang or accepted (a number that is not finite)
    detail: str = ""


class Hang(BaseException):
    """An input took more than SECONDS."""


# ---- one input ----


def observe(use: Callable[[], Any]) -> Outcome:
    """Run one input. Output goes nowhere; a message of more than one line counts as a traceback."""

    def alarm(*_: Any) -> None:
        raise Hang

    handler = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(SECONDS)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            use()
        return Outcome("ok")
    except UserError as e:
        return Outcome("traceback" if "\n" in str(e) else "error", str(e))
    except SystemExit as e:
        text = str(e.code)
        if e.code in (0, None):
            return Outcome("ok")
        return Outcome("error" if text.startswith(("error: ", "2")) and "\n" not in text else "traceback", text)
    except Hang:
        return Outcome("hang", traceback.format_exc(limit=-6))
    except (Exception, RecursionError):
        return Outcome("traceback", traceback.format_exc(limit=-8))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def run_command(name: str, arguments: list[str]) -> Outcome:
    """A command with these arguments in this process."""
    main, fixed = COMMANDS[name]

    def use() -> None:
        answer_early(name)
        main()

    GlobalHydra.instance().clear()
    before = sys.argv
    sys.argv = [f"{name}.py", *fixed, *arguments]
    try:
        return observe(use)
    finally:
        sys.argv = before
        shutil.rmtree("runs/new", ignore_errors=True)


# ---- random settings ----


def keys_of(name: str) -> list[str]:
    """The settings of a command, with those of the groups."""
    lines = (ROOT / "conf" / f"{name}.yaml").read_text().splitlines()
    keys = [m[1] for line in lines if (m := re.match(r"([a-z_]+):", line)) and m[1] not in ("defaults", "hydra")]
    groups = {
        "train": ("pos", "scaling", "data", "model", "optim"),
        "eval": ("scaling", "task"),
        "sample": ("scaling",),
    }
    return keys + [f"{group}.{key}" for group in groups[name] for key in group_keys(group)] + list(groups[name])


def group_keys(group: str) -> list[str]:
    return sorted({key for name in choices(group) for key in yaml_values(group, name)})


def random_arguments(name: str, rng: random.Random) -> list[str]:
    """One to three settings: known or unknown keys, appended or deleted ones, a choice of each group now and then."""
    arguments = []
    for group in ("scaling", "pos", "task"):
        if group in keys_of(name) and rng.random() < 0.3 and not (group == "pos" and name != "train"):
            arguments.append(f"{group}={rng.choice(choices(group))}")
    for _ in range(rng.choice((1, 1, 2, 3))):
        key = (
            rng.choice(keys_of(name)) if rng.random() < 0.95 else rng.choice(("", "x", "a.b", "hydra.run.dir", "ctx."))
        )
        value = rng.choice(VALUES)
        sign = rng.choice(("", "", "++", "++", "++", "+", "~"))
        if key in LONG and value in ("1e20", "99999999999999999999", "1e3", "1_000", "/", "~", "../x"):
            continue
        if key == "compile" and value == "true":  # takes half a minute
            continue
        arguments.append(f"~{key}" if sign == "~" and rng.random() < 0.5 else f"{sign}{key}={value}")
    return arguments


def not_finite(argument: str) -> bool:
    """Whether an argument gives a setting a number that is not finite."""
    value, number = argument.partition("=")[2], r"(^|[\[:,])-?\.?(nan|inf|1e999)([\]},]|$)"
    return not argument.startswith("~") and bool(re.search(number, value, flags=re.I))


def settings_input(rng: random.Random) -> tuple[str, Outcome]:
    name = rng.choice(list(COMMANDS))
    arguments = random_arguments(name, rng)
    outcome = run_command(name, arguments)
    # As the name of a run, a project or a prompt it is a text
    texts = ("name", "project", "prompt", "run", "exp", "trained_with", "init", "key_tokens", "cache", "runs", "device")
    numbers = [a for a in arguments if not_finite(a) and a.lstrip("+").partition("=")[0] not in texts]
    if outcome.kind == "ok" and numbers:
        outcome = Outcome("accepted", " ".join(numbers))
    return f"{name}.py {' '.join(arguments)}", outcome


# ---- damaged files ----


def damaged(content: bytes, rng: random.Random) -> bytes:
    """The content of a file with one kind of damage."""
    if not content:
        return b"\0"
    kind, place = rng.randrange(6), rng.randrange(len(content))
    if kind == 0:
        return content[:place]
    if kind == 1:
        return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]
    if kind == 2:
        return content[:place] + rng.randbytes(min(64, len(content) - place)) + content[place + 64 :]
    if kind == 3:
        return content + rng.randbytes(rng.randrange(1, 64))
    if kind == 4:
        return b""
    return reshaped(content, rng)


def reshaped(content: bytes, rng: random.Random) -> bytes:
    """The JSON of a file with one value replaced by one of another type; other files without some bytes."""
    try:
        values = [json.loads(line) for line in content.decode().splitlines()]
        lines = True
    except ValueError:
        try:
            values, lines = [json.loads(content)], False
        except ValueError:
            place = rng.randrange(len(content))
            return content[:place] + content[place + rng.randrange(1, 9) :]
    value = rng.choice(values)
    path: list[tuple[Any, Any]] = []
    while isinstance(value, dict | list) and value and (not path or rng.random() < 0.7):
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        path.append((value, key))
        value = value[key]
    new = rng.choice([None, "text", -1, 0, 1.5, math.nan, math.inf, 10**30, [], {}, [[]], True, "0", [1, 2]])
    if path and rng.random() < 0.2 and isinstance(path[-1][0], dict):
        del path[-1][0][path[-1][1]]
    elif path:
        path[-1][0][path[-1][1]] = new
    else:
        values = [new]
    return "\n".join(json.dumps(value, indent=None if lines else 1) for value in values).encode()


def edited_checkpoint(path: Path, rng: random.Random) -> None:
    """Replace or remove one part of a checkpoint, which stays a complete file."""
    state = torch.load(path, weights_only=True)
    holder: Any = state
    key = rng.choice(list(holder))
    while isinstance(holder[key], dict) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder))
    old = holder[key]
    news: list[Any] = [None, "text", -1, 1.5, math.nan, math.inf, [], {}, torch.ones(2), 10**25]
    if isinstance(old, torch.Tensor) and old.dim():
        news = [old.float() * math.nan, old.double(), old[:1], old.flatten(), old.long(), old.to(torch.bfloat16)]
    if rng.random() < 0.2:
        del holder[key]
    else:
        holder[key] = rng.choice(news)
    torch.save(state, path)


def open_everything() -> None:
    """Use the run, its curves and its corpus. Each part may end in a UserError, of which the last one is raised."""
    error: UserError | None = None

    def resume() -> None:
        train.train(CHECKED["train"])

    def read_run() -> None:
        run = Run.open("x", runs="runs", cache="cache")
        losses = run.model.losses(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64))
        if not losses.isfinite().all():
            raise AssertionError("losses that are not finite were accepted")

    def evaluate() -> None:
        evaluation.evaluate(CHECKED["eval"])
        for file in Path("runs/x/eval").glob("*.jsonl"):
            if re.search(r'"(loss|ppl|bits_per_byte)": (NaN|-?Infinity)', file.read_text()):
                raise AssertionError(f"{file} has a loss that is not finite")

    def read_curves() -> None:
        curves = compare.read_curves("runs", [])
        compare.comparison.select_shared(curves, compare.most_shared_texts(curves))

    for use in (read_run, evaluate, read_curves, resume):
        try:
            use()
        except UserError as e:
            error = e
    if error:
        raise error


CHECKED: dict[str, Any] = {}  # the settings of the commands above, composed one time


def file_input(rng: random.Random) -> tuple[str, Outcome]:
    """One damaged file of the run or the cache."""
    for folder in ("runs", "cache"):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(f"good/{folder}", folder)
    files = sorted(f for folder in ("runs", "cache") for f in Path(folder).rglob("*") if f.is_file())
    important = [f for f in files if f.name in ("ckpt.pt", "config.json", "meta.json") or f.suffix == ".jsonl"]
    file = rng.choice(important if rng.random() < 0.7 else files)
    if file.name == "ckpt.pt" and rng.random() < 0.6:
        edited_checkpoint(file, rng)
        what = "edited"
    else:
        file.write_bytes(damaged(file.read_bytes(), rng))
        what = "damaged"
    return f"{what} {file}", observe(open_everything)


def hugging_face_input(rng: random.Random) -> tuple[str, Outcome]:
    """One damaged file of a Hugging Face folder, which is then read as far as its weights and its tokenizer."""
    shutil.rmtree("hf", ignore_errors=True)
    shutil.copytree("good/hf", "hf")
    files = sorted(f for f in Path("hf").iterdir() if f.suffix != ".md")
    file = rng.choice(files)
    file.write_bytes(damaged(file.read_bytes(), rng))

    def read() -> None:
        source = open_checkpoint("hf:hf")
        _, weights, _ = read_checkpoint(source, 64, 16)
        if not all(x.isfinite().all() for x in weights.values()):
            raise AssertionError("weights that are not finite were accepted")
        source.tokenizer()

    return f"damaged {file}", observe(read)


# ---- all inputs ----


def prepare(folder: Path) -> None:
    """A small corpus, a run with a curve, and its export, in folder/good; folder becomes the working folder."""
    os.chdir(folder)
    for i in range(5):
        Path(f"{i}.txt").write_text(f"some words of the text {i}, and more of them than of others. " * (10 + i))
    run = (*SMALL, "name=x", "runs=runs", "cache=cache")
    evaluate = (*COMMANDS["eval"][1], "runs=runs", "cache=cache")
    CHECKED.update(train=train_settings(*run), eval=eval_settings(*evaluate))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        train.train(CHECKED["train"])
        evaluation.evaluate(CHECKED["eval"])
        sys.argv = ["export.py", "run=x", "out=hf", "cache=cache"]
        with contextlib.suppress(SystemExit):
            export.main()
    if not Path("hf").exists():
        raise RuntimeError("the run could not be exported")
    Path("good").mkdir()
    for name in ("runs", "cache", "hf"):
        shutil.copytree(name, f"good/{name}")
    if not Path(".cache").exists():
        shutil.copytree("cache", ".cache")


def inputs(seed: int, count: int, first: int = 0) -> Iterator[tuple[str, Outcome]]:
    """The outcomes of `count` inputs from number `first` on, half of them settings. In the folder of `prepare`."""
    for i in range(first, first + count):
        rng = random.Random(f"{seed} {i}")
        kind = (settings_input, file_input, settings_input, file_input, hugging_face_input)[i % 5]
        if kind is settings_input:
            for folder in ("runs", "cache"):
                shutil.rmtree(folder, ignore_errors=True)
                shutil.copytree(f"good/{folder}", folder)
        yield kind(rng)


def main() -> None:
    """Try the inputs and print the counts. Exit code 1 if there is a traceback, a hang or an accepted NaN."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input, to share them out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    faulthandler.enable()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            prepare(Path(folder))
            for i, (what, outcome) in enumerate(inputs(args.seed, args.inputs, args.first), args.first):
                counts[outcome.kind] += 1
                if outcome.kind not in ("ok", "error"):
                    print(f"--- input {i}: {what}: {outcome.kind}\n{outcome.detail}", flush=True)
                if (i + 1) % 100 == 0:
                    print(f"to input {i + 1}, {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
        finally:
            os.chdir(home)
    bad = {kind: counts[kind] for kind in ("traceback", "hang", "accepted")}
    print(f"{args.inputs} inputs: {counts['ok']} ran, {counts['error']} ended in one line, {bad}")
    sys.exit(1 if any(bad.values()) else 0)


if __name__ == "__main__":
    main()
