"""Switches that add: their tree, their times, and what ranks no longer have to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from unisono.plan import PRESETS, Topology, find, rank_algorithms, simulate
from unisono.plan.in_network import PIECES, reduce_in_network, switch_tree

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
    """A piece up and a piece down, and the others a piece apart."""
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


def test_one_node_needs_no_switch_of_the_network() -> None:
    for topology in (H100, A100):
        alone = reduce_in_network(8, topology, 1 << 20)
        assert (alone.levels, alone.switches, alone.card_bytes) == (0, 0, 0)
        inside = dataclasses.replace(topology, reduce_bytes_per_s=1e30)
        summing = inside if topology.inside_switch_adds else topology
        scatter = simulate(find("reduce_scatter", "direct").schedule(8), summing, 1 << 20)
        gather = simulate(find("all_gather", "direct").schedule(8), topology, 1 << 20)
        wanted = scatter.time_s + gather.time_s - topology.call_s
        assert alone.time_s == pytest.approx(wanted)
    assert reduce_in_network(1, H100, 8).time_s == pytest.approx(H100.call_s)


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        reduce_in_network(0, H100, 8)
    with pytest.raises(ValueError, match="the switches of topology h100 do not add"):
        reduce_in_network(8, PRESETS["h100"], 8)
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
    assert ranking.in_network == reduce_in_network(32, H100, 1 << 20)
    assert rank_algorithms("all_reduce", 8, 1 << 20, H100).in_network is None
    assert rank_algorithms("broadcast", 32, 1 << 20, H100).in_network is None
    assert rank_algorithms("all_reduce", 32, 1 << 20, PRESETS["h100"]).in_network is None
