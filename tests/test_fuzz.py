"""A part of the inputs of tests/fuzz.py, with a fixed seed: as many as fit into some seconds, and at least 15."""

import sys
import time

import pytest

from tests import fuzz

SECONDS = 15  # in CI; the long form is python -m tests.fuzz --inputs 2000


@pytest.mark.process
def test_random_settings_and_damaged_files_end_well_or_with_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # restored after the test
    fuzz.prepare(tmp_path)
    began, kinds = time.monotonic(), []
    for what, outcome in fuzz.inputs(seed=1, count=200):
        assert outcome.kind in ("ok", "error"), f"{what}: {outcome.kind}\n{outcome.detail}"
        kinds.append(outcome.kind)
        if time.monotonic() - began > SECONDS and len(kinds) >= 15:
            break
    assert {"ok", "error"} == set(kinds)


def test_bugs_of_ours_and_hangs_are_found(monkeypatch):
    """The observer itself: what it must not take for a message to the user."""

    def fail() -> None:
        raise KeyError("kind")

    def hang() -> None:
        time.sleep(30)

    monkeypatch.setattr(fuzz, "SECONDS", 1)
    assert fuzz.observe(fail).kind == "traceback" and "KeyError: 'kind'" in fuzz.observe(fail).detail
    assert fuzz.observe(hang).kind == "hang" and fuzz.observe(lambda: None).kind == "ok"
    assert fuzz.observe(lambda: sys.exit("error: x=1: must be 2")).kind == "error"
    assert fuzz.observe(lambda: sys.exit("a\nb")).kind == "traceback"


@pytest.mark.parametrize(
    "argument, found", [("a=nan", True), ("a=[1,-.inf]", True), ("a=infinite", False), ("~a=nan", False)]
)
def test_numbers_that_are_not_finite_are_recognised(argument, found):
    assert fuzz.not_finite(argument) == found
