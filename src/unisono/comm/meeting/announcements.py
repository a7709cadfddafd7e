"""Where ranks that do not know each other yet announce themselves: a file or a torch Store; and
how they evaluate what they find there."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
import stat
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from unisono.comm import engine
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.unix_socket import Connection, descriptors_needed
from unisono.errors import RendezvousError
from unisono.processes import boot_id, namespace, start_time

Announcement = dict[str, Any]
"""What a rank publishes about itself: its rendezvous server's address, host, boot, pid."""


class Announcements(ABC):
    """A place that all ranks of a new group can reach, where rank 0 announces itself."""

    def announce(self, announcement: Announcement) -> None:
        self._write(json.dumps(announcement))

    def look_up(self) -> Announcement | None:
        try:
            found = json.loads(self._read())
        except ValueError:
            return None
        return found if isinstance(found, dict) and "address" in found else None

    def clear(self, announcement: Announcement) -> None:
        """Remove this announcement, unless another has replaced it."""
        with contextlib.suppress(RendezvousError):  # an unreadable one is not ours
            if self.look_up() == announcement:
                self._remove()

    def object_to(self, announcement: Announcement, reason: str) -> None:
        """Tell rank 0, which made this announcement, why another rank cannot join, if possible."""
        return

    def objection_to(self, announcement: Announcement) -> str:
        """Why another rank cannot join; "" if none has said so."""
        return ""

    @abstractmethod
    def _write(self, text: str) -> None: ...

    @abstractmethod
    def _read(self) -> str | bytes:
        """What was written; empty if nothing was."""

    @abstractmethod
    def _remove(self) -> None: ...


class FileAnnouncements(Announcements):
    """Announcements in a file: a path that all ranks know, or a descriptor that all inherited.
    Files at `others` are read too, if there is nothing in the first, and never written."""

    def __init__(self, where: str | os.PathLike[str] | int, *others: Path) -> None:
        self._where, self._others = where, others

    def _write(self, text: str) -> None:
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
            os.pwrite(self._where, text.encode(), 0)
            return
        path = Path(self._where)
        draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
        try:
            descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            os.replace(draft, path)
        except BaseException as error:
            draft.unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            raise RendezvousError(
                f"cannot write the rendezvous file {path}: {error.strerror}; it must be a file "
                f"of user {os.geteuid()}"
            ) from error

    def _read(self) -> bytes:
        if isinstance(self._where, int):
            return os.pread(self._where, 1 << 16, 0)
        data = _read_own_file(self._where)
        for path in self._others:
            with contextlib.suppress(RendezvousError):
                data = data or _read_own_file(path)
        return data

    def _remove(self) -> None:
        if isinstance(self._where, int):
            os.ftruncate(self._where, 0)
            return
        for path in (self._where, *self._others):
            Path(path).unlink(missing_ok=True)


def _read_own_file(path: str | os.PathLike[str]) -> bytes:
    """The contents of a file of this user, empty if there is none."""
    try:  # without waiting: it may be a FIFO without a writer
        with descriptors_needed():
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            return os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RendezvousError(
            f"the rendezvous file {path} cannot be read: {error.strerror}; it must be a file of "
            f"user {os.geteuid()}"
        ) from error


class StoreAnnouncements(Announcements):
    """Announcements on a board, which belongs to one meeting."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def object_to(self, announcement: Announcement, reason: str) -> None:
        self._board.set(f"unisono/objection/{announcement['address']}", reason)

    def objection_to(self, announcement: Announcement) -> str:
        return self._board.get(f"unisono/objection/{announcement['address']}")

    def _write(self, text: str) -> None:
        self._board.set("unisono/0", text)

    def _read(self) -> str:
        return self._board.get("unisono/0")

    def _remove(self) -> None:
        self._write("")  # not deleted: a rank that has just seen that it exists would wait for it


def about_me(address: str) -> Announcement:
    return {
        "address": address,
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        **_about_process(os.getpid()),
        "layout": engine.native.LAYOUT_VERSION,
        "cpus": sorted(os.sched_getaffinity(0)),
        "net": namespace("net"),
    }


@functools.cache
def _about_process(pid: int) -> Announcement:
    """What is read once: its many small files would take most of the time of `about_me`."""
    return {"started": start_time(pid), "quota": engine.native.cpu_quota()}


def is_over(error: OSError, announcement: Announcement, me: Announcement) -> bool:
    """Whether a refused connection proves that the announced meeting is over: its server was
    open before it was announced, and every process in its network namespace can reach it."""
    here = announcement.get("boot") == me["boot"] and announcement.get("net") == me["net"]
    return here and error.errno == errno.ECONNREFUSED


def is_from_before(announcement: Announcement, me: Announcement) -> bool:
    return bool(announcement.get("host") == me["host"] and announcement.get("boot") != me["boot"])


def is_dead(announcement: Announcement) -> bool:
    """Whether the announced process seems to have ended (or is in another PID namespace)."""
    try:
        started = start_time(int(announcement.get("pid", 0)))
    except (OSError, ValueError):
        return True
    # a later process may have its PID
    return bool(announcement.get("started", started) != started)


def clear_if_over(announcements: Announcements, me: Announcement) -> None:
    """Remove rank 0's announcement if it was killed while it waited."""
    with contextlib.suppress(RendezvousError):
        announcement = announcements.look_up()
        if announcement is None:
            return
        if not is_from_before(announcement, me):
            try:
                Connection.connect(str(announcement["address"])).close()
                return
            except OSError as error:
                if not is_over(error, announcement, me):
                    return
        announcements.clear(announcement)
