"""The trace that this process records at the moment: when it begins, what it follows, who writes
it.

Over hosts the first host's lowest rank writes it, and the others send it their parts. Each host has
its own clock (CLOCK_MONOTONIC starts with the machine). The lowest rank of every other host reads
the first host's clock over the line between them when it sends its part.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from unisono.comm.shared_memory.record_reader import segments_of
from unisono.comm.shared_memory.records import GroupRecords
from unisono.comm.shared_memory.segment_listeners import listeners
from unisono.errors import UnisonoError
from unisono.watch.job_view import describe, group_from, open_links
from unisono.watch.traces import Trace, TracePart

if TYPE_CHECKING:
    from unisono.comm.hosts.links import Links

TOPIC = "trace"
_PEERS_S = 0.3
"""How often to look for new groups of the other ranks."""
_SETTLE_S = 1.0  # for calls that other ranks have not quite finished at the end of a trace
_AT_ONCE = 5000
"""How many records go into one message."""
_ACCEPT_S = 10.0
_AWAIT_S = 10.0
_logger = logging.getLogger("unisono")


class Tracing:
    """One trace at a time. `retire` records the ends of calls, before the trace ends."""

    def __init__(self, retire: Callable[[], object]) -> None:
        self._retire = retire
        self._lock = threading.Lock()
        self._trace: Trace | None = None
        self._held: Trace | None = None
        self._serial = 0
        self._links: Links | None = None
        self._follow_again_s = 0.0

    def begin(self, trace: Trace) -> None:
        """Collect records from now on."""
        self.end()
        self._serial += 1
        self._links = next(iter(open_links()), None)
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
                self._find_links()
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
        self._find_links()
        links = self._links
        if links is not None and links.hosts.mine != 0:
            trace.collect(to_the_end=True)
            if not _send(links, self._serial, trace.groups(), trace.lost()):
                _logger.warning(
                    "unisono: the first host did not accept this host's part of a trace"
                )
            trace.close()
            return
        parts, missing = ([], []) if links is None else inbox.take(links, self._serial)
        for part in parts:
            trace.add(part)
        try:
            trace.write(missing)
        except OSError as error:
            why = trace.path, error.strerror
            _logger.warning("unisono: the %s %s could not be written: %s", trace.what, *why)
        if missing:
            _logger.warning("unisono: the trace does not include %s", " and ".join(missing))

    def _find_links(self) -> None:
        """Look for other hosts: a trace may start before the ranks have met."""
        self._links = self._links or next(iter(open_links()), None)

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


# -- over hosts ----------------------------------------------------------------------------------


def _send(links: Links, serial: int, groups: Sequence[GroupRecords], lost: int) -> bool:
    """Send this host's part of the `serial`-th trace to the host that writes it; returns whether it
    was accepted."""
    if not links.is_open():
        return False
    writer, hosts = links.hosts.leader(0), links.hosts
    behind = links.questions.read_clock(writer)
    ahead_s, error_s = (None, None) if behind is None else (-behind[0], behind[1])
    part = {"host": hosts.names[hosts.mine], "number": hosts.mine, "dropped": lost}
    part |= {"ahead_s": ahead_s, "error_s": error_s}
    pieces = [
        replace(group, ranks=(replace(member, records=member.records[at : at + _AT_ONCE]),))
        for group in groups
        for member in group.ranks
        for at in range(0, max(1, len(member.records)), _AT_ONCE)
    ]
    return all(
        links.questions.ask(
            [writer], TOPIC, {"serial": serial, "part": part, "group": told}, _ACCEPT_S
        )
        for told in chain(map(describe, pieces), [None])
    )


class Inbox:
    """Parts of traces that other hosts have sent to this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[tuple[int, int], list[GroupRecords]] = {}
        self._parts: dict[tuple[int, int], TracePart] = {}

    def accept(self, message: dict[str, Any]) -> bool:
        """Handle a message of a host, the last of which has no group; returns the answer."""
        part, group = message["part"], message["group"]
        key = message["serial"], part["number"]
        with self._changed:
            groups = self._groups.setdefault(key, [])
            if group is not None:
                ahead_s = part["ahead_s"] or 0.0
                groups.append(group_from(group, part["host"], part["number"], ahead_s))
            else:
                self._parts[key] = TracePart(**part, groups=tuple(self._groups.pop(key)))
                self._changed.notify_all()
        return True

    def take(self, links: Links, serial: int) -> tuple[list[TracePart], list[str]]:
        """What the other hosts have sent, and the names of those that did not send in time."""
        keys = [(serial, host) for host in range(links.hosts.count) if host != links.hosts.mine]
        within_s = _AWAIT_S if links.is_open() else 0.0
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._parts for key in keys), within_s)
            missing = [links.hosts.names[key[1]] for key in keys if key not in self._parts]
            return [self._parts.pop(key) for key in keys if key in self._parts], missing


inbox = Inbox()
