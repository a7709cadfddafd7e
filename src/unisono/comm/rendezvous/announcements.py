"""Where ranks that do not know each other announce themselves: a file or a torch Store; and what
every rank tells all others through a store."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from unisono.comm.rendezvous.bounded_store import BoundedStore
from unisono.comm.rendezvous.unix_socket import Deadline, descriptors_needed
from unisono.comm.rendezvous.waiting import JOIN_TIMEOUT_S, Waiting, in_seconds
from unisono.errors import RendezvousError, name_ranks

Announcement = dict[str, Any]
"""What a rank says of itself: its lobby's address, host, boot, pid."""


class Announcements(Protocol):
    """A board that all ranks of a new group can reach."""

    def announce(self, rank: int, announcement: Announcement) -> None:
        """Announce this rank."""

    def look_up(self, rank: int) -> Announcement | None:
        """What a rank has announced, if anything."""

    def clear(self, rank: int, announcement: Announcement | None = None) -> None:
        """Take back what a rank announced; where `announcement` is given, only if it is still
        that."""


class FileAnnouncements:
    """Announcements in a file: a path that all ranks know, or a descriptor that all inherited.

    Only rank 0 announces itself here. A stale file of a dead job does no harm: its lobby is gone.
    """

    def __init__(self, where: str | os.PathLike[str] | int) -> None:
        self._where = where

    def announce(self, rank: int, announcement: Announcement) -> None:
        if rank != 0:
            return
        data = json.dumps(announcement).encode()
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
            os.pwrite(self._where, data, 0)
            return
        path = Path(self._where)
        draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        try:
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(draft, path)
        except BaseException as error:
            draft.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise RendezvousError(
                f"cannot write the rendezvous file {path}: {error.strerror}{_what_is_at(path)}"
            ) from error

    def look_up(self, rank: int) -> Announcement | None:
        if rank != 0:
            return None
        try:
            announcement = json.loads(self._read())
        except (FileNotFoundError, ValueError):
            return None
        return (
            announcement if isinstance(announcement, dict) and "address" in announcement else None
        )

    def clear(self, rank: int, announcement: Announcement | None = None) -> None:
        with contextlib.suppress(RendezvousError):  # what cannot be read is not our announcement
            if rank != 0 or (announcement is not None and self.look_up(0) != announcement):
                return
            if isinstance(self._where, int):
                os.ftruncate(self._where, 0)
            else:
                Path(self._where).unlink(missing_ok=True)

    def _read(self) -> bytes:
        if isinstance(self._where, int):
            return os.pread(self._where, 1 << 16, 0)
        try:  # without waiting: it may be a FIFO, to which nobody will ever write
            with descriptors_needed():
                descriptor = os.open(self._where, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise RendezvousError(
                f"the rendezvous file {self._where} cannot be read: {error.strerror}"
                f"{_what_is_at(self._where)}; use a path of your own"
            ) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise RendezvousError(
                    f"the rendezvous file {self._where} is {_describe(status)}, not a file of user "
                    f"{os.geteuid()}: use a path of your own"
                )
            return os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)


def _what_is_at(path: str | os.PathLike[str]) -> str:
    """ ", for a FIFO of user 7 is in its place", where there is something that we cannot use."""
    try:
        status = os.lstat(path)
    except OSError:
        return ""
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return ""
    return f", for {_describe(status)} is in its place"


def _describe(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a FIFO"}
    kinds |= {stat.S_IFSOCK: "a socket", stat.S_IFLNK: "a link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
    return f"{kind} of user {status.st_uid}"


class StoreAnnouncements:
    """Announcements in a torch Store (TCPStore, FileStore, PrefixStore, ...), which belongs to one
    job, and is asked until a `limit`. Meetings in one store are told apart by their `prefix`."""

    def __init__(self, store: Any, prefix: str = "unisono", limit: Deadline | None = None) -> None:
        self._store = BoundedStore(store, (limit or Deadline(JOIN_TIMEOUT_S)).left_s)
        self._prefix = prefix

    def announce(self, rank: int, announcement: Announcement) -> None:
        self._store.set(f"{self._prefix}/{rank}", json.dumps(announcement))

    def look_up(self, rank: int) -> Announcement | None:
        key = f"{self._prefix}/{rank}"
        if not self._store.check([key]):
            return None
        try:
            announcement = json.loads(self._store.get(key))
        except ValueError:
            return None
        return (
            announcement if isinstance(announcement, dict) and "address" in announcement else None
        )

    def clear(self, rank: int, announcement: Announcement | None = None) -> None:
        key = f"{self._prefix}/{rank}"
        with contextlib.suppress(RendezvousError):  # the store is gone, with all that is in it
            if announcement is not None and self.look_up(rank) != announcement:
                return
            # Not deleted: whoever has just seen that it is there would wait for it.
            self._store.set(key, "")


def exchange(
    store: Any,
    name: str,
    rank: int,
    ranks: Sequence[int],
    text: str,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
    group: str = "world",
) -> list[str]:
    """The texts of these ranks, in their order; each of them calls this, and has it once all have
    come.

    Exchanges under one name are numbered, so that a store may serve several, one after the other.
    Raises RendezvousError, with who is missing, at the deadline; and what `check` raises.
    """
    size = len(ranks)
    waiting = Waiting(rank, size, group, deadline)
    store = BoundedStore(store, deadline.left_s)
    serial = store.add(f"unisono/{name}/count/{rank}", 1)
    keys = {member: f"unisono/{name}/{serial}/{member}" for member in ranks}
    store.set(keys[rank], text)
    pause_s = 0.001
    while not store.check(list(keys.values())):
        is_late = not deadline.left_s()
        if is_late or waiting.is_long():
            missing = [member for member, key in keys.items() if not store.check([key])]
            if is_late and missing:
                raise RendezvousError(
                    f"group {group}: {name_ranks(missing)} of {size} did not come within "
                    f"{in_seconds(deadline.timeout_s)}"
                )
            waiting.say(missing, size - len(missing))
        check()
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return [text.decode() for text in store.multi_get(list(keys.values()))]
