"""The schedules of ranks on several hosts: what comm/hosts runs, for any placement of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unisono.comm.hosts.placement import Placement
from unisono.plan import PRESETS, Schedule, find, simulate, verify
from unisono.plan.algorithms import lanes, mates

PLACEMENTS = {
    "1+3": [[0], [1, 2, 3]],
    "3+1": [[0, 1, 2], [3]],
    "2+1+1": [[0, 1], [2], [3]],
    "1+2+3, mixed": [[0], [1, 5], [2, 3, 4]],
    "cyclic": [[0, 2, 4], [1, 3, 5]],
    "cyclic and uneven": [[0, 2, 4, 5], [1, 3]],
    "one host": [[0, 1, 2]],
}


def every_schedule(hosts: list[list[int]]) -> Iterator[Schedule]:
    ranks = sum(map(len, hosts))
    for pieces in (1, 2, 6):
        yield lanes.all_reduce(ranks, hosts, pieces)
        yield lanes.all_gather(ranks, hosts, pieces)
        yield lanes.reduce_scatter(ranks, hosts, pieces)
        yield lanes.all_to_all(ranks, hosts, pieces)
        for root in range(ranks):
            yield lanes.broadcast(ranks, root, hosts, pieces)
            yield lanes.reduce(ranks, root, hosts, pieces)
    for root in range(ranks):
        yield mates.broadcast(ranks, root, hosts)
    for name in ("all_reduce", "reduce_scatter", "barrier", "all_gather", "all_to_all"):
        yield getattr(mates, name)(ranks, hosts)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_any_placement_verifies(placement: str) -> None:
    for schedule in every_schedule(PLACEMENTS[placement]):
        verify(schedule)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_who_talks_between_hosts_is_who_does_in_the_engine(placement: str) -> None:
    """Lanes and mates, by the rules of comm/hosts, for each rank of each placement."""
    hosts = PLACEMENTS[placement]
    ranks = sum(map(len, hosts))
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    by_lane, by_mate = set(), set()
    by_pair = {(a, b) for a in host_of for b in host_of if host_of[a] != host_of[b]}
    for number, host in enumerate(hosts):
        for index, rank in enumerate(host):
            place = Placement(tuple(range(ranks)), tuple(map(tuple, hosts)), number, index)
            for other in place.others():
                by_mate.add((rank, place.mate(rank, other)))
                if index < min(map(len, hosts)):
                    by_lane.add((rank, hosts[other][index]))

    def crossing(schedule: Schedule) -> set[tuple[int, int]]:
        moves = [transfer for step in schedule.steps for transfer in step]
        pairs = [(move.source, move.destination) for move in moves]
        return {pair for pair in pairs if host_of[pair[0]] != host_of[pair[1]]}

    assert crossing(lanes.all_reduce(ranks, hosts, 2)) == by_lane
    assert crossing(lanes.all_gather(ranks, hosts, 2)) == by_lane
    assert crossing(lanes.reduce_scatter(ranks, hosts, 2)) == by_lane
    assert crossing(lanes.all_to_all(ranks, hosts, 2)) == by_pair
    assert crossing(mates.all_reduce(ranks, hosts)) == by_mate
    assert crossing(mates.all_gather(ranks, hosts)) == by_mate


Shares = Callable[[int, int], float]
# What leaves each of h hosts of g ranks, in tensors; the steps with p pieces.
COSTS: dict[tuple[str, str], tuple[Callable[[int, int], int], Shares]] = {
    ("all_reduce", "lanes"): (lambda h, p: p + 3, lambda h, g: 2 * (h - 1) / h),
    ("reduce", "lanes"): (lambda h, p: p + 2, lambda h, g: 1),
    ("broadcast", "lanes"): (lambda h, p: p + h, lambda h, g: 1),
    ("all_gather", "lanes"): (lambda h, p: p + 1, lambda h, g: (h - 1) / h),
    ("reduce_scatter", "lanes"): (lambda h, p: p + 1, lambda h, g: (h - 1) / h),
    ("all_to_all", "lanes"): (lambda h, p: p + 1, lambda h, g: g * (h - 1) / h),
    ("all_reduce", "mates"): (lambda h, p: 2, lambda h, g: g * (h - 1)),
    ("all_gather", "mates"): (lambda h, p: 2, lambda h, g: (h - 1) / h),
}


@pytest.mark.parametrize(("collective", "name"), COSTS)
def test_steps_and_bytes_between_hosts(collective: str, name: str) -> None:
    steps, leaves = COSTS[collective, name]
    for count in (2, 3, 5):
        for size in (2, 4):
            schedule = find(collective, name).schedule(count * size, node_size=size, pieces=7)
            assert schedule.rounds == steps(count, 7)
            sent = [0.0] * count
            for step in schedule.steps:
                for move in step:
                    if move.source // size != move.destination // size:
                        sent[move.source // size] += move.count * schedule.chunk_bytes(1.0)
            assert max(sent) == pytest.approx(leaves(count, size))


def test_64_hosts_of_8_are_simulated_in_seconds() -> None:
    topology = PRESETS["ethernet"]
    began = time.process_time()
    for collective, least in (
        ("all_reduce", 2 * 63 / 64),
        ("broadcast", 1),
        ("all_gather", 63 / 64),
        ("reduce_scatter", 63 / 64),
    ):
        schedule = find(collective, "lanes").schedule(512, node_size=8, pieces=8)
        timeline = simulate(schedule, topology, 64 << 20)
        assert timeline.most_bytes("card") == pytest.approx(least * (64 << 20))
        assert timeline.time_s > least * (64 << 20) / topology.card_bytes_per_s
    assert time.process_time() - began < 10


def test_invalid_options_are_rejected() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"node_size": 0}, "at least one rank, not 0"),
        ({"pieces": 0}, "pieces must be at least 1, not 0"),
        ({"root": 4}, "root 4 is not among 4 ranks"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            find("broadcast", "lanes").schedule(4, **options)
