"""Where processes that were started separately meet by a name, for `Communicator.join`."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.comm.rendezvous.announcements import (
    Announcement,
    Announcements,
    FileAnnouncements,
    StoreAnnouncements,
)
from unisono.comm.rendezvous.by_parent import claim_name, is_private
from unisono.comm.rendezvous.discovery import about_me, clear_if_over
from unisono.errors import RendezvousError


@contextlib.contextmanager
def meeting_by_name(name: str, rank: int, store: Any) -> Iterator[Announcements]:
    """Where those who know the name announce themselves."""
    if store is not None:
        yield StoreAnnouncements(store, f"unisono/join/{name}")
        return
    meeting = file_of(name)
    complaint = (
        f"another process joins {name!r} as rank {rank} at this moment: every rank is one process, "
        "and two jobs at once need two names"
    )
    with claim_name(f"{meeting}-{rank}", complaint):
        yield _FolderAnnouncements(meeting)


def file_of(name: str) -> str:
    """The name of the file through which those who know `name` find each other."""
    short = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"unisono-{os.geteuid()}-join-{short}"


class _FolderAnnouncements:
    """A file in the first folder that there is, and a look into all of them.

    What others put into /tmp under our file's name hinders only those who have no other folder.

    Not the folders that the environment names: a service and a shell of one user have different
    ones. In /tmp nobody can replace our file unnoticed: whoever reads it looks at the
    owner.
    """

    def __init__(self, file: str) -> None:
        self._file = file

    def announce(self, rank: int, announcement: Announcement) -> None:
        self._boards()[0].announce(rank, announcement)
        if rank == 0:
            _sweep()

    def look_up(self, rank: int) -> Announcement | None:
        first, *others = self._boards()
        announcement = first.look_up(rank)
        for announcements in others:
            with contextlib.suppress(RendezvousError):
                announcement = announcement or announcements.look_up(rank)
        return announcement

    def clear(self, rank: int, announcement: Announcement | None = None) -> None:
        for announcements in self._boards():
            announcements.clear(rank, announcement)

    def _boards(self) -> list[FileAnnouncements]:
        return [FileAnnouncements(folder / self._file) for folder in _folders()]


def _folders() -> list[Path]:
    own = f"/run/user/{os.geteuid()}"
    return [Path(own), Path("/tmp")] if is_private(own) else [Path("/tmp")]


def _sweep() -> None:
    """Take away what ranks 0 have left, of any name, that were killed while they waited."""
    me = about_me("")
    for folder in _folders():
        for file in folder.glob(f"unisono-{os.geteuid()}-join-*"):
            clear_if_over(FileAnnouncements(file), me)
