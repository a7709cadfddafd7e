"""How the ranks of a run find each other: started by us, by mpirun, or by torchrun."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from unisono.comm.base import Communicator
from unisono.comm.hosts.identity import identify_host
from unisono.comm.rendezvous.announcements import (
    Announcements,
    FileAnnouncements,
    StoreAnnouncements,
)
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.comm.solo import SoloCommunicator
from unisono.environment import RankInfo, find_master, read_rank_info
from unisono.errors import UnisonoError

DEADLINE_S = 300.0


class Meeting(ABC):
    """Which rank of how many this is, and where it finds the others."""

    rank: int
    size: int

    @abstractmethod
    def announcements(self, name: str) -> Announcements:
        """Where the ranks of a Communicator announce themselves."""

    def communicator(self) -> Communicator:
        """A group of all ranks."""
        if self.size == 1:
            return SoloCommunicator()
        board = self.announcements("unisono")
        return SharedMemoryCommunicator.connect(board, self.rank, self.size)

    @abstractmethod
    def store(self) -> Any:
        """torch's store for all ranks."""

    def hosts(self) -> list[str]:
        """For each rank what tells its machine from others."""
        return [""] * self.size

    def close(self) -> None:  # noqa: B027 - most leave nothing anyway
        """Leave nothing behind."""


class FolderMeeting(Meeting):
    """All ranks are on this machine and know a folder."""

    def __init__(self, rank: int, size: int, folder: str, *, ours: bool = False) -> None:
        self.rank, self.size, self.folder = rank, size, Path(folder)
        self._ours = ours and rank == 0
        """Whether this rank has to remove the folder."""

    def announcements(self, name: str) -> Announcements:
        return FileAnnouncements(self.folder / name)

    def store(self) -> Any:
        import torch.distributed as dist

        return dist.FileStore(str(self.folder / "store"), self.size)  # type: ignore[attr-defined]

    def close(self) -> None:
        if self._ours:
            shutil.rmtree(self.folder, ignore_errors=True)


class StoreMeeting(Meeting):
    """The ranks know a store, and may be on several machines."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.rank, self.size, self._store = rank, size, store
        store.set(f"host-{rank}", _boot())

    def announcements(self, name: str) -> Announcements:
        import torch.distributed as dist

        return StoreAnnouncements(dist.PrefixStore(name, self._store))  # type: ignore[attr-defined]

    def store(self) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore("torch", self._store)  # type: ignore[attr-defined]

    def communicator(self) -> Communicator:
        import torch.distributed as dist

        from unisono.comm.hosts.connect import connect

        return connect(
            dist.PrefixStore("unisono", self._store),  # type: ignore[attr-defined]
            self.rank,
            self.size,
        )

    def hosts(self) -> list[str]:
        return [self._store.get(f"host-{rank}").decode() for rank in range(self.size)]


class WorldMeeting(Meeting):
    """The ranks are a world of unisono's already."""

    def __init__(self, world: Communicator) -> None:
        self.rank, self.size, self._world = world.rank, world.size, world
        self._closing = contextlib.ExitStack()

    def announcements(self, name: str) -> Announcements:
        raise AssertionError("a world is split")

    def communicator(self) -> Communicator:
        made = self._world.split(range(self.size), "bench")
        assert made is not None
        return made

    def hosts(self) -> list[str]:
        names = getattr(self._world, "host_names", None)
        return [""] * self.size if names is None else list(names)

    def store(self) -> Any:
        from unisono.comm.over_torch.store import store_of

        return self._closing.enter_context(store_of(self._world))

    def close(self) -> None:
        self._closing.close()


def meeting_of(world: Communicator, number: int) -> Meeting:
    """The meeting of the ranks of a world, for its run of this number."""
    if world.backend == "unisono":
        return WorldMeeting(world)
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    own = dist.PrefixStore(f"unisono/bench/{number}", _get_default_store())  # type: ignore[attr-defined]
    return StoreMeeting(world.rank, world.size, own)


def launched_rank() -> RankInfo | None:
    """This process among the ranks that torchrun, `unisono run` or mpirun has started; None where
    nobody has.

    Raises UnisonoError where an mpirun does not say which rank this is.
    """
    info = read_rank_info()
    # A batch script of Slurm has srun's variables, too, and is not a rank.
    if info is not None and info.launcher != "srun":
        return info
    if "PMIX_RANK" in os.environ:
        raise UnisonoError("this mpirun does not tell its ranks which of how many they are")
    return None


def meeting_of_launched_ranks() -> Meeting:
    """The meeting of ranks that torchrun, `unisono run` or mpirun has started."""
    info = launched_rank()
    if info is not None and info.launcher != "mpirun" and find_master() is not None:
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(iter(rendezvous("env://")))
        return StoreMeeting(rank, size, store)
    return _under_mpi()


def _under_mpi() -> Meeting:
    from datetime import timedelta

    import torch.distributed as dist
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(_boot())
    if len(set(hosts)) == 1:
        folder = tempfile.mkdtemp(prefix="unisono-bench-") if world.rank == 0 else ""
        return FolderMeeting(world.rank, world.size, world.bcast(folder), ours=True)
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
    return StoreMeeting(world.rank, world.size, store)


def _boot() -> str:
    """What is equal on the ranks of one host."""
    try:
        return identify_host()
    except OSError:
        return socket.gethostname()
