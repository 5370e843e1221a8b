"""The measured numbers of README.md, docs/findings.md and others, from the rows of today: python -m studies.numbers

Behind each number stands a comment that says what it is, and that a rendered page does not show:

    +0.033 [+0.012, +0.054]<!--gain rope yarn @2 > 0-->

The command writes the numbers again, in the form in which they stand there, and lists them in results/numbers.md. One
number is the mean, two (`23 to 40`) are the ends of the interval or of the range over seeds, three are all;
with a % behind them they are in hundredths. A comment is one of

    WHAT CONDITION [in FILE]           WHAT: one of MEASURES, or a column of the rows (loss, in_window, documents ...).
                                       CONDITION: as in claims.yaml. FILE: of rows in results/, without .jsonl; or rope
    difference CONDITION - CONDITION [in FILE]   the first loss less the second
    by COMMAND                         printed by this command; the number stays as it is

and may end with what the words around the number say: `> 0`, `< 0` or `? 0`, if both ends are above or below 0, or 0 is
between them. Where this is no longer so, or a number with decimals on one of FULL has no comment, the command says it
and fails.
Lines from `<!--table NAME-->` (of TABLES) to `<!--end-->` are written as a whole; after `<!--by COMMAND-->` they stay.
"""

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import yaml

from conf.errors import UserError, ensure, user_errors
from conf.registry import ROOT
from engine.files import write_atomically
from measure.intervals import mean_interval
from studies import gain_parts, tables
from studies.claims import fully, read_condition
from studies.plan import PLANS
from studies.rows import RESULTS, Rows, StudyRow, compare, fill, line, read_rows

FULL = ("README.md", "docs/findings.md")  # where all measured numbers have a comment
PAGES = (*FULL, *(f"docs/{x}.md" for x in ("choosing", "encodings", "layers", "measuring", "scaling", "tasks")))
NUMBER = r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?"
MARKED = re.compile(rf"({NUMBER}(?:\s+\[{NUMBER},\s+{NUMBER}\]|\s+to\s+{NUMBER})?(?:\s%)?)<!--(.+?)-->")
BLOCK = re.compile(r"(<!--(table|by) ([^>]+)-->\n)(.*?)(<!--end-->)", re.DOTALL)
COMMENT = r"(\w+) (.+?)(?: in (\w+))?"
# Numbers that are not measured: in code, pictures and links, multiples of L, sizes, versions, numbers of papers, limits
PLAIN = r"(?ms)^```.*?^```|^    .*?$|`[^`]*`|!\[[^]]*\]|\]\([^)]*\)|[\d.]+ L\b|[\d.]+M\b|Python 3\.\d+"
PLAIN += r"|\b\d{4}\.\d{5}\b|q < 0\.05"

Value = Sequence[float]  # the mean, and both ends: of the interval, or of the range over seeds
Listed = list[str]  # cells of results/numbers.md: the file of rows, their number of seeds, their commits, the command


# ---- values ----


def over_seeds(values: Iterable[Any]) -> Value:
    seeds = [float(x) for x in values]
    return float(np.mean(seeds)), min(seeds), max(seeds)


def interval(values: np.ndarray) -> Value:
    """values: [seeds, documents]"""
    ensure(len(values), "no rows of it")
    return mean_interval(values)


# Of the rows of a file and a condition: run, label of the method, n in tokens
MEASURES: dict[str, Callable[..., Value]] = {
    "perplexity": lambda rows, *at: np.exp(over_seeds(rows.losses(*at))).tolist(),
    "seeds": lambda rows, *at: over_seeds([len(rows.find(*at))]),
    "sd": lambda rows, *at: over_seeds([rows.losses(*at).std(ddof=1)]),
    "chance": lambda rows, *at: over_seeds([gain_parts.chance(rows.losses(*at), 1)]),  # one training against one
    "gain": lambda rows, *at: interval(rows.gain(*at)),
    "tax": lambda rows, *at: interval(gain_parts.part_of_gain(rows, *at, reward=False)),
    "reward": lambda rows, *at: interval(gain_parts.part_of_gain(rows, *at, reward=True)),
    "headroom": lambda rows, run, _, n: interval(gain_parts.headroom(rows, run, n)),
    "right": lambda rows, *at: interval(np.array([row.hits for row in rows.find(*at).values()])),
    "beyond": lambda rows, *at: interval(gain_parts.beyond_window(rows, *at)),
    "rise_of_rope": lambda rows, run, _, n: interval(gain_parts.rise_of_rope(rows, run, n)),
    "share": lambda rows, *at: gain_parts.share_of_headroom(rows, *at) or interval(np.array([])),
}


@functools.cache
def read(file: str) -> Rows:
    return read_rows(RESULTS / f"{file}.jsonl")


def of_conditions(what: str, text: str, file: str) -> tuple[Value, Listed]:
    """WHAT CONDITION, or the difference of two conditions."""
    rows = read(file)
    conditions = [read_condition(at, rows.trained_ctx) for at in text.split(" - ")]
    found = [rows.find(at.run, at.label, at.n) for at in conditions]
    found += [gain_parts.fine_tuned(rows, conditions[0].run, conditions[0].n)] if what in ("headroom", "share") else []
    used = [row for seeds in found for row in seeds.values()]
    ensure(all(found), f"{file}.jsonl has no rows of it")
    if what == "difference":
        result = compare(found[0], found[-1])
        if not result:
            raise UserError("too few seeds for a difference of independent trainings")
        value = result.mean, *result.interval
    elif what in MEASURES:
        value = MEASURES[what](rows, conditions[0].run, conditions[0].label, conditions[0].n)
    else:
        ensure(hasattr(used[0], what), f"{what}: not a column of the rows")
        value = over_seeds(getattr(row, what) for row in used)
    return value, origin(file, used, min(map(len, found)))


def origin(file: str, rows: Iterable[StudyRow], seeds: int | str = "") -> Listed:
    commits = sorted({row.commit for row in rows if row.commit})
    command = f"`python -m studies.matrix --plan {file}`" if file in PLANS else "[how](README.md)"
    return [f"[{file}]({file}.jsonl)", str(seeds), " ".join(commits), command]


# ---- pages ----

TABLES = {  # name -> file, lines
    "default": ("default", tables.methods_section),
    "gains": ("rope", tables.gains_section),
    "antecedents": ("rope", tables.antecedents_section),
}


def number(shown: str, comment: str) -> tuple[str, Listed, bool]:
    """(the number as today's rows give it in the form of `shown`, what is listed of it, whether it has the sign)."""
    if comment.startswith("by "):
        return shown, ["", "", "", f"`{comment.removeprefix('by ')}`"], True
    comment, sign = fully(r"(.+?)(?: ([<>?]) 0)?", comment)
    what, text, file = fully(COMMENT, comment)
    (mean, low, high), listed = of_conditions(what, text, file or "rope")
    as_said = {"<": high < 0, ">": low > 0, "?": low <= 0 <= high, None: True}[sign]
    tokens = re.findall(NUMBER, shown)
    values = iter({1: [mean], 2: [low, high], 3: [mean, low, high]}[len(tokens)])
    percent = 100 if "%" in shown else 1
    return re.sub(NUMBER, lambda token: like(token.group(), percent * next(values)), shown), listed, as_said


def like(shown: str, value: float) -> str:
    """The value with the sign and the decimals of the number `shown`."""
    sign = "+" if shown[0] in "+-" else ""
    return f"{value:{sign},.{len(shown.partition('.')[2])}f}"


def precision() -> list[str]:
    """What each letter of the plan took, and half of the intervals that it reached, beside what the plan asked for."""
    lines = []
    for letter, (file, part, halves) in yaml.safe_load((ROOT / "studies/precision.yaml").read_bytes()).items():
        trainings, *hours = tables.cost(read(file), part)
        about = [letter, f"{file}, {part}", str(trainings), f"{sum(hours):.1f}"]
        for what, half in halves.items():
            (_, low, high), (_, seeds, *_) = of_conditions(*fully(r"(\w+) (.+)", what), file)
            lines.append(line([*about, f"`{what}`", seeds, f"{half:.3f}", f"{(high - low) / 2:.3f}"]))
    return lines


def update(path: str, text: str) -> tuple[str, list[str], list[str]]:
    """(the page with the numbers of today, its lines of results/numbers.md, what is wrong)."""
    lines, wrong = [], []

    def listed(match: re.Match, shown: str, comment: str, cells: Listed) -> None:
        section = re.findall(r"^#+ (.+)$", match.string[: match.start()], re.MULTILINE)[-1]
        lines.append(line([" ".join(shown.split()), f"`{comment}`", f"{path}, {section}", *cells]))

    def rewrite(match: re.Match) -> str:
        shown, comment = match.groups()
        try:
            shown, cells, as_said = number(shown, comment)
            listed(match, shown, comment, cells)
            if not as_said:
                wrong.append(f"{path}: the words around {shown} ({comment}) are no longer right")
        except UserError as e:
            wrong.append(f"{path}: {shown} ({comment}): {e}")
        return f"{shown}<!--{comment}-->"

    def rewrite_table(match: re.Match) -> str:
        first, kind, name, lines_of_table, last = match.groups()
        cells = ["", "", "", f"`{name}`"]
        if kind == "table":
            file, made = TABLES[name]
            cells = origin(file, read(file).rows)
            lines_of_table = "".join(f"{x}\n" for x in made(read(file)))
        listed(match, "table", f"{kind} {name}", cells)
        return first + lines_of_table + last

    text = MARKED.sub(rewrite, BLOCK.sub(rewrite_table, text))
    rest = re.sub(PLAIN, "", MARKED.sub("", BLOCK.sub("", text)))
    if path in FULL:
        wrong += [f"{path}: no comment says what {x} is" for x in re.findall(r".{,20}\b\d+\.\d+", rest)]
    return text, lines, wrong


def report() -> tuple[dict[str, str], list[str]]:
    """(path -> the text of each page and of results/numbers.md, what is wrong)."""
    found = {path: update(path, (ROOT / path).read_text(encoding="utf-8")) for path in PAGES}
    numbers = [x for _, lines, _ in found.values() for x in lines]
    texts = {path: text for path, (text, *_) in found.items()}
    texts["results/numbers.md"] = fill("numbers.md", numbers=numbers, precision=precision())
    return texts, [x for *_, wrong in found.values() for x in wrong]


@user_errors
def main() -> None:
    texts, wrong = report()
    for path, text in texts.items():
        write_atomically(ROOT / path, lambda f, text=text: f.write(text.encode()))
    print(*wrong, *texts, sep="\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
