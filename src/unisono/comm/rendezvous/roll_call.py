"""Who of the ranks is there at this moment, by a torch Store: for processes of several hosts that
were started separately, and may start again.

Every rank writes down that it waits, under a number of its own. Once all have come, rank 0 proposes
to begin; whoever still waits agrees, and rank 0 says that all have. A rank that does not agree has
ended since it came: what it wrote is removed, and the others wait for whoever takes its place.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from typing import Any

from unisono.comm.rendezvous.bounded_store import BoundedStore
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.errors import RendezvousError, name_ranks

_AGREE_S = 2.0
"""How long a rank that waits may take to agree."""

_LONGEST_PAUSE_S = 0.02


def call_roll(store: Any, name: str, rank: int, size: int, deadline: Deadline) -> str:
    """What the ranks that are there now have in common, and no others ever had.

    Raises RendezvousError if they do not come by the deadline, come with another size, or if
    another process comes as this rank.
    """
    call = _RollCall(BoundedStore(store, deadline.left_s), name, rank, size, deadline)
    call.come()
    try:
        return call.propose_until_all_agree() if rank == 0 else call.agree_until_it_begins()
    finally:
        call.leave()


class _RollCall:
    """One rank's part in it."""

    def __init__(self, store: Any, name: str, rank: int, size: int, deadline: Deadline) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._deadline = deadline
        self._waiting = Waiting(rank, size, name, deadline)
        self._pause_s = 0.001
        me = {"number": secrets.token_hex(8), "size": size, "pid": os.getpid()}
        self._me = json.dumps(me | {"machine": socket.gethostname()})

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("unisono/roll", self._name, *parts)))

    def come(self) -> None:
        """Say that this rank waits."""
        self._store.set(self._key("waits", self._rank), self._me)

    def leave(self) -> None:
        """It waits no longer."""
        self._store.compare_set(self._key("waits", self._rank), self._me, "-")

    def propose_until_all_agree(self) -> str:
        """Rank 0's part."""
        while True:
            here = self._wait_for_all()
            token = secrets.token_hex(8)
            problem = self._find_problem(here)
            plan = {"token": token, "here": here, "problem": problem}
            self._store.set(self._key("plan"), json.dumps(plan))
            if problem:
                raise RendezvousError(problem)
            self._store.set(self._key(token, 0), "agreed")
            silent = self._wait_for_agreement(token)
            if not silent:
                self._store.set(self._key(token, "begins"), "now")
                return token
            for rank in silent:
                self._store.compare_set(self._key("waits", rank), here[rank], "-")

    def agree_until_it_begins(self) -> str:
        """Every other rank's part."""
        while True:
            plan = json.loads(self._read("plan") or "{}")
            if self._me in plan.get("here", ()):
                if plan["problem"]:
                    raise RendezvousError(plan["problem"])
                self._store.set(self._key(plan["token"], self._rank), "agreed")
                if self._read(plan["token"], "begins"):
                    return str(plan["token"])
            self._pause([rank for rank in range(self._size) if not self._waits(rank)] or [0])

    def _wait_for_all(self) -> list[str]:
        while True:
            here = [self._waits(rank) for rank in range(self._size)]
            missing = [rank for rank, text in enumerate(here) if not text]
            if not missing:
                return here
            self._pause(missing)

    def _wait_for_agreement(self, token: str) -> list[int]:
        """The ranks that have not agreed in time."""
        soon = Deadline(min(_AGREE_S, max(self._deadline.left_s(), 0.1)))
        silent = list(range(self._size))
        while silent and soon.left_s():
            silent = [rank for rank in silent if not self._read(token, rank)]
            time.sleep(0.002 if silent else 0.0)
        return silent

    def _find_problem(self, here: list[str]) -> str:
        for rank, text in enumerate(here):
            theirs = json.loads(text)
            if theirs["size"] != self._size:
                return (
                    f"group {self._name}: rank {rank} (pid {theirs['pid']} on "
                    f"{theirs['machine']}) came to a group of {theirs['size']}, rank 0 to one of "
                    f"{self._size}"
                )
        return ""

    def _waits(self, rank: int) -> str:
        text = self._read("waits", rank)
        return "" if text == "-" else text

    def _read(self, *parts: object) -> str:
        key = self._key(*parts)
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _pause(self, missing: list[int]) -> None:
        """Before the next look. Raises RendezvousError if there shall be none."""
        if self._read("waits", self._rank) != self._me:
            raise RendezvousError(
                f"another process joins {self._name!r} as rank {self._rank} at this moment: every "
                "rank is one process, and two jobs at once need two names"
            )
        if not self._deadline.left_s():
            raise RendezvousError(
                f"group {self._name}: {name_ranks(missing)} of {self._size} did not come within "
                f"{in_seconds(self._deadline.timeout_s)}"
            )
        if self._waiting.is_long():
            self._waiting.say(missing)
        time.sleep(self._pause_s)
        self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
