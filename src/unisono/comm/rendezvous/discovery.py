"""How a rank announces itself, finds rank 0, and judges what others have announced."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from unisono.comm import engine
from unisono.comm.rendezvous.announcements import Announcement, Announcements
from unisono.comm.rendezvous.membership import JoinRequest
from unisono.comm.rendezvous.unix_socket import Connection
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.errors import RendezvousError
from unisono.processes import boot_id, namespace, start_time

UNREACHABLE_S = 10.0
"""How long a living leader that has announced itself may refuse connections."""


def about_me(address: str) -> Announcement:
    """What the others need to know of this process, whose lobby is at `address`."""
    return {
        "address": address,
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "layout": engine.layout_version(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "quota": engine.cpu_quota(),
        "net": namespace("net"),
    }


def find_leader(announcements: Announcements, request: JoinRequest, me: Announcement) -> Connection:
    """Wait for rank 0's announcement and connect to its lobby, until `request.check` raises."""
    pause_s = 0.0001
    refused_since: tuple[str, float] | None = None
    suspect: Announcement | None = None
    waiting = Waiting(request.rank, request.size, request.key, request.deadline)
    while True:
        announcement = announcements.look_up(0)
        complaint = f"rank 0 did not come within {in_seconds(request.deadline.timeout_s)}"
        if announcement is not None and not _is_from_before(announcement, me):
            _check_same_host(0, announcement, request.rank, me)
            address = str(announcement["address"])
            try:
                return Connection.connect(address)
            except BlockingIOError:
                complaint = (
                    f"rank 0 (pid {announcement.get('pid')}) is here, but its queue of connections "
                    f"is full, and stayed so for {in_seconds(request.deadline.timeout_s)}"
                )
            except OSError as error:
                if _is_over(error, announcement, me):
                    announcements.clear(0, announcement)
                elif refused_since is None or refused_since[0] != address or _is_dead(announcement):
                    refused_since = (address, time.monotonic())
                elif time.monotonic() - refused_since[1] > UNREACHABLE_S:
                    raise RendezvousError(
                        f"rank {request.rank} (pid {me['pid']}) cannot reach rank 0 (pid "
                        f"{announcement.get('pid')}) on host {me['host']}, though both are on it: "
                        f"do they live in different network namespaces? ({error.strerror})"
                    ) from error
        suspect = announcement or suspect
        if not request.deadline.left_s():
            if suspect is not None:  # it looked stale; perhaps it is another host of this name
                _check_same_host(0, suspect, request.rank, me)
            raise RendezvousError(f"group {request.key}: {complaint}")
        request.check()
        if waiting.is_long():
            waiting.say(*_who_is_missing(announcements, request))
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def _who_is_missing(
    announcements: Announcements, request: JoinRequest
) -> tuple[list[int], int | None]:
    """Who has not announced itself yet, and how many are here: all that a rank knows without rank
    0. In a file nobody but rank 0 announces itself."""
    others = [rank for rank in range(1, request.size) if rank != request.rank]
    here = [rank for rank in others if announcements.look_up(rank) is not None]
    if not here and others:
        return [0], None
    return [0, *sorted(set(others) - set(here))], len(here) + 1


def clear_if_over(announcements: Announcements, me: Announcement) -> None:
    """Take rank 0's announcement away if it was killed while it waited."""
    with contextlib.suppress(RendezvousError):
        announcement = announcements.look_up(0)
        if announcement is None:
            return
        if _is_from_before(announcement, me):
            announcements.clear(0, announcement)
            return
        try:
            Connection.connect(str(announcement["address"])).close()
        except OSError as error:
            if _is_over(error, announcement, me):
                announcements.clear(0, announcement)


def _is_over(error: OSError, announcement: Announcement, me: Announcement) -> bool:
    """Whether a refused connection proves that the announced meeting is over: its lobby was open
    before it was announced, and everybody in one network namespace can reach it."""
    here = announcement.get("boot") == me["boot"] and announcement.get("net") == me["net"]
    return here and error.errno == errno.ECONNREFUSED


def _is_from_before(announcement: Announcement, me: Announcement) -> bool:
    """Whether it was announced on this host before the host was restarted."""
    return bool(announcement.get("host") == me["host"] and announcement.get("boot") != me["boot"])


def _is_dead(announcement: Announcement) -> bool:
    """Whether the announced process seems to have ended (or is in another PID namespace)."""
    try:
        started = start_time(int(announcement.get("pid", 0)))
    except (OSError, ValueError):
        return True
    # a later process may have its number
    return bool(announcement.get("started", started) != started)


def check_missing(
    announcements: Announcements, missing: list[int], unreached: dict[int, float]
) -> None:
    """Say at once if a missing rank has announced itself from where it cannot come."""
    me = about_me("")
    for rank in missing:
        announcement = announcements.look_up(rank)
        if announcement is None or _is_from_before(announcement, me) or _is_dead(announcement):
            continue
        _check_same_host(rank, announcement, 0, me)
        if announcement.get("net") == me["net"]:
            continue  # it can come, and is only slow
        first = unreached.setdefault(rank, time.monotonic())
        if time.monotonic() - first > UNREACHABLE_S:
            raise RendezvousError(
                f"rank {rank} (pid {announcement.get('pid')}) is on this host but does not reach "
                f"rank 0 (pid {os.getpid()}): do they live in different network namespaces?"
            )


def _check_same_host(rank: int, announcement: Announcement, my_rank: int, me: Announcement) -> None:
    if announcement.get("boot") != me["boot"]:
        raise RendezvousError(
            f"rank {rank} is on host {announcement.get('host')}, rank {my_rank} on host "
            f"{me['host']}: shared memory does not reach from one to the other; use a backend for "
            "several machines (gloo, nccl, mpi)"
        )
