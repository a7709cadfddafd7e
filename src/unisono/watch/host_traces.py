"""A trace over hosts: the first host's lowest rank writes it, and the others send it their parts.

Each host has its own clock (CLOCK_MONOTONIC starts with the machine). The lowest rank of every
other host reads the first host's clock over the line between them when it sends its part.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.watch.job_view import by_our_clock, group_on_host, open_links

TOPIC = "trace"
_AT_ONCE = 5000
"""How many records go into one message."""
_ACCEPT_S = 10.0
_AWAIT_S = 10.0


@dataclass(frozen=True)
class TracePart:
    """What the ranks of the `number`-th host did, by the first host's clock. Its own clock was
    `ahead_s` ahead, within `error_s`; both are None if they could not be compared."""

    host: str
    number: int
    ahead_s: float | None
    error_s: float | None
    groups: tuple[GroupRecords, ...]
    records: tuple[tuple[int, int, Record], ...]
    """The number of a group, a rank of it, and the record."""
    dropped: int


class HostTraces:
    """This process's exchange with other hosts for the `serial`-th trace."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self._links = next(iter(open_links()), None)

    def find_links(self) -> None:
        """Look for other hosts: a trace may start before the ranks have met."""
        if self._links is None:
            self._links = next(iter(open_links()), None)

    def writes(self) -> bool:
        """Whether the lowest rank of this host writes the file: it does on the first one."""
        return self._links is None or self._links.hosts.mine == 0

    def send(
        self,
        groups: Sequence[GroupRecords],
        records: Sequence[tuple[int, int, Record]],
        dropped: int,
    ) -> bool:
        """Send this host's part to the one that writes; returns whether it was accepted."""
        links = self._links
        if links is None or not links.is_open():
            return False
        writer, hosts = links.hosts.leader(0), links.hosts
        behind = links.questions.read_clock(writer)
        rest = {
            "host": hosts.names[hosts.mine],
            "ahead_s": None if behind is None else -behind[0],
            "error_s": None if behind is None else behind[1],
            "groups": [asdict(group) for group in groups],
            "dropped": dropped,
        }
        for begin in range(0, max(1, len(records)), _AT_ONCE):
            some = records[begin : begin + _AT_ONCE]
            message = {
                "serial": self.serial,
                "number": hosts.mine,
                "records": [(group, rank, asdict(record)) for group, rank, record in some],
                "rest": rest if begin + _AT_ONCE >= len(records) else None,
            }
            if not links.questions.ask([writer], TOPIC, message, _ACCEPT_S):
                return False
        return True

    def parts(self) -> tuple[list[TracePart], list[str]]:
        """What the other hosts have sent, and the names of those that did not send in time."""
        links = self._links
        if links is None:
            return [], []
        others = [number for number in range(links.hosts.count) if number != links.hosts.mine]
        found = inbox.take(self.serial, others, _AWAIT_S if links.is_open() else 0.0)
        missing = [links.hosts.names[number] for number in others if number not in found]
        return [found[number] for number in sorted(found)], missing


class Inbox:
    """Parts of traces that other hosts have sent to this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: dict[tuple[int, int], list[tuple[int, int, Record]]] = {}
        self._parts: dict[tuple[int, int], TracePart] = {}

    def accept(self, message: dict[str, Any]) -> bool:
        """Handle a message of a host; returns the answer."""
        key = int(message["serial"]), int(message["number"])
        with self._changed:
            records = self._records.setdefault(key, [])
            records += [
                (int(group), int(rank), Record(**record))
                for group, rank, record in message["records"]
            ]
            rest = message["rest"]
            if rest is not None:
                ahead_s = rest["ahead_s"]
                self._parts[key] = TracePart(
                    host=str(rest["host"]),
                    number=key[1],
                    ahead_s=ahead_s,
                    error_s=rest["error_s"],
                    groups=tuple(group_on_host(found, key[1]) for found in rest["groups"]),
                    records=tuple(
                        (group, rank, by_our_clock(record, ahead_s or 0.0))
                        for group, rank, record in self._records.pop(key)
                    ),
                    dropped=int(rest["dropped"]),
                )
                self._changed.notify_all()
        return True

    def take(self, serial: int, hosts: Sequence[int], within_s: float) -> dict[int, TracePart]:
        """The parts of these hosts that arrive in time."""
        keys = [(serial, host) for host in hosts]
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._parts for key in keys), within_s)
            return {key[1]: self._parts.pop(key) for key in keys if key in self._parts}


inbox = Inbox()
