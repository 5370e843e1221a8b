"""The numbers of README.md and docs/findings.md: those of the committed rows, and on rows made by hand."""

import math
import re

import numpy as np
import pytest

from measure.intervals import estimate
from studies import numbers, tables
from studies.rows import RESULTS, Rows
from tests.helpers import ROOT, study_row as row

NATS = {label: np.random.default_rng(3).normal(3 - gain, 0.05, (4, 6)) for label, gain in (("none", 0), ("yarn", 0.5))}


@pytest.fixture
def by_hand(monkeypatch):
    """rope with four seeds at L and, with yarn, at 2 L; one run of alibi."""
    rows = [row("rope", "none", 256, s, NATS["none"][s].tolist(), in_window=1 + s / 10) for s in range(4)]
    rows += [row("rope", "yarn", 512, s, NATS["yarn"][s].tolist()) for s in range(4)]
    rows.append(row("alibi", "none", 256, 0, [2.0, 2.0]))
    far, ones = {"none": [1, 0.75, 1, 0.75], "window": [0, 0.25, 0, 0.25]}, [1, 1, 1, 1]
    answers = {m: {"64": ones, "224": x} for m, x in far.items()}
    rows += [row("recall", m, 256, 0, [0, 0], hits=np.mean([*x.values()], 0), answers=x) for m, x in answers.items()]
    monkeypatch.setattr(numbers, "read", lambda file: Rows(rows))


def updated(text: str) -> tuple[str, list[str]]:
    """(the text without comments, what is wrong)."""
    found, _, wrong = numbers.update("README.md", f"# Title\n{text}")
    return numbers.re.sub("<!--.*?-->", "", found).removeprefix("# Title\n"), wrong


def test_numbers_are_written_in_the_form_that_stands_there(by_hand):
    found = estimate(NATS["none"] - NATS["yarn"])
    low, high = found.interval
    difference = f"{found.mean:+.3f} [{low:+.3f},\n  {high:+.3f}]"
    losses = NATS["none"].mean(axis=1)
    text = """+9.999 [+9.999,\n  -9.999]<!--difference rope @1 - rope yarn @2 > 0--> 0<!--perplexity rope @1-->
0.0 to 0.0<!--loss rope @1--> 1<!--seeds rope @1-->, 1,111.00<!--in_window rope @1 > 0--> 5 %<!--right recall @1-->
3 %<!--beyond recall @1 > 0-->"""
    want = f"""{difference} {math.exp(losses.mean()):.0f}
{losses.min():.1f} to {losses.max():.1f} 4, 1.15 94 %
75 %"""
    assert updated(text) == (want, [])


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("0.1 [0.0, 0.2]<!--difference rope @1 - rope yarn @2 < 0-->", "no longer right"),
        ("0.1 [0.0, 0.2]<!--difference rope @1 - rope yarn @2 ? 0-->", "no longer right"),
        ("0.1<!--difference rope @1 - alibi @1-->", "too few seeds"),
        ("0.1<!--loss xpos @1-->", "no rows"),
        ("1<!--by x--> 2<!--seeds rope @1-->\nthe loss is 2.5 at 2.5 L\n<!--end-->", "the loss is 2.5"),
    ],
)
def test_what_the_rows_do_not_say_is_wrong(text, wrong, by_hand):
    (found,) = updated(text)[1]
    assert wrong in found


def test_the_pages_have_the_numbers_of_the_rows_and_no_others():
    texts, wrong = numbers.report()
    assert wrong == [] and {path: (ROOT / path).read_text() for path in texts} == texts
    assert texts["results/numbers.md"].count("\n| ") > 80
    quick = numbers.BLOCK.search(texts["README.md"]).group(4)
    assert {*quick.splitlines()} <= {f"    {line}" for line in (RESULTS / "quick.md").read_text().splitlines()}


def test_numbers_by_a_command_stand_on_a_page_that_it_writes():
    pages = {"tables": [*tables.REPORTS], "repeats": ["repeats.md"]}
    texts = {name: "".join((RESULTS / page).read_text() for page in of) for name, of in pages.items()}
    written = {f"by python -m studies.{name}": {*re.findall(numbers.NUMBER, text)} for name, text in texts.items()}
    marked = [x for path in numbers.PAGES for x in numbers.MARKED.findall((ROOT / path).read_text()) if x[1] in written]
    assert len(marked) > 5
    assert [x for x in marked if not {*re.findall(numbers.NUMBER, x[0])} <= written[x[1]]] == []
