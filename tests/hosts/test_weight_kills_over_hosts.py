"""A trainer or an engine on one of two hosts is killed in each phase of a weight update."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from host_jobs import PORT, Places, places
from namespaces import MakeNetwork, start_on

from ranks import RankPool
from weight_kills import PHASES, Kill, be_killed_or_survive, run_kills, table

# The decision is kept in the store, whose process lives.
STORE = """
import signal, sys
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), None, True, wait_for_workers=False)
signal.pause()
"""


def be_killed_on_a_host(
    rank: int, size: int, path: str, kill: Kill, name: str, where: Places
) -> Any:
    where.host(rank).enter()
    store = dist.TCPStore(where.host(0).ipv4, PORT, None, False)
    return be_killed_or_survive(rank, size, path, kill, name, store)


@pytest.mark.parametrize("of_rank", [(0, 0, 1, 1), (0, 1, 0, 1)], ids=["apart", "mixed"])
@pytest.mark.parametrize("count", [len(PHASES), pytest.param(50, marks=pytest.mark.slow)])
def test_kills_over_hosts(
    fresh_pool: RankPool,
    make_network: MakeNetwork,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    of_rank: tuple[int, ...],
    count: int,
) -> None:
    chance = random.Random(count)
    with make_network(2) as made:
        where = places(made, of_rank)
        command = [sys.executable, "-c", STORE, where.host(0).ipv4, str(PORT)]
        start_on(made.hosts[0], command, tmp_path / "store", dict(os.environ))
        kills = [Kill.random(number, chance) for number in range(count)]
        took = run_kills(fresh_pool, kills, be_killed_on_a_host, where)
    with capsys.disabled():
        print("", *table(took), sep="\n")
