"""What course notes claim about rings and trees; docs/schedules.md says what holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from unisono.plan import PRESETS, Topology, find, simulate
from unisono.plan.algorithms.binary_trees import both_trees, depths

H100 = PRESETS["h100"]
FLAT = Topology.flat(5e-6, 25e9, overhead_s=0.5e-6, reduce_bytes_per_s=500e9)
TINY, LARGE = 8, 1 << 30


def time_s(name: str, ranks: int, size: int, topology: Topology = H100, **options: int) -> float:
    schedule = find("all_reduce", name).schedule(ranks, **options)
    return simulate(schedule, topology, size).time_s


# -- rings ---------------------------------------------------------------------------------------


def test_in_a_ring_everybody_sends_and_receives_all_the_time_and_as_much() -> None:
    for ranks in (2, 3, 8, 24):
        schedule = find("all_reduce", "ring").schedule(ranks)
        assert schedule.rounds == 2 * (ranks - 1)
        for step in schedule.steps:
            assert sorted(step.source) == sorted(step.destination) == list(range(ranks))
        assert len({*schedule.chunks_sent()}) == 1


def test_the_latency_of_a_ring_grows_with_the_ranks_and_a_trees_with_their_logarithm() -> None:
    for small, large in ((64, 128), (128, 256)):
        ring = time_s("ring", large, TINY, FLAT) / time_s("ring", small, TINY, FLAT)
        assert ring == pytest.approx((large - 1) / (small - 1), rel=1e-3)
        for name in ("binomial", "binary_tree", "double_tree"):
            steps = [find("all_reduce", name).schedule(n).rounds for n in (small, large)]
            assert steps[1] - steps[0] == 2
            assert steps[1] <= 2 * math.ceil(math.log2(large))


def test_one_slow_rank_slows_all_of_a_ring() -> None:
    ring = find("all_reduce", "ring").schedule(64)
    usual, slow = (
        simulate(ring, FLAT, 1 << 20, slow_ranks=ranks).finish_s for ranks in ({}, {5: 20.0})
    )
    assert slow.min() > 1.3 * usual.max()


def test_small_tensors_do_not_want_a_ring_and_large_ones_on_few_ranks_do() -> None:
    trees = ("binomial", "binary_tree", "double_tree")
    for name in trees:
        assert time_s("ring", 64, TINY) > 4 * time_s(name, 64, TINY)
        for pieces in (1, 8, 64) if name != "binomial" else (1,):
            assert time_s("ring", 8, LARGE) < time_s(name, 8, LARGE, pieces=pieces)


def test_a_ring_in_two_dimensions_uses_what_is_inside_nodes() -> None:
    plain = find("all_reduce", "ring").schedule(64)
    by_nodes = find("all_reduce", "ring_2d").schedule(64, node_size=8)
    for size in (TINY, 1 << 20, LARGE):
        ring, ring_2d = (simulate(schedule, H100, size) for schedule in (plain, by_nodes))
        assert ring_2d.time_s < ring.time_s / 2
        assert ring_2d.most_bytes("card") == pytest.approx(ring.most_bytes("card") / 8, rel=0.15)


# -- trees ---------------------------------------------------------------------------------------


def test_a_tree_uses_bandwidth_worse_than_a_ring_and_two_trees_better_than_one() -> None:
    for ranks in (16, 64):
        ring = time_s("ring", ranks, LARGE, FLAT)
        one, two = (
            time_s(name, ranks, LARGE, FLAT, pieces=64) for name in ("binary_tree", "double_tree")
        )
        assert ring < two < one < time_s("binomial", ranks, LARGE, FLAT)


def test_each_rank_is_a_leaf_in_one_of_the_two_trees_and_each_carries_half() -> None:
    for ranks in (8, 64, 1024):
        first, second = both_trees(ranks)
        roots = {int(np.argmin(tree)) for tree in (first, second)}
        inner = [{*tree[tree >= 0].tolist()} - roots for tree in (first, second)]
        assert not inner[0] & inner[1]
        assert max(depths(tree).max() for tree in (first, second)) <= math.log2(ranks)
        schedule = find("all_reduce", "double_tree").schedule(ranks, pieces=4)
        assert schedule.chunks == 2 * 4


def test_which_tree_at_which_scale() -> None:
    """Below 32 ranks a plain tree, above 512 two of them: true for some sizes, not for all."""
    assert time_s("binomial", 16, TINY) < time_s("double_tree", 16, TINY)
    assert time_s("ring", 16, LARGE) < time_s("binomial", 16, LARGE)  # no tree at all
    best = min(time_s("double_tree", 1024, 64 << 20, pieces=p) for p in (8, 64))
    others = [time_s(name, 1024, 64 << 20) for name in ("ring", "binomial")]
    assert best < min(*others, time_s("binary_tree", 1024, 64 << 20, pieces=64))
    assert time_s("binomial", 1024, TINY) < time_s("double_tree", 1024, TINY)


def test_24756_gpus_ring_180_ms_tree_1_ms() -> None:
    """The right order of magnitude for the ring; a tree's latency alone would be far shorter."""
    ring, tree = (time_s(name, 24_576, TINY, PRESETS["summit"]) for name in ("ring", "double_tree"))
    assert 0.09 < ring < 0.36
    assert tree < 1e-3
    assert ring / tree > 180
