"""All connections of this process to processes of other hosts, made when they are first needed.

Two processes that both know that they need each other connect by the store in which the world met.
Where only one knows, it knocks: a thread of every process waits at its own door in the store.

Each connection is a link, which carries data (link.py), and a line beside it, which carries the end
of groups and tells when the other process or its host is gone (control_line.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Protocol

from unisono.comm.hosts.control_line import ControlLines
from unisono.comm.hosts.identity import Hosts
from unisono.comm.hosts.link import Frame, Kind, Link
from unisono.comm.hosts.network import make_gloo
from unisono.errors import RendezvousError

_DAY = timedelta(days=1)


class Party(Protocol):
    """A group's end of the connections: what they bring it."""

    key: bytes

    def on_frame(self, peer: int, frame: Frame) -> None: ...

    def on_ending(self, text: str) -> None:
        """Another host's member has ended the group, and says why."""

    def on_lost(self, peer: int, why: str) -> None:
        """The process of a global rank is gone; `why` says how, behind its name in a sentence, and
        is "" where it has ended in order."""


class Links:
    """The connections of one process of a world. Groups hold on to them by `share` and `close`."""

    def __init__(self, store: Any, hosts: Hosts, me: int) -> None:
        self.hosts = hosts
        self.me = me
        self._store = store
        self._lock = threading.Lock()
        self._links: dict[int, Link | threading.Event] = {}
        self._problems: dict[int, str] = {}
        self._lost: dict[int, str] = {}
        self._parties: dict[bytes, weakref.ref[Party]] = {}
        self._early: dict[bytes, list[tuple[int, Frame]]] = {}
        self._early_endings: dict[bytes, str] = {}
        self._holders = 0
        self._is_closed = False
        self._knocks = 0
        self._door: threading.Thread | None = None
        self._lines = ControlLines(hosts.address, me, hosts.secret, self._on_line, self._on_lost)
        store.set(_where_key(me), json.dumps(self._lines.where))
        atexit.register(_close_at_exit, weakref.ref(self))

    def share(self) -> Links:
        """One more holds on to them."""
        with self._lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """One less does; the last one ends all connections."""
        with self._lock:
            self._holders -= 1
            if self._holders > 0:
                return
        self.close_all()

    def close_all(self) -> None:
        """Say goodbye to everybody."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            links = [link for link in self._links.values() if isinstance(link, Link)]
        if self._door is not None:
            with contextlib.suppress(Exception):  # the store's host may be gone
                self._knock(self.me)
        for link in links:
            link.close()
        self._lines.close()

    # -- groups ----------------------------------------------------------------------------------

    def add(self, party: Party) -> None:
        """Let a group have the frames with its key, those that have come already included."""
        with self._lock:
            self._parties[party.key] = weakref.ref(party)
            early = self._early.pop(party.key, [])
            ending = self._early_endings.pop(party.key, None)
            lost = dict(self._lost)
        for peer, frame in early:
            party.on_frame(peer, frame)
        if ending is not None:
            party.on_ending(ending)
        for peer, why in lost.items():
            party.on_lost(peer, why)

    def remove(self, party: Party) -> None:
        """Frames with its key are nobody's from now on."""
        with self._lock:
            self._parties.pop(party.key, None)
            self._early.pop(party.key, None)

    def _on_frame(self, peer: int, frame: Frame) -> None:
        with self._lock:
            reference = self._parties.get(frame.group)
            if reference is None and frame.kind != Kind.CLOSED:
                self._early.setdefault(frame.group, []).append((peer, frame))
        party = reference() if reference is not None else None
        if party is not None:
            party.on_frame(peer, frame)

    def tell_ending(self, peer: int, key: bytes, text: str) -> None:
        """Tell the process of a global rank, ahead of all data, why a group has ended."""
        self._lines.send(peer, {"group": key.hex(), "ending": text})

    def _on_line(self, peer: int, message: dict[str, Any]) -> None:
        key, text = bytes.fromhex(message["group"]), str(message["ending"])
        with self._lock:
            reference = self._parties.get(key)
            if reference is None:
                self._early_endings[key] = text
        party = reference() if reference is not None else None
        if party is not None:
            party.on_ending(text)

    def _on_lost(self, peer: int, why: str) -> None:
        self._on_end(peer, why)
        link = self.peer(peer)
        if link is not None:
            link.hang_up()

    def _on_end(self, peer: int, why: str) -> None:
        with self._lock:
            if self._is_closed or peer in self._lost:
                return
            self._lost[peer] = why
            parties = [reference() for reference in self._parties.values()]
        for party in parties:
            if party is not None:
                party.on_lost(peer, why)

    # -- connections -----------------------------------------------------------------------------

    def peer(self, peer: int) -> Link | None:
        """The connection to a global rank, if there is one."""
        link = self._links.get(peer)
        return link if isinstance(link, Link) else None

    def connect(self, peers: Iterable[int], timeout_s: float, *, knocks: bool = False) -> None:
        """Have connections to these global ranks, which either connect to this one by themselves
        or, with `knocks`, are told to. Raises RendezvousError if that fails."""
        waiting = [(peer, self._begin(peer, timeout_s, knocks)) for peer in peers]
        for peer, event in waiting:
            if event is not None and not event.wait(timeout_s + 5.0):
                raise RendezvousError(f"no connection to {self.hosts.name_rank(peer)}")
            if peer in self._problems:
                raise RendezvousError(self._problems[peer])

    def _begin(self, peer: int, timeout_s: float, knocks: bool) -> threading.Event | None:
        with self._lock:
            known = self._links.get(peer)
            if isinstance(known, Link):
                return None
            if known is not None:
                return known
            event = self._links[peer] = threading.Event()
        # beside each other: processes have their peers in different orders
        threading.Thread(
            target=self._make,
            args=(peer, event, timeout_s, knocks),
            name=f"unisono connects to rank {peer}",
            daemon=True,
        ).start()
        return event

    def _make(self, peer: int, event: threading.Event, timeout_s: float, knocks: bool) -> None:
        low, high = sorted((self.me, peer))
        try:
            if knocks:
                self._knock(peer)
            store = self._store.clone()  # its own connection: a store answers one at a time
            address, port = json.loads(store.get(_where_key(peer)))
            self._lines.connect(peer, (address, port), timeout_s)
            name = f"unisono/link/{low}-{high}"
            gloo = make_gloo(store, name, int(self.me == high), 2, self.hosts.address, timeout_s)
            link = Link(peer, gloo, self._on_frame, self._on_end)
            with self._lock:
                self._links[peer] = link
                is_late = self._is_closed
            if is_late:
                link.close()
        except Exception as error:
            self._problems[peer] = f"no connection to {self.hosts.name_rank(peer)}: {error}"
        event.set()

    # -- the door --------------------------------------------------------------------------------

    def open_door(self) -> None:
        """Connect to whoever knocks, from now on."""
        with self._lock:
            if self._door is not None:
                return
            self._door = threading.Thread(
                target=_wait_at_door,
                args=(weakref.ref(self), self._store.clone(), self.me),
                name="unisono door",
                daemon=True,
            )
        self._door.start()

    def _knock(self, peer: int) -> None:
        store = self._store.clone()
        number = store.add(f"unisono/knocks/{peer}", 1)
        store.set(f"unisono/knock/{peer}/{number}", str(self.me))


def _where_key(rank: int) -> str:
    """Under which the store has where a rank's lines are to be called."""
    return f"unisono/line/{rank}"


def _wait_at_door(reference: weakref.ref[Links], store: Any, me: int) -> None:
    number = 0
    while True:
        key = f"unisono/knock/{me}/{number + 1}"
        try:
            store.wait([key], _DAY)
        except Exception as error:
            if "imeout" in str(error) or "imed out" in str(error):
                continue
            return  # the store is gone, and with it whoever could knock
        number += 1
        links = reference()
        if links is None or links._is_closed:
            return
        with contextlib.suppress(Exception):
            peer = int(store.get(key))
            if peer != me:
                links._begin(peer, 60.0, False)
        del links


def _close_at_exit(reference: weakref.ref[Links]) -> None:
    links = reference()
    if links is not None:
        links.close_all()
