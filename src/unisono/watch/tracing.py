"""The trace that this process records at the moment: when it begins, what it follows, who writes
it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from unisono.comm.shared_memory.record_reader import segments_of
from unisono.comm.shared_memory.segment_listeners import listeners
from unisono.errors import UnisonoError
from unisono.watch.host_traces import HostTraces
from unisono.watch.traces import Trace

_PEERS_S = 0.3
"""How often to look for new groups of the other ranks."""
_SETTLE_S = 1.0  # for calls that other ranks have not quite finished at the end of a trace
_logger = logging.getLogger("unisono")


class Tracing:
    """One trace at a time. `retire` records the ends of calls, before the trace ends."""

    def __init__(self, retire: Callable[[], object]) -> None:
        self._retire = retire
        self._lock = threading.Lock()
        self._trace: Trace | None = None
        self._held: Trace | None = None
        self._begun = 0
        self._hosts = HostTraces(0)
        self._follow_again_s = 0.0

    def begin(self, trace: Trace) -> None:
        """Collect records from now on."""
        self.end()
        self._begun += 1
        self._hosts = HostTraces(self._begun)
        _follow(trace, [os.getpid()], is_new=False)
        trace.collect()
        _follow(trace, trace.peers(), is_new=False)
        self._trace = trace  # from here on `collect` does something
        listeners.append(self._follow_new)

    @contextlib.contextmanager
    def during(self, trace: Trace) -> Iterator[None]:
        """Collect records in a block, and write the trace after it."""
        self.begin(trace)
        try:
            yield
        finally:
            if self._trace is trace:  # else something else has ended it
                self.end()

    def collect(self) -> bool:
        """Look at new records, and for new groups; returns whether to do so again soon."""
        with self._lock:
            trace = self._trace
            if trace is None:
                return False
            soon = trace.look()
            if time.monotonic() >= self._follow_again_s and trace.is_ours():
                self._hosts.find_links()
                self._follow_again_s = time.monotonic() + _PEERS_S
                _follow(trace, trace.peers())
            return soon

    def end(self) -> None:
        """Write the trace; a file that cannot be written is only a warning. Other ranks keep the
        records open for the rank that writes."""
        with self._lock:  # `collect` runs in another thread
            trace, self._trace = self._trace, None
        if trace is None:
            return
        listeners.remove(self._follow_new)
        self._retire()
        trace.settle(_SETTLE_S)
        if self._held is not None:
            self._held.close()
            self._held = None
        if not trace.is_ours():
            self._held = trace
            return
        _follow(trace, trace.peers())
        self._hosts.find_links()
        if self._hosts.writes():
            parts, missing = self._hosts.parts()
            for part in parts:
                trace.add(part)
            try:
                trace.write(missing)
            except OSError as error:
                why = trace.path, error.strerror
                _logger.warning("unisono: the %s %s could not be written: %s", trace.what, *why)
            if missing:
                _logger.warning("unisono: the trace does not include %s", " and ".join(missing))
        else:
            if not trace.send(self._hosts):
                _logger.warning(
                    "unisono: the first host did not accept this host's part of a trace"
                )
            trace.close()

    def _follow_new(self, descriptor: int) -> None:
        trace = self._trace
        if trace is not None:
            trace.follow(descriptor, is_new=True)


def _follow(trace: Trace, pids: Iterable[int], is_new: bool = True) -> None:
    """Trace the groups of these processes."""
    for pid in pids:
        with contextlib.suppress(UnisonoError):  # it has ended
            for path in segments_of(pid):
                with contextlib.suppress(UnisonoError, OSError), open(path, "rb") as file:
                    trace.follow(file.fileno(), is_new)
