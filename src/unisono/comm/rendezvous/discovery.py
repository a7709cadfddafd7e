"""What a rank says of itself to ranks that it does not know, and what it makes of their word."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import TYPE_CHECKING

from unisono.comm.rendezvous.announcements import Exchange, Word
from unisono.comm.rendezvous.unix_socket import Deadline, Line
from unisono.comm.rendezvous.waiting import Waiting, in_seconds
from unisono.comm.shared_memory import engine
from unisono.errors import RendezvousError
from unisono.processes import boot_id, namespace, start_time

if TYPE_CHECKING:
    from unisono.comm.rendezvous.lobby import Side

UNREACHABLE_S = 10.0
"""How long a living leader that has announced itself may refuse connections."""


def about_me(address: str) -> Word:
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


def find_leader(exchange: Exchange, side: Side, deadline: Deadline, me: Word) -> Line:
    """Wait for rank 0's word and connect to its lobby, while `side.check` sees hope."""
    pause_s = 0.0001
    refused_since: tuple[str, float] | None = None
    suspect: Word | None = None
    waiting = Waiting(side.rank, side.size, side.key, deadline)
    while True:
        word = exchange.look_up(0)
        complaint = f"rank 0 did not come within {in_seconds(side.deadline.timeout_s)}"
        if word is not None and not _is_from_before(word, me):
            _check_same_host(0, word, side.rank, me)
            address = str(word["address"])
            try:
                return Line.connect(address)
            except BlockingIOError:
                complaint = (
                    f"rank 0 (pid {word.get('pid')}) is here, but the queue at its door is full, "
                    f"and stayed so for {in_seconds(side.deadline.timeout_s)}"
                )
            except OSError as error:
                if _is_over(error, word, me):
                    exchange.clear(0, word)
                elif refused_since is None or refused_since[0] != address or _is_dead(word):
                    refused_since = (address, time.monotonic())
                elif time.monotonic() - refused_since[1] > UNREACHABLE_S:
                    raise RendezvousError(
                        f"rank {side.rank} (pid {me['pid']}) cannot reach rank 0 (pid "
                        f"{word.get('pid')}) on host {me['host']}, though both are on it: do they "
                        f"live in different network namespaces? ({error.strerror})"
                    ) from error
        suspect = word or suspect
        if not deadline.left_s():
            if suspect is not None:  # it looked stale; perhaps it is another host of this name
                _check_same_host(0, suspect, side.rank, me)
            raise RendezvousError(f"group {side.key}: {complaint}")
        side.check()
        if waiting.is_long():
            waiting.say(*_who_is_missing(exchange, side))
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)


def _who_is_missing(exchange: Exchange, side: Side) -> tuple[list[int], int | None]:
    """Who has left no word yet, and how many are here: all that a rank knows without rank 0. In a
    file nobody but rank 0 leaves word."""
    others = [rank for rank in range(1, side.size) if rank != side.rank]
    here = [rank for rank in others if exchange.look_up(rank) is not None]
    if not here and others:
        return [0], None
    return [0, *sorted(set(others) - set(here))], len(here) + 1


def clear_if_over(exchange: Exchange, me: Word) -> None:
    """Take rank 0's word away if it was killed while it waited."""
    with contextlib.suppress(RendezvousError):
        word = exchange.look_up(0)
        if word is None:
            return
        if _is_from_before(word, me):
            exchange.clear(0, word)
            return
        try:
            Line.connect(str(word["address"])).close()
        except OSError as error:
            if _is_over(error, word, me):
                exchange.clear(0, word)


def _is_over(error: OSError, word: Word, me: Word) -> bool:
    """Whether a refused call proves that the word's meeting is over: its door was open before the
    word was left, and all of one network namespace can reach it."""
    here = word.get("boot") == me["boot"] and word.get("net") == me["net"]
    return here and error.errno == errno.ECONNREFUSED


def _is_from_before(word: Word, me: Word) -> bool:
    """Whether a word was left on this host before it was started anew."""
    return bool(word.get("host") == me["host"] and word.get("boot") != me["boot"])


def _is_dead(word: Word) -> bool:
    """Whether the process that left a word seems to be gone (or is in another PID namespace)."""
    try:
        started = start_time(int(word.get("pid", 0)))
    except (OSError, ValueError):
        return True
    return bool(word.get("started", started) != started)  # a later process may have its number


def check_missing(exchange: Exchange, missing: list[int], unreached: dict[int, float]) -> None:
    """Say at once if a missing rank has announced itself from where it cannot come."""
    me = about_me("")
    for rank in missing:
        word = exchange.look_up(rank)
        if word is None or _is_from_before(word, me) or _is_dead(word):
            continue
        _check_same_host(rank, word, 0, me)
        if word.get("net") == me["net"]:
            continue  # it can come, and is only slow
        first = unreached.setdefault(rank, time.monotonic())
        if time.monotonic() - first > UNREACHABLE_S:
            raise RendezvousError(
                f"rank {rank} (pid {word.get('pid')}) is on this host but does not reach rank 0 "
                f"(pid {os.getpid()}): do they live in different network namespaces?"
            )


def _check_same_host(rank: int, word: Word, my_rank: int, me: Word) -> None:
    if word.get("boot") != me["boot"]:
        raise RendezvousError(
            f"rank {rank} is on host {word.get('host')}, rank {my_rank} on host {me['host']}: "
            "shared memory does not reach from one to the other; use a backend for several "
            "machines (gloo, nccl, mpi)"
        )
