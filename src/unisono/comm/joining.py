"""How processes that were started separately meet by a name: `Communicator.join`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.comm.base import Communicator
from unisono.comm.exchange import Exchange, FileExchange, StoreExchange, Word
from unisono.comm.line import Deadline, Departed
from unisono.comm.native import NativeCommunicator, open_with
from unisono.comm.rendezvous import Lobby, Side
from unisono.comm.siblings import is_private, seat
from unisono.comm.solo import SoloCommunicator
from unisono.errors import RendezvousError


def join(
    name: str, rank: int, size: int, store: Any, timeout_s: float, join_timeout_s: float
) -> Communicator:
    """As `Communicator.join`, which says it all."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is no name to meet by")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} does not lie in a group of {size}")
    if size == 1:
        return SoloCommunicator(name, None, timeout_s)
    deadline = Deadline(join_timeout_s)
    side = Side(name, rank, size, join_timeout_s, open_with(timeout_s))
    with _meeting(name, rank, store) as exchange, Lobby() as lobby:
        while True:
            try:
                place = lobby.meet_by(exchange, side)
            except Departed:  # while it waited: it may come back, or another in its place
                if not deadline.left_s():
                    raise
                side = dataclasses.replace(side, timeout_s=deadline.left_s())
            else:
                return NativeCommunicator(place, lobby, name, None, timeout_s)


@contextlib.contextmanager
def _meeting(name: str, rank: int, store: Any) -> Iterator[Exchange]:
    """Where those who know the name leave word."""
    if store is not None:
        yield StoreExchange(store, f"unisono/join/{name}")
        return
    short = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    meeting = f"unisono-{os.geteuid()}-join-{short}"
    complaint = (
        f"another process joins {name!r} as rank {rank} at this moment: every rank is one process, "
        "and two jobs at once need two names"
    )
    with seat(f"{meeting}-{rank}", complaint):
        yield _FolderExchange(meeting)


class _FolderExchange:
    """A file in the first folder that there is, and a look into all of them.

    Not the folders that the environment names: a service and a shell of one user have different
    ones. In /tmp nobody can put another file into our file's place unnoticed: whoever reads it
    looks at the owner.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def announce(self, rank: int, word: Word) -> None:
        self._exchanges()[0].announce(rank, word)

    def look_up(self, rank: int) -> Word | None:
        words = (exchange.look_up(rank) for exchange in self._exchanges())
        return next((word for word in words if word is not None), None)

    def clear(self, rank: int, word: Word | None = None) -> None:
        for exchange in self._exchanges():
            with contextlib.suppress(RendezvousError):  # not our file: the look-up has said so
                exchange.clear(rank, word)

    def _exchanges(self) -> list[FileExchange]:
        own = f"/run/user/{os.geteuid()}"
        folders = [own, "/tmp"] if is_private(own) else ["/tmp"]
        return [FileExchange(Path(folder) / self._file) for folder in folders]
