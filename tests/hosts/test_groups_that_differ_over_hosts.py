"""Ranks of several hosts that make different groups: each is told at once, on every host."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from host_jobs import Places, places, world
from namespaces import MakeNetwork

from ranks import RankPool, attempt
from unisono import Communicator


def new_group(*ranks: int, local: bool) -> object:
    return dist.new_group(list(ranks), use_local_synchronization=local)


CASES: dict[str, tuple[Callable[[Communicator], object], list[str]]] = {
    "order": (
        lambda comm: comm.split([0, 1, 2, 3] if comm.rank < 2 else [3, 2, 1, 0]),
        ["ranks 0 and 1 in split([0, 1, 2, 3])", "ranks 2 and 3 in split([3, 2, 1, 0])"],
    ),
    "hosts": (  # two hosts against one of them
        lambda comm: comm.split([0, 1, 2, 3] if comm.rank else [0, 1]),
        ["split([0, 1])", "split([0, 1, 2, 3])"],
    ),
    "label": (
        lambda comm: comm.split(range(4), label="red" if comm.rank % 2 else "blue"),
        ["ranks 0 and 2 in split([0, 1, 2, 3], label='blue')", "label='red'"],
    ),
    "new_group": (
        lambda comm: new_group(*([0, 1, 3] if comm.rank == 3 else range(4)), local=False),
        ["new_group([0, 1, 3])", "new_group([0, 1, 2, 3])"],
    ),
    "local new_group": (
        lambda comm: new_group(*[(0, 2), (0, 1), (1, 2, 3), (1, 3)][comm.rank], local=True),
        ["new_group([0, 2])", "new_group([0, 1])", "new_group([1, 2, 3])"],
    ),
}


def fail_to_make(rank: int, size: int, path: str, where: Places, case: str) -> Any:
    with world(rank, where) as comm:
        comm.barrier()
        error = attempt(CASES[case][0], comm)
        comm.barrier()  # the group they come from goes on
        return type(error).__name__, str(error)


@pytest.mark.parametrize("case", CASES)
def test_each_rank_names_both_groups(
    fresh_pool: RankPool, make_network: MakeNetwork, case: str
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        for error, text in fresh_pool.run(fail_to_make, 4, where, case, connected=False):
            assert error == "GroupsDiffer", (error, text)
            assert all(part in text for part in CASES[case][1]), text


def shrink_or_split(rank: int, size: int, path: str, where: Places, splits_first: bool) -> str:
    with world(rank, where) as comm:
        comm.barrier()
        if (rank == 3) == splits_first:
            time.sleep(0.5)
        error = attempt(comm.shrink if rank == 3 else lambda: comm.split(range(4)))
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"tried/{rank}", "")  # a rank that leaves is left out of the smaller group
        store.wait([f"tried/{other}" for other in range(4)])
        return type(error).__name__


@pytest.mark.parametrize("splits_first", [False, True])
def test_shrink_against_split(
    fresh_pool: RankPool, make_network: MakeNetwork, splits_first: bool
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1, 1))
        found = fresh_pool.run(shrink_or_split, 4, where, splits_first, connected=False)
    assert found == ["GroupsDiffer"] * 4


def split_after_one_left(rank: int, size: int, path: str, where: Places) -> str:
    with world(rank, where) as comm:
        comm.barrier()
        if rank == 2:
            return ""
        time.sleep(1.0)
        return str(attempt(comm.split, range(3)))


def test_a_rank_of_another_host_that_has_left(
    fresh_pool: RankPool, make_network: MakeNetwork
) -> None:
    with make_network(2) as made:
        where = places(made, (0, 0, 1))
        first, second, _ = fresh_pool.run(split_after_one_left, 3, where, connected=False)
    for said in (first, second):
        assert re.search("rank 2.* closed", said), said
