"""Who of the ranks is there at this moment, by a torch Store: for processes of several hosts that
were started separately, and may start again. Every rank writes down that it waits. Whoever sees an
entry of every rank agrees to begin with just these processes; once all have agreed, they begin."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from typing import Any

from unisono.comm.rendezvous.bounded_store import BoundedStore
from unisono.comm.rendezvous.deadline import Deadline, Waiting
from unisono.errors import RendezvousError


def call_roll(store: Any, name: str, rank: int, size: int, deadline: Deadline) -> str:
    """What the ranks that are there now have in common, and no others ever had."""
    call = _RollCall(BoundedStore(store, deadline.left_s), name, rank, size)
    try:
        return call.wait_until_all_agree(Waiting(rank, size, name, deadline))
    finally:
        call.leave()


class _RollCall:
    def __init__(self, store: Any, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._number = secrets.token_hex(8)
        about = {"number": self._number, "size": size, "pid": os.getpid()}
        self._me = json.dumps(about | {"machine": socket.gethostname()})

    def wait_until_all_agree(self, waiting: Waiting) -> str:
        """What names those who have agreed."""
        self._store.set(self._key("waits", self._rank), self._me)
        agreed: dict[str, list[str]] = {}
        while True:
            here = self._look_who_waits()
            missing = [rank for rank, text in enumerate(here) if not text]
            if not missing:
                self._compare_sizes(here)
                token = hashlib.blake2b("".join(here).encode(), digest_size=8).hexdigest()
                keys = [self._key(token, rank) for rank in range(self._size)]
                if token not in agreed:
                    agreed[token] = keys
                    self._store.set(keys[self._rank], "agreed")
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            for token, keys in agreed.items():  # what all have agreed to counts, whoever came since
                if self._store.check(keys):
                    return token
            problem = self._read("problem", self._number)
            if problem:
                raise RendezvousError(problem)
            waiting.look(lambda missing=missing: missing)  # type: ignore[misc]
            waiting.pause()

    def leave(self) -> None:
        self._store.compare_set(self._key("waits", self._rank), self._me, "-")

    def _look_who_waits(self) -> list[str]:
        """What each rank that waits has written of itself, "" for the others."""
        here = [self._read("waits", rank) for rank in range(self._size)]
        if here[self._rank] != self._me:
            raise RendezvousError(
                f"another process joins {self._name!r} as rank {self._rank} at this moment: every "
                "rank is one process, and two jobs at once need two names"
            )
        return ["" if text == "-" else text for text in here]

    def _compare_sizes(self, here: list[str]) -> None:
        """Raise RendezvousError if a rank came with another size; all are told."""
        everyone = [json.loads(text) for text in here]
        wrong = [rank for rank, about in enumerate(everyone) if about["size"] != self._size]
        if not wrong:
            return
        theirs = everyone[wrong[0]]
        problem = (
            f"group {self._name}: rank {wrong[0]} (pid {theirs['pid']} on {theirs['machine']}) "
            f"came to a group of {theirs['size']}, rank {self._rank} to one of {self._size}"
        )
        for about in everyone:
            self._store.set(self._key("problem", about["number"]), problem)
        raise RendezvousError(problem)

    def _read(self, *key: object) -> str:
        name = self._key(*key)
        return str(self._store.get(name).decode()) if self._store.check([name]) else ""

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("unisono/roll", self._name, *parts)))
