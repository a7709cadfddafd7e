"""Deadlock across hosts: a circle of ranks that wait for each other's messages.

A rank that has waited for a message for a while sends a *probe* to the rank that it waits for, over
the line between them. Whoever gets a probe and waits for a message itself passes it on to the rank
that it waits for in turn. A probe that comes back to its sender, who still waits as it did, has
gone round a circle (Chandy, Misra and Haas, 1983).

Nobody in it can go on: each rank, when it passed the probe on, could go on only with the help of
the next one, and had received all that this one, which waited already when the probe came, had sent
it. For that, ranks count what they send each other; for two ranks of one host the engine tells. The
same circle must be found twice, for a thread of the program that does not wait may yet send
something. Who has other receives under way, or waits in several threads, passes no probe on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unisono.comm.engine import where_is_program
from unisono.comm.hosts.causes import Cause
from unisono.comm.shared_memory.memory_transport import SharedMemory

if TYPE_CHECKING:
    from unisono.comm.hosts.messages import HostsMessages
    from unisono.comm.hosts.post_office import LinkMessage

_EVERY_S = 0.3
"""How long a rank waits before it sends a probe, and then before the next."""


@dataclass(frozen=True)
class Wait:
    """What this rank waits for: a message from or to a global rank, alone. `received` is how much
    has come from there until now; `number` tells this wait from every other one."""

    number: int
    peer: int
    received: int
    doing: str


class DeadlockSearch:
    """The part of one rank of a group in it."""

    def __init__(self, group: HostsMessages) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._waits: list[tuple[int, LinkMessage]] = []
        self._number = 0
        self._next = 0.0
        self._found: object = None

    def count_sent(self, peer: int) -> None:
        """Something for a global rank, by which it may go on, is about to be sent."""
        with self._lock:
            self._sent[peer] += 1

    def count_received(self, peer: int) -> None:
        """Such a thing has come, and whoever waited for it goes on."""
        with self._lock:
            self._received[peer] += 1

    @contextlib.contextmanager
    def waiting(self, work: LinkMessage) -> Iterator[None]:
        """While a thread waits for this message."""
        with self._lock:
            self._number += 1
            entry = self._number, work
            self._waits.append(entry)
            self._next = time.monotonic() + _EVERY_S
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(entry)

    def look(self) -> None:
        """Send a probe, if it is time for one; called now and then by a thread that waits."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        wait = self._own_wait()
        if wait is not None:
            self._pass_on({"initiator": self._me, "wait": wait.number, "path": []}, wait)

    def on_probe(self, probe: dict[str, Any]) -> None:
        """A rank that waits for this one asks what this one waits for."""
        wait = self._own_wait()
        if wait is None or not self._has_all(probe):
            return
        again = self._own_wait()
        if again is None or again.number != wait.number:
            return  # it has gone on, and may have sent something, meanwhile
        path = [tuple(hop) for hop in probe["path"]]
        if probe["initiator"] != self._me:
            if self._me not in [hop[0] for hop in path]:  # else that rank finds it by itself
                self._pass_on(probe, wait)
        elif probe["wait"] == wait.number:
            self._report([(rank, number, doing, site) for rank, number, doing, site in path])

    @property
    def _me(self) -> int:
        return self._group.links.me

    def _own_wait(self) -> Wait | None:
        """What this rank waits for, if nothing but that can let it go on."""
        with self._lock:
            waits = list(self._waits)
            received = dict(self._received)
        if len(waits) == 1:
            number, work = waits[0]
            if work.peer is None or not self._group.office.is_alone(work):
                return None
            return Wait(number, work.peer, received.get(work.peer, 0), work.doing)
        local = self._group.local.transport
        if waits or not isinstance(local, SharedMemory):
            return None
        stuck = local.group.stuck(local.rank)
        if stuck is None or not self._group.office.is_alone(None):
            return None
        number, peer = stuck
        doing = self._describe_local_wait(local)
        return Wait(number, self._global_rank_here(peer), 0, doing)

    def _has_all(self, probe: dict[str, Any]) -> bool:
        """Whether the rank that waits for us, and sent the probe on, has received all that we have
        sent it, and waits still."""
        sender, *_ = probe["path"][-1]
        local = self._group.local.transport
        here = self._group.placement.here
        ranks = [self._group.placement.members[rank] for rank in here]
        if sender in ranks:
            assert isinstance(local, SharedMemory)
            _, number, _, _ = probe["path"][-1]
            return local.group.stuck(ranks.index(sender)) == (number, local.rank)
        with self._lock:
            return bool(self._sent[sender] == probe["received"])

    def _pass_on(self, probe: dict[str, Any], wait: Wait) -> None:
        hop = (self._me, wait.number, wait.doing, where_is_program())
        further = probe | {"path": [*probe["path"], hop], "received": wait.received}
        self._group.links.tell_probe(wait.peer, self._group.key, further)

    def _report(self, path: list[tuple[int, int, str, str]]) -> None:
        circle = [(rank, number) for rank, number, _, _ in path]
        if self._found != circle:
            self._found = circle
            return
        members = self._group.placement.members
        cycle = tuple(members.index(rank) for rank, *_ in path)
        lines = [
            f"  rank {rank}: {doing} at {site}"
            for rank, (_, _, doing, site) in zip(cycle, path, strict=True)
        ]
        receives = all(doing.startswith("recv") for _, _, doing, _ in path)
        advice = (
            "Everybody receives and nobody has sent: let one side send first."
            if receives
            else "A send waits until it is received: let one side receive first, or use isend."
        )
        self._group.end(Cause("DeadlockError", "\n".join([*lines, advice]), cycle=cycle))

    def _describe_local_wait(self, local: SharedMemory) -> str:
        waiting = local.group.waiting(local.rank)
        if waiting is None:
            return "a message"
        sends, _, peer, tag, *_ = waiting
        rank = self._group.placement.here[peer]
        return f"{'send to' if sends else 'recv from'} {self._group.name_rank(rank)} (tag {tag})"

    def _global_rank_here(self, local_rank: int) -> int:
        return self._group.placement.members[self._group.placement.here[local_rank]]
