"""The roster: who takes part in a meeting and what each says, as one table on a board.

Every rank publishes an entry, and waits for those of the others. That is enough for ranks that one
launcher starts (`gather`). Processes that were started separately may restart meanwhile (`agree`):
a rank that sees an entry of every rank agrees to begin with these processes; once all agree, they
begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from unisono import variables
from unisono.comm.meeting.board import Board, Foreign
from unisono.comm.meeting.deadline import Waiting
from unisono.comm.meeting.unix_socket import Departed
from unisono.errors import RendezvousError, name_ranks

Entry = dict[str, Any]
"""What a rank says, and its process: `number`, which no other has, `pid`, `machine`, `host`; `size`
is how many ranks it expects."""

_LEFT = "-"
_DAMAGED = "the torch Store of the meeting, and another process has deleted or replaced that there"
_PAUSE_S = 0.001
"""Before the second look: each is a request to the store."""
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def gather(
    board: Board,
    name: str,
    rank: int,
    size: int,
    says: Mapping[str, Any] = _NOTHING,
    group: str = "world",
) -> list[Entry]:
    """What each rank says, in their order; each of them calls this, and it returns once all have.
    Rosters of one name are numbered, so that a board may have several.

    Raises RendezvousError if some do not join by the deadline, or have another secret; or if
    another process has deleted or replaced what one of them wrote."""
    part = board.part(f"unisono/{name}")
    number = part.add(f"count/{rank}")
    roster = Roster(part.part(str(number)), group, rank, size, says)

    def find_missing() -> list[int]:
        missing = roster.missing()
        there = [] if board.deadline.left_s() else missing
        if gone := [other for other in there if part.add(f"count/{other}", 0) >= number]:
            raise RendezvousError(f"group {group}: {name_ranks(gone)} wrote to {_DAMAGED}")
        return missing

    roster.publish()
    while not (table := roster.read()):
        roster.wait(find_missing)
    if table[rank]["number"] != roster.mine["number"]:
        raise RendezvousError(f"group {group}: {name_ranks([rank])} wrote to {_DAMAGED}")
    return table


def agree(
    board: Board, name: str, rank: int, size: int, says: Mapping[str, Any] = _NOTHING
) -> tuple[str, list[Entry]]:
    """A token that the present ranks share, and no others ever had; and what each of them says.

    Raises RendezvousError if they do not join by the deadline, join with another size, or if
    another process joins as this rank; and what the board's `check` raises."""
    roster = Roster(board.part(f"unisono/roll/{name}"), name, rank, size, says)
    roster.publish()
    try:
        return roster.await_agreement()
    finally:
        roster.leave()


class Roster:
    """One rank's view of it, on a part of a board for this meeting alone. A `problem` that a rank
    finds ends the meeting for the processes that it has seen."""

    def __init__(
        self,
        board: Board,
        group: str,
        rank: int,
        size: int,
        says: Mapping[str, Any] = _NOTHING,
    ) -> None:
        self.board, self.group, self.rank, self.size = board, group, rank, size
        machine = socket.gethostname()
        about = {"number": os.urandom(8).hex(), "size": size, "pid": os.getpid()}
        about |= {"machine": machine, "host": variables.HOSTID.read() or machine}
        self.mine: Entry = {**says, **about}
        self._text = json.dumps(self.mine)
        self._waiting = Waiting(rank, size, group, board.deadline, _PAUSE_S, board.sleep)

    def publish(self) -> None:
        self.board.set(str(self.rank), self._text)

    def claim(self) -> Entry | None:
        """Publish, unless another process did as this rank: returns its entry then."""
        found = self.board.compare_set(str(self.rank), "", self._text)
        return None if found == self._text else json.loads(found)

    def read(self) -> list[Entry]:
        """Every rank's entry; none until all are there."""
        texts = self._texts()
        return [json.loads(text) for text in texts] if all(text != _LEFT for text in texts) else []

    def look_up(self, rank: int) -> Entry | None:
        text = self._read(str(rank))
        return json.loads(text) if text else None

    def wait(self, find_missing: Callable[[], list[int]] | None = None) -> None:
        """Call this until all are there. Raises RendezvousError at the deadline."""
        self.board.check()
        self._waiting.look(find_missing or self.missing)
        self._waiting.pause()

    def await_agreement(self) -> tuple[str, list[Entry]]:
        """The token of those that have agreed, and who they are."""
        agreed: dict[str, list[Entry]] = {}
        while True:
            if (found := self._read(str(self.rank))) != self._text:
                if not found:
                    raise RendezvousError(f"{self.group!r}: rank {self.rank} wrote to {_DAMAGED}")
                raise RendezvousError(
                    f"another process is joining {self.group!r} as rank {self.rank} right now: "
                    "each rank must be one process, and two jobs at once need two names"
                )
            wanted, texts = self._names(), self._texts()
            if texts and all(text != _LEFT for text in texts):
                here = [json.loads(text) for text in texts]
                self._compare_sizes(here)
                token = hashlib.blake2b("".join(texts).encode(), digest_size=8).hexdigest()
                wanted = self._names(token)
                if token not in agreed:
                    agreed[token] = here
                    self.board.set(wanted[self.rank], "agreed")
                    self._waiting.hurry()
            for token, here in agreed.items():  # even if others have joined since
                if self.board.has(self._names(token)):
                    return token, here
            problem = self.board.get(f"problem/{self.mine['number']}")
            if problem:
                raise RendezvousError(problem)
            self.wait(partial(self.missing, wanted))

    def leave(self) -> None:
        with contextlib.suppress(Foreign, Departed):  # there is a reason already
            self.board.compare_set(str(self.rank), self._text, _LEFT)

    def _compare_sizes(self, here: list[Entry]) -> None:
        """Raise RendezvousError if a rank joined with another size; all ranks do."""
        wrong = [rank for rank, about in enumerate(here) if about["size"] != self.size]
        if not wrong:
            return
        theirs = here[wrong[0]]
        problem = (
            f"group {self.group}: rank {wrong[0]} (pid {theirs['pid']} on {theirs['machine']}) "
            f"joined a group of {theirs['size']}, but rank {self.rank} a group of {self.size}"
        )
        for about in here:
            self.board.set(f"problem/{about['number']}", problem)
        raise RendezvousError(problem)

    def _names(self, *parts: str) -> list[str]:
        return ["/".join((*parts, str(rank))) for rank in range(self.size)]

    def missing(self, names: list[str] | None = None) -> list[int]:
        names = names or self._names()
        return [rank for rank, name in enumerate(names) if self._read(name) in ("", _LEFT)]

    def _texts(self) -> list[str]:
        """Every rank's entry, _LEFT for one that has left; none until all have been there."""
        try:
            return self.board.get_all(self._names())
        except Foreign as error:
            raise self._differs(error) from None

    def _read(self, name: str) -> str:
        try:
            return self.board.get(name)
        except Foreign as error:
            raise self._differs(error) from None

    def _differs(self, error: Foreign) -> RendezvousError:
        """Both sides, as far as the other one may be believed."""
        theirs = error.name.rpartition("/")[2]
        pair = self._describe(str(self.rank), self._text), self._describe(theirs, error.text)
        who = f"group {self.group}: {' and '.join(pair)}"
        return RendezvousError(str(Foreign(error.name, error.text, who)))

    @staticmethod
    def _describe(rank: str, text: str) -> str:
        try:
            about = json.loads(text)
            return f"rank {rank} (pid {int(about['pid'])} on {str(about['host'])[:64]})"
        except (ValueError, KeyError, TypeError):
            return f"what is there as rank {rank}"
