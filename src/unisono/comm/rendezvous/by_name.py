"""How processes that were started separately meet by a name: `Communicator.join`."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.comm.base import DEFAULT_TIMEOUT_S, Communicator
from unisono.comm.rendezvous.announcements import Exchange, FileExchange, StoreExchange, Word
from unisono.comm.rendezvous.by_parent import is_private, seat
from unisono.comm.rendezvous.discovery import about_me, clear_if_over
from unisono.comm.rendezvous.lobby import Lobby, Side
from unisono.comm.rendezvous.unix_socket import Deadline, Departed
from unisono.comm.rendezvous.waiting import meeting_timeout_s
from unisono.comm.shared_memory.communicator import NativeCommunicator, open_with
from unisono.comm.solo import SoloCommunicator
from unisono.errors import RendezvousError


def join(
    name: str,
    rank: int,
    size: int,
    store: Any,
    timeout_s: float | None,
    join_timeout_s: float | None,
) -> Communicator:
    """As `Communicator.join`, which says it all."""
    _check_name(name)
    if not isinstance(rank, int) or not isinstance(size, int):
        raise TypeError(f"rank and size are whole numbers, not {rank!r} and {size!r}")
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} does not lie in a group of {size}")
    meeting_s = meeting_timeout_s(timeout_s, join_timeout_s)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if size == 1:
        return SoloCommunicator(name, None, timeout_s)
    deadline = Deadline(meeting_s)
    side = Side(name, rank, size, deadline, open_with(timeout_s))
    with _meeting(name, rank, store) as exchange, Lobby() as lobby:
        while True:
            try:
                place = lobby.meet_by(exchange, side)
            except Departed:  # while it waited: it may come back, or another in its place
                if not deadline.left_s():
                    raise
            else:
                return NativeCommunicator(place, lobby, name, None, timeout_s)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is no name to meet by")
    try:
        is_text = b"\0" not in name.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ValueError(f"{name!r} is no name to meet by: it has characters that are no text")


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

    What strangers put into /tmp in our file's place hinders those alone who have no other folder.

    Not the folders that the environment names: a service and a shell of one user have different
    ones. In /tmp nobody can put another file into our file's place unnoticed: whoever reads it
    looks at the owner.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def announce(self, rank: int, word: Word) -> None:
        self._exchanges()[0].announce(rank, word)
        if rank == 0:
            _sweep()

    def look_up(self, rank: int) -> Word | None:
        first, *others = self._exchanges()
        word = first.look_up(rank)
        for exchange in others:
            with contextlib.suppress(RendezvousError):
                word = word or exchange.look_up(rank)
        return word

    def clear(self, rank: int, word: Word | None = None) -> None:
        for exchange in self._exchanges():
            exchange.clear(rank, word)

    def _exchanges(self) -> list[FileExchange]:
        return [FileExchange(folder / self._file) for folder in _folders()]


def _folders() -> list[Path]:
    own = f"/run/user/{os.geteuid()}"
    return [Path(own), Path("/tmp")] if is_private(own) else [Path("/tmp")]


def _sweep() -> None:
    """Take away what ranks 0 have left, of any name, that were killed while they waited."""
    me = about_me("")
    for folder in _folders():
        for file in folder.glob(f"unisono-{os.geteuid()}-join-*"):
            clear_if_over(FileExchange(file), me)
