"""How a group over torch ends: a torch backend raises different errors on the ranks, so the
first rank that fails leaves the cause in the group's store, and the others raise that."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import time
from typing import Any

from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import LimitOfEach
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    GroupError,
    PeerLost,
    UnisonoError,
)

_KINDS: dict[str, type[GroupError]] = {
    kind.__name__: kind
    for kind in (CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost, GroupError)
}
_KEY = "unisono/ending"
_TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(closed|refused|aborted)|"
    r"remote process|peer.*(exited|died)",
    re.IGNORECASE,
)
_CAUSE_COMES_S = 0.3
_STORE_ANSWERS_S = 2.0


class Faults:
    """Why a group ended, for one of its members; `cause` is None while the group works."""

    def __init__(self, name: str, rank: int, store: Any) -> None:
        self._name = name
        self._rank = rank
        self._board = Board(store, LimitOfEach(_STORE_ANSWERS_S))
        self._pid = os.getpid()
        self.cause: GroupError | None = None

    def check(self) -> None:
        ending = self.ending()
        if ending is not None:
            raise ending from ending.__cause__

    def ending(self) -> GroupError | None:
        """The cause, if the group has ended, or if this is a forked child, which cannot use it."""
        if self.cause is not None:
            error = copy.copy(self.cause)
            error.__cause__ = self.cause.__cause__
            return error
        if os.getpid() == self._pid:
            return None
        text = f"group {self._name} belongs to the parent process (pid {self._pid}): a forked "
        return GroupClosed(f"{text}child cannot use it", rank=self._rank, group=self._name)

    def closed(self, *, tell: bool) -> None:
        """The group was closed here; with `tell` the others learn which rank left."""
        if tell and self.cause is None:
            self._tell(PeerLost(f"rank {self._rank} closed group {self._name}", peer=self._rank))
        text = f"group {self._name} is closed"
        self.cause = GroupClosed(text, rank=self._rank, group=self._name)

    def end(self, error: GroupError, *, tell: bool = True) -> GroupError:
        """End the group with this error; returns an earlier error if it has already ended."""
        if self.cause is None:
            self.cause = error
            before = self._tell(error) if tell else None
            if before is not None and isinstance(error, GroupAborted):
                self.cause = before  # if two ranks end a group, the first cause counts for all
        return self.cause

    def translate(self, error: Exception, doing: str) -> GroupError:
        """What a member raises for an exception of the backend. It ends the group."""
        if self.cause is not None:
            return self.cause
        text = str(error).strip()
        cause = self._await_cause() if _LOST.search(text) or "pair closure" in text else None
        if cause is None:
            cause = self._describe(text, doing)
        cause.__cause__ = error
        return self.end(cause)

    def _describe(self, text: str, doing: str) -> GroupError:
        where = f"{doing} on group {self._name}"
        reason = text.split("\n", 1)[0]
        ours = {"rank": self._rank, "group": self._name}
        if _LOST.search(text):
            return PeerLost(f"a peer left while this rank was in {where}: {reason}", **ours)
        if _TIMED_OUT.search(text):
            return CollectiveTimeout(f"{where} did not finish by its deadline: {reason}", **ours)
        return GroupError(f"{where} failed: {reason}", **ours)

    # -- through the store -----------------------------------------------------------------------

    def decide(self, serial: int, value: int, timeout_s: float) -> int:
        """The value that the first member proposed under this serial. Raises StoreGone."""
        if self._board.store is None:
            raise UnisonoError(f"group {self._name} has no store to keep a decision in")
        board = self._board.until(LimitOfEach(timeout_s))
        return int(board.compare_set(f"unisono/decision/{serial}", "", str(value)))

    def _tell(self, error: GroupError) -> GroupError | None:
        """Leave the cause for the others; returns an earlier one of another member, if any."""
        record = {"kind": type(error).__name__, "text": str(error), "rank": self._rank}
        record |= {"reason": getattr(error, "reason", ""), "peer": getattr(error, "peer", -1)}
        with contextlib.suppress(Exception):  # its host may be gone with the group
            first = self._board.compare_set(_KEY, "", json.dumps(record))
            return self._cause_from(json.loads(first))
        return None

    def _await_cause(self) -> GroupError | None:
        """The cause that another member has left, or is about to leave."""
        end = time.monotonic() + _CAUSE_COMES_S
        with contextlib.suppress(Exception):
            while not (found := self._board.get(_KEY)):
                if time.monotonic() > end:
                    return None
                time.sleep(0.01)
            return self._cause_from(json.loads(found))
        return None

    def _cause_from(self, record: dict[str, Any]) -> GroupError | None:
        """The cause that another member has left; None if it is our own."""
        if record["rank"] == self._rank:
            return None
        kind = _KINDS.get(record["kind"], GroupError)
        text = f"{record['text']} (reported by rank {record['rank']})"
        error = kind(text, rank=self._rank, group=self._name)
        if isinstance(error, (GroupAborted, PeerLost)):
            error.peer = int(record["peer"])
        if isinstance(error, GroupAborted):
            error.reason = str(record["reason"])
        return error
