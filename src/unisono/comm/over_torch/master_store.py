"""torch's store at MASTER_ADDR and MASTER_PORT, without its silence while ranks are missing."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from datetime import timedelta
from functools import partial
from typing import Any

from unisono.comm.rendezvous.bounded_store import answer_within
from unisono.comm.rendezvous.deadline import Deadline, Waiting
from unisono.errors import RendezvousError

_ATTEMPT_S = 10.0
"""How long torch may try, uninterruptibly, to talk to whoever listens there."""

_OPERATION_S = 1800.0
"""How long the store's own operations may take, once it is there: torch's default."""


def store_at(
    address: str,
    port: str,
    rank: int,
    size: int,
    timeout_s: float,
    *,
    group: str = "world",
    hosts: bool | None = None,
) -> Any:
    """The store that rank 0 hosts there, unless torchrun or `unisono run` does: then all call it.
    `hosts` says of other ranks and stores whether this one does; `group` is for whom it is.

    As torch's own meeting by "env://", but rank 0 does not wait for the others here, and a rank
    that waits for rank 0 says so. Raises RendezvousError if nobody hosts it within `timeout_s`.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise RendezvousError(f"MASTER_PORT is {port!r}, which is not a port")
    deadline = Deadline(timeout_s)
    named = "" if hosts is not None else " (MASTER_ADDR, MASTER_PORT)"
    if hosts is None:
        hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    waiting = Waiting(rank, size, group, deadline)
    while True:
        if not hosts:
            _wait_for_host(address, int(port), named, waiting, deadline)
        patience_s = max(min(deadline.left_s(), _ATTEMPT_S), 1.0)
        call = partial(TCPStore, address, int(port), size, hosts, timedelta(seconds=patience_s))
        libuv = os.environ.get("USE_LIBUV", "1") == "1"
        call = partial(call, wait_for_workers=False, multi_tenant=True, use_libuv=libuv)
        try:
            store = answer_within(patience_s + 1.0, call)
            store.set_timeout(timedelta(seconds=_OPERATION_S))
            return store
        except RuntimeError as error:
            if hosts or not deadline.left_s():
                reason = str(error).partition("\n")[0]
                does = "host" if hosts else "reach"
                raise RendezvousError(
                    f"rank {rank} cannot {does} torch's store at {address}:{port}{named}: {reason}"
                ) from error


def _wait_for_host(
    address: str, port: int, named: str, waiting: Waiting, deadline: Deadline
) -> None:
    """Return once somebody listens there; so that an interrupt is heard, and silence broken."""
    pause_s = 0.001
    reason = "nobody listens there"
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                socket.create_connection((address, port), 1.0).close()
                return
            except OSError as error:
                reason = error.strerror or str(error)
        if not deadline.left_s():
            raise RendezvousError(
                f"rank 0 did not come in time: there is no store at {address}:{port}{named}: "
                f"{reason}"
            )
        if waiting.is_long():
            waiting.say([0], where=f", who hosts the store at {address}:{port}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)
