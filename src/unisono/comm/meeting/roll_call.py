"""Which ranks are present, through a torch Store: for processes on several hosts that were
started separately, and may restart. Every rank publishes that it waits. A rank that sees an
entry of every rank agrees to begin with these processes; once all agree, they begin."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from unisono.comm.meeting.bounded_store import BoundedStore
from unisono.comm.meeting.deadline import Deadline, Waiting
from unisono.errors import RendezvousError


def call_roll(
    store: Any,
    name: str,
    rank: int,
    size: int,
    deadline: Deadline,
    about: Mapping[str, Any] = MappingProxyType({}),
    check: Callable[[], None] = lambda: None,
) -> tuple[str, list[dict[str, Any]]]:
    """A token that the present ranks share, and no others ever had; and what each of them publishes
    `about` itself.

    Raises RendezvousError if they do not join by the deadline, join with another size, or if
    another process joins as this rank; and what `check` raises.
    """
    call = _RollCall(BoundedStore(store, deadline.left_s), name, rank, size, about)
    try:
        return call.wait_until_all_agree(Waiting(rank, size, name, deadline), check)
    finally:
        call.leave()


class _RollCall:
    """One rank's part in it."""

    def __init__(
        self, store: Any, name: str, rank: int, size: int, about: Mapping[str, Any]
    ) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self._number = secrets.token_hex(8)
        me = {"number": self._number, "size": size, "pid": os.getpid()}
        self._me = json.dumps({**about, **me, "machine": socket.gethostname()})

    def wait_until_all_agree(
        self, waiting: Waiting, check: Callable[[], None]
    ) -> tuple[str, list[dict[str, Any]]]:
        """The token of those that have agreed, and who they are."""
        waits = self._keys("waits")
        self._store.set(waits[self._rank], self._me)
        agreed: dict[str, tuple[list[str], list[str]]] = {}
        while True:
            wanted, here = waits, self._look_who_waits(waits)
            if all(here):
                self._compare_sizes(here)
                token = hashlib.blake2b("".join(here).encode(), digest_size=8).hexdigest()
                wanted = self._keys(token)
                if token not in agreed:
                    agreed[token] = wanted, here
                    self._store.set(wanted[self._rank], "agreed")
            for token, (keys, texts) in agreed.items():  # even if others have joined since
                if self._store.check(keys):
                    return token, [json.loads(text) for text in texts]
            check()
            problem = self._read(self._key("problem", self._number))
            if problem:
                raise RendezvousError(problem)
            waiting.look(partial(self._find_missing, wanted))
            waiting.pause()

    def leave(self) -> None:
        self._store.compare_set(self._key("waits", self._rank), self._me, "-")

    def _look_who_waits(self, keys: list[str]) -> list[str]:
        """What each waiting rank has published about itself; "" for others, for good if some
        never joined."""
        if self._read(keys[self._rank]) != self._me:
            raise RendezvousError(
                f"another process is joining {self._name!r} as rank {self._rank} right now: each "
                "rank must be one process, and two jobs at once need two names"
            )
        if not self._store.check(keys):
            return [""]
        return ["" if text == b"-" else text.decode() for text in self._store.multi_get(keys)]

    def _find_missing(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if self._read(key) in ("", "-")]

    def _compare_sizes(self, here: list[str]) -> None:
        """Raise RendezvousError if a rank joined with another size; all ranks do."""
        everyone = [json.loads(text) for text in here]
        wrong = [rank for rank, about in enumerate(everyone) if about["size"] != self._size]
        if not wrong:
            return
        theirs = everyone[wrong[0]]
        problem = (
            f"group {self._name}: rank {wrong[0]} (pid {theirs['pid']} on {theirs['machine']}) "
            f"joined a group of {theirs['size']}, but rank {self._rank} a group of {self._size}"
        )
        for about in everyone:
            self._store.set(self._key("problem", about["number"]), problem)
        raise RendezvousError(problem)

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def _keys(self, *parts: object) -> list[str]:
        return [self._key(*parts, rank) for rank in range(self._size)]

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("unisono/roll", self._name, *parts)))
