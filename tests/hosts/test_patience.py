"""How long a link between hosts may be down: UNISONO_LINK_PATIENCE_S."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import Places, places, world
from namespaces import COMMAND_S, Host, MakeNetwork
from test_control_line import Talker

from ranks import RankPool

LONG_S = 20.0


def lie_down(
    rank: int,
    size: int,
    path: str,
    hosts: Sequence[Host],
    patience_s: int | None,
    outage_s: float,
    speaks_s: float | None,
) -> Any:
    """Cut the line between two ranks; returns which rank learned what, and how long after the cut
    began, and was done, which takes a moment. A message is sent this long after it, if at all."""
    hosts[rank].enter()
    if patience_s is not None:
        os.environ["UNISONO_LINK_PATIENCE_S"] = str(patience_s)
    talker = Talker(rank, size, path, [host.ipv4 for host in hosts])
    lines = talker.connect()
    talker.send_all(lines, {"ready": True})
    talker.receive()
    if rank == 0:
        time.sleep(0.7)  # some time after the kernels' last probe
        begun = time.monotonic()
        mending = hosts[1].cut_for(outage_s) if outage_s else None
        if mending is None:
            hosts[1].cut()
        talker.store.set("cut", f"{begun} {time.monotonic()}")
    begun, cut = map(float, talker.store.get("cut").split())
    if speaks_s is not None:
        time.sleep(max(0.0, cut + speaks_s - time.monotonic()))
        talker.send_all(lines, {"said": "meanwhile"})
    if rank == 0 and mending is not None:
        assert mending.wait(COMMAND_S) == 0
    try:
        peer, why, lost = talker.losses.get(timeout=LONG_S if not outage_s else outage_s + 4.0)
        return peer, why, lost - begun, lost - cut
    except queue.Empty:
        if speaks_s is not None:
            assert talker.receive() == (1 - rank, {"said": "meanwhile"})
        talker.send_all(lines, {"said": "afterwards"})
        assert talker.receive() == (1 - rank, {"said": "afterwards"})
        return None
    finally:
        lines.close()


@pytest.mark.parametrize("speaks_s", [None, 0.0, 1.5])
def test_a_link_that_is_down_for_3_s_ends_nothing(
    fresh_pool: RankPool, make_network: MakeNetwork, speaks_s: float | None
) -> None:
    with make_network(2) as made:
        heard = fresh_pool.run(lie_down, 2, made.hosts, None, 3.0, speaks_s, connected=False)
    assert heard == [None, None]


@pytest.mark.parametrize(
    ("patience_s", "speaks_s"),
    [
        (1, None),
        (1, 0.7),
        (None, None),
        (None, 0.0),
        (None, 3.2),  # late in the outage
        pytest.param(8, 0.0, marks=pytest.mark.slow),
        pytest.param(8, 7.0, marks=pytest.mark.slow),
    ],
)
def test_one_that_stays_down_is_lost_when_patience_ends(
    fresh_pool: RankPool, make_network: MakeNetwork, patience_s: int | None, speaks_s: float | None
) -> None:
    with make_network(2) as made:
        heard = fresh_pool.run(lie_down, 2, made.hosts, patience_s, 0.0, speaks_s, connected=False)
    patience = patience_s or 4
    for rank, (peer, why, at_most_s, at_least_s) in enumerate(heard):
        assert peer == 1 - rank
        assert why.startswith("no longer answers (")
        # A second later by design; the rest is for a busy machine, and 1 s stays below the usual 4.
        assert patience - 0.5 < at_most_s
        assert at_least_s < patience + 2.5


@pytest.mark.slow
def test_more_patience_outlasts_more(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        heard = fresh_pool.run(lie_down, 2, made.hosts, 10, 9.0, 0.0, connected=False)
    assert heard == [None, None]


def sum_through_an_outage(rank: int, size: int, path: str, where: Places) -> None:
    with world(rank, where):
        dist.barrier()
        mending = where.host(rank).cut_for(3.0) if rank == size - 1 else None
        for count in (1, 300_000):  # these wait for the link
            dist.all_reduce(summed := torch.full((count,), 2.0**rank))
            assert summed.unique().tolist() == [2.0**size - 1]
        if mending is not None:
            assert mending.wait(COMMAND_S) == 0
        dist.barrier()


def test_a_job_goes_on_after_3_s(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2) as made:
        fresh_pool.run(sum_through_an_outage, 4, places(made, (0, 0, 1, 1)), connected=False)
