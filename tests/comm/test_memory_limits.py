"""Too little memory raises an exception with the numbers: no SIGBUS, no OOM kill, no rank waits."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ranks import RankPool, attempt, connect, subgroup
from resources import assert_given_back, held_resources
from unisono import CollectiveMismatch, GroupAborted, RendezvousError, SegmentError
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.shared_memory.exceptions import NEEDED_LATER
from unisono.variables import watch_is_wanted

SLICE_BYTES = 2 << 20
CGROUP_V1 = Path("/sys/fs/cgroup/memory")
CGROUP_V2 = Path("/sys/fs/cgroup")


class Cage:
    """Our own memory cgroup."""

    def __init__(self, folder: Path, version: int) -> None:
        self.folder = folder
        self._version = version

    @property
    def location(self) -> tuple[str, int]:
        """For a rank, which creates its own."""
        return str(self.folder), self._version

    def put(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def limit(self, size_bytes: int) -> None:
        name = "memory.limit_in_bytes" if self._version == 1 else "memory.max"
        (self.folder / name).write_text(str(size_bytes))

    def used_bytes(self) -> int:
        ahead = self.folder / "memory.force_empty"
        if ahead.exists():  # what the kernel charged ahead for each CPU is given back at any time
            ahead.write_text("0")
        name = "memory.usage_in_bytes" if self._version == 1 else "memory.current"
        return int((self.folder / name).read_text())

    def kills(self) -> int:
        """How many processes the kernel has killed because memory ran out."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        fields = (self.folder / name).read_text().split()
        return int(fields[fields.index("oom_kill") + 1])


@pytest.fixture
def cage() -> Iterator[Cage]:
    if watch_is_wanted():
        pytest.skip("the watch takes some of the room")
    version = 1 if (CGROUP_V1 / "memory.limit_in_bytes").exists() else 2
    above = CGROUP_V1 if version == 1 else CGROUP_V2
    folder = above / f"unisono-test-{os.getpid()}"
    try:
        folder.mkdir()
        if not (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).exists():
            folder.rmdir()
            pytest.skip("this cgroup has no memory controller")
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield Cage(folder, version)
    Cage(folder, version).limit(1 << 40)
    for pid in (folder / "cgroup.procs").read_text().split():
        (above / "cgroup.procs").write_text(pid)
    end = time.monotonic() + 10
    while (folder / "cgroup.procs").read_text() and time.monotonic() < end:
        time.sleep(0.01)
    folder.rmdir()


def leave_room(folder: str, version: int, size_bytes: int) -> None:
    """Set the limit so that about this much is left; called by a rank while all others are idle."""
    cage = Cage(Path(folder), version)
    cage.limit(cage.used_bytes() + size_bytes)


def warm_up(comm: Communicator) -> None:
    """Do once what will later be done without free memory: a process needs pages of its own for it,
    and so do the modules that write a group's first error, which a thread would import later."""
    for module in NEEDED_LATER:
        importlib.import_module(module)
    group = subgroup(comm, range(comm.size))
    group.all_reduce(tensor := torch.ones(300_000))
    assert tensor.sum() == 300_000 * comm.size
    assert isinstance(attempt(group.all_reduce, None), TypeError)
    assert isinstance(attempt(comm.empty, 1 << 60, torch.uint8), SegmentError)
    comm.all_reduce(torch.ones(5))
    group.close()
    del tensor
    gc.collect()
    own_every_page()
    comm.barrier()  # now their memory is returned


def own_every_page() -> None:
    """A page that this process shares with the one that forked it is copied on the first write to
    it, which may come at any time: copy all of them now."""
    populate_write = 23  # MADV_POPULATE_WRITE, since Linux 5.14; older kernels refuse it
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = end = shared_kib = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if name == "Shared_Dirty:":
            shared_kib = int(fields[0])
        elif name == "VmFlags:" and shared_kib and "wr" in fields and "sh" not in fields:
            madvise(begin, end - begin, populate_write)
        elif not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_room_for_anybody(cage: Cage, fresh_pool: RankPool, ranks: int) -> None:
    for pid in fresh_pool.pids(ranks):
        cage.put(pid)
    room_bytes = SLICE_BYTES - (512 << 10)
    for error in fresh_pool.run(call_without_room, ranks, *cage.location, room_bytes):
        assert isinstance(error, SegmentError), error
        assert "2 MiB" in str(error)
        assert "the memory limits leave" in str(error)
    assert cage.kills() == 0


def call_without_room(comm: Communicator, folder: str, version: int, room: int) -> object:
    """All ranks reject the same call, so the group stays usable for calls that need no slice."""
    error = call_with_little_room(comm, folder, version, room)
    comm.all_reduce(small := torch.ones(5))
    assert small.eq(comm.size).all()
    return error


def test_room_for_some_is_not_taken_by_all_at_once(cage: Cage, fresh_pool: RankPool) -> None:
    """A rank that finds room must have taken it before the next one checks."""
    for pid in fresh_pool.pids(4):
        cage.put(pid)
    errors = fresh_pool.run(call_with_little_room, 4, *cage.location, 3 * SLICE_BYTES - (512 << 10))
    assert cage.kills() == 0
    without = [error for error in errors if isinstance(error, SegmentError)]
    others = [error for error in errors if isinstance(error, CollectiveMismatch)]
    assert all("no room in shared memory" in str(error) for error in others)
    assert len(without) + len(others) == 4, errors
    assert len(without) >= 2


def call_with_little_room(comm: Communicator, folder: str, version: int, room: int) -> object:
    tensor = torch.ones(300_000)
    warm_up(comm)
    if comm.rank == 0:
        leave_room(folder, version, room)
    comm.barrier()
    error = attempt(comm.all_reduce, tensor)
    assert tensor.sum() == 300_000  # needs no memory: there is none
    return error


def test_no_room_for_a_message(cage: Cage, fresh_pool: RankPool) -> None:
    cage.put(fresh_pool.pids(2)[0])
    sender, receiver = fresh_pool.run(send_without_room, 2, *cage.location, deadline_s=20)
    assert isinstance(sender, SegmentError), sender
    assert isinstance(receiver, GroupAborted), receiver
    assert "rank 0" in str(receiver)
    assert cage.kills() == 0


def send_without_room(comm: Communicator, folder: str, version: int) -> object:
    tensor = torch.ones(3)
    warm_up(comm)
    if comm.rank == 1:
        return attempt(comm.recv, tensor, 0)
    leave_room(folder, version, 250 << 10)
    return attempt(comm.send, tensor, 1)


# only rank 0, which creates the segment, needs a file of its size
@pytest.mark.parametrize(
    ("limit", "limited"), [("RLIMIT_FSIZE", 0), ("RLIMIT_AS", 0), ("RLIMIT_AS", 1)]
)
def test_a_limit_of_the_process(fresh_pool: RankPool, limit: str, limited: int) -> None:
    errors = fresh_pool.run(join_under_a_limit, 2, limit, limited, connected=False, deadline_s=20)
    assert isinstance(errors[limited], SegmentError), errors
    assert isinstance(errors[1 - limited], RendezvousError), errors
    assert "shared memory" in str(errors[limited])
    assert "shared memory" in str(errors[1 - limited]), "the peer hears the reason"


def join_under_a_limit(rank: int, size: int, path: str, limit: str, limited: int) -> object:
    before = held_resources()
    if rank == limited:
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used_bytes + (1 << 20) if limit == "RLIMIT_AS" else 1 << 20
        which = getattr(resource, limit)
        resource.setrlimit(which, (most, resource.getrlimit(which)[1]))
    error = attempt(connect, path, rank, size)
    if rank == limited:
        resource.setrlimit(which, (resource.RLIM_INFINITY, resource.getrlimit(which)[1]))
    assert_given_back(before)
    with connect(f"{path}-again", rank, size) as comm:
        comm.all_reduce(tensor := torch.ones(300_000))
        assert tensor.eq(size).all()
    return error


# -- file descriptors ------------------------------------------------------------------------------


@pytest.mark.parametrize("limited", [0, 2])
def test_too_few_descriptors_are_told_to_every_rank(fresh_pool: RankPool, limited: int) -> None:
    """With every number of free descriptors from a few to enough: either all ranks have a group
    whose members are watched, or all get the reason."""
    results = fresh_pool.run(join_with_few_descriptors, 3, limited, connected=False, deadline_s=60)
    by_number = list(zip(*results, strict=True))
    outcomes = [["met" if text == "met" else "failed" for text in texts] for texts in by_number]
    assert all(len(set(outcome)) == 1 for outcome in outcomes), by_number
    assert outcomes[0][0] == "failed"
    assert outcomes[-1][0] == "met"
    for texts in by_number:
        for text in texts:
            assert text == "met" or "descriptors" in text or "open files" in text, by_number


def join_with_few_descriptors(rank: int, size: int, path: str, limited: int) -> list[str]:
    connect(f"{path}-warm", rank, size).close()  # loads what is loaded only once
    before = held_resources()
    numbers = {int(number) for number in before[0]}
    _, hard = usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = []
    for more in range(3, 18):
        # together: a rank that comes after rank 0 has failed waits for another rank 0
        here = [Path(f"{path}-{more}-{rank}") for rank in range(size)]
        here[rank].touch()
        while not all(file.exists() for file in here):
            time.sleep(0.001)
        if rank == limited:
            holes = set(range(max(numbers) + 1)) - numbers
            fill = [os.open(os.devnull, os.O_RDONLY) for _ in holes]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(numbers) + 1 + more, hard))
        error: BaseException | None = None
        try:
            board = FileBoard(f"{path}-{more}", deadline=Deadline(10))
            with connect_on_host(board, rank, size) as comm:
                kinds = held_resources()[0].values() if rank != limited else ()
                assert rank == limited or sum("pidfd" in kind for kind in kinds) == size - 1
                comm.barrier()
        except (RendezvousError, SegmentError) as failure:
            error = failure
        if rank == limited:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
            for descriptor in fill:
                os.close(descriptor)
        after = held_resources()
        assert after == before, (more, error, after, before)
        said.append("met" if error is None else str(error))
    return said
