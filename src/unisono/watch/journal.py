"""The reports of this process: each is kept, saved and logged once."""

from __future__ import annotations

import logging
import os

from unisono.watch.report import Report

Key = tuple[tuple[int, int], int]
"""A call of a group: its segment and the number of the record, or one of the next."""
DIFFERENT, SHIFTED, SLOW = -1, -2, -3
"""In place of a call's number: the first that differs, a step, all calls."""

_logger = logging.getLogger("unisono")


class Journal:
    """`reports` are those about calls of this rank, the newest last; `folder` is where they are
    saved, if anywhere; `told` says what they were about."""

    def __init__(self, folder: str) -> None:
        self.reports: list[Report] = []
        self.told: set[Key] = set()
        self._folder = folder
        self._saved = 0

    def keep(self, report: Report, key: Key | None = None, how: str = "seen") -> bool:
        """Remember a report and its `key`, so that it is made only once; returns whether it is
        new."""
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
            _logger.warning("unisono.watch: %s", report)
        return is_logged

    def save(self, report: Report, how: str) -> None:
        """Write a report to the folder for reports, if there is one. `how` starts the file's name:
        "seen" by the watch, or "raised" in an exception."""
        if not self._folder:
            return
        self._saved += 1
        name = f"{how}-{report.kind}-{os.getpid()}-{self._saved}.json"
        try:
            report.save(os.path.join(self._folder, name))
        except OSError as error:
            _logger.warning("unisono.watch: a report could not be saved: %s", error)
