"""A plugin of pytest for tests that are run in several parts: PASSED_TESTS=FILE pytest -p bench.passed_tests

Tests that are named in FILE are left out. Each test that passes, or skips itself, is added to FILE at once, so that a
later call continues where this one was killed. Tests that began before and did not pass come last, those that began
most often after the others, so that a test that always kills the process does not keep others from running.
"""

import os
from pathlib import Path

import pytest

file = Path(os.environ["PASSED_TESTS"])
before = set(file.read_text().splitlines()) if file.exists() else set()
begun_file = file.with_suffix(".begun")
begun = begun_file.read_text().splitlines() if begun_file.exists() else []
failed: set[str] = set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in before])
    items[:] = [item for item in items if item.nodeid not in before]
    items.sort(key=lambda item: begun.count(item.nodeid))


def pytest_runtest_logstart(nodeid: str) -> None:
    with begun_file.open("a") as f:
        f.write(nodeid + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        failed.add(report.nodeid)
    if report.when == "teardown" and report.nodeid not in failed:  # the last report of a test
        with file.open("a") as f:
            f.write(report.nodeid + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if before and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # all have passed before
        session.exitstatus = pytest.ExitCode.OK
