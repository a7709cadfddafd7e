"""How new processes join a group: on a board that they and its members reach, a torch Store or, on
one host, a file.

The first member announces there, under the name that newcomers know, how many may join. A newcomer
takes the next number after the members, unless a living process has it. Once all are there
(roster.py), they meet in a part of the board. The first member settles there, once and for all,
whether the group is made. The old group stays as it is, whether that succeeds or not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from unisono.comm.hosts.anywhere import connect_once
from unisono.comm.meeting import announcements
from unisono.comm.meeting.announcements import Announcement
from unisono.comm.meeting.board import Board, Foreign, StoreGone
from unisono.comm.meeting.deadline import Deadline, LimitOfEach, Waiting, in_seconds
from unisono.comm.meeting.makings import making
from unisono.comm.meeting.meeting_points import meeting_by_name
from unisono.comm.meeting.outcome import Outcome
from unisono.comm.meeting.roster import Entry, agree
from unisono.comm.meeting.unix_socket import Departed
from unisono.comm.transport import Transport
from unisono.errors import GroupError, RendezvousError, UnisonoError, name_ranks
from unisono.processes import boot_id, namespace, start_time

MEETING_S = 10.0
_STORE_S = 5.0
_PAUSE_S = 0.001


class _Refused(RendezvousError):
    """This process cannot join as it asked to."""


def places_after(members: int, wanted: Sequence[int]) -> list[int]:
    """The new ranks of members and newcomers: a newcomer gets the one it wants, or (-1) one at
    the end; the members get the others, in order."""
    size = members + len(wanted)
    free = [rank for rank in range(size) if rank not in wanted]
    behind = iter(free[members:])
    return free[:members] + [rank if rank >= 0 else next(behind) for rank in wanted]


def number_newcomers(
    global_ranks: Sequence[int] | None, places: Sequence[int]
) -> tuple[int, ...] | None:
    """The global ranks of a group that has grown, by its ranks: members keep theirs, newcomers
    get the lowest free ones, which belonged to dead ranks."""
    if global_ranks is None:
        return None
    free = (rank for rank in itertools.count() if rank not in global_ranks)
    known = dict(zip(places, global_ranks, strict=False))
    return tuple(known[rank] if rank in known else next(free) for rank in range(len(places)))


class Growth:
    """What a group grows into, as its first member has announced it, and where its members and the
    newcomers meet."""

    def __init__(self, board: Board, about: Announcement) -> None:
        self._board, self._about = board, about
        self.name = str(about["name"])
        self.members, self.size = int(about["members"]), int(about["size"])
        self._part = f"{about['generation']}/{self.size}"
        self.is_passed = False  # all were there
        self.is_over = True  # nobody looks for the outcome

    def take_number(self) -> int:
        """The next number for newcomers. Raises Departed if a living process has it."""
        taken = self._board.add(f"{self._part}/taken") - 1
        number = self.members + taken % (self.size - self.members)
        told = self._board.part(self._part).get(f"unisono/roll/{self.name}/{number}")
        if told.startswith("{") and _is_here(entry := json.loads(told)) and not _is_gone(entry):
            raise Departed(f"group {self.name} has enough new processes")
        return number

    def pass_through(
        self,
        number: int,
        wanted: int,
        timeout_s: float,
        limit: Deadline,
        check: Callable[[], None],
    ) -> Transport:
        """Wait for all, and make the group; as the one with this number, which wants a rank, or
        any (-1). Raises Departed if another attempt may succeed."""
        name, members, size = self.name, self.members, self.size
        says = {"wants": wanted, "where": _where(), "started": start_time(os.getpid())}
        part = self._board.part(self._part).until(limit, check)
        token, here = agree(part, name, number, size, says)
        self.is_passed = True
        wants = [one["wants"] for one in here[members:]]
        twice = [at for at, rank in enumerate(wants) if rank >= 0 and rank in wants[:at]]
        if twice:
            raise (_Refused if number - members in twice else Departed)(
                f"group {name}: two new processes asked for rank {wants[twice[0]]}"
            )

        def look() -> None:
            check()
            if any(map(_is_gone, here)):
                raise Departed(f"group {name}: a process left again")

        places = places_after(members, wants)
        ranks = number_newcomers(self._about["global_ranks"], places)
        outcome = Outcome(name, partial(self._settle, token), Deadline(MEETING_S), look)
        how: Any = {"name": name, "global_ranks": ranks, "timeout_s": timeout_s}
        leads = number == 0
        part, self.is_over = self._board.part(token), False
        try:
            made = connect_once(part, places[number], size, outcome, leads, **how)
        except BaseException:
            self.is_over = self._settle(token, None) is False
            raise
        with contextlib.suppress(RendezvousError):
            informed = self._board.add(f"informed/{token}")
            while leads and informed < size and outcome.deadline.left_s():
                if any(map(_is_gone, here)):
                    break
                self._board.sleep(_PAUSE_S)
                informed = self._board.add(f"informed/{token}", 0)
            self.is_over = informed == size
        return made

    def _settle(self, token: str, made: bool | None) -> bool | None:
        try:
            return self._board.settle(f"made/{token}", made)
        except Departed:  # nobody can settle it any more
            return False


def grow(
    group: Any, name: str, generation: int, known_as: str, count: int, store: Any, limit_s: float
) -> Transport:
    """A group of all ranks and `count` new processes; all ranks call it. `name` and `generation`
    are the new group's, and newcomers know it by another name."""
    board = None if store is None else Board(store)
    if group.backend != "unisono" or not (group.is_on_one_host or (board and board.host)):
        raise UnisonoError(
            f"group {group.name} ({group.backend}) cannot grow like this: only unisono's own "
            "groups can, on several hosts with grow(store=) and a TCPStore"
        )
    group.raise_if_ended()
    about: Announcement = {"name": name, "generation": generation, "timeout_s": group.timeout_s}
    known = group.global_ranks
    about |= {"members": group.size, "size": group.size + count}
    about |= {"global_ranks": None if known is None else list(known)}
    failed: RendezvousError | None = None
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(_place(known_as, 0 if group.rank == 0 else None, board))
            if group.rank == 0:
                mine = announcements.about_me(group.server().address) | about
                announcements.announce(place, mine)
                stack.callback(lambda: announcements.clear(place, mine) if growth.is_over else None)
            growth = Growth(place, about)
        except RendezvousError as error:
            failed = error
        exchange_s = max(group.timeout_s, limit_s + MEETING_S)  # another rank may take so long
        told = group.exchange_integers((count, int(failed is None)), exchange_s)
        counts = sorted({theirs for theirs, _ in told})
        if len(counts) > 1:
            text = f"its ranks called grow with different counts, {counts}"
            raise RendezvousError(f"group {known_as}: {text}")
        if unable := [rank for rank, (_, is_open) in enumerate(told) if not is_open]:
            text = f"group {known_as}: {name_ranks(unable)} cannot reach new processes"
            raise failed or RendezvousError(text)
        limit, check = Deadline(limit_s), group.raise_if_ended
        what = f"grow({known_as!r}, count={count}) of group {group.name}"
        try:
            with making(what, f"grow {name}", group, range(group.size)):
                return growth.pass_through(group.rank, -1, group.timeout_s, limit, check)
        except StoreGone as error:
            if growth.is_passed:  # and it is unknown what the others have learned
                group.abort(f"growing failed: {error}")
            raise
        except RendezvousError as error:
            check()  # rank 0 may be away because a member has ended
            if not growth.is_passed and announcements.look_up(place) is None:
                text = f"group {known_as}: not enough new processes reached rank 0"
                raise RendezvousError(text) from error
            raise
        except GroupError:
            raise
        except BaseException as error:  # the others wait for this rank
            group.abort(f"growing failed: {type(error).__name__}")
            raise


def join_growing(
    board: Board | None,
    name: str,
    rank: int | None,
    generation: int,
    timeout_s: float | None,
    limit: Deadline,
) -> Transport:
    """Wait until the members of a group admit this process."""
    wanted = -1 if rank is None else rank
    why = ""
    with _place(name, None, board) as place:
        waiting = Waiting(wanted, 0, name, limit, _PAUSE_S, place.sleep)
        while limit.left_s():
            about = announcements.look_up(place)
            if about is not None and about["generation"] >= generation:
                if wanted >= (size := about["size"]):
                    text = f"grows to {size} ranks and has no rank {rank}"
                    raise RendezvousError(f"group {name} {text}")
                growth, check = Growth(place, about), partial(_check, place, about)
                call_s = about["timeout_s"] if timeout_s is None else timeout_s
                try:
                    number = growth.take_number()
                    return growth.pass_through(number, wanted, call_s, limit, check)
                except (GroupError, RendezvousError) as error:
                    foreign = isinstance(error.__context__, Foreign)
                    if foreign or isinstance(error, (StoreGone, Foreign, _Refused)):
                        raise
                    why = f" ({error})"
            elif waiting.is_long():
                waiting.say([0])
            waiting.pause()
    later = f", of generation {generation} or later," if generation else ""
    raise RendezvousError(
        f"group {name}{later} did not admit this process within {in_seconds(limit.timeout_s)}: do "
        f"its members call grow({name!r})?{why}"
    )


@contextlib.contextmanager
def _place(name: str, rank: int | None, board: Board | None) -> Iterator[Board]:
    """Where the first member of a group and new processes look for each other."""
    limit = LimitOfEach(_STORE_S)
    if board is not None and board.host:
        yield board.reopen(limit).part(f"unisono/grow/{name}")
        return
    with meeting_by_name(f"{name} grows", rank, board) as place:
        yield place.until(limit)


def _check(place: Board, about: Announcement) -> None:
    """Raise Departed if the group will be a different one."""
    if announcements.look_up(place) != about:
        raise Departed(f"group {about['name']} no longer grows")


def _where() -> str:
    """Where PIDs mean the same processes."""
    return f"{boot_id()}/{namespace('pid')}"


def _is_here(entry: Entry) -> bool:
    return bool(entry["where"] == _where())


def _is_gone(entry: Entry) -> bool:
    """Whether a process has certainly ended."""
    return _is_here(entry) and announcements.is_dead(entry)
