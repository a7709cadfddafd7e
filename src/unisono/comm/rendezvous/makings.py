"""Calls of this process that make a group, and whether they fit those of its peers.

While a rank waits in such a call, it leaves a note in every group that it is in, again and again:
which group it makes, which ranks it needs, and whether another of its threads could make a group
meanwhile. If none can, and it needs a rank that waits for another group, which in turn needs ...,
until the first is needed again, then all of them wait in vain: each raises GroupsDiffer.

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
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from unisono import variables
from unisono.comm.engine import native
from unisono.comm.engine.numbers import Note
from unisono.comm.transport import Transport
from unisono.errors import RendezvousError, name_ranks

if TYPE_CHECKING:
    from unisono.comm.rendezvous.membership import Member, Membership

SHRINKS = "it continues in a smaller group (shrink)"
"""Why a rank that calls shrink ends its group."""
_LOOK_S = 0.1
_LAST_WORDS_S = 1.0
"""How long a rank that gives up waits until the others do, too."""
_LONGEST_NOTE_BYTES = 247
_MOST_SHOWN = 4
_FILES = str(os.__file__), str(variables.__file__)
_LIBRARIES = ("<frozen ", *(os.path.dirname(file) + os.sep for file in _FILES))
_BUSY, _ALONE, _RECOVERS, _GIVES_UP = range(4)

in_progress: dict[int, Making] = {}
"""The calls of this process that make a group, by thread."""
_numbers = itertools.count(1)
_memberships: weakref.WeakSet[Membership] = weakref.WeakSet()
_lock = threading.Lock()


class GroupsDiffer(RendezvousError):
    """Ranks wait for each other in calls that make different groups."""


class Published(NamedTuple):
    """What a rank says about its call: its number in the process, how often it was said, what the
    rank's threads may do; the keys of all groups that it makes, the ranks that it needs as bits,
    and the call in words."""

    number: int
    times: int
    state: int
    keys: list[str]
    needs: str
    what: str

    def blockers(self, all_notes: Mapping[int, Published]) -> list[int]:
        """The ranks that it needs, and that wait for another group."""
        bits = int(self.needs, 16)
        others = [rank for rank in all_notes if bits >> rank & 1]
        return [rank for rank in others if self.keys[0] not in all_notes[rank].keys]


class Making:
    """A call that makes a group: `what` it is, the `name` that only its members' calls have, and
    which ranks of the `parent`, if it has one, are needed. `recovers`: it goes on without those
    that do not come."""

    def __init__(
        self,
        what: str,
        name: str,
        parent: Transport | None = None,
        members: Sequence[int] = (),
        recovers: bool = False,
    ) -> None:
        self.what, self.parent, self.recovers = what, parent, recovers
        self._group: Membership | None = parent.membership if parent else None
        self._members = members if self._group else ()
        self.key = key_of(name)
        self._line = ""
        self._number, self._times, self._state = next(_numbers), 0, _BUSY
        self._again_s = time.monotonic() + _LOOK_S
        self._first: dict[int, Published] = {}

    def look(self) -> None:
        """Tell the others what this rank waits for. Raises GroupsDiffer if that is in vain."""
        if time.monotonic() < self._again_s:
            return
        self._again_s = time.monotonic() + _LOOK_S
        is_alone = len(in_progress) == 1 and not _may_others_make_groups()
        is_whole = not self.recovers and len(self._living()) == len(self._members)
        self._state = _RECOVERS if not is_whole else _ALONE if is_alone else _BUSY
        self._publish()
        stuck = self._find_stuck() if self._state == _ALONE else {}
        if _numbers_of(stuck) != _numbers_of(self._first):
            self._first = stuck
        elif stuck and all(
            note.state == _GIVES_UP or note.times >= self._first[rank].times + 2
            for rank, note in stuck.items()
        ):
            self._give_up(stuck)

    def end(self) -> None:
        """It has returned, or raised; a note that says why stays until the next."""
        if self._times and self._state != _GIVES_UP:
            _say_to_all()

    def _publish(self) -> None:
        self._times += 1
        self._line = self._line or native.site_of(sys._getframe()) or "an unknown line"
        _say_to_all(self)

    def words_for(self, group: Membership) -> Published:
        """The note for a group, in terms of its ranks."""
        needed = {_process(self._group.members[rank]) for rank in self._members if self._group}
        places = enumerate(group.members)
        needs = sum(1 << rank for rank, member in places if _process(member) in needed)
        keys = [self.key, *(other.key for other in in_progress.values() if other is not self)][:4]
        what = f"{self.what} at {self._line}"
        return Published(self._number, self._times, self._state, keys, f"{needs:x}", what)

    def _living(self) -> list[int]:
        return [
            rank for rank in self._members if self._group and self._group.group.loss(rank) is None
        ]

    def _read(self) -> dict[int, Published]:
        """What the ranks of the parent say that they make; none if this one's own did not fit."""
        if self._group is None or read(self._group, self._group.rank) is None:
            return {}
        ranks = range(self._group.size)
        return {rank: note for rank in ranks if (note := read(self._group, rank))}

    def peers(self) -> dict[int, tuple[Member, Published | None]]:
        """The living members that it needs, by global rank, and what each says that it makes."""
        notes = self._read()
        if self.parent is None or self._group is None or not notes:
            return {}
        known, members = self.parent.global_ranks or range(self.parent.size), self._group.members
        return {known[rank]: (members[rank], notes.get(rank)) for rank in self._living()}

    def _find_stuck(self) -> dict[int, Published]:
        """The ranks that wait for each other, if this is one of them."""
        found = self._read()
        if self.parent is None or not found:
            return {}
        me, known = self.parent.rank, _numbers_of(self._first)
        shrink = key_of(f"shrink {self.parent.name}")
        for rank in found[me].blockers(found):
            if found[rank].state == _RECOVERS and shrink in found[rank].keys:
                ending = self.parent.ending(self.what)
                if ending is not None:
                    raise ending
        for rank, note in list(found.items()):
            gave_up_now = note.state == _GIVES_UP and known.get(rank) == note.number
            if note.state != _ALONE and not gave_up_now:
                del found[rank]
        while free := [rank for rank, note in found.items() if not note.blockers(found)]:
            for rank in free:
                del found[rank]
        reached = {rank for rank, note in found.items() if me in found and self.key in note.keys}
        while more := {to for rank in reached for to in found[rank].blockers(found)} - reached:
            reached |= more
        return {rank: found[rank] for rank in sorted(reached)}

    def _give_up(self, stuck: dict[int, Published]) -> NoReturn:
        """Raise, once the others have seen this, too."""
        end = time.monotonic() + _LAST_WORDS_S
        self._state, left = _GIVES_UP, True
        while left and time.monotonic() < end:
            self._publish()
            time.sleep(_LOOK_S / 4)
            now = {rank: note for rank, note in self._read().items() if note.state == _ALONE}
            left = any(_numbers_of(now).get(rank) == note.number for rank, note in stuck.items())
        calls: dict[str, list[int]] = {}
        for rank, note in stuck.items():
            calls.setdefault(note.what, []).append(rank)
        shown = [f"{name_ranks(ranks)} in {what}" for what, ranks in calls.items()][:_MOST_SHOWN]
        raise GroupsDiffer(
            f"ranks wait for each other in calls that make different groups: {'; '.join(shown)}. "
            "All members make a group with the same ranks, in the same order, and the same label, "
            "and all ranks make their groups in the same order"
        )


@contextlib.contextmanager
def making(*call: Any) -> Iterator[None]:
    """This thread is in a call that makes a group, until this ends; arguments as of Making."""
    thread = threading.get_ident()
    if thread in in_progress:  # a part of another
        yield
        return
    made = in_progress[thread] = Making(*call)
    try:
        yield
    finally:
        del in_progress[thread]
        made.end()


def look() -> None:
    """To be called periodically by a thread that waits for the others of a new group."""
    found = in_progress.get(threading.get_ident())
    if found is not None:
        found.look()


def add_group(group: Membership) -> None:
    """The members of this group can be told what this rank makes."""
    with _lock:
        _memberships.add(group)


def say(group: Membership, note: Published | tuple[()] = ()) -> None:
    """Leave a note in a group; or none, but which attempt to continue it this rank joins."""
    text = _encode([*group.said, *note])
    if (excess := len(text.encode()) - _LONGEST_NOTE_BYTES) > 0 and note:
        text = _encode([*group.said, *note[:-1], f"{note.what[: -excess - 3]}..."])
    if len(text.encode()) <= _LONGEST_NOTE_BYTES:  # otherwise only the watch can tell
        group.group.write_note(Note.COMING, next(_numbers), text)


def read(group: Membership, rank: int) -> Published | None:
    """What a rank says that it makes, if anything."""
    for _ in range(3):  # it may be writing
        text = group.group.read_note(rank, Note.COMING, 0)
        if text:
            _, _, *note = json.loads(text)
            return Published(*note) if note else None
    return None


def key_of(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


def _encode(note: list[Any]) -> str:
    return json.dumps(note, ensure_ascii=False, separators=(",", ":"))


def _say_to_all(made: Making | None = None) -> None:
    with _lock:
        for group in list(_memberships):
            say(group, made.words_for(group) if made else ())


def _numbers_of(notes: Mapping[int, Published]) -> dict[int, int]:
    return {rank: note.number for rank, note in notes.items()}


def _process(member: Member) -> tuple[str, int]:
    return "" if member.is_here else member.host, member.pid


def _may_others_make_groups() -> bool:
    """Whether code of the program runs in another thread."""
    me = threading.get_ident()
    for thread, frame in sys._current_frames().items():
        at: FrameType | None = frame if thread != me else None
        while at is not None:
            file = at.f_code.co_filename
            if not file.startswith(_LIBRARIES) and f"-packages{os.sep}" not in file:
                return True
            at = at.f_back
    return False
