"""How GPU memory is passed from one process to another: by CUDA IPC, or piece by piece.

CUDA IPC does not support expandable segments. They consist of pieces with a descriptor each: a
thread of their owner passes these through a rendezvous server, whose address is the segment's
handle.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from unisono.comm.cuda.driver import Allocation, Driver, DriverError
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.unix_socket import Connection, RendezvousServer
from unisono.errors import RendezvousError

HANDLE_BYTES = 64

_ADDRESS = b"unisono-"  # a rendezvous server's address begins so, and no CUDA IPC handle does
_KEY = "memory of a GPU"
_AT_ONCE = 64
"""Descriptors in one message: a process may have a thousand open."""
_ANSWER_S = 10.0


def export_memory(driver: Driver, allocation: Allocation) -> bytes:
    """A handle by which another process can open an allocation. Raises DriverError if none can."""
    if not driver.has_descriptors(allocation.base):
        return driver.export_memory(allocation.base)
    with _needed():
        return _open_server(driver).encode().ljust(HANDLE_BYTES, b"\0")


def open_memory(driver: Driver, handle: bytes, base: int, size: int) -> int:
    """Open another process's allocation, of `size` bytes at `base`; returns its address here."""
    if not handle.startswith(_ADDRESS):
        return driver.open_memory(handle)
    return driver.open_pieces(size, _ask_for_pieces(handle.rstrip(b"\0").decode(), base, size))


def _ask_for_pieces(address: str, base: int, size: int) -> Iterator[tuple[int, int]]:
    """The pieces, each as a descriptor, which is closed afterwards, and its size."""
    end = base + size
    while base < end:
        with _needed():
            connection = Connection.connect(address)
        with contextlib.closing(connection):
            with _needed():
                connection.send({"key": _KEY, "rank": 0, "base": base, "size": end - base})
                sizes = connection.receive(Deadline(_ANSWER_S))["sizes"]
            yield from zip(connection.descriptors, sizes, strict=True)
            base += sum(sizes)


@contextlib.contextmanager
def _needed() -> Iterator[None]:
    """Around uses of the server: if it fails, no memory can be opened."""
    try:
        yield
    except (OSError, RendezvousError) as error:
        raise DriverError("descriptors of memory", str(error)) from error


@functools.cache
def _open_server(driver: Driver) -> str:
    """The address at which a thread of this process passes out pieces of its memory."""
    server = RendezvousServer()
    address, given = server.address, (server, driver, driver.context())
    threading.Thread(target=_give_out, args=given, name="unisono-gpu-memory", daemon=True).start()
    return address


def _give_out(server: RendezvousServer, driver: Driver, context: Any) -> None:
    driver.use_context(context)
    while True:
        try:
            for visitor in server.visitors_for(_KEY, timeout_s=60.0):
                with contextlib.closing(visitor), contextlib.suppress(OSError, KeyError):
                    _answer(visitor, driver)
        except RendezvousError:  # out of descriptors, for now
            time.sleep(0.1)


def _answer(visitor: Connection, driver: Driver) -> None:
    descriptors: list[int] = []
    try:
        pieces = driver.pieces_of(visitor.hello["base"], visitor.hello["size"])[:_AT_ONCE]
        descriptors += (driver.export_piece(piece.base) for piece in pieces)
        visitor.send({"sizes": [piece.size for piece in pieces]}, *descriptors)
    except DriverError as error:
        visitor.try_send({"error": str(error)})
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
