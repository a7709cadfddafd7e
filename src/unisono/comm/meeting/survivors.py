"""After a group has ended, the survivors agree which ranks are left, and form a new group.

They agree by a *vote*, in a place that outlives the group: each rank can leave a text there, and
the first of several proposals counts (compare-and-swap). On one host it is the old segment, which
stays mapped until its last member has left it. No leader is needed whose death could matter.

In attempt k = 1, 2, ... each rank publishes that it is present. Once every rank is present, known
to be gone, or late, the first rank that sees this proposes the *choice* of attempt k: which ranks
continue. Those meet, and the first of them, once all have opened the new segment, settles the
*outcome*: made. A rank that gives up before (a member has died or is stopped) settles it as failed.
Then attempt k + 1 follows, with all ranks again. So:

- A decider that dies has either decided or not: its proposal is written before it counts.
- Ranks with different views (one knows of a death, another does not) propose different choices, and
  all take the first. If it contains a dead rank, its meeting fails, and the next one does not.
- A rank that wakes late reads what was decided. If it was left out, it waits for the outcome, and
  raises NoQuorum once the others have formed the group, or joins the next attempt.
- There is one place, so there are never two groups. Over hosts a rank may be unable to reach it,
  and then does not continue; there only a strict majority may leave out ranks that are merely
  silent, unless the program has named the store of the vote (`StoreVote.refusal`).
"""

from __future__ import annotations

import base64
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from unisono.comm.engine import OF_SURVIVORS
from unisono.comm.engine.numbers import Note, Status
from unisono.comm.meeting import makings
from unisono.comm.meeting.board import StoreGone
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.membership import Membership
from unisono.comm.meeting.outcome import Outcome
from unisono.comm.meeting.unix_socket import Departed, TooFewDescriptors
from unisono.errors import GroupClosed, GroupError, NoQuorum, RendezvousError, name_ranks

STOPPED_S = 5.0
"""How long to wait for a stopped rank, unless the limit is shorter."""

_MEETING_S = 10.0
"""How long ranks that are present may take to meet."""
_MOST_ATTEMPTS = 30  # each needs the death of a rank; the segment keeps 32
_GLANCE_S = 0.25
_LONGEST_PAUSE_S = 0.002
_WITHDRAWN = -1

_Made = TypeVar("_Made")


class Vote(ABC):
    """How the ranks of a group that has ended agree."""

    def __init__(self, membership: Membership, name: str) -> None:
        self.rank, self.size, self.name = membership.rank, membership.size, name
        self._membership, self._group = membership, membership.group

    @abstractmethod
    def say(self, text: str) -> None:
        """Publish this text of ours, instead of the previous one."""

    @abstractmethod
    def heard(self, rank: int) -> str:
        """The latest text of a rank; "" if none."""

    @abstractmethod
    def choose(self, attempt: int, text: str | None) -> str | None:
        """The first proposal for an attempt; None if we have none and there is none; "" if it
        was replaced by a later attempt."""

    @abstractmethod
    def settle(self, attempt: int, made: bool | None) -> bool | None:
        """How an attempt ended, in the same way as `choose`."""

    @abstractmethod
    def is_gone(self, rank: int) -> bool:
        """Whether a rank has certainly left the group: it ended, or closed the group."""

    def is_closed(self) -> bool:
        """Whether this process has closed the group meanwhile, in another thread."""
        return self._group.failure()[0] == Status.CLOSED

    def find_stopped(self) -> Sequence[int]:
        """The ranks that are stopped, as far as the system knows."""
        return self._membership.find_stopped()

    def find_cut_off(self) -> Sequence[int]:
        """The ranks not worth waiting for, since their host does not answer."""
        return ()

    def refusal(self, present: Sequence[int], silent: Sequence[int]) -> str:
        """Why these may not continue while those are silent; "" if they may."""
        return ""

    def said(self, rank: int) -> tuple[int, int]:
        """Which attempt a rank has joined, 0 if none, and how many ranks it requires."""
        text = self.heard(rank)
        number, at_least = json.loads(text) if text else (0, 1)
        return int(number), int(at_least)

    def find_left(self, ranks: Sequence[int]) -> list[int]:
        """Which of these, other than this one, are gone or have given up."""
        others = [rank for rank in ranks if rank != self.rank]
        return [rank for rank in others if self.is_gone(rank) or self.said(rank)[0] == _WITHDRAWN]


class SegmentVote(Vote):
    """The vote of ranks on one host: in their group's segment, which they all reach."""

    def say(self, text: str) -> None:
        said = json.loads(text)
        if said[0] != self._membership.said[0]:  # what it first required counts
            self._membership.said = said
            makings.say(self._membership)

    def heard(self, rank: int) -> str:
        text = self._group.read_note(rank, Note.COMING, 0)
        return json.dumps(json.loads(text)[:2]) if text else ""

    def choose(self, attempt: int, text: str | None) -> str | None:
        if text is None:
            chooser = self._group.decide(OF_SURVIVORS, 2 * attempt)
        else:
            self._group.write_note(Note.CHOICE, attempt, text)
            chooser = self._group.decide(OF_SURVIVORS, 2 * attempt, self.rank)
        if chooser < 0:
            return None if text is None else ""
        return self._group.read_note(chooser, Note.CHOICE, attempt) or ""

    def settle(self, attempt: int, made: bool | None) -> bool | None:
        proposed = () if made is None else (int(made),)
        outcome = self._group.decide(OF_SURVIVORS, 2 * attempt + 1, *proposed)
        return None if outcome < 0 else bool(outcome)

    def is_gone(self, rank: int) -> bool:
        state = self._group.state(rank)
        return state["loss"] is not None or state["has_closed"]


class Attempt(Outcome):
    """One attempt to form a new group: its `members`, ranks of the old one, and its `name`."""

    def __init__(self, vote: Vote, number: int, members: Sequence[int], name: str) -> None:
        super().__init__(name, partial(vote.settle, number), Deadline(_MEETING_S), self._look)
        self.members, self._vote = members, vote

    def _look(self) -> None:
        if gone := self._vote.find_left(self.members):
            raise Departed(f"{name_ranks(gone)} left while {self.name} was made")


def go_on(
    vote: Vote, at_least: int, timeout_s: float, meet: Callable[[Attempt], _Made]
) -> tuple[_Made, Sequence[int]]:
    """What `meet` returns once the survivors have agreed on an attempt and made the group, and who
    they are. All ranks that get a result get the same.

    Raises NoQuorum if fewer than `at_least` are left, if the others formed the group without
    this rank, or if no group may be formed."""
    try:
        for number in range(1, _MOST_ATTEMPTS + 1):
            made = _attempt(vote, number, at_least, timeout_s, meet)
            if made is not None:
                return made
    except (NoQuorum, StoreGone):
        raise  # a rank that has lost its store may go on at another: here it must count as silent
    except BaseException:
        vote.say(json.dumps([_WITHDRAWN, at_least]))  # no rank needs to wait for this one
        raise
    raise RendezvousError(f"group {vote.name}: {_MOST_ATTEMPTS} attempts to form a group failed")


def _attempt(
    vote: Vote,
    number: int,
    at_least: int,
    timeout_s: float,
    meet: Callable[[Attempt], _Made],
) -> tuple[_Made, Sequence[int]] | None:
    """One attempt; None: it has failed for all ranks."""
    vote.say(json.dumps([number, at_least]))
    choice = _await_choice(vote, number, timeout_s)
    if not choice:  # it failed long ago
        _await_outcome(vote, number, ())
        return None
    chosen = json.loads(choice)
    bits = base64.b85decode(chosen["members"])
    members = [rank for rank in range(vote.size) if bits[rank // 8] >> rank % 8 & 1]
    if why := str(chosen["refusal"]):
        text = f"group {vote.name} cannot continue: {why}"
        raise NoQuorum(text, rank=vote.rank, group=vote.name)
    needed = max(vote.said(rank)[1] for rank in members)
    if len(members) < needed:
        raise NoQuorum(
            f"group {vote.name} cannot continue: only {name_ranks(members)} of {vote.size} "
            f"{'is' if len(members) == 1 else 'are'} left, and at_least={needed} is required",
            rank=vote.rank,
            group=vote.name,
        )
    if vote.rank not in members:
        _await_outcome(vote, number, members)
        return None
    attempt = Attempt(vote, number, members, f"{vote.name} on {chosen['token']}")
    try:
        return meet(attempt), members
    except TooFewDescriptors:
        attempt.settle(False)
        raise
    except (RendezvousError, GroupError):
        if attempt.settle(False):
            raise  # the group was made, but this rank could not stay in it
        return None
    except BaseException:
        attempt.settle(False)
        raise


def _await_choice(vote: Vote, number: int, timeout_s: float) -> str:
    """Wait for every rank that may join, then choose those that have."""
    limit, stopped_limit = Deadline(timeout_s), Deadline(min(timeout_s, STOPPED_S))
    pause_s, glance, stopped = 0.0001, Deadline(_GLANCE_S), frozenset[int]()
    while True:
        if vote.is_closed():
            raise GroupClosed(f"group {vote.name} is closed", rank=vote.rank, group=vote.name)
        choice = vote.choose(number, None)
        if choice is not None:
            return choice
        gone = vote.find_left(range(vote.size))
        here = [rank for rank in range(vote.size) if rank not in gone]
        present = [rank for rank in here if vote.said(rank)[0] >= number]
        silent = [rank for rank in here if rank not in present]
        if not stopped_limit.left_s() and not glance.left_s():
            stopped, glance = frozenset(vote.find_stopped()), Deadline(_GLANCE_S)
        if not limit.left_s() or stopped.union(vote.find_cut_off()).issuperset(silent):
            bits = bytearray(-(-vote.size // 8))
            for rank in present:
                bits[rank // 8] |= 1 << rank % 8
            proposal = {
                "members": base64.b85encode(bits).decode(),
                "token": os.urandom(6).hex(),
                "refusal": vote.refusal(present, silent) if silent else "",
            }
            return vote.choose(number, json.dumps(proposal)) or ""
        makings.look()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _await_outcome(vote: Vote, number: int, members: Sequence[int]) -> None:
    """Wait until an attempt without this rank has failed. Raises NoQuorum if it has not."""

    def check() -> None:
        if len(vote.find_left(members)) == len(members):
            raise Departed(f"{name_ranks(members)} left")

    if Outcome(vote.name, partial(vote.settle, number), Deadline(2 * _MEETING_S), check).wait():
        raise NoQuorum(
            f"{name_ranks(members)} of group {vote.name} continued without this rank, which was "
            "too late: it was stopped, or busy for longer than their limit. It can join again if "
            "they call grow",
            members=members,
            rank=vote.rank,
            group=vote.name,
        )
