"""Keeps the records of ranks while they run, so that they outlive even the last of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

from unisono.comm.records import read_segment, segments_of
from unisono.errors import UnisonoError
from unisono.watch.calls import failed, waits
from unisono.watch.diagnose import Whereabouts, hang, mismatch
from unisono.watch.report import Report

_PERIOD_S = 0.3
_LAST = 64


class Keeper:
    """A thread that opens the segments of the processes that `pids` names, and lets none go."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._kept: dict[tuple[int, int], int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono keeper", daemon=True)
        self._thread.start()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for descriptor in self._kept.values():
            os.close(descriptor)
        self._kept.clear()

    def verdict(self, endings: Mapping[int, str]) -> Report | None:
        """What the records say of ranks that have all ended; `endings` says how, by process."""
        groups = []
        for descriptor in list(self._kept.values()):
            found = read_segment(descriptor, _LAST)
            if found is not None:
                groups.append(found)
        different = mismatch(groups)
        if different is not None:
            return different
        for wait in [*waits(groups), *failed(groups)]:
            if wait.missing():
                return hang(groups, wait, lambda pid: _ended(endings, pid))
        return None

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_S):
            for pid in list(self._pids()):
                self._keep(pid)

    def _keep(self, pid: int) -> None:
        try:
            for path in segments_of(pid):
                facts = os.stat(path)
                key = facts.st_dev, facts.st_ino
                if key not in self._kept:
                    self._kept[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, UnisonoError):
            return  # it has ended


def _ended(endings: Mapping[int, str], pid: int) -> Whereabouts:
    return Whereabouts(state=endings.get(pid, "has ended"))
