"""After a death, over hosts: the survivors agree through a torch Store, and meet there again."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from unisono import variables
from unisono.comm.engine import ENDING_SILENT
from unisono.comm.hosts.anywhere import connect_once
from unisono.comm.hosts.control_line import ENDED, PATIENCE_S
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.hosts.links import Ballot
from unisono.comm.meeting.board import Board, StoreGone
from unisono.comm.meeting.deadline import Deadline, LimitOfEach
from unisono.comm.meeting.survivors import Attempt, Vote, go_on
from unisono.comm.transport import Transport
from unisono.errors import NoQuorum, RendezvousError, name_ranks

_CALL_S = 1.0
_CALL_EVERY_S = 0.3
_ANSWER_S = 0.5
_ASK_EVERY_S = 2.0
_MOST_TURNS = 3


def _limit() -> Deadline:
    return LimitOfEach(_store_s())


def _store_s() -> float:
    """How long a store may take to answer, before it and its host count as lost: longer than a
    link may be down, so that a rank that turns to another store is silent for those at this one."""
    return max(5.0, 1.0 + (variables.LINK_PATIENCE_S.read() or PATIENCE_S))


class _Elsewhere(RendezvousError):
    """The others agree at an earlier `store`."""

    def __init__(self, store: int) -> None:
        super().__init__(f"the others agree at store {store}")
        self.store = store


class StoreVote(Vote):
    """The vote of ranks on several hosts: on a board. `is_named`: the program chose its store, and
    the ranks that reach it decide. `ballot` says where this rank is, for those that miss it; once
    it has `met` others there, it stays."""

    def __init__(
        self,
        group: HostsTransport,
        board: Board,
        is_named: bool,
        ballot: Ballot,
        met: Sequence[object],
    ) -> None:
        super().__init__(group.membership, group.name)
        self._of, self._is_named, self._ballot, self._met = group, is_named, ballot, met
        ballot.answered_s = time.monotonic()
        board = board.hidden(group.links.hosts.secret)
        self._board = board.part(f"unisono/survivors/{group.key:x}")
        self._said, self._text, self._told = "", "", frozenset[int]()
        self._gone: set[int] = set()  # as reported by a rank whose system attests it
        self._refused: set[int] = set()  # their host's system says that the process is gone
        self._cut_off: set[int] = set()
        self._next_call = Deadline(_CALL_EVERY_S)
        self._next_question = Deadline(_ASK_EVERY_S)

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
        name, board = f"choice/{attempt}", self._board
        choice = board.compare_set(name, "", text) if text else board.get(name) or None
        self._ballot.answered_s = time.monotonic()
        return choice

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
        if not self._next_question.left_s():
            self._look_elsewhere()
            self._next_question = Deadline(_ASK_EVERY_S)
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

    def _look_elsewhere(self) -> None:
        """Ask the missing ranks where they vote. This one turns back to those at an earlier store,
        unless it was there too often; then none of them waits for the other."""
        members, mine = self._of.placement.members, self._ballot
        attempt = self.said(self.rank)[0]
        missing = [
            members[rank]
            for rank in range(self.size)
            if not self.is_gone(rank) and 0 <= self.said(rank)[0] < attempt
        ]
        told = self._of.links.ask_ranks(missing, "vote", self._of.key, _ANSWER_S, _ANSWER_S)
        for member, at in told.items():
            if at is None:
                continue
            if at[0] < mine.store and not (mine.is_final or self._met) and _has_answer(at):
                self._board.set(f"said/{self.rank}", "")
                raise _Elsewhere(at[0])
            if at[2] or (mine.is_final and at[0] != mine.store):
                self._cut_off.add(members.index(member))

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
    """The group of the survivors of a group over hosts.

    If none is named, the ranks agree in the store in which they met (number 0); if it is lost, in
    one hosted by the first rank that seems to be alive (number 1 for rank 0). Even if they disagree
    about that, each rank is in one store, and only a majority continues. A rank that loses a store
    which still answers others tries again, and one that finds the others at an earlier store turns
    back, a few times: after a slow answer they would wait for each other."""
    old.end_for_survivors()
    met: list[Attempt] = []
    lost: StoreGone | None = None
    ballot = old.links.votes[old.key] = Ballot()
    number: int | None = 0
    turns = 0
    try:
        while number is not None:
            ballot.store = number
            try:
                opened = _open(old, number, store)
                vote = StoreVote(old, opened, store is not None, ballot, met)
                return go_on(vote, at_least, timeout_s, partial(_meet, old, name, opened, met))[0]
            except _Elsewhere as error:
                number, turns = error.store, turns + 1
            except StoreGone as error:
                lost = lost or error
                if met:  # that group may be made, and this rank must not leave it for another
                    break
                if turns < _MOST_TURNS and _answers_others(old, ballot):
                    turns += 1
                else:
                    number = None if store is not None else _next_store(old, number)
            ballot.is_final = turns >= _MOST_TURNS
    finally:
        ballot.is_final = True
    raise NoQuorum(
        f"group {old.name} cannot continue: its ranks need a torch Store to agree, and {lost}",
        rank=old.rank,
        group=old.name,
    ) from lost


def _open(old: HostsTransport, number: int, named: Any) -> Board:
    if named is not None:
        return Board(named).reopen(_limit())
    if not number:
        return old.links.reopen_board(_store_s()).until(_limit())
    member, is_gone = old.placement.members[number - 1], partial(_is_gone, old, number - 1)
    return Board(old.links.open_hosted(member, is_gone, _store_s()), _limit())


def _next_store(old: HostsTransport, number: int) -> int | None:
    ranks = range(number, old.size)
    return next((rank + 1 for rank in ranks if not _is_gone(old, rank)), None)


def _answers_others(old: HostsTransport, ballot: Ballot) -> bool:
    """Whether another rank votes in the store that this one has lost."""
    members = old.placement.members
    told = old.links.ask_ranks(members, "vote", old.key, _ANSWER_S, _ANSWER_S)
    return any(at and at[0] == ballot.store and _has_answer(at) for at in told.values())


def _has_answer(at: tuple[int, float, bool]) -> bool:
    """Whether the store of a rank that votes `at` this one has answered it lately."""
    return at[2] or at[1] < _store_s()


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
