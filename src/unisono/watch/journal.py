"""The reports of this process: each is kept, saved and logged once."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys

from unisono import variables
from unisono.output_files import temporary_folder
from unisono.watch.exit_status import has_failed
from unisono.watch.report import ADVICE, Report, in_brief

Key = tuple[tuple[int, int], int]
"""A call of a group: its segment and the number of the record, or one of the next."""
DIFFERENT, SHIFTED, SLOW = -1, -2, -3
"""In place of a call's number: the first that differs, a step, all calls."""

_logger = logging.getLogger("unisono")
_own_files: list[tuple[int, str]] = []
"""What was saved where no folder was named, and by which process."""


class Journal:
    """`reports` are those about calls of this rank, the newest last; `folder` is where they are
    saved, by default `folder_of_launch()`; `told` says what they were about."""

    def __init__(self, folder: str) -> None:
        self.reports: list[Report] = []
        self.told: set[Key] = set()
        self._folder = folder
        self._paths: dict[str, str] = {}
        self._saved = 0

    def keep(self, report: Report, key: Key | None = None, how: str = "seen") -> bool:
        """Remember a report and its `key`, so that it is made only once, and write it to a file;
        returns whether it is new. `how` starts the file's name: "seen" by the watch, or "raised" in
        an exception."""
        if key is not None:
            self.told.add(key)
        if any(known.verdict == report.verdict for known in self.reports):
            return False
        self.reports.append(report)
        self.save(report, how)
        return True

    def tell(self, report: Report, speaks: bool = True, key: Key | None = None) -> bool:
        """Keep a report, and log it if it is new and this rank `speaks`; returns whether it was
        logged."""
        is_logged = self.keep(report, key) and speaks
        if is_logged:
            self.log(report)
        return is_logged

    def log(self, report: Report) -> None:
        """Log a report that was saved."""
        headline, *evidence = (line.removeprefix("  ") for line in str(report).splitlines())
        advice, *_ = ADVICE.get(report.kind, ("",))
        path = self._paths.get(report.verdict, "")
        is_short = variables.TERMINAL.read_or_warn() or (sys.stderr and sys.stderr.isatty())
        text = in_brief(headline, evidence, advice, path, bool(is_short))
        _logger.warning("unisono.watch: %s", text)

    def save(self, report: Report, how: str) -> None:
        """Write a report to the folder for reports."""
        folder = self._folder or folder_of_launch()
        self._saved += 1
        name = f"{how}-{report.kind}-{os.getpid()}-{self._saved}.json"
        path = os.path.join(folder, name)
        try:
            if folder:
                report.save(path)
                self._paths[report.verdict] = path
        except OSError as error:
            _logger.warning("unisono.watch: a report could not be saved: %s", error)
        if folder != self._folder:
            _own_files.append((os.getpid(), path))


def folder_of_launch() -> str:
    """Where processes that one launcher has started on this machine save their reports if no folder
    was named: one for temporary files, which only this user can write. "" if there is none."""
    with contextlib.suppress(OSError):
        folder = os.path.join(temporary_folder(), f"unisono-reports-{os.getppid()}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.lstat(folder)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
            return folder
    return ""


def discard_unless_failed() -> None:
    """A program that ends well leaves no reports where no folder was named for them."""
    for pid, path in () if has_failed() else _own_files:
        if pid == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(path)
                os.rmdir(os.path.dirname(path))
