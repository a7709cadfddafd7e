"""Handing a descriptor from rank 0 of a group to the others, over the lobby in which they met."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from unisono.comm.rendezvous.lobby import Lobby, Visitor
from unisono.comm.rendezvous.unix_socket import (
    Connection,
    Deadline,
    descriptors_needed,
)
from unisono.errors import RendezvousError

_GLANCE_S = 0.2
"""How often rank 0 looks whether there is anybody left to wait for."""


def hand_out(
    descriptor: int,
    lobby: Lobby,
    key: str,
    ranks: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> None:
    """Give everybody who comes to our lobby for `key`, ranks 1 to `ranks - 1`, a descriptor; a
    negative one tells them that there is none. `check` raises once there is no group any more."""
    missing = set(range(1, ranks))
    while missing:
        for visitor in lobby.visitors_for(key, _GLANCE_S):
            if visitor.rank in missing:
                missing.remove(visitor.rank)
                _answer(visitor, descriptor)
            visitor.connection.close()
        check()
        if missing and not deadline.left_s():
            raise RendezvousError(f"{key}: ranks {sorted(missing)} have not come")


def _answer(visitor: Visitor, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # whoever is gone, the group hears of it
        if descriptor < 0:
            visitor.connection.send({"failed": True})
        else:
            visitor.connection.send({}, descriptor)


def receive_from(
    address: str, key: str, rank: int, deadline: Deadline, check: Callable[[], None]
) -> int:
    """The descriptor that rank 0, whose lobby is at `address`, hands out for `key`; -1: there is
    none. It is the caller's to close."""
    connection = _connect(address, deadline, check)
    try:
        connection.send({"key": key, "rank": rank})
        answer = connection.receive(deadline, check)
        return -1 if "failed" in answer else os.dup(connection.descriptors[0])
    except (OSError, ValueError, IndexError) as error:
        check()
        raise RendezvousError(f"{key}: rank 0 has gone away ({error})") from error
    finally:
        connection.close()


def _connect(address: str, deadline: Deadline, check: Callable[[], None]) -> Connection:
    while True:
        try:
            with descriptors_needed():
                return Connection.connect(address)
        except BlockingIOError:  # its queue is full
            check()
            if not deadline.left_s():
                raise
            time.sleep(0.001)
        except OSError as error:
            check()
            raise RendezvousError(f"rank 0 cannot be reached: {error.strerror}") from error
