"""The board of encodings: `python -m studies.board pos=NAME` enters one; without pos= it writes docs/board.md again.

It trains and evaluates the encoding's seeds with the settings of the board, compares their losses with those of rope's
entry, and writes results/board/NAME: the encoding's .py and .yaml, settings, rows, verdict and log. It can be stopped
at any time: the same command again continues. docs/board.md is made from these folders alone.
"""

import argparse
import functools
import hashlib
import itertools
import json
import signal
from dataclasses import asdict
from pathlib import Path

import numpy as np

from conf.cli import train_settings
from conf.errors import UserError, check, file_errors, user_errors
from conf.registry import ROOT, choices, yaml_values
from conf.schema import RUN_CONTROL, flatten
from engine.files import write_atomically
from measure.groups import FEWEST
from measure.intervals import Estimate, estimate
from measure.report import print_table, print_wrapped
from studies.claims import q_text
from studies.jobs import Stopped, run_job
from studies.matrix import finished_jobs, interrupt, share_cores
from studies.plan import Evaluation, Job, Size, from_scratch
from studies.rows import Rows, Seeds, contrast, difference, fill, header, line, read_rows

BOARD, PAGE, RUNS = ROOT / "results/board", ROOT / "docs/board.md", Path("runs/board")
# The settings of the board, the same for all entries of a size
SIZES = {"quick": Size(train=["exp=quick"], windows=16), "default": Size(windows=8)}
LENGTHS = (1, 2, 4, 8, 16)  # in trained contexts L
REFERENCE = "rope"
ALPHA = 0.01  # of the two-sided test: lower than elsewhere, because many encodings are tried
COLUMNS = ("", "gain, 4 L", "gain, 8 L", "rise, 8 L", "not worse up to", "bits/byte, L", "tokens/s", "seeds")
COLUMNS += ("loss less rope's, 8 L", "p")
ENOUGH = f"at least {FEWEST}: fewer decide nothing past L"


def job_of(size: str, pos: str, seed: int) -> Job:
    return from_scratch(SIZES[size], "board", pos, seed, Evaluation(SIZES[size].lengths(*LENGTHS)))


def folder_of(pos: str, size: str) -> Path:
    return BOARD / (pos if size == "quick" else f"{pos}-{size}")


@functools.cache
def settings_of(size: str) -> dict:
    """What all entries of a size have in common: the settings of training and evaluation, as JSON has them."""
    training = flatten(asdict(train_settings(*job_of(size, REFERENCE, 0).train)))
    kept = {key: x for key, x in training.items() if key not in (*RUN_CONTROL, "seed") and not key.startswith("pos.")}
    keys = ("documents", "scored_tokens", "windows", "far_windows")
    evaluation = {key: getattr(SIZES[size], key) for key in keys} | {"lengths": SIZES[size].lengths(*LENGTHS)}
    return json.loads(json.dumps(kept | {f"evaluation.{key}": value for key, value in evaluation.items()}))


# ---- an entry: its rows ----


def read_entry(folder: Path) -> Rows:
    """UserError if it is no entry, is of an encoding that does not exist, or has other settings or too few seeds."""
    try:
        rows, saved = read_rows(folder / "rows.jsonl"), json.loads((folder / "settings.json").read_text("utf-8"))
        pos, size = saved["pos"], SIZES[saved["size"]]
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{folder}: no entry: measure it with python -m studies.board pos=NAME --size SIZE") from None
    check(pos in choices("pos"), f"{folder}: pos", pos, "an encoding of conf/pos")
    board = settings_of(saved["size"])
    if other := [f"{key}={x} (it has {saved[key]})" for key, x in board.items() if saved.get(key, x) != x]:
        raise UserError(f"{folder}: not the settings of the board: {', '.join(other)}: delete it and measure it again")
    seeds = min(len(rows.find(pos, label, n)) for label in ("none", "window") for n in size.lengths(*LENGTHS))
    check(seeds >= FEWEST, f"{folder}: seeds", seeds, ENOUGH)
    return rows


def at(entry: Rows, multiple: int) -> Seeds:
    """The rows without scaling at this multiple of L."""
    return entry.find(entry.rows[0].name, "none", multiple * entry.trained_ctx)


def compare(entry: Rows, reference: Rows) -> Estimate:
    """Loss at 8 L less that of the reference. UserError if they score other tokens."""
    a, b = at(entry, 8), at(reference, 8)
    same = len({row.targets for seeds in (a, b) for row in seeds.values()}) == 1
    check(same, "pos", entry.rows[0].name, f"measured again: it scores other tokens than {REFERENCE}")
    return estimate(contrast([a]), contrast([b]))


# ---- the page ----


def cells(entry: Rows, reference: Rows) -> list[str]:
    """Its line of the table."""
    pos, seeds, x = entry.rows[0].name, at(entry, 1), compare(entry, reference)
    gains = [entry.gain(pos, "none", multiple * entry.trained_ctx) for multiple in (4, 8)]
    found = [estimate(delta) for delta in (*gains, difference(at(entry, 8), seeds))]
    bits, speed = np.mean([(row.bits_per_byte, row.tokens_per_second) for row in seeds.values()], axis=0)
    *texts, tested = (str(each) for each in (*found, x))
    last = ("", "") if pos == REFERENCE else (tested, q_text(x.p))
    return [f"`{pos}`", *texts, effective_context(entry), f"{bits:.3f}", f"{speed:,.0f}", str(len(seeds)), *last]


def effective_context(entry: Rows) -> str:
    """The longest length up to which the gain is at none below 0, as far as its interval tells."""
    pos, L = entry.rows[0].name, entry.trained_ctx
    for before, multiple in itertools.pairwise(LENGTHS):
        if estimate(entry.gain(pos, "none", multiple * L)).interval[1] < 0:
            return f"{before} L"
    return f">= {LENGTHS[-1]} L"


def verdict(entry: Rows, reference: Rows) -> str:
    """A sentence."""
    pos, x, seeds = entry.rows[0].name, compare(entry, reference), len(at(entry, 1))
    better, worse = x.p_below(0) < ALPHA / 2, x.p_above(0) < ALPHA / 2
    outcome = "better than" if better else "worse than" if worse else "not decided against"
    loss = f"{x} nats/token, p {q_text(x.p)}, {seeds} seeds"
    gain = estimate(entry.gain(pos, "none", 8 * entry.trained_ctx))
    uses = "it gains" if gain.interval[0] > 0 else "it does not gain"
    return f"{pos} is {outcome} {REFERENCE} at 8 L: {loss}; {uses} from text further back than L ({gain.mean:+.3f})"


def table(reference: Rows, entries: list[Rows]) -> list[str]:
    """The reference and the other entries of its size, the lowest loss first."""
    others = sorted(entries, key=lambda entry: compare(entry, reference).mean)
    shown = [reference, *(entry for entry in others if entry.rows[0].name != REFERENCE)]
    return [*header(COLUMNS), *(line(cells(entry, reference)) for entry in shown)]


def verdict_lines(folder: Path) -> list[str]:
    """Of an entry's verdict.md: its sentence, and its line of the table below the reference's."""
    entry, size = read_entry(folder), json.loads((folder / "settings.json").read_text("utf-8"))["size"]
    reference = read_entry(folder_of(REFERENCE, size))
    if entry.rows[0].name == REFERENCE:
        return table(reference, [])
    return [verdict(entry, reference), "", *table(reference, [entry])]


def render() -> str:
    """The text of docs/board.md."""
    entries = [read_entry(file.parent) for file in sorted(BOARD.glob("*/settings.json"))]
    sections: dict[bool, list[str]] = {True: [], False: []}
    for size, plan in SIZES.items():
        here = [entry for entry in entries if entry.trained_ctx == plan.L]
        for better, lines in sections.items() if here else ():
            reference = read_entry(folder_of(REFERENCE, size))
            shown = [entry for entry in here if (compare(entry, reference).p_below(0) < ALPHA / 2) == better]
            lines += ["", f"### Size {size}: L = {plan.L}", "", *table(reference, shown)]
    return fill("board.md", better=sections[True], others=sections[False], alpha=ALPHA, fewest=FEWEST)


# ---- entering ----


def enter(pos: str, size: str, seeds: int, jobs: int) -> None:
    """Measure an entry in runs/board and move it to results/board, complete. UserError if it cannot be entered."""
    folder, plan = folder_of(pos, size), SIZES[size]
    check(pos in choices("pos"), "pos", pos, "an encoding: write model/pos/NAME.py and conf/pos/NAME.yaml")
    check(pos != "rope_interleaved", "pos", pos, "another: it is rope, with permuted dimensions")
    check(seeds >= FEWEST, "--seeds", seeds, ENOUGH)
    check(not folder.exists(), "pos", pos, f"a new name: {folder} exists; delete it to measure it again")
    others = [] if pos == REFERENCE else [read_entry(folder_of(REFERENCE, size))]

    files = [ROOT / f"model/pos/{yaml_values('pos', pos)['kind']}.py", ROOT / f"conf/pos/{pos}.yaml"]
    code = [*(file.read_text(encoding="utf-8") for file in files), str(settings_of(size))]
    runs = RUNS / f"{folder.name}-{hashlib.sha256(repr(code).encode()).hexdigest()[:8]}"  # changed code is trained anew
    for file, text in zip(files, code, strict=False):
        write(runs / "entry" / file.name, text.splitlines())
    todo = [job_of(size, pos, seed) for seed in range(seeds)]
    run = functools.partial(run_job, size=plan, runs=str(runs), cache=".cache", one=jobs == 1)
    finished = finished_jobs(todo, run, jobs)
    rows = sorted((row for _, of_job in finished for row in of_job), key=lambda row: row.seed)
    log = (f"{x.command}: {x.tokens_per_second:,} tokens/s, held-out {x.in_window:.3f} bits/byte" for x in rows)
    write(runs / "entry/rows.jsonl", [json.dumps(asdict(row)) for row in rows])
    write(runs / "entry/log.txt", [*dict.fromkeys(log)])
    write(runs / "entry/settings.json", [json.dumps({"pos": pos, "size": size} | settings_of(size), indent=1)])
    reference, *entries = [*others, read_entry(runs / "entry")]
    with file_errors(folder):
        BOARD.mkdir(parents=True, exist_ok=True)
        (runs / "entry").rename(folder)
    print()
    shown = [cells(entry, reference) for entry in (reference, *entries)]
    print_table({name.strip("`"): dict(zip(COLUMNS[1:], rest, strict=True)) for name, *rest in shown})
    for sentence in (*(verdict(entry, reference) for entry in entries), f"entry: {folder}"):
        print_wrapped(sentence)


def write(path: Path, lines: list[str]) -> None:
    write_atomically(path, lambda f: f.write("".join(f"{text}\n" for text in lines).encode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pos", nargs="*", metavar="pos=NAME", help="the encoding to enter")
    parser.add_argument("--size", choices=SIZES, default="quick", help="quick takes minutes, default an hour")
    parser.add_argument("--seeds", type=int, default=FEWEST, help=ENOUGH)
    parser.add_argument("--jobs", type=int, default=2, help="seeds at a time, each with its share of the threads")
    args = parser.parse_args()
    given = dict(word.partition("=")[::2] for word in args.pos)
    check(given.keys() <= {"pos"}, "settings", " ".join(args.pos), "pos=NAME alone: the others are those of the board")
    signal.signal(signal.SIGTERM, interrupt)
    share_cores(args.jobs)
    try:
        if given:
            enter(given["pos"], args.size, args.seeds, args.jobs)
    except (Stopped, KeyboardInterrupt):
        raise SystemExit("stopped: run the same command again to continue") from None
    page = render().splitlines()
    for file in BOARD.glob("*/settings.json"):  # rope's own entry may be a new one
        write(file.parent / "verdict.md", verdict_lines(file.parent))
    write(PAGE, page)
    print(f"page: {PAGE}")


if __name__ == "__main__":
    user_errors(main)()
