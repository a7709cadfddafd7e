"""A peer that dies: every survivor says so at once, and groups without it stay usable."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ranks import RankPool, attempt, raised, subgroup
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.errors import PeerLost

WITHIN_S = 0.1  # what is guaranteed, measured from the moment of death
SLACK_S = 2.0  # for a busy machine; a watched rank first asks all others


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("large", [False, True], ids=["before a small call", "within a large one"])
def test_every_survivor_raises_at_once(fresh_pool: RankPool, size: int, large: bool) -> None:
    outcomes = fresh_pool.outcomes(die_in_the_middle, size, large, connected=False)
    survivors = [outcome.value for outcome in outcomes[:-1]]
    died_at = float((Path(outcomes[0].value[3])).read_text())
    for rank, (text, peer, raised_at, _) in enumerate(survivors):
        assert peer == size - 1, text
        assert f"rank {size - 1} (pid " in text
        assert "of group world" in text
        assert raised_at - died_at < WITHIN_S + SLACK_S, f"rank {rank} took {raised_at - died_at}"


def die_in_the_middle(rank: int, size: int, path: str, large: bool) -> tuple[str, int, float, str]:
    comm = connect_on_host(FileBoard(path), rank, size)
    tensor = torch.ones(8_000_000 if large else 4)
    for _ in range(3):
        comm.all_reduce(tensor)
    if rank == size - 1:
        Path(f"{path}-died").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(comm.all_reduce, tensor)
    raised_at = time.monotonic()
    assert isinstance(error, PeerLost), error
    raised(PeerLost, comm.barrier)
    comm.close()
    return str(error), error.peer, raised_at, f"{path}-died"


def test_groups_without_the_dead_go_on(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(go_on_without, 4, connected=False)
    assert [outcome.value for outcome in outcomes[:3]] == [3.0, 3.0, 3.0]


def go_on_without(rank: int, size: int, path: str) -> float:
    comm = connect_on_host(FileBoard(path), rank, size)
    living = comm.split([0, 1, 2])
    with_the_dead = comm.split([0, 3])
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    assert living is not None
    assert isinstance(attempt(comm.barrier), PeerLost)
    if with_the_dead is not None:
        assert isinstance(attempt(with_the_dead.barrier), PeerLost)
    tensor = torch.ones(1)
    living.all_reduce(tensor)
    return float(tensor)


def test_a_forked_child_that_lives_on_hides_nothing(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(leave_a_child, 2, connected=False)
    assert isinstance(outcomes[0].value, float)
    assert outcomes[0].value < 2.0


def leave_a_child(rank: int, size: int, path: str) -> float:
    comm = connect_on_host(FileBoard(path), rank, size)
    if rank == 1:
        comm.barrier()
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    start = time.monotonic()
    assert isinstance(attempt(comm.barrier), PeerLost)
    return time.monotonic() - start


LEAVES_EARLY = """
import sys
from unisono.comm.factory import connect_on_host
from unisono.comm.communicator import Communicator
from unisono.comm.meeting.board import FileBoard
from unisono.errors import PeerLost
rank = int(sys.argv[2])
comm = connect_on_host(FileBoard(sys.argv[1]), rank, 2)
comm.barrier()
if rank == 1:
    raise RuntimeError("this rank fails")
try:
    comm.barrier()
except PeerLost as error:
    print(error.peer, error)
"""


def test_how_a_rank_ended_that_its_parent_has_yet_to_collect(tmp_path: Path) -> None:
    """A launcher on a busy machine is slow to do so."""
    killed = LEAVES_EARLY.replace(
        'raise RuntimeError("this rank fails")', "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", f"import os{killed}", str(tmp_path / "meeting")]
    other = subprocess.Popen([*command, "1"])
    found = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True, timeout=180)
    assert re.match(r"1 rank 1 \(pid \d+\) was killed by SIGKILL;", found.stdout), found.stdout
    assert other.wait(180) == -signal.SIGKILL


def test_a_rank_that_raises_is_lost_too(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES_EARLY, str(tmp_path / "meeting"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=180) for process in ranks]
    assert said[0][0].startswith("1 rank 1"), said
    assert "this rank fails" in said[1][1]


def test_a_death_in_another_pid_namespace_is_seen(tmp_path: Path) -> None:
    """As in a container: the rank's pid there means nothing here."""
    elsewhere = ["unshare", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*elsewhere, "true"]).returncode:
        pytest.skip("this user cannot make a PID namespace")
    program = LEAVES_EARLY.replace('raise RuntimeError("this rank fails")', "os._exit(3)")
    command = [sys.executable, "-c", f"import os\n{program}", str(tmp_path / "meeting")]
    there = subprocess.Popen([*elsewhere, *command, "1"])
    here = subprocess.run([*command, "0"], stdout=subprocess.PIPE, text=True, timeout=180)
    assert here.stdout.startswith("1 rank 1 (pid 1) "), here.stdout
    assert there.wait(30) == 3


def test_a_rank_that_left_in_order_is_no_death(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(leave_in_order, 3, connected=False)
    assert [outcome.value for outcome in outcomes] == ["closed", "closed", None]
    assert outcomes[2].exit_code == 0


def leave_in_order(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size)
    comm.barrier()
    if rank == 2:
        comm.close()
        os._exit(0)
    pid = comm.transport.membership.members[2].pid
    ended = select.poll()
    ended.register(os.pidfd_open(pid), select.POLLIN)
    assert ended.poll(30_000)
    for _ in range(100):  # the others continue, for longer than it takes to detect a death
        if rank == 0:
            comm.send(torch.ones(1), 1)
        else:
            comm.recv(torch.ones(1), 0)
        time.sleep(0.002)
    comm.close()
    return "closed"


# -- groups with a dead member ---------------------------------------------------------------------


def test_a_split_names_the_member_that_has_died(fresh_pool: RankPool) -> None:
    """Also if the leader lives on and does not split; and the error does not name the rank that
    died first, if that one is no member."""
    *survivors, second, first = fresh_pool.outcomes(split_with_the_dead, 5, connected=False)
    assert (second.exit_code, first.exit_code) == (-9, -9)
    for survivor in survivors:
        assert survivor.value == "went on", survivor.error


def split_with_the_dead(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size, timeout_s=40)
    turned = subgroup(comm, [4, 3, 2, 1, 0])
    comm.barrier()
    if rank == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    assert raised(PeerLost, comm.barrier).peer == 4
    if rank == 1:  # a follower, while no rank leads
        assert raised(PeerLost, comm.split, range(size)).peer == 4
        lost = raised(PeerLost, turned.split, [4, 3, 0])  # global 0, 1 and 4: led by 0
        assert (lost.peer, lost.rank) == (0, 3)
        assert "rank 0 (global 4)" in str(lost)
        assert "split([4, 3, 0])" in str(lost)
    if rank == 0:
        time.sleep(0.5)  # longer than a leader's check interval: the others wait for it
    living = subgroup(comm, range(4))
    if rank == 2:
        time.sleep(0.5)
    assert_sum(subgroup(comm, range(4)))

    if rank == 3:  # it dies while 1 and 2 wait for 0, which does not lead
        await_files(f"{path}-waits-1", f"{path}-waits-2")
        os.kill(os.getpid(), signal.SIGKILL)
    if rank:
        Path(f"{path}-waits-{rank}").touch()
        assert raised(PeerLost, comm.split, [0, 1, 2, 3], "again").peer == 3
    assert raised(PeerLost, living.barrier).peer == 3
    assert raised(PeerLost, comm.split, range(4), "led").peer == 3
    assert_sum(subgroup(comm, range(3)))
    return "went on"


def await_files(*files: str) -> None:
    while not all(Path(file).exists() for file in files):
        time.sleep(0.01)


def assert_sum(group: Communicator) -> None:
    group.all_reduce(tensor := torch.ones(1))
    assert float(tensor) == group.size
