"""Keeps the records of ranks, even after the last rank has ended.

Ranks send the descriptor of each group's segment as soon as it exists, so that nothing is lost if
the group is closed at once or the process is killed. They also send reports.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from unisono.comm.shared_memory.record_reader import RecordFollower, read_segment, segment_key
from unisono.comm.shared_memory.records import Process
from unisono.comm.shared_memory.segment_listeners import (
    NOTES,
    REPORT,
    SEGMENT,
    new_socket_pair,
    receive_message,
)
from unisono.errors import UnisonoError
from unisono.watch.calls import failed_calls, waits, with_creations
from unisono.watch.differences import mismatch
from unisono.watch.hangs import hang
from unisono.watch.report import Report, from_text, global_culprits
from unisono.watch.traces import Trace
from unisono.watch.whereabouts import Whereabouts

_PERIOD_S = 0.1
_TRACE_PERIOD_S = 0.005
_LAST = 64
_LEFT_KEPT = 16
"""How many closed groups are kept, for the verdict on how the ranks ended."""


class RecordKeeper:
    """A thread that holds the segments of the ranks' groups, and writes traces of them.
    `notes` gets the descriptor of each process's waits. `ranks_fd` is the descriptor that the ranks
    inherit; `give_up` is called, with the reason and the culprit's rank, `grace_s` after their
    first report."""

    def __init__(
        self,
        traces: Sequence[Trace],
        notes: dict[int, int],
        grace_s: float,
        give_up: Callable[[str, int], None],
    ) -> None:
        self._grace_s = grace_s
        self._give_up = give_up
        self._ours, self._ranks = new_socket_pair()
        self._ours.setblocking(False)
        self.ranks_fd = self._ranks.fileno()
        self._kept: dict[tuple[int, int], int] = {}
        self._tidy_at = 2 * _LEFT_KEPT
        self._traces, self._notes = traces, notes
        self.report: Report | None = None
        """Of something that cannot resolve by itself."""
        self._give_up_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono record keeper", daemon=True)
        self._thread.start()

    def __enter__(self) -> RecordKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        """The ranks have ended: write the traces."""
        self._stop.set()
        self._thread.join()
        self._receive()
        self._write_traces()
        for descriptor in (*self._kept.values(), *self._notes.values()):
            os.close(descriptor)
        self._kept.clear()
        self._ours.close()
        self._ranks.close()

    def verdict(self, endings: Mapping[int, str]) -> Report | None:
        """The verdict on ranks that have all ended; `endings` says how, by process."""
        read = [read_segment(descriptor, _LAST) for descriptor in list(self._kept.values())]
        groups = with_creations(group for group in read if group is not None)
        different = mismatch(groups)
        if different is not None:
            return different

        def whereabouts(process: Process) -> Whereabouts:
            return Whereabouts(state=endings.get(process[1], "has ended"))

        found = [*waits(groups), *failed_calls(groups)]
        for wait in sorted(found, key=lambda wait: wait.is_for_anybody()):
            if wait.missing():
                return hang(groups, wait, whereabouts)
        return None

    def _write_traces(self) -> None:
        for trace in self._traces:
            try:
                trace.write()
                say = trace.written
            except OSError as error:  # how the ranks ended is more important
                say = f"the {trace.what} {trace.path} could not be written: {error.strerror}"
            print(f"unisono: {say}", file=sys.stderr)

    def _run(self) -> None:
        period_s = _PERIOD_S
        while not self._stop.is_set():
            select.select([self._ours], [], [], period_s)
            self._receive()
            soon = [trace.look() for trace in self._traces]
            period_s = _TRACE_PERIOD_S if any(soon) else _PERIOD_S
            if self._give_up_at is not None and time.monotonic() >= self._give_up_at:
                self._give_up_at = None
                self._pass_on_report()

    def _pass_on_report(self) -> None:
        """Give up ranks whose reported problem cannot resolve by itself."""
        assert self.report is not None
        culprit = next(iter(global_culprits(self.report)), -1)
        self._give_up(
            f"ended {self._grace_s:g} s after the watch's report (--watch-grace)", culprit
        )

    def _receive(self) -> None:
        """Receive what the ranks have sent."""
        while True:
            try:
                message, descriptors = receive_message(self._ours)
            except OSError:  # nothing left, or no room for more descriptors
                return
            if not message:
                return
            if message[:1] == SEGMENT:
                for descriptor in descriptors:
                    self._keep(descriptor)
            elif message[:1] == NOTES:
                (self._notes[int(message[1:])],) = descriptors
            elif message[:1] == REPORT and self.report is None:
                with contextlib.suppress(UnisonoError):
                    self.report = from_text(message[1:].decode())
                    self._give_up_at = time.monotonic() + self._grace_s

    def _keep(self, descriptor: int) -> None:
        key = segment_key(descriptor)
        if key in self._kept:
            os.close(descriptor)
            return
        self._kept[key] = descriptor
        with contextlib.suppress(UnisonoError, OSError):
            for trace in self._traces:
                trace.follow(descriptor)
        if len(self._kept) > self._tidy_at:
            left = [key for key, kept in self._kept.items() if _is_left(kept)]
            for key in left[:-_LEFT_KEPT]:
                os.close(self._kept.pop(key))
            self._tidy_at = 2 * max(_LEFT_KEPT, len(self._kept))


def _is_left(descriptor: int) -> bool:
    try:
        with contextlib.closing(RecordFollower(descriptor)) as follower:
            return follower.is_left()
    except (UnisonoError, OSError):
        return True
