"""A torch Store for the ranks of one machine: in a file without a name, behind no port."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

from unisono.errors import RendezvousError
from unisono.processes import namespace

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

_idle: list[int] = []


@contextlib.contextmanager
def store_of(comm: Communicator) -> Iterator[Any]:
    """A store that the members of a shared-memory group share; all of them call this.

    torch's FileStore opens its file by name, again and again: each rank gives it the name of its
    own descriptor, of a nameless file that rank 0 has made. Raises RendezvousError where the ranks
    cannot see each other's processes.
    """
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


def meet_in_file(descriptor: int) -> None:
    """Let torch's "env://", the default of `init_process_group`, find the ranks' store in a file
    that all of them have inherited, where nobody has set MASTER_ADDR and MASTER_PORT: no port."""
    import torch.distributed as dist

    # torch lets nobody replace a scheme; where it keeps them otherwise, it asks for an address
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
        # each start has a part of the file, which all ranks count
        store = dist.PrefixStore(f"start {next(serials)}", file)  # type: ignore[attr-defined]
        if "timeout" in options:
            store.set_timeout(options["timeout"])
        yield store, int(rank), int(size)

    handlers["env"] = meet


def _shared_file(comm: Communicator) -> int:
    import numpy  # by then torch has done so; `store_of` does without

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
            "the ranks cannot see each other's processes (other PID namespaces?), by which torch's "
            "process group would start: set MASTER_ADDR and MASTER_PORT, or call "
            "unisono.init(with_torch=False)"
        )
    return descriptor


def _keep(descriptor: int) -> int:
    """The same file under the number of a descriptor that lies idle, if there is one."""
    if not _idle:
        return descriptor
    number = _idle.pop()
    os.dup2(descriptor, number, inheritable=False)
    os.close(descriptor)
    return number


def _put_aside(descriptor: int) -> None:
    """Give the file back, but not its number: a store that somebody still holds writes there when
    it goes, and must not find another file."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)
    _idle.append(descriptor)
