"""After a death, over hosts: the survivors agree through a torch Store, and meet there again."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from unisono import variables
from unisono.comm.engine import ENDING_SILENT
from unisono.comm.hosts.anywhere import connect_once
from unisono.comm.hosts.control_line import ENDED, PATIENCE_S
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.meeting.board import Board, StoreGone
from unisono.comm.meeting.deadline import Deadline, LimitOfEach
from unisono.comm.meeting.survivors import Attempt, Vote, go_on
from unisono.comm.transport import Transport
from unisono.errors import NoQuorum, name_ranks

_CALL_S = 1.0
_CALL_EVERY_S = 0.3


def _limit() -> Deadline:
    return LimitOfEach(_store_s())


def _store_s() -> float:
    """How long a store may take to answer, before it and its host count as lost: longer than a
    link may be down, so that a rank that turns to another store is silent for those at this one."""
    return max(5.0, 1.0 + (variables.LINK_PATIENCE_S.read() or PATIENCE_S))


class StoreVote(Vote):
    """The vote of ranks on several hosts: on a board. `is_named`: the program chose its store, and
    the ranks that reach it decide."""

    def __init__(self, group: HostsTransport, board: Board, is_named: bool) -> None:
        super().__init__(group.membership, group.name)
        self._of, self._is_named = group, is_named
        board = board.hidden(group.links.hosts.secret)
        self._board = board.part(f"unisono/survivors/{group.key:x}")
        self._said, self._text, self._told = "", "", frozenset[int]()
        self._gone: set[int] = set()  # as reported by a rank whose system attests it
        self._refused: set[int] = set()  # their host's system says that the process is gone
        self._cut_off: set[int] = set()
        self._next_call = Deadline(_CALL_EVERY_S)

    def say(self, text: str) -> None:
        self._text, self._told = text, frozenset(self._attested())
        self._said = json.dumps({"text": text, "gone": sorted(self._told)})
        self._board.set(f"said/{self.rank}", self._said)

    def heard(self, rank: int) -> str:
        said = json.loads(self._board.get(f"said/{rank}") or "{}")
        self._gone.update(said.get("gone", ()))
        return str(said.get("text", ""))

    def _attested(self) -> set[int]:
        """The ranks that are gone according to this host's system, or to theirs, over the line
        to it. A rank that closes the group after a silence may have gone on elsewhere."""
        group, here = self._of.group, self._of.placement.here
        return {
            rank
            for rank in range(self.size)
            if (group.state(rank)["has_closed"] and group.state(rank)["loss"] != ENDING_SILENT)
            or rank in self._refused
            or self._loss(rank) == ENDED
            or (rank in here and group.state(rank)["loss"] is not None)
        }

    def choose(self, attempt: int, text: str | None) -> str | None:
        name = f"choice/{attempt}"
        return self._board.compare_set(name, "", text) if text else self._board.get(name) or None

    def settle(self, attempt: int, made: bool | None) -> bool | None:
        return self._board.settle(f"outcome/{attempt}", made)

    def is_gone(self, rank: int) -> bool:
        return rank in self._gone or rank in self._attested()

    def find_cut_off(self) -> Sequence[int]:
        group = self._of.group
        silent = {rank for rank in range(self.size) if group.state(rank)["loss"] == ENDING_SILENT}
        silent |= {rank for rank in range(self.size) if self._loss(rank) not in (None, ENDED)}
        self._cut_off |= silent
        if not self._next_call.left_s():
            self._call_silent()
            self._next_call = Deadline(_CALL_EVERY_S)
        if self._attested() != self._told or self._board.get(f"said/{self.rank}") != self._said:
            self.say(self._text)  # others may have no line to them, or have lost what it said
        return sorted(self._cut_off)

    def _call_silent(self) -> None:
        """Connect to ranks on other hosts of which nothing is known here."""
        here, members = self._of.placement.here, self._of.placement.members
        for rank in range(self.size):
            if rank in here or rank in self._cut_off or self.is_gone(rank) or self.heard(rank):
                continue
            try:
                socket.create_connection(self._of.links.where(members[rank]), _CALL_S).close()
            except ConnectionRefusedError:
                self._refused.add(rank)
            except OSError:
                self._cut_off.add(rank)

    def _loss(self, rank: int) -> str | None:
        return self._of.links.loss_of(self._of.placement.members[rank])

    def refusal(self, present: Sequence[int], silent: Sequence[int]) -> str:
        if self._is_named or len(present) > len(silent):
            return ""
        return (
            f"{name_ranks(silent)} may be alive but cannot be reached, and this side, "
            f"{name_ranks(present)}, has no majority: name a store that decides with shrink(store=)"
        )


def shrink(
    old: HostsTransport, name: str, at_least: int, timeout_s: float, store: Any
) -> Transport:
    """The group of the survivors of a group over hosts."""
    old.end_for_survivors()
    met: list[Attempt] = []
    lost: StoreGone | None = None
    named = [lambda: Board(store).reopen(_limit())]
    boards = _boards(old) if store is None else iter(named)
    for open_board in boards:
        try:
            opened = open_board()
            vote = StoreVote(old, opened, is_named=store is not None)
            return go_on(vote, at_least, timeout_s, partial(_meet, old, name, opened, met))[0]
        except StoreGone as error:
            lost = lost or error
            if met:  # that group may be made, and this rank must not leave it for another
                break
    raise NoQuorum(
        f"group {old.name} cannot continue: its ranks need a torch Store to agree, and {lost}",
        rank=old.rank,
        group=old.name,
    ) from lost


def _boards(old: HostsTransport) -> Iterator[Callable[[], Board]]:
    """Functions that open the stores in which the ranks may agree if none is named: the one in
    which they met; if it is lost, one hosted by the first rank that seems to be alive. Even if
    they disagree about that, each rank is in one store, and only a majority continues."""
    yield lambda: old.links.reopen_board(_store_s()).until(_limit())
    for rank, member in enumerate(old.placement.members):
        is_gone = partial(_is_gone, old, rank)
        if not is_gone():
            yield partial(_hosted_board, old, member, is_gone)


def _hosted_board(old: HostsTransport, member: int, is_gone: Callable[[], bool]) -> Board:
    return Board(old.links.open_hosted(member, is_gone), _limit())


def _is_gone(old: HostsTransport, rank: int) -> bool:
    return old.group.state(rank)["loss"] is not None


def _meet(
    old: HostsTransport, name: str, board: Board, met: list[Attempt], attempt: Attempt
) -> Transport:
    """Meet the survivors, wherever they are."""
    met.append(attempt)
    rank, size = attempt.members.index(old.rank), len(attempt.members)
    known, timeout_s = old.global_ranks, old.timeout_s
    global_ranks = None if known is None else tuple(known[member] for member in attempt.members)
    part = board.part(f"unisono/{attempt.name}")
    how: Any = {"name": name, "global_ranks": global_ranks, "timeout_s": timeout_s}
    return connect_once(part, rank, size, attempt, leads=rank == 0, **how)
