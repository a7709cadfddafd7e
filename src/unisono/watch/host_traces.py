"""A trace over hosts: the first host's lowest rank writes it, and the others send it their parts.

Each host has a clock of its own (CLOCK_MONOTONIC begins when a machine starts). The lowest rank of
every other host reads the first host's clock over the line between them when a trace begins and
when it ends; between the two readings clocks are taken to run evenly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.watch.from_json import build
from unisono.watch.job_view import by_our_clock, group_on_host, open_links

if TYPE_CHECKING:
    from unisono.comm.hosts.links import Links

TOPIC = "trace"
_AT_ONCE = 5000
"""How many records go into one message."""
_ACCEPT_S = 10.0
_AWAIT_S = 10.0


@dataclass(frozen=True)
class Reading:
    """At `at_s` of our clock the first host's showed `behind_s` less, give or take `error_s`."""

    at_s: float
    behind_s: float
    error_s: float


@dataclass(frozen=True)
class TracePart:
    """What the ranks of a host did, by its own clock; `readings` tell what that is worth."""

    host: str
    number: int
    readings: tuple[Reading, ...]
    groups: tuple[GroupRecords, ...]
    records: tuple[tuple[int, int, Record], ...]
    """The number of a group, a rank of it, and the record."""
    dropped: int

    def behind_s(self, moment_s: float) -> float:
        """How much less the first host's clock showed at a moment of this host's."""
        if not self.readings:
            return 0.0
        first, last = self.readings[0], self.readings[-1]
        if last.at_s <= first.at_s:
            return last.behind_s
        share = (moment_s - first.at_s) / (last.at_s - first.at_s)
        return first.behind_s + share * (last.behind_s - first.behind_s)

    def by_first_clock(self, record: Record) -> Record:
        """A record by the first host's clock."""
        return by_our_clock(record, self.behind_s)

    def describe_clock(self) -> dict[str, Any]:
        """For the file: how far this host's clock was ahead, and how sure that is."""
        if not self.readings:
            return {"ahead_us": None, "error_us": None}
        last = self.readings[-1]
        drift = last.behind_s - self.readings[0].behind_s
        return {
            "ahead_us": last.behind_s * 1e6,
            "error_us": max(reading.error_s for reading in self.readings) * 1e6,
            "drift_us": drift * 1e6,
        }


class HostTraces:
    """What this process has to do with other hosts for one trace, the `serial`-th."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self._readings: list[Reading] = []
        self._links: Links | None = None

    def read_clock(self) -> None:
        """Compare our clock with the first host's, unless this is it, or there is only one."""
        if self._links is None:
            self._links = next(iter(open_links()), None)
        links = self._links
        if links is not None and links.hosts.mine > 0 and links.is_open():
            found = links.questions.read_clock(links.hosts.leader(0))
            if found is not None:
                self._readings.append(Reading(time.monotonic(), -found[0], found[1]))

    @property
    def has_read_clock(self) -> bool:
        return bool(self._readings)

    def writes(self) -> bool:
        """Whether the lowest rank of this host writes the file: it does on the first one."""
        return self._links is None or self._links.hosts.mine == 0

    def send(
        self,
        groups: Sequence[GroupRecords],
        records: Sequence[tuple[int, int, Record]],
        dropped: int,
    ) -> bool:
        """Send this host's part to the one that writes; whether that has taken it."""
        self.read_clock()
        links = self._links
        if links is None or not links.is_open():
            return False
        return all(
            links.questions.ask([links.hosts.leader(0)], TOPIC, message, _ACCEPT_S)
            for message in self._messages(links, groups, records, dropped)
        )

    def _messages(
        self,
        links: Links,
        groups: Sequence[GroupRecords],
        records: Sequence[tuple[int, int, Record]],
        dropped: int,
    ) -> Iterator[dict[str, Any]]:
        for begin in range(0, max(1, len(records)), _AT_ONCE):
            some = records[begin : begin + _AT_ONCE]
            is_last = begin + _AT_ONCE >= len(records)
            yield {
                "serial": self.serial,
                "number": links.hosts.mine,
                "records": [(group, rank, asdict(record)) for group, rank, record in some],
                "rest": {
                    "host": links.hosts.names[links.hosts.mine],
                    "readings": [asdict(reading) for reading in self._readings],
                    "groups": [asdict(group) for group in groups],
                    "dropped": dropped,
                }
                if is_last
                else None,
            }

    def parts(self) -> tuple[list[TracePart], list[str]]:
        """What the other hosts have sent, and the names of those that have not, in time."""
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
        """A message of a host; the answer to it."""
        key = int(message["serial"]), int(message["number"])
        with self._changed:
            records = self._records.setdefault(key, [])
            records += [
                (int(group), int(rank), Record(**record))
                for group, rank, record in message["records"]
            ]
            rest = message["rest"]
            if rest is not None:
                self._parts[key] = TracePart(
                    host=str(rest["host"]),
                    number=key[1],
                    readings=build(tuple[Reading, ...], rest["readings"]),
                    groups=tuple(group_on_host(found, key[1]) for found in rest["groups"]),
                    records=tuple(self._records.pop(key)),
                    dropped=int(rest["dropped"]),
                )
                self._changed.notify_all()
        return True

    def take(self, serial: int, hosts: Sequence[int], within_s: float) -> dict[int, TracePart]:
        """The parts of these hosts, as far as they come in time."""
        keys = [(serial, host) for host in hosts]
        with self._changed:
            self._changed.wait_for(lambda: all(key in self._parts for key in keys), within_s)
            return {key[1]: self._parts.pop(key) for key in keys if key in self._parts}


inbox = Inbox()


def accept_parts(wanted: bool) -> None:
    """Whether this process takes parts of traces from other hosts."""
    from unisono.comm.hosts import questions

    if wanted:
        questions.answers[TOPIC] = inbox.accept
    else:
        questions.answers.pop(TOPIC, None)
