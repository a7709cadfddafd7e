"""How new processes on any host join a group: through a torch Store that all of them reach.

The first member writes there, under the name that newcomers know, how many may join. A newcomer
takes the next free number after the members; if all are taken, the first one, whose owner may have
ended. Once all are there (roster.py), they meet in a part of the store. The first member settles
there, once and for all, whether the group is made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.comm.hosts.anywhere import connect_once
from unisono.comm.meeting.board import Board, Foreign, StoreGone
from unisono.comm.meeting.deadline import Deadline, LimitOfEach, in_seconds
from unisono.comm.meeting.growing import MEETING_S, number_newcomers, places_after
from unisono.comm.meeting.makings import making
from unisono.comm.meeting.outcome import Outcome
from unisono.comm.meeting.roster import agree
from unisono.comm.meeting.unix_socket import Departed
from unisono.comm.transport import Transport
from unisono.errors import GroupError, RendezvousError

_STORE_S = 5.0
_GLANCE_S = 0.02


class _Refused(RendezvousError):
    """This process cannot join as it asked to."""


class GrowthStore:
    """Where newcomers meet a group that grows: a place in a store, known by a name."""

    def __init__(self, board: Board, name: str) -> None:
        self._name = name
        self.is_passed = False  # all were there
        self._whole = board.reopen(LimitOfEach(_STORE_S))
        self._board = self._whole.part(f"unisono/grow/{name}")

    def open(self, about: dict[str, Any]) -> None:
        """Publish what the group will be."""
        self._board.set("growth", json.dumps(about))

    def look(self) -> dict[str, Any]:
        """What it will be; empty if it does not grow."""
        return dict(json.loads(self._board.get("growth") or "{}"))

    def take_number(self, about: dict[str, Any]) -> int:
        """The next number for newcomers."""
        taken = self._board.add(f"{about['generation']}/taken") - 1
        members, size = int(about["members"]), int(about["size"])
        return members + taken % (size - members)

    def pass_through(
        self,
        about: dict[str, Any],
        number: int,
        wanted: int,
        timeout_s: float,
        limit: Deadline,
        check: Callable[[], None],
    ) -> Transport:
        """Wait for all, and make the group; as the one with this number, which wants a rank, or
        any (-1). Raises Departed if another attempt may succeed."""
        name, members, size = str(about["name"]), int(about["members"]), int(about["size"])
        part = self._board.part(f"{about['generation']}/{size}").until(limit, check)
        token, here = agree(part, name, number, size, {"wants": wanted})
        self.is_passed = True
        wants = [one["wants"] for one in here[members:]]
        twice = [at for at, rank in enumerate(wants) if rank >= 0 and rank in wants[:at]]
        if twice:
            raise (_Refused if number - members in twice else Departed)(
                f"group {name}: two new processes asked for rank {wants[twice[0]]}"
            )
        places = places_after(members, wants)
        ranks = number_newcomers(about["global_ranks"], places)
        board, settle = self._whole.part(f"unisono/{token}"), self._board.settle
        outcome = Outcome(name, partial(settle, f"made/{token}"), Deadline(MEETING_S), check)
        how: Any = {"name": name, "global_ranks": ranks, "timeout_s": timeout_s}
        return connect_once(board, places[number], size, outcome, leads=number == 0, **how)


def grow(
    group: Any, board: Board, name: str, known_as: str, count: int, limit_s: float, generation: int
) -> Transport:
    """A group of all ranks and `count` new processes on any host; all ranks call it."""
    group.raise_if_ended()
    growth_store = GrowthStore(board, known_as)
    about = {"name": name, "generation": generation, "global_ranks": group.global_ranks}
    about |= {"members": group.size, "size": group.size + count, "timeout_s": group.timeout_s}
    if group.rank == 0:
        growth_store.open(about)
    check, limit = group.raise_if_ended, Deadline(limit_s)
    what = f"grow({known_as!r}, count={count}) of group {group.name}"
    try:
        with making(what, f"grow {name}", group, range(group.size)):
            return growth_store.pass_through(about, group.rank, -1, group.timeout_s, limit, check)
    except StoreGone as error:
        if growth_store.is_passed:  # and it is unknown what the others have learned
            group.abort(f"growing failed: {error}")
        raise


def join_growing(
    board: Board,
    name: str,
    rank: int | None,
    generation: int,
    timeout_s: float | None,
    limit: Deadline,
) -> Transport:
    """Wait until the members of a group admit this process."""
    growth_store, why = GrowthStore(board, name), ""
    while limit.left_s():
        about = growth_store.look()
        if about and about["generation"] >= generation:
            if rank is not None and rank >= about["size"]:
                size = about["size"]
                raise RendezvousError(f"group {name} grows to {size} ranks and has no rank {rank}")
            number, check = growth_store.take_number(about), partial(_check, growth_store, about)
            call_s = about["timeout_s"] if timeout_s is None else timeout_s
            try:
                wanted = -1 if rank is None else rank
                return growth_store.pass_through(about, number, wanted, call_s, limit, check)
            except (GroupError, RendezvousError) as error:
                foreign = isinstance(error.__context__, Foreign)
                if foreign or isinstance(error, (StoreGone, Foreign, _Refused)):
                    raise
                why = f" ({error})"
        time.sleep(_GLANCE_S)
    limit_s = in_seconds(limit.timeout_s)
    raise RendezvousError(f"group {name} did not admit this process within {limit_s}{why}")


def _check(growth_store: GrowthStore, about: dict[str, Any]) -> None:
    """Raise Departed if the group will be a different one."""
    if growth_store.look() != about:
        raise Departed(f"group {about['name']} no longer grows")
