"""Calls of this process that make a group, and whether they fit those of its peers.

While a rank waits in such a call, it leaves a note in the group that its peers come from, again and
again: which group it makes, which ranks it needs, and whether another of its threads could make a
group meanwhile. If none can, and it needs a rank that waits for another group, which in turn needs
..., until the first is needed again, then all of them wait in vain: each raises GroupsDiffer.

A note may be out of date: its rank has its group, and has not run since. So the notes count only
once each of these ranks has written its own twice more: in between it has looked for its peers,
after all of them were seen to wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from unisono import variables
from unisono.comm.engine import native
from unisono.comm.engine.numbers import Note
from unisono.comm.transport import Transport
from unisono.errors import GroupsDiffer, RendezvousError, name_ranks

Membership = Any
"""That of membership.py, which needs this file."""
SHRINKS = "it continues in a smaller group (shrink)"
"""Why a rank that calls shrink ends its group."""
ASKS_A_STORE = "unisono asks a store"
"""The name of threads in which a request to a torch Store runs."""
_LOOK_S = 0.1
_LAST_WORDS_S = 1.0
"""How long a rank that gives up waits until the others do, too."""
_LONGEST_NOTE_BYTES = 247
_MOST_SHOWN = 4
_OURS = os.path.dirname(variables.__file__) + os.sep
_LIBRARIES = (_OURS, os.path.dirname(os.__file__) + os.sep, "<frozen ")
_BUSY, _ALONE, _RECOVERS, _GIVES_UP = range(4)

in_progress: dict[int, Making] = {}
"""The calls of this process that make a group, by thread."""
_numbers = itertools.count(1)


class Published(NamedTuple):
    """What a rank says about its call: the call's number in its process, how often it was said,
    what its threads may do; the keys of all groups that it makes, the ranks needed, as bits."""

    number: int
    times: int
    state: int
    keys: list[str]
    needs: str
    what: str

    def blockers(self, notes: Mapping[int, Published]) -> list[int]:
        """The ranks that it needs, and that wait for another group."""
        others = [rank for rank in notes if int(self.needs, 16) >> rank & 1]
        return [rank for rank in others if self.keys[0] not in notes[rank].keys]


class Making:
    """A call that makes a group: `what` it is, the `name` that only its members' calls have, and
    the `members`, ranks of its `parent`, if it has one. `recovers`: it goes on without those that
    do not come."""

    def __init__(
        self,
        what: str,
        name: str,
        parent: Transport | None = None,
        members: Sequence[int] = (),
        recovers: bool = False,
    ) -> None:
        self.what, self.parent, self.recovers = what, parent, recovers
        self._group: Membership = parent.membership if parent else None
        self._members = members if self._group else ()
        self.key, self._line = key_of(name), ""
        self._number, self._times, self._state = next(_numbers), 0, _BUSY
        self._again_s = time.monotonic() + _LOOK_S
        self._first: dict[int, Published] = {}
        self._closed: list[int] = []
        self._stuck: dict[int, int] = {}
        shrinks = what.startswith("shrink")
        self._heeds_closing = parent is not None and parent.is_on_one_host and not shrinks

    def look(self) -> None:
        """Tell the others what this rank waits for. Raises GroupsDiffer if that is in vain."""
        if self._group is None or time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _LOOK_S
        is_whole = not self.recovers and len(self.living_members()) == len(self._members)
        is_alone = len(in_progress) == 1 and not _may_others_make_groups()
        self._publish(_RECOVERS if not is_whole else _ALONE if is_alone else _BUSY)
        self._look_for_closed(self._group)
        stuck, first = self._find_stuck() if self._state == _ALONE else {}, self._first
        if _numbers_of(stuck) != _numbers_of(first):
            self._first = stuck
        elif stuck and all(
            note.state == _GIVES_UP or note.times >= first[rank].times + 2
            for rank, note in stuck.items()
        ):
            self._give_up(stuck)

    def end(self) -> None:
        """It has returned, or raised; a note that it gives up stays until the next."""
        if self._group is not None and self._times and self._state != _GIVES_UP:
            say(self._group)

    def living_members(self) -> list[int]:
        group = self._group
        if group is None:
            return []
        return [rank for rank in self._members if group.group.state(rank)["loss"] is None]

    def notes(self) -> dict[int, Published]:
        """What the ranks of the parent say that they make."""
        group = self._group
        ranks = range(group.size if group else 0)
        return {rank: note for rank in ranks if group and (note := _read(group, rank))}

    def _publish(self, state: int) -> None:
        self._state, self._times = state, self._times + 1
        self._line = self._line or native.site_of(sys._getframe()) or "an unknown line"
        needs = f"{sum(1 << rank for rank in self._members):x}"
        keys = [self.key, *(other.key for other in in_progress.values() if other is not self)][:4]
        what = f"{self.what} at {self._line}"
        if self._group is not None:
            say(self._group, Published(self._number, self._times, state, keys, needs, what))

    def _look_for_closed(self, group: Membership) -> None:
        """Raise if a member has closed the parent, and not because its process ends, nor because it
        has the new group: none has it before the first member."""
        before, needed = self._closed, self._members
        needed = needed if group.rank == needed[0] else needed[:1]
        states = {rank: group.group.state(rank) for rank in needed}
        self._closed = [r for r in needed if states[r]["has_closed"] and states[r]["loss"] is None]
        if before and before == self._closed and self._heeds_closing:
            self.look_for_given_up()
            ending = self.parent.ending(self.what) if self.parent else None  # it says why
            who = name_ranks(before)
            text = f"{who} closed the group that it comes from before {self.what}"
            raise ending or GroupsDiffer(text)

    def _find_stuck(self) -> dict[int, Published]:
        """The ranks that wait for each other, if this is one of them."""
        found, parent = self.notes(), self.parent
        if parent is None or parent.rank not in found:
            return {}
        shrink, blockers = key_of(f"shrink {parent.name}"), found[parent.rank].blockers(found)
        if any(found[rank].state == _RECOVERS and shrink in found[rank].keys for rank in blockers):
            ending = parent.ending(self.what)  # they leave out those who do not shrink, too
            if ending is not None:
                raise ending
        known = _numbers_of(self._first)
        for rank, note in list(found.items()):
            gives_up_now = note.state == _GIVES_UP and known.get(rank) == note.number
            if note.state != _ALONE and not gives_up_now:
                del found[rank]
        while free := [rank for rank, note in found.items() if not note.blockers(found)]:
            for rank in free:
                del found[rank]
        self._stuck = _numbers_of(found)
        reached = {rank for rank in found if parent.rank in found and self.key in found[rank].keys}
        while more := {to for rank in reached for to in found[rank].blockers(found)} - reached:
            reached |= more
        return {rank: found[rank] for rank in sorted(reached)}

    def _give_up(self, stuck: dict[int, Published]) -> NoReturn:
        """Raise, once the others have seen this, too, and those that wait for any of them."""
        end, left = time.monotonic() + _LAST_WORDS_S, True
        while left and time.monotonic() < end:
            self._publish(_GIVES_UP)
            time.sleep(_LOOK_S / 4)
            wait = {rank: note for rank, note in self.notes().items() if note.state == _ALONE}
            left = bool(_numbers_of(wait).items() & self._stuck.items())
        raise _differ(stuck)

    def look_for_given_up(self) -> None:
        """It fails: raise GroupsDiffer if a member has given up another call, and left."""
        is_alone = len(in_progress) == 1 and not _may_others_make_groups()
        if self._group is None or self.recovers or not is_alone:
            return
        self._publish(_ALONE)
        found = self.notes()
        own = found.get(self._group.rank)
        others = {rank: found[rank] for rank in own.blockers(found)} if own else {}
        if own and any(note.state == _GIVES_UP for note in others.values()):
            self._publish(_GIVES_UP)
            raise _differ({self._group.rank: own} | others)


@contextlib.contextmanager
def making(*call: Any) -> Iterator[None]:
    """This thread is in a call that makes a group, until this ends; arguments as of Making."""
    thread = threading.get_ident()
    made = in_progress[thread] = Making(*call)
    try:
        yield
    except RendezvousError as error:
        if not isinstance(error, GroupsDiffer):
            made.look_for_given_up()
        raise
    finally:
        in_progress.pop(thread, None)
        made.end()


def look() -> None:
    """To be called periodically by a thread that waits for the others of a new group."""
    found = in_progress.get(threading.get_ident())
    if found is not None:
        found.look()


def say(group: Membership, note: Published | None = None) -> None:
    """Leave a note in a group: which attempt to continue it this rank joins, and what it makes."""
    text = _encode([*group.said, *(note or ())])
    if note and (excess := len(text.encode()) - _LONGEST_NOTE_BYTES) > 0:
        text = _encode([*group.said, *note[:-1], f"{note.what[: -excess - 3]}..."])
    if len(text.encode()) <= _LONGEST_NOTE_BYTES:  # otherwise only the watch can tell
        group.group.write_note(Note.COMING, next(_numbers), text)


def _differ(notes: Mapping[int, Published]) -> GroupsDiffer:
    calls: dict[str, list[int]] = {}
    for rank, note in sorted(notes.items()):
        calls.setdefault(note.what, []).append(rank)
    shown = [f"{name_ranks(ranks)} in {what}" for what, ranks in calls.items()][:_MOST_SHOWN]
    return GroupsDiffer(
        f"ranks wait for each other in calls that make different groups: {'; '.join(shown)}. "
        "All members make a group with the same ranks, in the same order, and the same label, "
        "and all ranks make their groups in the same order"
    )


def key_of(name: str) -> str:
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=4).hexdigest()


def _read(group: Membership, rank: int) -> Published | None:
    for _ in range(3):  # it may be writing
        if text := group.group.read_note(rank, Note.COMING, 0):
            _, _, *note = json.loads(text)
            return Published(*note) if note else None
    return None


def _encode(note: list[Any]) -> str:
    return json.dumps(note, ensure_ascii=False, separators=(",", ":"))


def _numbers_of(notes: Mapping[int, Published]) -> dict[int, int]:
    return {rank: note.number for rank, note in notes.items()}


def _may_others_make_groups() -> bool:
    """Whether code of the program, or of a package that may be the program, runs in another
    thread: packages run their own services in daemons."""
    before = threading.enumerate()
    frames = sys._current_frames()
    frames.pop(threading.get_ident())  # a frame that refers to itself keeps its callers' groups
    threads = [*before, *threading.enumerate()]
    daemons = {thread.ident for thread in threads if thread.daemon}
    # CPython 3.11 may crash in f_back of a thread that ends meanwhile, as these do all the time.
    brief = {thread.ident for thread in threads if thread.name == ASKS_A_STORE}
    for thread, frame in frames.items():
        at: FrameType | None = frame if thread not in brief else None
        while at is not None:
            file = at.f_code.co_filename
            is_package = f"-packages{os.sep}" in file and not file.startswith(_OURS)
            if not (thread in daemons if is_package else file.startswith(_LIBRARIES)):
                return True
            at = at.f_back
    return False
