"""Large calls on ordinary tensors, which the kernel copies from process to process; the kernel
refuses, or ranks die or stop in the middle."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
import torch

from ranks import RankPool, attempt, connect
from unisono import CollectiveTimeout, PeerLost, variables
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.memory_transport import SharedMemory

PART = 80_000  # floats: more than a step, and above the threshold of ranks that share cores
_READV = {"x86_64": 310, "aarch64": 270}[platform.machine()]
_MEMFD_SECRET = 447


def reads(comm: Communicator) -> int:
    return cast(SharedMemory, comm.transport).group.state()["reads"]


def row(rank: int, number: int, count: int = PART) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1e6 * rank + 1e3 * number


def exchange(comm: Communicator, number: int) -> None:
    """An all_to_all in which every element is checked. Every rank then overwrites its input."""
    given = torch.cat([row(comm.rank, number + to) for to in range(comm.size)])
    out = torch.full_like(given, -1)
    comm.all_to_all(out, given)
    given.fill_(-2)
    wanted = [row(source, number + comm.rank) for source in range(comm.size)]
    assert torch.equal(out, torch.cat(wanted))


def refuse_readv(error: int) -> None:
    """Make this thread's process_vm_readv fail with this error; 0: return 0 bytes."""
    instructions = [
        (0x20, 0, 0, 0),  # load the system call's number
        (0x15, 0, 1, _READV),  # if it is a different one, skip the next
        (0x06, 0, 0, 0x00050000 | error),  # SECCOMP_RET_ERRNO
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HP", 4, ctypes.addressof(buffer)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    done = libc.prctl(22, 2, ctypes.byref(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    assert done == 0, os.strerror(ctypes.get_errno())


# -- what is read ------------------------------------------------------------------------------


@pytest.mark.ranks([2, 3])
def test_an_all_to_all_of_ordinary_tensors_is_read(comm: Communicator) -> None:
    for number in range(3):
        exchange(comm, number)
    assert reads(comm) == 3 * (comm.size - 1)


@pytest.mark.ranks(2)
def test_an_all_gather_is_read_in_place_and_into_any_layout(comm: Communicator) -> None:
    wanted = torch.stack([row(source, 0) for source in range(2)])
    for out in (torch.zeros(2, PART), torch.zeros(2, PART, 2)[..., 1], torch.zeros(PART, 2).t()):
        comm.all_gather(list(out), row(comm.rank, 0))
        assert torch.equal(out, wanted)
    out = torch.zeros(2, PART)
    own = out[comm.rank]
    own.copy_(row(comm.rank, 0))
    comm.all_gather(out, own)
    assert torch.equal(out, wanted)
    crowded = len(os.sched_getaffinity(0)) < 2
    assert (reads(comm) > 0) is not crowded


@pytest.mark.ranks(3)
def test_parts_of_all_sizes_and_memory_of_all_kinds(comm: Communicator) -> None:
    """Some ranks' input is small, empty, strided or shared: it is copied in, or read in another
    way."""
    shared = comm.empty(3 * PART)
    kinds = [[PART, 0, 5], [PART, PART, PART], [7, 7, 7]]
    for case in range(6):
        counts = kinds[(comm.rank + case) % 3]
        given = torch.cat([row(comm.rank, to, count) for to, count in enumerate(counts)])
        if case > 2 and comm.rank == case % 3:
            given = shared[: len(given)].copy_(given)
        if case == 5 and comm.rank == 0:
            given = torch.stack([given, given], 1)[:, 1]
        wanted = [
            row(source, comm.rank, kinds[(source + case) % 3][comm.rank]) for source in range(3)
        ]
        out = [torch.full_like(part, -1) for part in wanted]
        comm.all_to_all(out, list(given.split(counts)))
        assert torch.equal(torch.cat(out), torch.cat(wanted))


@pytest.mark.ranks(2)
def test_what_would_not_gain_is_not_read(comm: Communicator) -> None:
    for part in (1000, 2_000_000):
        comm.all_to_all(torch.empty(2 * part), torch.ones(2 * part))
    x = torch.ones(PART)
    comm.all_reduce(x)
    comm.broadcast(x, 0)
    assert reads(comm) == 0


# -- what the kernel refuses -------------------------------------------------------------------


@pytest.mark.parametrize("refused", [errno.EPERM, errno.EFAULT, errno.ESRCH, 0])
def test_a_process_that_may_not_read_is_asked_once(fresh_pool: RankPool, refused: int) -> None:
    assert fresh_pool.run(exchange_with_one_refused, 3, refused) == [2, 0, 2]


def exchange_with_one_refused(comm: Communicator, refused: int) -> int:
    if comm.rank == 1:
        refuse_readv(refused)
    for number in range(3):
        exchange(comm, number)
    return reads(comm)


def open_secret_memory() -> int:
    return int(ctypes.CDLL(None).syscall(_MEMFD_SECRET, 0))


def has_secret_memory() -> bool:
    descriptor = open_secret_memory()
    if descriptor >= 0:
        os.close(descriptor)
    return descriptor >= 0


@pytest.mark.skipif(not has_secret_memory(), reason="this kernel has no memfd_secret")
@pytest.mark.ranks(3)
def test_memory_that_the_kernel_does_not_read_is_brought(comm: Communicator) -> None:
    """Such as a driver's memory: the next call reads directly again."""
    descriptor = open_secret_memory()
    os.ftruncate(descriptor, 3 * 4 * PART)
    secret = torch.frombuffer(mmap.mmap(descriptor, 3 * 4 * PART), dtype=torch.float32)
    os.close(descriptor)
    for giver in range(3):
        given = secret if comm.rank == giver else torch.empty(3 * PART)
        given.copy_(torch.cat([row(comm.rank, to) for to in range(3)]))
        out = torch.empty(3 * PART)
        comm.all_to_all(out, given)
        assert torch.equal(out, torch.cat([row(source, comm.rank) for source in range(3)]))
    before = reads(comm)
    exchange(comm, 7)
    assert reads(comm) == before + 2


@pytest.mark.parametrize("switched_off", [[0, 1], [1]])
def test_the_variable_switches_it_off_for_all(pool: RankPool, switched_off: list[int]) -> None:
    assert pool.run(exchange_switched_off, 2, switched_off, connected=False) == [0, 0]


def exchange_switched_off(rank: int, size: int, path: str, switched_off: list[int]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        if rank in switched_off:
            patch.setenv(variables.READ_PEERS.name, "0")
        comm = connect(path, rank, size)
    comm.barrier()
    exchange(comm, 1)
    count = reads(comm)
    comm.close()
    return count


ELSEWHERE = """
import sys, numpy
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
rank = int(sys.argv[2])
comm = connect_on_host(FileBoard(sys.argv[1]), rank, 2)
for number in range(3):
    out = numpy.zeros(200_000, numpy.float32)
    comm.all_to_all(out, numpy.full_like(out, rank + number))
    assert (out == numpy.repeat([number, number + 1], 100_000)).all()
print(comm.transport.group.state()["reads"])
comm.close()
"""


@pytest.mark.parametrize("proc", [["--mount-proc"], []], ids=["own /proc", "the host's /proc"])
def test_a_rank_in_another_pid_namespace_reads_nobody_else(tmp_path: Path, proc: list[str]) -> None:
    """With the host's /proc it gets pids that mean other processes in its own namespace."""
    elsewhere = ["unshare", "--pid", "--fork", *proc]
    if shutil.which("unshare") is None or subprocess.run([*elsewhere, "true"]).returncode:
        pytest.skip("this user cannot make a PID namespace")
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "meeting")]
    with subprocess.Popen([*elsewhere, *command, "1"], stdout=subprocess.PIPE) as there:
        subprocess.run([*command, "0"], check=True, timeout=180)
        assert there.communicate(timeout=30)[0] == b"0\n"


# -- deaths and stops in the middle ------------------------------------------------------------


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.11])
def test_a_death_in_the_middle_is_no_number(fresh_pool: RankPool, after_s: float) -> None:
    outcomes = fresh_pool.outcomes(exchange_until_death, 3, after_s)
    assert [outcome.value for outcome in outcomes[:2]] == ["lost", "lost"], outcomes
    assert outcomes[2].exit_code == -signal.SIGKILL


def exchange_until_death(comm: Communicator, after_s: float) -> str:
    exchange(comm, 0)
    if comm.rank == 2:
        threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGKILL]).start()
    error = exchange_until_error(comm)
    assert isinstance(error, PeerLost), error
    assert error.peer == 2
    return "lost"


def exchange_until_error(comm: Communicator) -> BaseException:
    for number in range(1, 100_000):
        error = attempt(exchange, comm, number)
        if error is not None:
            return error
    raise AssertionError("nothing happened")


@pytest.mark.parametrize("after_s", [0.02, 0.07])
def test_a_stopped_rank_has_no_wrong_number_when_it_goes_on(pool: RankPool, after_s: float) -> None:
    """The others give up, and overwrite what it may still be reading."""
    assert pool.run(exchange_until_stopped, 3, after_s, connected=False) == ["timeout"] * 3


def exchange_until_stopped(rank: int, size: int, path: str, after_s: float) -> str:
    comm = connect(path, rank, size)
    comm.transport.timeout_s = 1.0
    exchange(comm, 0)
    me = os.getpid()
    stop = f"sleep {after_s}; kill -STOP {me}; sleep 2; kill -CONT {me}"
    stopper = subprocess.Popen(["sh", "-c", stop]) if rank == 2 else None
    error = exchange_until_error(comm)
    assert isinstance(error, CollectiveTimeout), error
    if stopper:
        stopper.wait()
    comm.close()
    return "timeout"
