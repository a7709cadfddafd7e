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
from unisono.comm.rendezvous.deadline import Deadline, Waiting
from unisono.errors import RendezvousError

_AGREE_S = 2.0
"""How long a rank that waits may take to agree."""


def call_roll(store: Any, name: str, rank: int, size: int, deadline: Deadline) -> str:
    """What the ranks that are there now have in common, and no others ever had.

    Raises RendezvousError if they do not come by the deadline, come with another size, or if
    another process comes as this rank.
    """
    call = _RollCall(BoundedStore(store, deadline.left_s), name, rank, size, deadline)
    call.write(call.me, "waits", rank)
    try:
        return call.propose_until_all_agree() if rank == 0 else call.agree_until_it_begins()
    finally:
        call.remove(rank, call.me)


class _RollCall:
    """One rank's part in it."""

    def __init__(self, store: Any, name: str, rank: int, size: int, deadline: Deadline) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._deadline = deadline
        self._waiting = Waiting(rank, size, name, deadline)
        number, machine = secrets.token_hex(8), socket.gethostname()
        about = {"number": number, "size": size, "pid": os.getpid(), "machine": machine}
        self.me = json.dumps(about)

    def propose_until_all_agree(self) -> str:
        """Rank 0's part."""
        while True:
            here = self._look_who_waits()
            if "" in here:
                self._pause([rank for rank, text in enumerate(here) if not text])
                continue
            token = secrets.token_hex(8)
            problem = self._find_problem(here)
            self.write(json.dumps({"token": token, "here": here, "problem": problem}), "plan")
            if problem:
                raise RendezvousError(problem)
            silent = self._wait_for_agreement(token)
            if not silent:
                self.write("now", token, "begins")
                return token
            for rank in silent:
                self.remove(rank, here[rank])

    def agree_until_it_begins(self) -> str:
        """Every other rank's part."""
        while True:
            plan = json.loads(self._read("plan") or "{}")
            if self.me in plan.get("here", ()):
                if plan["problem"]:
                    raise RendezvousError(plan["problem"])
                self.write("agreed", plan["token"], self._rank)
                if self._read(plan["token"], "begins"):
                    return str(plan["token"])
            here = self._look_who_waits()
            self._pause([rank for rank, text in enumerate(here) if not text] or [0])

    def _wait_for_agreement(self, token: str) -> list[int]:
        """The ranks that have not agreed in time."""
        soon = Deadline(min(_AGREE_S, max(self._deadline.left_s(), 0.1)))
        silent = list(range(1, self._size))
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

    def _look_who_waits(self) -> list[str]:
        """What each rank that waits has written of itself, "" for the others."""
        here = [self._read("waits", rank) for rank in range(self._size)]
        if here[self._rank] != self.me:
            raise RendezvousError(
                f"another process joins {self._name!r} as rank {self._rank} at this moment: every "
                "rank is one process, and two jobs at once need two names"
            )
        return ["" if text == "-" else text for text in here]

    def _pause(self, missing: list[int]) -> None:
        self._waiting.look(lambda: missing)
        self._waiting.pause()

    def remove(self, rank: int, text: str) -> None:
        """Note that this process, if it still stands there, waits no longer as this rank."""
        self._store.compare_set(self._key("waits", rank), text, "-")

    def write(self, text: str, *key: object) -> None:
        """Write under a key of this roll call."""
        self._store.set(self._key(*key), text)

    def _read(self, *key: object) -> str:
        name = self._key(*key)
        return str(self._store.get(name).decode()) if self._store.check([name]) else ""

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("unisono/roll", self._name, *parts)))
