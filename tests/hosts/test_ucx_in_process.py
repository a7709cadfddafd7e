"""UCX in a user's process: forks, children, other UCXs, signals, threads, and all kinds of exits.

Hosts are simulated (UNISONO_HOSTID), so this needs no root.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from host_jobs import SOON_S, await_all, moment, set_moment
from test_ucx import wheel
from torch.utils.data import DataLoader, Dataset

import ranks
from made_up_hosts import join_world, world
from ranks import RankPool, attempt, end_as_a_program, raised, subgroup
from resources import assert_given_back, held_resources
from unisono import GroupAborted, GroupClosed, PeerLost
from unisono.comm.communicator import Communicator
from user_programs import DEADLINE_S, WriteProgram, eventually

SMALL, LARGE = 3, 300_000  # elements: in one message, and in lanes
HUGE = 16_000_000


def check_group(comm: Communicator) -> None:
    """It works: small and large calls, also as works, and messages of either kind."""
    for count in (SMALL, LARGE):
        comm.all_reduce(tensor := torch.full((count,), 2.0**comm.rank))
        assert tensor.unique().tolist() == [2.0**comm.size - 1]
        work = comm.all_reduce(tensor := torch.full((count,), 2.0**comm.rank), async_op=True)
        assert work is not None
        work.wait(30)
        assert tensor.unique().tolist() == [2.0**comm.size - 1]
        got = torch.empty(count)
        received = comm.irecv(got, (comm.rank - 1) % comm.size)
        comm.barrier()  # which every receive precedes: the group now has all its threads
        comm.send(torch.full((count,), float(comm.rank)), (comm.rank + 1) % comm.size)
        received.wait(30)
        assert got.unique().tolist() == [(comm.rank - 1) % comm.size]


# -- forks and children ----------------------------------------------------------------------------


class Numbers(Dataset[torch.Tensor]):
    """From a worker, which finds out whether it can use its parent's group."""

    def __init__(self, group: Communicator | None) -> None:
        self.group = group

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.group is not None:
            raised(GroupClosed, self.group.all_reduce, torch.ones(LARGE))
        return torch.tensor(float(index))


@pytest.mark.ranks(3)
def test_a_data_loaders_workers_beside_a_group(shared_tmp_path: Path) -> None:
    """Workers are forked while data moves; those of the second loader find the group closed."""
    rank = int(os.environ["UNISONO_RANK"])
    with world(rank, str(shared_tmp_path / "path"), "AAB") as comm:
        for group in (None, comm):
            loader = DataLoader(Numbers(group), num_workers=2, multiprocessing_context="fork")
            begun = comm.all_reduce(large := torch.ones(LARGE), async_op=True)
            total = 0.0
            for batch in loader:
                comm.all_reduce(shared := batch.clone())
                assert torch.equal(shared, 3 * batch)
                total += batch.item()
            assert begun is not None
            begun.wait()
            assert large.eq(3).all()
            assert total == sum(range(16))
        check_group(comm)


def use_in_children(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AAB") as comm:
        check_group(comm)
        before = held_resources()
        for ends_in_order in (False, True):
            begun = comm.all_reduce(large := torch.ones(LARGE), async_op=True)
            child = os.fork()
            if not child:
                use_in_child(comm, ends_in_order)
            check_group(comm)
            assert os.waitpid(child, 0)[1] == 0
            assert begun is not None
            begun.wait()
            assert large.eq(size).all()
            check_group(comm)
        assert_given_back(before)


def use_in_child(comm: Communicator, ends_in_order: bool) -> None:
    """Every use raises; closing it, and exiting the process with all its handlers, do nothing."""
    signal.alarm(20)
    tensor = torch.ones(LARGE)
    uses = [
        attempt(comm.barrier),
        attempt(comm.all_reduce, tensor),
        attempt(comm.all_reduce, tensor, async_op=True),
        attempt(comm.send, tensor, (comm.rank + 1) % comm.size),
        attempt(comm.irecv, tensor, (comm.rank + 1) % comm.size),
        attempt(comm.split, range(comm.size)),
        comm.errored,
    ]
    comm.close()
    wrong = sum(not isinstance(error, GroupClosed) for error in uses)
    if ends_in_order:
        end_as_a_program(SystemExit(wrong))
    os._exit(wrong)


def test_a_forked_child_that_uses_the_group_breaks_nothing(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_in_children, 3, connected=False)


def run_programs(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AAB") as comm:
        check_group(comm)
        before = held_resources()
        for _ in range(3):
            begun = comm.all_reduce(large := torch.ones(LARGE), async_op=True)
            told = subprocess.run([sys.executable, "-c", "print(7)"], stdout=subprocess.PIPE)
            assert told.stdout == b"7\n"
            comm.all_reduce(torch.ones(SMALL))
            assert begun is not None
            begun.wait()
            assert large.eq(size).all()
        check_group(comm)
        assert_given_back(before)


def test_programs_that_ranks_run(fresh_pool: RankPool) -> None:
    fresh_pool.run(run_programs, 3, connected=False)


def leave_a_child(rank: int, size: int, path: str, how: str) -> Any:
    with world(rank, path, "AAB") as comm:
        check_group(comm)
        await_all(path, rank, size)
        if rank == 2:
            if how == "program":  # with all descriptors that may be inherited
                subprocess.Popen(["sleep", "10"], close_fds=False)
            elif not os.fork():
                time.sleep(10)
                os._exit(0)
            set_moment(path, "death")
            os.kill(os.getpid(), signal.SIGKILL)
        error = raised(PeerLost, comm.all_reduce, torch.ones(LARGE))
        return error.peer, time.monotonic() - moment(path, "death")


@pytest.mark.parametrize("how", ["fork", "program"])
def test_a_child_that_lives_on_hides_no_death(fresh_pool: RankPool, how: str) -> None:
    *survivors, _ = fresh_pool.outcomes(leave_a_child, 3, how, connected=False)
    for outcome in survivors:
        assert outcome.error is None, outcome.error
        peer, took_s = outcome.value
        assert peer == 2
        assert took_s < SOON_S


# -- another UCX in the process --------------------------------------------------------------------


def folders_of_ucx() -> set[Path]:
    """The paths of the libraries that this process has loaded, except Python modules."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = [Path(line.split(maxsplit=5)[5]) for line in maps if "/libuc" in line]
    return {path.parent for path in paths if path.parent.name != "ucx"}


def find_another_ucx(rank: int, size: int, path: str, folder: str, everywhere: bool) -> None:
    other = Path(folder) / "libucp.so.0"
    if rank == 0:
        ctypes.CDLL(str(other), ctypes.RTLD_GLOBAL if everywhere else ctypes.RTLD_LOCAL)
    with world(rank, path, "AB") as comm:
        check_group(comm)
        expected = other.parent if rank == 0 else (wheel() / "lib").resolve()
        assert folders_of_ucx() == {expected}


@pytest.mark.parametrize("everywhere", [False, True], ids=["local", "global"])
def test_a_ucx_that_is_in_the_process_already_serves(
    fresh_pool: RankPool, tmp_path: Path, everywhere: bool
) -> None:
    """As an Open MPI would load it. It must not be mixed with ours."""
    shutil.copytree(wheel() / "lib", tmp_path / "lib")
    fresh_pool.run(find_another_ucx, 2, str(tmp_path / "lib"), everywhere, connected=False)


# -- what it must not change -----------------------------------------------------------------------


def signals_caught() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))


def code_of_allocators() -> dict[str, bytes]:
    """The first bytes of the libc functions that UCX would patch."""
    libc = ctypes.CDLL(None)
    names = ("malloc", "free", "mmap", "munmap", "mremap", "madvise", "brk", "sbrk", "shmat")
    code = {}
    for name in names:
        where = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
        assert where is not None
        code[name] = ctypes.string_at(where, 16)
    return code


def change_nothing(rank: int, size: int, path: str) -> None:
    before = signals_caught(), code_of_allocators(), dict(os.environ), libc_environment()
    with world(rank, path, "AB") as comm:
        check_group(comm)
        now = signals_caught(), code_of_allocators(), dict(os.environ), libc_environment()
        assert now == before


def libc_environment() -> list[bytes]:
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: list[bytes] = []
    while (entry := environ[len(found)]) is not None:
        found.append(entry)
    return found


def test_no_handler_of_signals_no_patched_allocator_no_environment(fresh_pool: RankPool) -> None:
    fresh_pool.run(change_nothing, 2, connected=False)


def handle_signals(rank: int, size: int, path: str) -> None:
    handled, stacks = Path(f"{path}-handled"), Path(f"{path}-stacks")
    before = signal.signal(signal.SIGUSR2, lambda *_: handled.touch())
    with world(rank, path, "AB") as comm, open(f"{stacks}-{rank}", "w") as file:
        check_group(comm)
        # It would read data that other threads are changing.
        faulthandler.register(signal.SIGTERM, file, all_threads=False)
        if rank == 0:
            for number in (signal.SIGTERM, signal.SIGUSR2):
                threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), number)).start()
            comm.recv(torch.empty(1), 1)
        else:  # it learns nothing before both have been handled
            assert eventually(lambda: "in handle_signals" in Path(f"{stacks}-0").read_text(), 20)
            assert eventually(handled.exists, 20)
            comm.send(torch.ones(1), 0)
        faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGUSR2, before)


def test_handlers_of_signals_run_while_a_rank_waits(fresh_pool: RankPool) -> None:
    fresh_pool.run(handle_signals, 2, connected=False)


def crash(rank: int, size: int, path: str) -> str:
    with world(rank, path, "AB") as comm:
        check_group(comm)
        await_all(path, rank, size)
        if rank == 1:
            with open(f"{path}-crash", "w") as file:
                faulthandler.enable(file)
                ctypes.string_at(0)
        assert raised(PeerLost, comm.barrier).peer == 1
        return Path(f"{path}-crash").read_text()


def test_a_crash_is_told_by_faulthandler_and_to_the_others(fresh_pool: RankPool) -> None:
    survivor, dead = fresh_pool.outcomes(crash, 2, connected=False)
    assert dead.exit_code == -signal.SIGSEGV
    assert survivor.value.startswith("Fatal Python error: Segmentation fault"), survivor
    assert "in crash" in survivor.value


# -- Ctrl-C ----------------------------------------------------------------------------------------


@contextmanager
def interrupted_after(seconds: float) -> Iterator[list[float]]:
    """Ctrl-C, and the moment when it was pressed."""
    moments: list[float] = []

    def press() -> None:
        moments.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, press)
    timer.start()
    try:
        yield moments
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def repeat(call: Callable[[], object]) -> None:
    while True:
        call()


def be_interrupted(rank: int, size: int, path: str, hosts: str) -> None:
    with world(rank, path, hosts) as comm:
        tensor = torch.ones(HUGE)
        comm.all_reduce(tensor)
        if rank == 1:
            while comm.errored is None:  # if pressed as a call ends, it does no harm
                with interrupted_after(0.3) as pressed, pytest.raises(KeyboardInterrupt):
                    repeat(lambda: comm.all_reduce(tensor, "max"))
                assert time.monotonic() - pressed[0] < SOON_S
        else:
            error = raised(GroupAborted, repeat, lambda: comm.all_reduce(tensor, "max"))
            assert error.peer == 1
            assert "interrupted" in str(error)
        tensor.fill_(-1)  # it belongs to us again
        time.sleep(1)
        assert tensor.eq(-1).all()
        raised(GroupAborted, comm.barrier)
    assert tensor.eq(-1).all()


@pytest.mark.parametrize("hosts", ["AB", "ABA"])
def test_an_interrupt_in_a_large_call(fresh_pool: RankPool, hosts: str) -> None:
    """At once here, soon elsewhere, and no tensor is written any more."""
    fresh_pool.run(be_interrupted, len(hosts), hosts, connected=False)


# -- ends ------------------------------------------------------------------------------------------


def end_somehow(rank: int, size: int, path: str, how: str) -> Any:
    comm = join_world(rank, path, "AAB")
    check_group(comm)
    other = subgroup(comm, range(size), "other")
    await_all(path, rank, size)
    if rank == 1:
        comm.irecv(torch.empty(LARGE), 2, tag=1)
        other.all_reduce(torch.ones(HUGE), async_op=True)
        set_moment(path, "end")
        if how == "exit":
            sys.exit(3)
        if how == "exception":
            raise RuntimeError("as it happens")
        os._exit(3)
    error = raised(PeerLost, comm.all_reduce, torch.ones(LARGE))
    came = time.monotonic()
    if rank == 2:
        other.close()
    comm.close()
    other.close()
    return error.peer, came - moment(path, "end")


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("_exit", 3), ("exception", 1)])
def test_a_process_that_ends_without_closing(fresh_pool: RankPool, how: str, code: int) -> None:
    """With a work and a receive in progress."""
    first, dead, third = fresh_pool.outcomes(end_somehow, 3, how, connected=False, mortal=True)
    assert dead.exit_code == code
    for outcome in (first, third):
        assert outcome.error is None, outcome.error
        assert outcome.value[0] == 1
        assert outcome.value[1] < SOON_S


NOT_DESTROYED = """
import atexit, os, sys
import torch
import torch.distributed as dist
import unisono

rank, path = int(sys.argv[1]), sys.argv[2]
seen = []


def try_group(when):
    try:
        dist.all_reduce(tensor := torch.ones(300_000))
    except unisono.GroupClosed:
        print(when, "closed")
    else:
        print(when, tensor[0].item())


atexit.register(try_group, "after ours")
dist.init_process_group("unisono", store=dist.FileStore(path, 2), rank=rank, world_size=2)
group = dist.new_group([0, 1])
atexit.register(try_group, "before ours")
begun = dist.all_reduce(torch.ones(300_000), group=group, async_op=True)
dist.all_reduce(torch.ones(3))
if rank:
    begun.wait()
"""


def test_a_program_that_does_not_destroy_its_groups(program: WriteProgram, tmp_path: Path) -> None:
    """atexit runs the user's handlers before ours, if they came later; and after ours otherwise."""
    script = program(NOT_DESTROYED)
    started = [
        script.start(str(rank), str(tmp_path / "store"), environment={"UNISONO_HOSTID": host})
        for rank, host in enumerate("AB")
    ]
    for process in started:
        out, err = process.communicate(timeout=DEADLINE_S)
        said = [line for line in err.splitlines() if " is waiting for rank " not in line]
        assert (process.returncode, said) == (0, [])  # but one may have started late
        assert out.splitlines() == ["before ours 2.0", "after ours closed"]


def see_a_death(rank: int, size: int, path: str) -> Any:
    with world(rank, path, "AAB") as comm:  # everything that UCX keeps for good exists now
        check_group(comm)
    before = held_resources()
    with world(rank, f"{path}-again", "AAB") as comm:
        check_group(comm)
        await_all(path, rank, size)
        if rank == 2:
            time.sleep(0.3)  # the others wait
            set_moment(path, "death")
            os.kill(os.getpid(), signal.SIGKILL)
        works = [comm.irecv(torch.empty(LARGE), 2), comm.all_reduce(torch.ones(3), async_op=True)]
        error = raised(PeerLost, comm.all_reduce, torch.ones(LARGE))
        took_s = time.monotonic() - moment(path, "death")
        for work in works:
            assert work is not None
            raised(PeerLost, work.wait)
    del works, work
    assert_given_back(before)
    return error.peer, took_s


def test_a_death_while_others_wait_leaves_nothing_behind(fresh_pool: RankPool) -> None:
    *survivors, dead = fresh_pool.outcomes(see_a_death, 3, connected=False)
    assert dead.exit_code == -signal.SIGKILL
    for outcome in survivors:
        assert outcome.error is None, outcome.error
        assert outcome.value[0] == 2
        assert outcome.value[1] < SOON_S


# -- threads ---------------------------------------------------------------------------------------


def in_threads(*calls: Callable[[], None]) -> None:
    """Each in its own thread; an exception in one is raised here."""
    failures: list[BaseException | None] = []
    threads = [
        threading.Thread(target=lambda call=call: failures.append(attempt(call)))  # type: ignore[misc]
        for call in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        if failure is not None:
            raise failure


def sum_often(comm: Communicator, factor: float) -> None:
    for turn in range(40):
        count = (SMALL, 5_000, LARGE)[turn % 3]
        comm.all_reduce(tensor := torch.full((count,), factor * turn))
        assert tensor.unique().tolist() == [comm.size * factor * turn]


def use_two_groups(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AAB") as comm:
        others = [subgroup(comm, range(size), str(number)) for number in range(2)]
        in_threads(*(lambda g=group, n=n: sum_often(g, n) for n, group in enumerate(others, 1)))  # type: ignore[misc]
        check_group(comm)
        for other in others:
            other.close()


def test_two_threads_with_a_group_each(fresh_pool: RankPool) -> None:
    fresh_pool.run(use_two_groups, 3, connected=False)


def close_two_worlds_at_once(rank: int, size: int, path: str) -> None:
    for turn in range(10):
        worlds = [join_world(rank, f"{path}-{turn}-{name}", "AB") for name in "ab"]
        at_once = threading.Barrier(len(worlds))

        def close(comm: Communicator, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            comm.close()

        closing = [threading.Thread(target=close, args=(comm,), daemon=True) for comm in worlds]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(30)
            assert not thread.is_alive()


def test_two_threads_that_close_the_last_groups(fresh_pool: RankPool) -> None:
    """Both find that no group is left, and only one may close the network."""
    fresh_pool.run(close_two_worlds_at_once, 2, connected=False)


def play(comm: Communicator, tag: int) -> None:
    """Messages there and back, and from any source."""
    peer = 1 - comm.rank
    for turn in range(25):
        count = (SMALL, 5_000, LARGE)[turn % 3]
        sent, got = torch.full((count,), float(10 * tag + turn)), torch.empty(count)
        work = comm.isend(sent, peer, tag)
        assert comm.recv(got, peer if turn % 2 else None, tag) == peer
        work.wait(30)
        assert torch.equal(sent, got)


def call_from_threads(rank: int, size: int, path: str) -> None:
    with world(rank, path, "AB") as comm:
        plays = [lambda tag=tag: play(comm, tag) for tag in range(3)]  # type: ignore[misc]
        in_threads(lambda: sum_often(comm, 1.0), *plays)
        check_group(comm)


def test_calls_and_messages_of_several_threads_in_one_group(fresh_pool: RankPool) -> None:
    fresh_pool.run(call_from_threads, 2, connected=False)


ranks.preload("host_jobs")
