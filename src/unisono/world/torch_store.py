"""A torch Store for the ranks of one machine: in an anonymous file, without a port."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from unisono.comm.communicator import Communicator
from unisono.errors import RendezvousError
from unisono.processes import namespace

_idle: list[int] = []


@contextlib.contextmanager
def store_of(comm: Communicator) -> Iterator[Any]:
    """A store that the members of a shared-memory group share; all of them call this. torch's
    FileStore opens its file by name, repeatedly: each rank passes it the name of its own
    descriptor of an anonymous file that rank 0 has made."""
    import torch.distributed as dist

    if comm.size == 1:
        yield dist.HashStore()  # type: ignore[attr-defined]
        return
    aside = comm.split(range(comm.size), "torch store")  # the program's own calls count from 1
    assert aside is not None
    try:
        descriptor = _keep(_shared_file(aside))
    finally:
        aside.close()
    try:
        yield dist.FileStore(f"/proc/self/fd/{descriptor}", comm.size)  # type: ignore[attr-defined]
    finally:
        _put_aside(descriptor)


def _shared_file(comm: Communicator) -> int:
    import numpy  # torch has imported it by then; `store_of` does not need it

    descriptor = os.memfd_create("unisono store") if comm.rank == 0 else -1
    where = numpy.array([os.getpid(), descriptor, namespace("pid")], numpy.int64)
    comm.broadcast(where)
    pid, number, home = where.tolist()
    problem = numpy.zeros(1, numpy.int64)
    if comm.rank != 0:
        try:
            if home != namespace("pid"):
                raise OSError("another PID namespace")
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            problem[0] = 1
    comm.all_reduce(problem, "max")
    if problem[0]:
        if descriptor >= 0:
            os.close(descriptor)
        raise RendezvousError(
            "the ranks cannot see each other's processes (different PID namespaces?), which "
            "torch's process group needs to start: set MASTER_ADDR and MASTER_PORT, or call "
            "unisono.init(with_torch=False)"
        )
    return descriptor


def _keep(descriptor: int) -> int:
    """The same file under the number of an idle descriptor, if there is one."""
    if not _idle:
        return descriptor
    number = _idle.pop()
    os.dup2(descriptor, number, inheritable=False)
    os.close(descriptor)
    return number


def _put_aside(descriptor: int) -> None:
    """Close the file, but keep its number: a store that is still held writes there when it is
    dropped, and must not find another file."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)
    _idle.append(descriptor)
