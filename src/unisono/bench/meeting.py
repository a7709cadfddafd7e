"""How the ranks of a run find each other: started by us, by mpirun, or by torchrun."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from unisono.comm.rendezvous.announcements import Exchange, FileExchange, StoreExchange
from unisono.processes import boot_id

_MPI_RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
DEADLINE_S = 300.0


class Meeting(ABC):
    """A rank's place in the run, and where it leaves word for the others."""

    rank: int
    size: int

    @abstractmethod
    def exchange(self, name: str) -> Exchange:
        """Where a Communicator's ranks meet."""

    @abstractmethod
    def store(self) -> Any:
        """torch's store for all ranks."""

    def hosts(self) -> list[str]:
        """For each rank what tells its machine from others."""
        return [""] * self.size

    def close(self) -> None:  # noqa: B027 - most leave nothing anyway
        """Leave nothing behind."""


class InFolder(Meeting):
    """All ranks are on this machine and know a folder."""

    def __init__(self, rank: int, size: int, folder: str, *, ours: bool = False) -> None:
        self.rank, self.size, self.folder = rank, size, Path(folder)
        self._ours = ours and rank == 0
        """Whether nobody but this rank will remove the folder."""

    def exchange(self, name: str) -> Exchange:
        return FileExchange(self.folder / name)

    def store(self) -> Any:
        import torch.distributed as dist

        return dist.FileStore(str(self.folder / "store"), self.size)  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._ours:
            shutil.rmtree(self.folder, ignore_errors=True)


class AtStore(Meeting):
    """The ranks know a store, and may be on several machines."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        store.set(f"host-{rank}", _boot())

    def exchange(self, name: str) -> Exchange:
        import torch.distributed as dist

        return StoreExchange(dist.PrefixStore(name, self._store))  # type: ignore[attr-defined]

    def store(self) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore("torch", self._store)  # type: ignore[attr-defined]

    def hosts(self) -> list[str]:
        return [self._store.get(f"host-{rank}").decode() for rank in range(self.size)]


def under_mpirun() -> bool:
    """Whether an mpirun started this process."""
    return any(name in os.environ for name in _MPI_RANKS)


def already_a_rank() -> bool:
    """Whether somebody else has started this process as one of several ranks."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return launched or under_mpirun()


def of_environment() -> Meeting:
    """The meeting of ranks that torchrun, `unisono run` or mpirun has started."""
    if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(iter(rendezvous("env://")))
        return AtStore(rank, size, store)
    return _under_mpi()


def _under_mpi() -> Meeting:
    from datetime import timedelta

    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(_boot())
    if len(set(hosts)) == 1:
        folder = tempfile.mkdtemp(prefix="unisono-bench-") if world.rank == 0 else ""
        return InFolder(world.rank, world.size, world.bcast(folder), ours=True)
    address = socket.getfqdn()
    deadline = timedelta(seconds=DEADLINE_S)
    store = None
    port = 0
    if world.rank == 0:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, 0, world.size, True, deadline, wait_for_workers=False
        )
        port = store.port
    address, port = world.bcast((address, port))
    if store is None:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, world.size, False, deadline
        )
    return AtStore(world.rank, world.size, store)


def _boot() -> str:
    """What tells a running machine from every other one."""
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()
