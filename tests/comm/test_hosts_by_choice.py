"""UNISONO_HOSTS: gloo between hosts, only on request. Hosts are simulated with UNISONO_HOSTID."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool, raised
from unisono import RendezvousError, UnisonoError
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.over_torch.torch_transport import OverTorch
from unisono.comm.shared_memory.memory_transport import SharedMemory
from user_programs import WriteProgram


@contextmanager
def asking(host: str, carrier: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_HOSTID", host)
        patch.setenv("UNISONO_HOSTS", carrier)
        yield


def meet(rank: int, path: str, hosts: str, carrier: str = "gloo") -> Communicator:
    """A world with a rank for each letter; equal letters are one host."""
    with asking(hosts[rank], carrier):
        store = dist.FileStore(f"{path}-store", len(hosts))  # type: ignore[attr-defined]
        return connect(Board(store, Deadline(20)), rank, len(hosts), timeout_s=30)


def use_gloo(rank: int, size: int, path: str) -> None:
    with meet(rank, path, "ABBA") as comm:
        assert isinstance(comm.transport, OverTorch)
        assert comm.backend == "gloo"
        assert (comm.name, comm.global_ranks) == ("world", (0, 1, 2, 3))
        comm.all_reduce(summed := torch.tensor([2.0**rank]))
        assert summed.item() == 15.0
        comm.broadcast(told := torch.full((3,), rank), root=2)
        assert told.tolist() == [2, 2, 2]
        if rank % 2:
            comm.send(torch.tensor([rank]), (rank + 1) % size)
        else:
            comm.recv(heard := torch.empty(1, dtype=torch.int64), (rank - 1) % size)
            assert heard.item() == (rank - 1) % size
        part = comm.split([3, 1] if rank % 2 else [0, 2])
        assert part is not None
        assert part.global_ranks == ((3, 1) if rank % 2 else (0, 2))
        part.all_reduce(summed := torch.tensor([2.0**rank]))
        assert summed.item() == (10.0 if rank % 2 else 5.0)
        part.close()


def test_gloo_serves_by_name(pool: RankPool) -> None:
    pool.run(use_gloo, 4, connected=False)


def stay_on_one_host(rank: int, size: int, path: str) -> None:
    with meet(rank, path, "AA") as comm:
        assert isinstance(comm.transport, SharedMemory)


def test_it_changes_nothing_on_one_host(pool: RankPool) -> None:
    pool.run(stay_on_one_host, 2, connected=False)


def ask_differently(rank: int, size: int, path: str) -> None:
    error = raised(RendezvousError, lambda: meet(rank, path, "AB", ("ucx", "gloo")[rank]))
    text = str(error)
    assert text.startswith("rank 0 (pid ")
    assert " on A) asks for ucx between hosts, but rank 1 (pid " in text
    assert text.endswith(" on B) for gloo: set UNISONO_HOSTS to the same on every rank")


def test_ranks_that_ask_for_different_ones_are_told_so(pool: RankPool) -> None:
    pool.run(ask_differently, 2, connected=False)


def ask_for_mpi(rank: int, size: int, path: str) -> None:
    error = raised(UnisonoError, lambda: meet(rank, path, "AB", "mpi"))
    assert str(error) == "UNISONO_HOSTS must be ucx or gloo, not 'mpi'"


def test_another_value_is_refused_with_those_there_are(pool: RankPool) -> None:
    pool.run(ask_for_mpi, 2, connected=False)


PROGRAM = """
import os, sys
os.environ |= {"RANK": sys.argv[1], "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
os.environ |= {"MASTER_PORT": sys.argv[2], "UNISONO_HOSTS": "gloo"}
os.environ["UNISONO_HOSTID"] = "ABB"[int(sys.argv[1])]
import torch
import torch.distributed as dist

dist.init_process_group("unisono")
rank = dist.get_rank()
inside = dist.new_group([1, 2])  # of one host
across = dist.new_group([0, 2])
x = torch.tensor([2.0 ** rank])
dist.all_reduce(x)
texts = [str(x.item())]
for group, members in ((inside, (1, 2)), (across, (0, 2))):
    if rank in members:
        x = torch.tensor([2.0 ** rank])
        dist.all_reduce(x, group=group)
        texts.append(f"{group.comm.backend} {x.item()}")
print(", ".join(texts))
dist.destroy_process_group()
"""


def test_torch_s_groups_follow(program: WriteProgram) -> None:
    script = program(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [script.start(str(rank), port) for rank in range(3)]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [out for out, _ in said] == [
        "7.0, gloo 5.0\n",
        "7.0, unisono 6.0\n",
        "7.0, unisono 6.0, gloo 5.0\n",
    ], said
