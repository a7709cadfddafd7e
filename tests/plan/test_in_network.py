"""Switches that reduce: their tree, their times, and what ranks no longer have to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from unisono.plan import PRESETS, Topology, find, rank_algorithms, simulate
from unisono.plan.in_network import PIECES, reduce_in_network, switch_tree, ways

H100, A100 = PRESETS["h100_sharp"], PRESETS["a100_sharp"]


def test_every_node_is_counted_once_and_hears_the_sum() -> None:
    for ports in (4, 6, 40, 64):
        for nodes in (1, 2, 3, 20, 21, 33, 400, 3095):
            tree = switch_tree(nodes, ports)
            given = np.random.default_rng(nodes).integers(0, 1 << 40, nodes)
            sums = given
            for above in tree:
                assert np.bincount(above).max() <= ports // 2
                received = np.zeros(int(above.max()) + 1, np.int64)
                np.add.at(received, above, sums)
                sums = received
            assert sums.tolist() == [given.sum()]
            for above in reversed(tree):
                sums = sums[above]
            assert sums.tolist() == [given.sum()] * nodes
            assert len(tree) == max(1, next(d for d in range(99) if (ports // 2) ** d >= nodes))


def test_one_switch_takes_what_the_formula_says() -> None:
    """One piece up and down, and the others one piece apart."""
    latency, rate, overhead = 10e-6, 1e9, 2e-6
    pair = Topology(
        "pair", 1, 1e-6, 100e9, between_latency_s=latency, card_bytes_per_s=rate,
        overhead_s=overhead, switch_ports=4, call_s=5e-6,
    )  # fmt: skip
    for size in (0, 8, 1 << 20, 1 << 30):
        wanted = {p: 5e-6 + latency + (p + 1) * (overhead + size / p / rate) for p in PIECES}
        found = reduce_in_network(2, pair, size)
        assert found.time_s == pytest.approx(min(wanted.values()))
        assert wanted[found.pieces] == pytest.approx(min(wanted.values()))
        assert (found.levels, found.switches, found.card_bytes) == (1, 1, size)
    slow = dataclasses.replace(pair, switch_bytes_per_s=1e6)
    assert reduce_in_network(2, slow, 1 << 20).time_s > (1 << 20) / 1e6


def test_the_switch_inside_a_node_needs_little_more_than_a_tensor_each_way() -> None:
    """(1 + 1/g) S leave and enter every port, at once; a ring has 2(g - 1)/g S."""
    for ranks in (2, 4, 8):
        for size in (8, 1 << 20, 1 << 30, 16 << 30):
            alone = reduce_in_network(ranks, H100, size)
            assert (alone.way, alone.levels, alone.switches, alone.card_bytes) == ("nvls", 0, 0, 0)
            assert alone.rank_bytes == pytest.approx((1 + 1 / ranks) * size)
            assert alone.added_bytes == 0
            least = H100.call_s + alone.rank_bytes / H100.inside_bytes_per_s
            assert least < alone.time_s
            # A piece is read and written, the others follow; each costs a rank some overhead.
            piece_s = size / alone.pieces / H100.inside_bytes_per_s + H100.overhead_s
            most = least + 2 * alone.pieces * H100.overhead_s + piece_s + 3 * H100.inside_latency_s
            assert alone.time_s <= most + 1e-12
    assert reduce_in_network(8, H100, 1 << 30).time_s == pytest.approx(2.7e-3, rel=0.05)
    ring = simulate(find("all_reduce", "ring").schedule(8), H100, 1 << 30)
    assert ring.time_s > 1.5 * reduce_in_network(8, H100, 1 << 30).time_s
    tiny = 2 * (H100.overhead_s + 8 / H100.inside_bytes_per_s) + 3 * H100.inside_latency_s
    assert reduce_in_network(8, H100, 8).time_s == pytest.approx(H100.call_s + tiny)
    assert reduce_in_network(1, H100, 8).time_s == pytest.approx(H100.call_s)


def test_which_ways_there_are() -> None:
    assert ways(8, PRESETS["h100"]) == ways(8, H100) == ("nvls",)
    assert ways(16, PRESETS["h100"]) == ("nvls_tree",)
    assert ways(16, H100) == ("nvls", "nvls_tree", "collnet_direct", "collnet_chain")
    assert ways(16, A100) == ("collnet_direct", "collnet_chain")
    assert ways(8, A100) == ways(16, PRESETS["a100"]) == ()
    for way in ways(16, H100):
        assert reduce_in_network(16, H100, 1 << 20, way).way == way
    fastest = min(reduce_in_network(16, H100, 1 << 20, way).time_s for way in ways(16, H100))
    assert reduce_in_network(16, H100, 1 << 20).time_s == fastest


@pytest.mark.parametrize("way", ["nvls", "nvls_tree", "collnet_direct", "collnet_chain"])
def test_no_way_is_faster_than_its_bytes(way: str) -> None:
    """What a port, a card and a rank carry, by the table in in_network.py."""
    for nodes in (2, 3, 8, 128):
        for size in (8, 1 << 20, 1 << 30):
            found = reduce_in_network(8 * nodes, H100, size, way)
            port = 1 + 1 / 8 if way.startswith("nvls") else 2 - 2 / 8
            assert found.rank_bytes == pytest.approx(port * size)
            shares = {2: 1, 3: 1.5}.get(nodes, 2) if way == "nvls_tree" else 1
            assert found.card_bytes == pytest.approx(shares * size / 8)
            added = {"nvls": 0, "nvls_tree": 1 / 8}.get(way, 7 / 8)
            assert found.added_bytes == pytest.approx(added * size)
            busy = (
                found.rank_bytes / H100.inside_bytes_per_s,
                found.card_bytes / H100.card_bytes_per_s,
                found.added_bytes / H100.reduce_bytes_per_s,
            )
            assert found.time_s > H100.call_s + max(busy)
            if size == 1 << 30 and nodes < 128:
                assert found.time_s < 1.35 * sum(busy)  # pieces overlap


def test_each_to_each_is_what_the_schedules_say() -> None:
    """One piece: reduce_scatter, up and down, all_gather; our model adds when all have arrived."""
    for size in (8, 1 << 16):
        found = reduce_in_network(16, A100, size, "collnet_direct")
        scatter = simulate(find("reduce_scatter", "direct").schedule(8), A100, size).time_s
        gather = simulate(find("all_gather", "direct").schedule(8), A100, size).time_s
        link_s = A100.overhead_s + size / 8 / A100.card_bytes_per_s
        between = A100.between_latency_s + 2 * link_s + size / 8 / A100.switch_bytes_per_s
        assert found.pieces == 1
        wanted = scatter + between + gather - A100.call_s
        assert found.time_s == pytest.approx(wanted, rel=0.01)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        reduce_in_network(0, H100, 8)
    with pytest.raises(ValueError, match="the switches of topology a100 cannot reduce"):
        reduce_in_network(8, PRESETS["a100"], 8)
    with pytest.raises(ValueError, match="topology h100 cannot reduce by collnet_chain"):
        reduce_in_network(16, PRESETS["h100"], 8, "collnet_chain")
    with pytest.raises(ValueError, match="at least 4 ports, not 2"):
        switch_tree(8, 2)
    with pytest.raises(ValueError, match="switch_ports of topology 'h100' must be 0, or 4 or more"):
        dataclasses.replace(PRESETS["h100"], switch_ports=2)
    with pytest.raises(ValueError, match=r"inside_switch_adds of .* must be true or false, not 1"):
        dataclasses.replace(PRESETS["h100"], inside_switch_adds=1)
    path = tmp_path / "own.toml"
    path.write_text(H100.to_toml())
    assert Topology.from_toml(path) == H100


def test_it_stands_in_a_ranking_beside_the_others() -> None:
    ranking = rank_algorithms("all_reduce", 32, 1 << 20, H100)
    assert ranking.in_network[0].way == "nvls"
    assert ranking.in_network[0] == reduce_in_network(32, H100, 1 << 20)
    times = [found.time_s for found in ranking.in_network]
    assert times == sorted(times)
    assert len(times) == 4
    assert ranking.times_s["nvls"] == times[0]
    assert len(rank_algorithms("all_reduce", 8, 1 << 20, H100).in_network) == 1
    assert rank_algorithms("broadcast", 32, 1 << 20, H100).in_network == ()
    assert rank_algorithms("all_reduce", 32, 1 << 20, PRESETS["a100"]).in_network == ()
