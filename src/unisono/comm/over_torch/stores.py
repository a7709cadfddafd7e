"""torch's stores: in a file that all ranks have inherited, without a port; and the one at
MASTER_ADDR and MASTER_PORT, with warnings while ranks are missing."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlparse

from unisono.comm.meeting.board import answer_within
from unisono.comm.meeting.deadline import Deadline, Waiting
from unisono.errors import RendezvousError

_ATTEMPT_S = 10.0
"""How long torch may try, uninterruptibly, to talk to the process that listens there."""

_OPERATION_S = 1800.0
"""How long the store's own operations may take: torch's default."""


def meet_in_file(descriptor: int) -> None:
    """Let torch's "env://", the default of `init_process_group`, find the ranks' store in a file
    that all of them have inherited, without a port, unless MASTER_ADDR and MASTER_PORT are set."""
    import torch.distributed as dist

    # torch offers no way to replace a scheme; if it stores them differently, it asks for an address
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = getattr(module, "_rendezvous_handlers", {})
    with_address = handlers.get("env")
    if with_address is None:
        return
    serials = itertools.count()

    def meet(url: str, *args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
        given = dict(parse_qsl(urlparse(url).query))
        rank = given.get("rank") or os.environ.get("RANK")
        size = given.get("world_size") or os.environ.get("WORLD_SIZE")
        address = os.environ.get("MASTER_ADDR") or os.environ.get("MASTER_PORT")
        if address or not rank or not size:
            yield from with_address(url, *args, **options)
            return
        file = dist.FileStore(f"/proc/self/fd/{descriptor}", int(size))  # type: ignore[attr-defined]
        # each start has its own part of the file, counted by all ranks
        store = dist.PrefixStore(f"start {next(serials)}", file)  # type: ignore[attr-defined]
        if "timeout" in options:
            store.set_timeout(options["timeout"])
        yield store, int(rank), int(size)

    handlers["env"] = meet


# -- at MASTER_ADDR --------------------------------------------------------------------------------


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
    """The store that rank 0 hosts there, unless torchrun or `unisono run` does: then all ranks
    connect. `hosts` overrides whether this rank hosts it; `group` is whose it is. A rank that
    waits for rank 0 logs a warning. Raises RendezvousError if there is none within `timeout_s`."""
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
    """Return once a process listens there; handles interrupts, and warns meanwhile."""
    reason = "no process listens there"
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                socket.create_connection((address, port), 1.0).close()
                return
            except OSError as error:
                reason = error.strerror or str(error)
        if not deadline.left_s():
            raise RendezvousError(
                f"rank 0 did not start the store at {address}:{port}{named} in time: {reason}"
            )
        if waiting.is_long():
            waiting.say([0], where=f", which hosts the store at {address}:{port}")
        waiting.pause()
