"""Processes that were started separately meet under a name, and meet again after one has
restarted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import in_a_fork
from resources import is_announced, meeting_files, waits_at_a_meeting
from unisono import Communicator, RendezvousError, UnisonoError
from unisono.comm.meeting import deadline, meeting_points
from unisono.comm.meeting.announcements import about_me, announce
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.membership import JoinRequest, meet_at, meet_by
from unisono.comm.meeting.unix_socket import Connection, RendezvousServer
from unisono.processes import start_time
from user_programs import DEADLINE_S, Program, eventually, read_line, write_program

PROGRAM = """
    import signal, sys
    import numpy
    from unisono import Communicator, PeerLost

    def meet(name, rank, size, turns="1", within_s="30"):
        rank, size = int(rank), int(size)
        for turn in range(int(turns)):
            with Communicator.join(name, rank, size, join_timeout_s=float(within_s)) as comm:
                ones = numpy.full(1000, rank + 1.0)
                comm.all_reduce(ones)
                assert (ones == size * (size + 1) / 2).all()
                assert comm.global_ranks is None and comm.name == name
                pair = comm.split([0, 1])
                assert pair is None or (pair.global_ranks is None and pair.size == 2)
                print("met", turn, flush=True)
                comm.barrier()

    def stay(name, rank, size):
        # meet, wait for ever, and meet again whenever a peer is lost
        while True:
            with Communicator.join(name, int(rank), int(size), join_timeout_s=30) as comm:
                print("met", flush=True)
                try:
                    comm.barrier()
                    print("together", flush=True)
                    return
                except PeerLost as lost:
                    print("lost", lost.peer, flush=True)

    def hold(name, rank, size):
        with Communicator.join(name, int(rank), int(size), join_timeout_s=30):
            signal.pause()

    {"meet": meet, "stay": stay, "hold": hold}[sys.argv[1]](*sys.argv[2:])
    assert "torch" not in sys.modules
"""


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4()}"


@pytest.fixture
def joiner(tmp_path: Path) -> Program:
    return write_program(tmp_path, PROGRAM)


@pytest.fixture(autouse=True)
def _nothing_stays(name: str) -> Iterator[None]:
    yield
    assert not meeting_files(name)


def ends_well(*processes: subprocess.Popen[str]) -> list[str]:
    """What they wrote, once all have exited; fails if one did not exit cleanly."""
    outputs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 0, err
            outputs.append(out)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return outputs


def test_separately_started_processes_meet_by_a_name(joiner: Program, name: str) -> None:
    ends_well(*(joiner.start("meet", name, str(rank), "3") for rank in (2, 0, 1)))


def test_the_same_name_serves_again_and_again(joiner: Program, name: str) -> None:
    outputs = ends_well(*(joiner.start("meet", name, str(rank), "2", "5") for rank in range(2)))
    assert outputs == ["".join(f"met {turn}\n" for turn in range(5))] * 2


def test_two_names_at_once_do_not_mix(joiner: Program, name: str) -> None:
    ends_well(
        *(joiner.start("meet", name + end, str(rank), "2") for rank in (0, 1) for end in ("", "b"))
    )


@pytest.mark.parametrize("dies", [0, 1])
def test_a_process_that_restarts_meets_the_others_again(
    joiner: Program, name: str, dies: int
) -> None:
    with joiner.start("stay", name, str(1 - dies), "2") as stays:
        with joiner.start("hold", name, str(dies), "2") as other:
            assert read_line(stays) == "met"
            other.send_signal(signal.SIGKILL)
        assert read_line(stays) == f"lost {dies}"
        with joiner.start("stay", name, str(dies), "2") as last:
            assert ends_well(stays, last) == ["met\ntogether\n"] * 2


@pytest.mark.parametrize("dies", [0, 1])
def test_whoever_dies_while_it_waits_may_come_back(joiner: Program, name: str, dies: int) -> None:
    """One of three is missing; another is killed while it waits, and comes back."""
    stays = joiner.start("meet", name, str(1 - dies), "3")
    with joiner.start("meet", name, str(dies), "3") as waits:
        assert eventually(lambda: waits_at_a_meeting(waits.pid) and waits_at_a_meeting(stays.pid))
        assert eventually(lambda: is_announced(name))
        waits.send_signal(signal.SIGKILL)
    ends_well(
        stays, joiner.start("meet", name, str(dies), "3"), joiner.start("meet", name, "2", "3")
    )


def test_different_sizes_are_refused_on_both_sides(joiner: Program, name: str) -> None:
    three = joiner.start("meet", name, "1", "3")
    with pytest.raises(RendezvousError, match="thinks the group has 3 ranks, not 2"):
        Communicator.join(name, 0, 2, join_timeout_s=30)
    _, err = three.communicate(timeout=DEADLINE_S)
    assert three.returncode == 1
    assert "thinks the group has 3 ranks, not 2" in err


def test_a_second_process_of_one_rank_is_told_so(joiner: Program, name: str) -> None:
    with joiner.start("meet", name, "1", "2") as first:
        assert eventually(lambda: waits_at_a_meeting(first.pid))
        with pytest.raises(RendezvousError, match=f"another process .*'{name}' as rank 1"):
            Communicator.join(name, 1, 2)
        ends_well(first, joiner.start("meet", name, "0", "2"))


def test_who_does_not_come_is_named(name: str) -> None:
    with pytest.raises(RendezvousError, match=r"ranks 1 and 2 of 3 did not join within 0.2 s"):
        Communicator.join(name, 0, 3, join_timeout_s=0.2)
    with pytest.raises(RendezvousError, match=r"rank 0 did not join within 0.2 s"):
        Communicator.join(name, 2, 3, join_timeout_s=0.2)


def test_a_stale_word_does_no_harm_even_if_its_number_lives_again(
    joiner: Program, name: str
) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    word = {"address": "gone", "pid": os.getpid(), "started": "1", "boot": boot}
    assert start_time(os.getpid()) != "1"
    announce(FileBoard(path_of(name)), word)
    follower = joiner.start("meet", name, "1", "2")
    assert eventually(lambda: waits_at_a_meeting(follower.pid))
    ends_well(follower, joiner.start("meet", name, "0", "2"))


@pytest.mark.ranks(2)
def test_ranks_meet_in_a_torch_store_by_name(shared_tmp_path: Path) -> None:
    rank = int(os.environ["UNISONO_RANK"])
    store = dist.FileStore(str(shared_tmp_path / "store"), 2)
    for name in ("a", "b", "a"):
        with Communicator.join(name, rank, 2, store) as comm:
            assert (comm.rank, comm.size) == (rank, 2)
            comm.broadcast(tensor := torch.full((3,), rank))
            assert tensor.tolist() == [0, 0, 0]
            comm.barrier()


def test_what_makes_no_sense_is_refused_at_once() -> None:
    for bad in ((1, 1), (-1, 2), (0, 0), (2, 2)):
        with pytest.raises(ValueError, match=re.escape(f"{bad[0]} is not a rank of a group")):
            Communicator.join("x", *bad)
    for name in ("", "a\0b", "\ud800", 7):
        with pytest.raises(ValueError, match=re.escape(f"{name!r} cannot be the name")):
            Communicator.join(name, 0, 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="rank must be a whole number, not '0'"):
        Communicator.join("x", "0", 2)  # type: ignore[arg-type]


def test_any_other_text_is_a_name(joiner: Program, name: str) -> None:
    odd = f"/{name}/../*" + "\U0001f41d" * 3000
    ends_well(*(joiner.start("meet", odd, str(rank), "2") for rank in range(2)))


# -- strangers -------------------------------------------------------------------------------------


def path_of(name: str) -> Path:
    """Where processes without their own folder meet."""
    return Path("/tmp", meeting_points.file_of(name))


@pytest.fixture
def no_own_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_points, "is_private", lambda folder: False)


@pytest.mark.usefixtures("no_own_folder")
@pytest.mark.parametrize("kind", ["FIFO", "directory", "socket"])
def test_what_stands_in_the_way_is_named_at_once(name: str, kind: str) -> None:
    path = path_of(name)
    {"FIFO": os.mkfifo, "directory": os.mkdir, "socket": bind}[kind](path)
    begin_s = time.monotonic()
    try:
        with pytest.raises(RendezvousError, match=f"must be a file of user {os.geteuid()}"):
            Communicator.join(name, 1, 2, join_timeout_s=5)
        if kind == "directory":  # nothing else can delay rank 0
            with pytest.raises(RendezvousError, match="Is a directory"):
                Communicator.join(name, 0, 2, join_timeout_s=5)
        assert time.monotonic() - begin_s < 4
    finally:
        path.rmdir() if kind == "directory" else path.unlink(missing_ok=True)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(str(path))


@pytest.mark.usefixtures("no_own_folder")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_strangers_fifo_is_refused(name: str) -> None:
    """By a rank of a user who is not root, in a folder where users cannot remove others' files."""
    path = Path(str(path_of(name)).replace("unisono-0-", "unisono-65534-"))
    os.mkfifo(path, 0o666)
    os.chmod(path, 0o666)
    try:
        assert "must be a file of user 65534" in in_a_fork(lambda: join_as_nobody(name, 0))
        assert "must be a file of user 65534" in in_a_fork(lambda: join_as_nobody(name, 1))
    finally:
        path.unlink()


def join_as_nobody(name: str, rank: int) -> str:
    os.setuid(65534)
    try:
        Communicator.join(name, rank, 2, join_timeout_s=5)
    except RendezvousError as error:
        return str(error)
    return "joined"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_squatted_name_is_told(name: str) -> None:
    address = f"\0{path_of(name).name}-1".encode()

    def squat() -> str:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.bind(address)
            os.write(ready, b".")
            return str(os.read(over, 1))

    begun, ready = os.pipe()
    over, end = os.pipe()
    thread = threading.Thread(target=in_a_fork, args=(squat,))
    thread.start()
    try:
        os.read(begun, 1)
        with pytest.raises(RendezvousError, match="a process holds the name @"):
            Communicator.join(name, 1, 2, join_timeout_s=5)
    finally:
        os.write(end, b".")
        thread.join()
        for descriptor in (begun, ready, over, end):
            os.close(descriptor)


def test_a_full_queue_at_the_door_is_waited_for(
    joiner: Program, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many strangers connect that no rank gets in until they are gone."""
    store = dist.HashStore()
    board = Board(store).part(f"unisono/join/{name}")
    calls = []
    with contextlib.closing(RendezvousServer()) as full:
        me = about_me(full.address)
        announce(board, me)
        with contextlib.suppress(BlockingIOError):
            while True:
                calls.append(Connection.connect(full.address))
        with pytest.raises(RendezvousError, match="queue of connections"):
            Communicator.join(name, 1, 2, store, join_timeout_s=0.3)
        request = JoinRequest("x", 1, 2, Deadline(0.3), 20.0)
        with (
            contextlib.closing(RendezvousServer()) as other,
            pytest.raises(RendezvousError, match="queue is full"),
        ):
            meet_at(full.address, other, request)
        follower = threading.Thread(target=Communicator.join, args=(name, 1, 2, store))
        follower.start()
        for call in calls:
            call.close()
        leader = JoinRequest(name, 0, 2, Deadline(20), 20.0)
        membership = meet_by(board, full, leader)
        follower.join()
        membership.group.close()


def test_a_rank_waits_in_silence_for_five_seconds() -> None:
    assert deadline.QUIET_S == 5.0
    assert Communicator.join.__doc__ is not None
    words = " ".join(Communicator.join.__doc__.split())
    assert f"after {deadline.QUIET_S:g} s" in words


# -- what the dead leave ---------------------------------------------------------------------------


@pytest.mark.alone
def test_what_a_killed_rank_0_leaves_is_taken_away(joiner: Program, name: str) -> None:
    """By a rank that waits for it, or by the next rank 0 under any name."""
    for other in ("", "-other"):
        with joiner.start("meet", name, "0", "2") as leader:
            assert eventually(lambda: is_announced(name))
            leader.send_signal(signal.SIGKILL)
        assert meeting_files(name)
        rank = 0 if other else 1
        with pytest.raises(RendezvousError, match=r"did not join within 0\.3 s"):
            Communicator.join(name + other, rank, 2, join_timeout_s=0.3)
        assert not meeting_files(name)


def test_a_word_that_is_taken_away_by_mistake_comes_back(joiner: Program, name: str) -> None:
    with joiner.start("meet", name, "0", "2") as leader:
        assert eventually(lambda: is_announced(name))
        meeting_files(name)[0].unlink()
        assert eventually(lambda: is_announced(name))
        ends_well(leader, joiner.start("meet", name, "1", "2"))


def test_alone_is_a_group_too() -> None:
    with Communicator.join("alone", 0, 1) as comm:
        assert (comm.rank, comm.size, comm.global_ranks) == (0, 1, None)
    with pytest.raises(UnisonoError):
        comm.barrier()
    assert not unisono.is_distributed()
