"""Counts what the watch reports in a watched test run (make test-watched), by test.

Every process saves its reports in one folder (UNISONO_WATCH_FOLDER). A report that the watch makes
by itself during a test that is not marked `@pytest.mark.provokes` is a false alarm, and fails the
run. Reports attached to exceptions are only counted: the test itself checks the exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unisono.watch import Report, load


class Alarms:
    """pytest's hooks in the controller."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = set(self._files())
        self._provoking: set[str] = set()
        self._tests = 0
        self._raised = 0
        self._provoked: list[tuple[str, Report]] = []
        self._false: list[tuple[str, Report]] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._provoking = {item.nodeid for item in items if item.get_closest_marker("provokes")}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._tests += 1
        self._take(nodeid, nodeid in self._provoking)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._take("after the last test", False)
        if self._false and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for title, found in (("provoked", self._provoked), ("FALSE ALARMS", self._false)):
            if found:
                terminalreporter.section(f"reports of the watch: {title}")
            for nodeid, report in found:
                terminalreporter.write_line(f"{nodeid}: {report.kind}: {report.verdict}")
        terminalreporter.write_line(
            f"watched: {self._tests} tests; {len(self._false)} false alarms; "
            f"{len(self._provoked)} reports that were provoked, {self._raised} in exceptions"
        )

    def _take(self, nodeid: str, provokes: bool) -> None:
        for file in sorted(self._files()):
            if file in self._known:
                continue
            self._known.add(file)
            if file.name.startswith("raised-"):
                self._raised += 1
                continue
            (self._provoked if provokes else self._false).append((nodeid, load(file)))

    def _files(self) -> Iterator[Path]:
        return self._folder.glob("*.json")
