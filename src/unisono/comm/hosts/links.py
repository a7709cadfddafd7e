"""All connections of this process to processes of other hosts, made when they are first needed.

Each connection is a link, which carries data (link.py), and a line beside it, which carries the end
of groups and tells when the other process or its host is gone (control_line.py). Where only one of
two processes knows that they need each other, the line comes first, and tells the other.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from unisono.comm.engine import where_is_program
from unisono.comm.hosts.control_line import ControlLines
from unisono.comm.hosts.identity import Hosts
from unisono.comm.hosts.link import Frame, Link
from unisono.comm.hosts.network import INSTEAD, find_interface, make_device, make_gloo, open_store
from unisono.comm.hosts.questions import Questions
from unisono.comm.rendezvous.bounded_store import BoundedStore, StoreGone
from unisono.comm.rendezvous.deadline import Deadline
from unisono.errors import RendezvousError

_ASKED_S = 60.0
"""How long a connection that another process has asked for may take."""
_DRAW_S = 1.0

all_links: weakref.WeakSet[Links] = weakref.WeakSet()
"""Those of this process, one for each world over hosts that it is in."""


@dataclass(frozen=True)
class GroupMembers:
    """The `name` of a group, the `key` of its records, and its members' global ranks."""

    name: str
    key: str
    members: tuple[int, ...]


class Answer(NamedTuple):
    """Where the program of a rank is, "" where that did not answer; and of a group which ranks of
    its host are stopped, and for which rank of another host it waits itself, as global ranks; and
    in which call it is, or has been last."""

    at: str = ""
    stopped: tuple[int, ...] = ()
    awaited: int = -1
    call: int = -1


class Party(Protocol):
    """A group's end of the connections: what they bring it."""

    key: bytes

    def on_frame(self, peer: int, frame: Frame) -> None: ...

    def on_ending(self, text: str) -> None:
        """Another host's member has ended the group, and says why."""

    def on_probe(self, probe: dict[str, Any]) -> None:
        """A rank that waits for this one looks for a deadlock."""

    def describe(self) -> GroupMembers: ...

    def answer(self) -> Answer:
        """A rank that waits for this one asks why."""

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
        self._made: Counter[str] = Counter()
        self._parties: dict[bytes, weakref.ref[Party]] = {}
        self._early: dict[bytes, list[tuple[int, Frame]]] = {}
        self._removed: set[bytes] = set()
        self._early_endings: dict[bytes, str] = {}
        self._drawn: set[int] = set()
        self._holders = 0
        self._is_closed = False
        self._lines = ControlLines(
            hosts.address, me, hosts.secret, self._on_line, self._on_lost, self._on_summons
        )
        self._device = make_device(hosts.address)
        self.questions = Questions(self._lines.send, {"stuck": self._tell_where})
        where = [*self._lines.where, find_interface(hosts.address)]
        BoundedStore(store, lambda: _ASKED_S).set(_where_key(me), json.dumps(where))
        all_links.add(self)
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
        for link in links:
            link.close()
        self._lines.close()
        self._store = self._device = None  # which have sockets, too

    # -- groups ----------------------------------------------------------------------------------

    def next_key(self, name: str) -> bytes:
        """What frames of the next group of this name carry. Programs use names again: what is on
        its way to a group that was closed must not reach the next one, nor be mixed up with it."""
        with self._lock:
            self._made[name] += 1
            text = f"{self._made[name]} {name}"
        return hashlib.blake2b(text.encode(), digest_size=8).digest()

    def add(self, party: Party) -> None:
        """Let a group have the frames with its key, those that have come already included."""
        while True:
            with self._lock:
                early = self._early.pop(party.key, [])
                if not early:  # and later ones do not overtake them
                    self._parties[party.key] = weakref.ref(party)
                    ending = self._early_endings.pop(party.key, None)
                    lost = dict(self._lost)
                    break
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
            self._removed.add(party.key)

    def _on_frame(self, peer: int, frame: Frame) -> None:
        with self._lock:
            reference = self._parties.get(frame.group)
            if reference is None and frame.group not in self._removed:
                self._early.setdefault(frame.group, []).append((peer, frame))
        party = reference() if reference is not None else None
        if party is not None:
            party.on_frame(peer, frame)

    def _party(self, key: bytes) -> Party | None:
        reference = self._parties.get(key)
        return reference() if reference is not None else None

    def tell_ending(self, peer: int, key: bytes, text: str) -> None:
        """Tell the process of a global rank, ahead of all data, why a group has ended."""
        self._lines.send(peer, {"group": key.hex(), "ending": text})

    def tell_probe(self, peer: int, key: bytes, probe: dict[str, Any]) -> None:
        """Send a probe to the process of a global rank, on this host or another. The first one may
        get lost, while there is no line yet."""
        if self._lines.reaches(peer):
            self._lines.send(peer, {"group": key.hex(), "probe": probe})
        else:
            self._draw_line(peer, summons=True)

    def open_store(self, timeout_s: float) -> Any:
        """A connection of one's own to the store in which the ranks have met; or StoreGone."""
        return open_store(self._store, timeout_s)

    def decide(self, key: bytes, serial: int, value: int, timeout_s: float) -> int:
        """What the first rank of a group proposed under this serial. Raises StoreGone."""
        limit = Deadline(timeout_s)
        store = BoundedStore(self.open_store(timeout_s), limit.left_s)
        return int(store.compare_set(f"unisono/decision/{key.hex()}/{serial}", "", str(value)))

    def ask_where(self, peer: int, timeout_s: float, key: bytes = b"") -> Answer:
        """Where the program of a global rank is, and what keeps it in a group."""
        told = self.questions.ask([peer], "stuck", key.hex(), timeout_s).get(peer)
        if told is None:
            return Answer()
        at, stopped, awaited, call = told
        return Answer(str(at), tuple(map(int, stopped)), int(awaited), int(call))

    def _tell_where(self, key: str) -> Answer:
        party = self._party(bytes.fromhex(key))
        answer = Answer() if party is None else party.answer()
        return answer._replace(at=where_is_program())

    def is_open(self) -> bool:
        """Whether anybody can be asked."""
        return not self._is_closed

    def ask_hosts(
        self,
        topic: str,
        about: Any,
        timeout_s: float,
        meanwhile: Callable[[], object] | None = None,
    ) -> dict[int, tuple[int, Any]]:
        """By host: which global rank of it has answered, and what. Who does not answer in time is
        passed over for another rank, once; a host where nobody knows is left out. `meanwhile` is
        called now and then."""
        found: dict[int, tuple[int, Any]] = {}
        tried: set[int] = set()
        for _ in range(2):
            asked = self._spokesmen(set(range(self.hosts.count)) - {self.hosts.mine, *found}, tried)
            tried |= set(asked)
            if not asked:
                break
            told = self.questions.ask(asked, topic, about, timeout_s, meanwhile)
            for peer, answer in told.items():
                if answer is not None:
                    found[asked[peer]] = peer, answer
        return found

    def _spokesmen(self, hosts: set[int], tried: set[int]) -> dict[int, int]:
        """A rank of each of these hosts, and the host: one that there is a line to, if any."""
        found: dict[int, int] = {}
        for host in hosts:
            left = [rank for rank in self.hosts.members[host] if rank not in tried]
            left.sort(key=lambda rank: not self._lines.reaches(rank))
            if left:
                found[left[0]] = host
                if not self._lines.reaches(left[0]):
                    self._draw_line(left[0], summons=True)
        end = time.monotonic() + _DRAW_S
        while not all(map(self._lines.reaches, found)) and time.monotonic() < end:
            time.sleep(0.01)
        return {rank: host for rank, host in found.items() if self._lines.reaches(rank)}

    def loss_of(self, peer: int) -> str | None:
        """How the process of a global rank went, behind its name in a sentence; "" if in order,
        None if it is there, or nothing is known."""
        return self._lost.get(peer)

    def describe_groups(self) -> list[GroupMembers]:
        """The groups over hosts that this process is in."""
        with self._lock:
            parties = [reference() for reference in self._parties.values()]
        return [party.describe() for party in parties if party is not None]

    def _on_line(self, peer: int, message: dict[str, Any]) -> None:
        if self.questions.on_message(peer, message):
            return
        if "link" in message:
            self._begin(peer, _ASKED_S, False)
        elif "problem" in message:
            self._fail(peer, str(message["problem"]))
        else:
            self._on_group_message(bytes.fromhex(message["group"]), message)

    def _on_group_message(self, key: bytes, message: dict[str, Any]) -> None:
        with self._lock:
            if key not in self._parties and "ending" in message:
                self._early_endings[key] = str(message["ending"])
        party = self._party(key)
        if party is not None and "ending" in message:
            party.on_ending(str(message["ending"]))
        elif party is not None:
            party.on_probe(message["probe"])

    def _on_summons(self, peer: int) -> None:
        self._draw_line(peer, summons=False)

    def _draw_line(self, peer: int, summons: bool) -> None:
        """Have a line to a rank, and nothing else, soon."""

        def draw() -> None:
            with contextlib.suppress(Exception):  # then there is no line: nobody depends on it
                address, port, _ = json.loads(self.open_store(_DRAW_S).get(_where_key(peer)))
                self._lines.connect(peer, (address, port), _ASKED_S, summons=summons)
            self._drawn.discard(peer)

        with self._lock:
            if peer in self._drawn or self._is_closed:
                return
            self._drawn.add(peer)
        threading.Thread(target=draw, name=f"unisono line to rank {peer}", daemon=True).start()

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

    def connect(self, peers: Iterable[int], timeout_s: float, *, summons: bool = False) -> None:
        """Have connections to these global ranks, which either connect to this one by themselves
        or, by a `summons`, are told to. Raises RendezvousError if that fails."""
        waiting = [(peer, self._begin(peer, timeout_s, summons)) for peer in peers]
        for peer, event in waiting:
            if event is not None and not event.wait(timeout_s + 5.0):
                raise RendezvousError(f"no connection to {self.hosts.name_rank(peer)}")
            if peer in self._problems:
                raise RendezvousError(self._problems[peer])

    def make_pair(self, peer: int, name: str, timeout_s: float) -> Any:
        """A gloo group of this process and that of a global rank, which makes it by the same name;
        apart from all others. Raises RendezvousError if there is none in time."""
        low, high = sorted((self.me, peer))
        store, me = self.open_store(timeout_s), int(self.me == high)
        return make_gloo(store, f"{name}/{low}-{high}", me, 2, self._device, timeout_s)

    def _begin(self, peer: int, timeout_s: float, summons: bool) -> threading.Event | None:
        with self._lock:
            known = self._links.get(peer)
            if isinstance(known, Link):
                return None
            if known is not None:
                return known
            event = self._links[peer] = threading.Event()
            if peer in self._problems:  # it has found that there can be none
                event.set()
        # beside each other: processes have their peers in different orders
        threading.Thread(
            target=self._make,
            args=(peer, event, timeout_s, summons),
            name=f"unisono connects to rank {peer}",
            daemon=True,
        ).start()
        return event

    def _make(self, peer: int, event: threading.Event, timeout_s: float, summons: bool) -> None:
        low, high = sorted((self.me, peer))
        limit, address, interface = Deadline(timeout_s), "?", "?"
        try:
            store = self.open_store(timeout_s)
            told = BoundedStore(store, limit.left_s).get(_where_key(peer))
            address, port, interface = json.loads(told)
            self._lines.connect(peer, (address, port), limit.left_s(), summons=summons)
            if summons:
                self._lines.send(peer, {"link": "please"})
            name = f"unisono/link/{low}-{high}"
            gloo = make_gloo(store, name, int(self.me == high), 2, self._device, limit.left_s())
            link = Link(peer, gloo, self._on_frame, self._on_end)
            with self._lock:
                self._links[peer] = link  # first: what comes in is answered on it
                link.start()
                is_late = self._is_closed
            if is_late:
                link.close()
        except Exception as error:
            here = f"{self.hosts.address} on {find_interface(self.hosts.address)}"
            advice = f". Open all ports between these hosts, or {INSTEAD}"
            problem = (
                f"no connection between {self.hosts.name_rank(self.me)}, at {here}, and "
                f"{self.hosts.name_rank(peer)}, at {address} on {interface}: {error}"
                f"{'' if isinstance(error, StoreGone) else advice}"
            )
            self._lines.send(peer, {"problem": problem})  # it may wait in vain
            self._fail(peer, problem)
        event.set()

    def _fail(self, peer: int, problem: str) -> None:
        """There is no connection to a rank: let those hear why who wait for it."""
        with self._lock:
            self._problems.setdefault(peer, problem)
            known = self._links.get(peer)
        if isinstance(known, threading.Event):
            known.set()


def _where_key(rank: int) -> str:
    """Under which the store has where a rank's lines are to be called."""
    return f"unisono/line/{rank}"


def _close_at_exit(reference: weakref.ref[Links]) -> None:
    links = reference()
    if links is not None:
        links.close_all()
