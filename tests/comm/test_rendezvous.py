"""How ranks find each other, and what happens if the wrong ones join or the right ones do not."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import unisono
from ranks import RankPool, attempt, in_a_fork, raised
from resources import assert_given_back, held_resources
from unisono import RendezvousError, UnisonoError
from unisono.comm import engine
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting import announcements as boards
from unisono.comm.meeting import membership
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.meeting.deadline import Deadline
from user_programs import eventually


def join(board: Board, rank: int, size: int, within_s: float = 10.0) -> Communicator:
    return connect_on_host(board.until(Deadline(within_s)), rank, size, timeout_s=10)


def assert_works(comm: Communicator) -> None:
    comm.all_reduce(tensor := torch.full((1000,), comm.rank + 1.0))
    assert tensor.eq(sum(range(1, comm.size + 1))).all()


def join_and_work(board: Board, rank: int, size: int, within_s: float = 10.0) -> None:
    with join(board, rank, size, within_s) as comm:
        assert_works(comm)


# -- ways to meet ------------------------------------------------------------------------------


def test_ranks_meet_at_a_path_whoever_comes_first(pool: RankPool, tmp_path: Path) -> None:
    for late in range(3):
        path = tmp_path / f"meeting {late}"
        pool.run(meet_at_a_path, 3, str(path), late, connected=False)
        assert list(tmp_path.iterdir()) == [], "the file goes once all have met"


def meet_at_a_path(rank: int, size: int, _: str, path: str, late: int) -> None:
    if rank == late:
        time.sleep(0.2)
    join_and_work(FileBoard(path), rank, size)


@pytest.mark.parametrize("kind", ["file", "tcp", "prefix"])
def test_ranks_meet_in_a_torch_store(pool: RankPool, tmp_path: Path, kind: str) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool.run(meet_in_a_store, 3, kind, str(tmp_path / "store"), server.port, connected=False)


def meet_in_a_store(rank: int, size: int, _: str, kind: str, path: str, port: int) -> None:
    store: Any
    if kind == "file":
        store = torch.distributed.FileStore(path, size)
    else:
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    if kind == "prefix":
        store = torch.distributed.PrefixStore("mine", store)
    join_and_work(Board(store), rank, size)
    with unisono.init(rank=rank, size=size, rendezvous=store) as comm:
        assert_works(comm)
    unisono.shutdown()


def test_ranks_of_one_process_meet_in_a_hash_store() -> None:
    board = Board(torch.distributed.HashStore())
    with ThreadPoolExecutor() as threads:
        list(threads.map(join_and_work, [board] * 3, range(3), [3] * 3))


PROGRAM = """
    import sys, numpy, unisono
    with unisono.init() as comm:
        tensor = numpy.full(1000, comm.rank + 1.0)
        comm.all_reduce(tensor)
        assert (tensor == sum(range(1, comm.size + 1))).all()
        assert (unisono.get_rank(), unisono.get_world_size()) == (comm.rank, comm.size)
        assert unisono.is_main_process() == (comm.rank == 0)
        unisono.barrier()
    unisono.shutdown()
    assert "torch" not in sys.modules
"""


def start_programs(size: int, where: str, descriptors: tuple[int, ...] = ()) -> None:
    """Run PROGRAM as separate ranks; the environment says where they meet."""
    environment = os.environ | {"UNISONO_SIZE": str(size), "UNISONO_RENDEZVOUS": where}
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM)],
            env=environment | {"UNISONO_RANK": str(rank)},
            pass_fds=descriptors,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        for program in programs:
            _, errors = program.communicate(timeout=180)
            assert program.returncode == 0, errors
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_programs_without_torch_meet_through_an_inherited_descriptor() -> None:
    with tempfile.TemporaryFile() as file:
        start_programs(2, f"fd:{file.fileno()}", (file.fileno(),))


def test_programs_meet_at_the_path_in_their_environment(tmp_path: Path) -> None:
    start_programs(3, str(tmp_path / "meeting"))
    assert list(tmp_path.iterdir()) == []


def test_torchruns_variables_are_understood(fresh_pool: RankPool) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fresh_pool.run(init_as_under_torchrun, 2, server.port, connected=False)


def init_as_under_torchrun(rank: int, size: int, _: str, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    with unisono.init() as comm:
        assert (comm.rank, comm.size) == (rank, size)
        assert_works(comm)
    unisono.shutdown()


def test_two_worlds_meet_at_two_paths_at_once(pool: RankPool, tmp_path: Path) -> None:
    pool.run(two_worlds_at_once, 6, str(tmp_path), connected=False)


def two_worlds_at_once(rank: int, size: int, _: str, folder: str) -> None:
    for step in range(5):
        path = os.path.join(folder, f"{step}-{rank % 2}")
        join_and_work(FileBoard(path), rank // 2, size // 2)


@pytest.mark.parametrize("turning", [0, 1], ids=["with the same leader", "with another leader"])
def test_a_path_is_used_again_at_once(pool: RankPool, turning: int) -> None:
    pool.run(meet_again_and_again, 3, turning, connected=False)


def meet_again_and_again(rank: int, size: int, path: str, turning: int) -> None:
    """Only the rendezvous itself keeps one meeting apart from the next."""
    for step in range(40):
        join(FileBoard(path), (rank + turning * step) % size, size, within_s=5.0).close()


def test_one_process_is_in_two_worlds(pool: RankPool) -> None:
    pool.run(one_process_is_in_two_worlds, 3, connected=False)


def one_process_is_in_two_worlds(rank: int, size: int, path: str) -> None:
    with join(FileBoard(path), rank, size) as first:
        with join(FileBoard(f"{path}-second"), size - 1 - rank, size) as second:
            for _ in range(10):
                assert_works(first)
                assert_works(second)
        assert_works(first)


# -- init and shutdown -------------------------------------------------------------------------


def test_a_world_comes_and_goes_many_times_at_one_path(fresh_pool: RankPool) -> None:
    fresh_pool.run(init_and_shutdown, 4, 40, connected=False)


def init_and_shutdown(rank: int, size: int, path: str, times: int) -> None:
    for _ in range(times):
        comm = unisono.init(rank=rank, size=size, rendezvous=path)
        assert unisono.get_world() is comm
        assert (unisono.get_rank(), unisono.get_world_size()) == (rank, size)
        assert_works(comm)
        unisono.shutdown()
        unisono.shutdown()


def test_a_world_comes_and_goes_many_times_in_one_store(fresh_pool: RankPool) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    fresh_pool.run(init_and_shutdown_in_a_store, 3, server.port, connected=False)


def init_and_shutdown_in_a_store(rank: int, size: int, _: str, port: int) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    for _ in range(20):
        assert_works(unisono.init(rank=rank, size=size, rendezvous=store))
        unisono.shutdown()


def test_a_program_that_nobody_launched_is_a_world_of_one(pool: RankPool) -> None:
    pool.run(a_world_of_one, 1, connected=False)


def a_world_of_one(rank: int, size: int, path: str) -> None:
    assert (unisono.get_rank(), unisono.get_world_size()) == (0, 1)
    unisono.barrier()
    assert unisono.get_world().size == 1
    comm = unisono.init()
    assert (comm.rank, comm.size) == (0, 1)
    assert_works(comm)
    again = raised(UnisonoError, unisono.init)
    assert "shutdown" in str(again)
    unisono.shutdown()
    for wrong in ({"rank": 0}, {"size": 2}, {"rank": 2, "size": 2}):
        assert isinstance(attempt(unisono.init, **wrong), ValueError), wrong


# -- who does not come, and who should not -------------------------------------------------------


def join_error(rank: int, size: int, path: str, within_s: float) -> tuple[str, float]:
    """The text of the error with which this rank fails to join, and after how long."""
    start = time.monotonic()
    error = raised(RendezvousError, join, FileBoard(path), rank, size, within_s)
    return str(error), time.monotonic() - start


def test_missing_ranks_are_named_at_the_deadline(pool: RankPool) -> None:
    (first, took_s), (second, _) = pool.run(two_of_five_come, 2, connected=False)
    assert "ranks 2-4 of 5" in first
    assert "did not join" in first
    assert 1.5 <= took_s < 11
    assert "ranks 2-4 of 5" in second


def two_of_five_come(rank: int, size: int, path: str) -> tuple[str, float]:
    return join_error(rank, 5, path, 1.5 if rank == 0 else 3.0)  # rank 1 may start a little later


def test_a_missing_rank_0_is_named_at_the_deadline(pool: RankPool) -> None:
    ((text, took_s),) = pool.run(rank_1_comes_alone, 1, connected=False)
    assert "rank 0 did not join" in text
    assert 0.5 <= took_s < 10


def rank_1_comes_alone(rank: int, size: int, path: str) -> tuple[str, float]:
    return join_error(1, 2, path, 0.5)


def test_ranks_that_disagree_about_the_size_all_fail(pool: RankPool) -> None:
    for text, took_s in pool.run(one_has_another_size, 3, connected=False):
        assert "thinks the group has 4 ranks, not 3" in text
        assert took_s < 10


def one_has_another_size(rank: int, size: int, path: str) -> tuple[str, float]:
    if rank == 2:
        time.sleep(0.2)  # the others have already joined
    return join_error(rank, 4 if rank == 2 else 3, path, 20.0)


def test_a_rank_that_comes_twice_fails_all(pool: RankPool) -> None:
    for text, took_s in pool.run(rank_1_comes_twice, 3, connected=False):
        assert "rank 1" in text
        assert "not free" in text
        assert took_s < 10


def rank_1_comes_twice(rank: int, size: int, path: str) -> tuple[str, float]:
    return join_error(min(rank, 1), 3, path, 20.0)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_another_build_is_refused(fresh_pool: RankPool) -> None:
    for text, _ in fresh_pool.run(one_has_another_build, 2, connected=False):
        assert "another build" in text


def one_has_another_build(rank: int, size: int, path: str) -> tuple[str, float]:
    if rank == 1:
        engine.native.LAYOUT_VERSION = 999
    return join_error(rank, 2, path, 4.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"\xff\x00garbage",
        "dead",
        pytest.param("rebooted", id="of an earlier boot"),
    ],
)
def test_a_stale_file_does_no_harm(pool: RankPool, tmp_path: Path, content: bytes | str) -> None:
    path = tmp_path / "meeting"
    if isinstance(content, str):
        announcement = boards.about_me("unisono-of-a-job-that-died")
        if content == "rebooted":
            announcement["boot"] = "b0070000-0000-0000-0000-000000000000"
        content = json.dumps(announcement).encode()
    path.write_bytes(content)
    pool.run(rank_0_comes_last, 3, str(path), connected=False)


def rank_0_comes_last(rank: int, size: int, _: str, path: str) -> None:
    if rank == 0:
        time.sleep(0.3)
    join_and_work(FileBoard(path), rank, size)


def test_a_rank_on_another_host_is_named(fresh_pool: RankPool) -> None:
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for elsewhere in (0, 2):
        texts = fresh_pool.run(one_is_elsewhere, 3, server.port, elsewhere, connected=False)
        stayed = [text for rank, text in enumerate(texts) if rank != elsewhere]
        assert all(f"rank {elsewhere} is on host faraway" in text for text in stayed), texts
        assert "host" in texts[elsewhere]


def one_is_elsewhere(rank: int, size: int, _: str, port: int, elsewhere: int) -> str:
    """Rank `elsewhere` behaves like a process on another machine."""
    boot_id, hostname = boards.boot_id, socket.gethostname
    if rank == elsewhere:
        boards.boot_id = lambda: "ffffffff-ffff-ffff-ffff-ffffffffffff"  # type: ignore
        socket.gethostname = lambda: "faraway"  # type: ignore
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    board = Board(store).part(f"{elsewhere}")
    try:
        error = attempt(join, board, rank, size, 3.0)
    finally:
        boards.boot_id, socket.gethostname = boot_id, hostname  # type: ignore
    assert isinstance(error, RendezvousError), error
    return str(error)


@as_root
def test_a_rank_out_of_reach_is_named_on_both_sides(fresh_pool: RankPool) -> None:
    """It is in another network namespace; through a store it can tell rank 0 so."""
    texts = fresh_pool.run(one_has_a_network_of_its_own, 2, connected=False)
    assert texts[0] == texts[1]
    assert re.search(r"rank 1 \(pid \d+\) cannot reach rank 0 \(pid \d+\) .* namespaces", texts[0])


def one_has_a_network_of_its_own(rank: int, size: int, path: str) -> str:
    membership.UNREACHABLE_S = 0.3
    if rank == 1:
        assert not ctypes.CDLL(None).unshare(0x40000000)  # CLONE_NEWNET
    store = torch.distributed.FileStore(f"{path}-store", 2)
    return str(raised(RendezvousError, join, Board(store), rank, size, 8.0))


# -- noise at the door -------------------------------------------------------------------------


def hello(key: str, rank: int) -> bytes:
    """The first message of a rank that guesses the group's key."""
    about = boards.about_me("unisono-" + "0" * 32)
    return json.dumps(about | {"key": key, "rank": rank, "size": 2}).encode()


NOISE: dict[str, bytes] = {
    "nothing": b"",
    "random bytes": bytes(range(256)) * 10,
    "half a message": hello("world", 1)[:20],
    "an endless message": b'{"key": "' + b"x" * 600_000,
    "no text": b"\xff\xfe\xfd",
    "no object": b"[1, 2, 3]",
    "an empty object": b"{}",
    "a rank that is no number": b'{"key": "world", "rank": "one", "size": 2}',
    "an infinite rank": b'{"key": "world", "rank": 1e999, "size": 2}',
    "deep nesting": b"[" * 200_000,
    "another group": b'{"key": "another world", "rank": 1, "size": 2}',
    "a guess at the group's name": hello("wor1d", 1),
    "a guess at a subgroup's name": hello("world/0,1/1", 1),
}


def hung_up(door: socket.socket) -> bool:
    """Whether the owner closes the connection without an answer, at the latest when its world
    ends."""
    door.settimeout(15)
    try:
        return door.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("stays", [False, True], ids=["and goes", "and stays"])
def test_noise_at_the_door_is_ignored(pool: RankPool, noise: str, stays: bool) -> None:
    pool.run(noise_while_a_group_forms, 3, noise, stays, connected=False, deadline_s=15)


def announced_address(path: str) -> str:
    """Rank 0's address, once it has announced it."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        announcement = boards.look_up(FileBoard(path))
        if announcement is not None:
            return str(announcement["address"])
        time.sleep(0.005)
    raise AssertionError("rank 0 has not announced itself")


def noise_while_a_group_forms(
    rank: int, size: int, path: str, noise: str, stays: bool, times: int = 1, descriptors: int = 0
) -> None:
    before = held_resources()
    made = Path(f"{path}-made")
    if rank == 2:  # not a member: the process that sends garbage
        doors = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(times)]
        for door in doors:
            door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            door.connect(b"\0" + announced_address(path).encode())
            if descriptors:
                attempt(socket.send_fds, door, [NOISE[noise]], [0] * descriptors)
            else:
                attempt(door.sendall, NOISE[noise])
        if stays:
            made.touch()
        for door in doors:
            with door:
                assert not stays or hung_up(door)
        made.touch()
        return
    if rank == 1:
        eventually(made.exists, 8.0)
    join_and_work(FileBoard(path), rank, 2, within_s=5.0)
    assert_given_back(before)


@pytest.mark.parametrize(
    ("times", "noise", "descriptors"),
    [
        (1, "a guess at the group's name", 1),
        (100, "a guess at a subgroup's name", 0),
        (20, "random bytes", 8),
        (20, "half a message", 8),
        (5, "an endless message", 2),
    ],
)
def test_noise_with_descriptors_leaves_nothing(
    fresh_pool: RankPool, times: int, noise: str, descriptors: int
) -> None:
    given = noise, True, times, descriptors
    fresh_pool.run(noise_while_a_group_forms, 3, *given, connected=False, deadline_s=20)


@as_root
def test_another_users_process_is_not_let_in(pool: RankPool) -> None:
    said = pool.run(another_user_knocks, 3, connected=False)
    assert said[2] == ["no answer", "rank 0 runs as user 0, but this rank as 65534"]


def another_user_knocks(rank: int, size: int, path: str) -> list[str]:
    done = Path(f"{path}-done")
    if rank < 2:
        if rank == 1:
            eventually(done.exists, 8.0)
        join_and_work(FileBoard(path), rank, 2)
        return []
    address = announced_address(path)
    announcement = boards.look_up(FileBoard(path))

    def knock() -> str:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(5)
            door.connect(b"\0" + address.encode())
            hello = boards.about_me("forged") | {"key": "world", "rank": 1, "size": 2}
            attempt(door.sendall, json.dumps(hello).encode())
            try:
                return "an answer" if door.recv(100) else "no answer"
            except ConnectionError:
                return "no answer"

    class Whisper(FileBoard):
        """Rank 0's announcement, which came in another way than by the file: we may not read the
        file."""

        def get(self, name: str) -> str:
            return json.dumps(announcement)

    def join_as_nobody() -> str:
        os.setuid(65534)
        return str(attempt(join, Whisper(path), 1, 2, 2.0))

    said = [in_a_fork(knock), in_a_fork(join_as_nobody)]
    done.touch()
    return said


@as_root
def test_a_file_of_another_user_is_not_believed(fresh_pool: RankPool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        for mode in (0o644, 0o600):
            path = Path(folder, f"meeting-{mode:o}")
            path.write_text(json.dumps(boards.about_me("unisono-somebody")))
            path.chmod(mode)
        for error in fresh_pool.run(read_as_nobody, 2, folder, connected=False):
            assert isinstance(error, RendezvousError), error


def read_as_nobody(rank: int, size: int, _: str, folder: str) -> BaseException | None:
    os.setuid(65534)
    path = os.path.join(folder, ("meeting-644", "meeting-600")[rank])
    return attempt(join, FileBoard(path), 1, 2, 1.0)


def test_a_path_that_cannot_be_written_is_named(pool: RankPool) -> None:
    ((error, name),) = pool.run(meet_nowhere, 1, connected=False)
    assert isinstance(error, RendezvousError)
    assert name in str(error)


def meet_nowhere(rank: int, size: int, path: str) -> tuple[BaseException | None, str]:
    missing = f"{path}-missing/meeting"
    return attempt(join, FileBoard(missing), 0, 2, 1.0), missing


def test_an_interrupt_ends_the_search_for_rank_0(fresh_pool: RankPool) -> None:
    ((error, took_s),) = fresh_pool.run(interrupted_while_searching, 1, connected=False)
    assert isinstance(error, KeyboardInterrupt)
    assert took_s < 5.0


def interrupted_while_searching(
    rank: int, size: int, path: str
) -> tuple[BaseException | None, float]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    return attempt(join, FileBoard(path), 1, 2), time.monotonic() - start - 0.2
