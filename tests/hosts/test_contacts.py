"""How ranks of several hosts agree on UCX before they create a group."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from ranks import RankPool, raised
from unisono import RendezvousError
from unisono.comm.factory import connect
from unisono.comm.hosts.contacts import Contact, compare_versions
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.identity import Hosts

HOSTS = Hosts(((0, 2), (1,)), ("node7", "node8"), 0, (11, 12, 13))


def contacts(*versions: tuple[int, int, int]) -> list[Contact]:
    return [Contact("", 0, "", version=version, path=f"/{version[1]}") for version in versions]


def test_the_last_number_of_a_version_may_differ() -> None:
    compare_versions(contacts((1, 22, 0), (1, 22, 4), (1, 22, 0)), HOSTS)


def test_other_versions_are_refused_with_which_host_has_what() -> None:
    mixed = contacts((1, 22, 0), (1, 13, 1), (1, 22, 0))
    text = str(raised(RendezvousError, compare_versions, mixed, HOSTS))
    first, *hosts = text.splitlines()
    assert first.startswith("the hosts have different versions of UCX")
    assert "pip install 'unisono[hosts]'" in first
    assert hosts == ["  node7: 1.22.0 (/22)", "  node8: 1.13.1 (/13)"]


def test_all_ranks_hear_that_one_has_no_ucx(pool: RankPool) -> None:
    for text in pool.run(meet_without_ucx, 3, connected=False):
        assert text.startswith("rank 2 (pid ")
        assert " on B): UNISONO_UCX must be the path of a libucp.so" in text


def meet_without_ucx(rank: int, size: int, path: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_HOSTID", "AAB"[rank])
        if rank == 2:
            patch.setenv("UNISONO_UCX", "/nowhere")
        store = dist.FileStore(f"{path}-store", size)  # type: ignore[attr-defined]
        return str(raised(RendezvousError, connect, Board(store), rank, size))
