"""A trace over hosts: the first host's lowest rank writes it, and the others send it their parts.

Each host has its own clock (CLOCK_MONOTONIC starts with the machine). The lowest rank of every
other host reads the first host's clock over the line between them when it sends its part.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.comm.shared_memory.records import GroupRecords
from unisono.watch.job_view import describe, group_from, open_links

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
    dropped: int
    groups: tuple[GroupRecords, ...]
    """With their records; a group may be there several times, with some ranks or records each."""


class HostTraces:
    """This process's exchange with other hosts for the `serial`-th trace."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self._links = next(iter(open_links()), None)

    def find_links(self) -> None:
        """Look for other hosts: a trace may start before the ranks have met."""
        self._links = self._links or next(iter(open_links()), None)

    def writes(self) -> bool:
        """Whether the lowest rank of this host writes the file: it does on the first one."""
        return self._links is None or self._links.hosts.mine == 0

    def send(self, members: Sequence[GroupRecords], dropped: int) -> bool:
        """Send this host's part, each group with one rank, to the host that writes; returns whether
        it was accepted."""
        links = self._links
        if links is None or not links.is_open():
            return False
        writer, hosts = links.hosts.leader(0), links.hosts
        behind = links.questions.read_clock(writer)
        part = {
            "host": hosts.names[hosts.mine],
            "number": hosts.mine,
            "ahead_s": None if behind is None else -behind[0],
            "error_s": None if behind is None else behind[1],
            "dropped": dropped,
        }
        pieces = [
            replace(
                group, ranks=(replace(member, records=member.records[begin : begin + _AT_ONCE]),)
            )
            for group in members
            for member in group.ranks
            for begin in range(0, max(1, len(member.records)), _AT_ONCE)
        ]
        for group in [*pieces, None]:
            told = describe(group) if group is not None else None
            message = {"serial": self.serial, "part": part, "group": told}
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

    def take(self, serial: int, hosts: Sequence[int], within_s: float) -> dict[int, TracePart]:
        """The parts of these hosts that arrive in time."""
        keys = [(serial, host) for host in hosts]
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._parts for key in keys), within_s)
            return {key[1]: self._parts.pop(key) for key in keys if key in self._parts}


inbox = Inbox()
