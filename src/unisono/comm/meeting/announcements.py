"""How rank 0 of one host announces itself on a board, and how the others judge what they find."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import socket
from typing import Any

from unisono.comm import engine
from unisono.comm.meeting.board import LEADER, Board
from unisono.comm.meeting.unix_socket import Connection
from unisono.errors import RendezvousError
from unisono.processes import boot_id, namespace, start_time

Announcement = dict[str, Any]
"""What a rank publishes about itself: its rendezvous server's address, host, boot, pid."""


def announce(board: Board, announcement: Announcement) -> None:
    board.set(LEADER, json.dumps(announcement))


def look_up(board: Board) -> Announcement | None:
    try:
        found = json.loads(board.get(LEADER))
    except ValueError:
        return None
    return found if isinstance(found, dict) and "address" in found else None


def clear(board: Board, announcement: Announcement) -> None:
    """Remove this announcement, unless another has replaced it."""
    with contextlib.suppress(RendezvousError):  # an unreadable one is not ours
        if look_up(board) == announcement:
            board.set(LEADER, "")  # a rank that has just seen a text must not wait for it


def object_to(board: Board, announcement: Announcement, reason: str) -> None:
    """Tell rank 0, which made this announcement, why another rank cannot join, if possible."""
    with contextlib.suppress(RendezvousError):
        board.set(f"unisono/objection/{announcement['address']}", reason)


def objection_to(board: Board, announcement: Announcement) -> str:
    """Why another rank cannot join; "" if none has said so."""
    return board.get(f"unisono/objection/{announcement['address']}")


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


def clear_if_over(board: Board, me: Announcement) -> None:
    """Remove rank 0's announcement if it was killed while it waited."""
    with contextlib.suppress(RendezvousError):
        announcement = look_up(board)
        if announcement is None:
            return
        if not is_from_before(announcement, me):
            try:
                Connection.connect(str(announcement["address"])).close()
                return
            except OSError as error:
                if not is_over(error, announcement, me):
                    return
        clear(board, announcement)
