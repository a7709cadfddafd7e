"""The simulator: closed formulas where they apply, laws that always hold, and scale."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unisono.plan import (
    COLLECTIVES,
    PRESETS,
    Schedule,
    Timeline,
    Topology,
    catalog,
    costs,
    explain,
    find,
    find_topology,
    rank_algorithms,
    simulate,
)
from unisono.plan.choose import rank_sizes
from unisono.plan.sizes import format_seconds, format_size, parse_size, parse_sizes

ROOT = Path(__file__).resolve().parents[2]

NCCL = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "scale.py")))
"""Its formulas are NCCL's."""

ALPHA, BETA, GAMMA = 3e-6, 1 / 5e9, 1 / 20e9
FLAT = Topology.flat(ALPHA, 1 / BETA, reduce_bytes_per_s=1 / GAMMA)
SIZE = 3 << 20


def time_s(
    collective: str, name: str, ranks: int, topology: Topology = FLAT, **options: int
) -> float:
    return simulate(find(collective, name).schedule(ranks, **options), topology, SIZE).time_s


# --- closed formulas (Thakur, Rabenseifner and Gropp 2005; Hockney's model) ------------------


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16, 31])
def test_rings(n: int) -> None:
    part = SIZE * (n - 1) / n
    scatter = (n - 1) * ALPHA + part * (BETA + GAMMA)
    gather = (n - 1) * ALPHA + part * BETA
    assert time_s("reduce_scatter", "ring", n) == pytest.approx(scatter, rel=1e-9)
    assert time_s("all_gather", "ring", n) == pytest.approx(gather, rel=1e-9)
    assert time_s("all_reduce", "ring", n) == pytest.approx(scatter + gather, rel=1e-9)


@pytest.mark.parametrize("n", [2, 4, 8, 32])
def test_powers_of_two(n: int) -> None:
    lg = n.bit_length() - 1
    part = SIZE * (n - 1) / n
    doubling = lg * (ALPHA + SIZE * (BETA + GAMMA))
    rabenseifner = 2 * lg * ALPHA + part * (2 * BETA + GAMMA)
    assert time_s("all_reduce", "recursive_doubling", n) == pytest.approx(doubling)
    assert time_s("all_reduce", "halving_doubling", n) == pytest.approx(rabenseifner)
    assert time_s("all_gather", "recursive_doubling", n) == pytest.approx(lg * ALPHA + part * BETA)
    assert time_s("all_gather", "bruck", n) == pytest.approx(lg * ALPHA + part * BETA)
    assert time_s("all_to_all", "bruck", n) == pytest.approx(lg * (ALPHA + SIZE / 2 * BETA))
    assert time_s("barrier", "dissemination", n) == pytest.approx(lg * ALPHA)
    scatter_gather = (lg + n - 1) * ALPHA + 2 * part * BETA
    assert time_s("broadcast", "scatter_all_gather", n) == pytest.approx(scatter_gather)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 21])
def test_the_rest(n: int) -> None:
    lg = (n - 1).bit_length()
    pairwise = (n - 1) * ALPHA + SIZE * (n - 1) / n * BETA
    assert time_s("all_to_all", "pairwise", n) == pytest.approx(pairwise)
    if n & (n - 1) == 0:
        assert time_s("broadcast", "binomial", n) == pytest.approx(lg * (ALPHA + SIZE * BETA))
    # one port: everything passes the root's, one message after another
    linear = ALPHA + SIZE * (n - 1) / n * BETA
    assert time_s("scatter", "linear", n) == pytest.approx(linear)
    assert time_s("gather", "linear", n) == pytest.approx(linear)
    chain = (n - 1) * (ALPHA + SIZE / 8 * BETA) + 7 * SIZE / 8 * BETA
    assert time_s("broadcast", "chain", n, pieces=8) == pytest.approx(chain)


@pytest.mark.parametrize("protocol", NCCL.PROTOCOLS)
def test_nccls_latency_of_a_ring(protocol: str) -> None:
    """NCCL's own formula counts 2(M - 1) hops between nodes; a ring of M nodes has up to 2M."""
    which = NCCL.PROTOCOLS.index(protocol)
    near_us, far_us = (NCCL.HOP_US["Ring"][where][which] for where in ("inside", "between"))
    topology = Topology(
        "nccl",
        node_size=8,
        inside_latency_s=near_us * 1e-6,
        inside_bytes_per_s=math.inf,
        between_latency_s=far_us * 1e-6,
        call_s=NCCL.CALL_US["Ring"][which] * 1e-6,
    )
    extra = 2 * (far_us - near_us) * 1e-6
    for ranks in (16, 64, 512):
        expected = NCCL.ring_latency_us(ranks, ranks // 8, protocol, post_us=0.0) * 1e-6
        assert time_s("all_reduce", "ring", ranks, topology) == pytest.approx(expected + extra)


def test_the_published_scale() -> None:
    """The result of NCCL's constants for 4,096 nodes of 6."""
    ring = [NCCL.ring_latency_us(24_576, 4096, protocol) / 1e3 for protocol in NCCL.PROTOCOLS]
    tree = [NCCL.tree_latency_us(24_576, 4096, protocol) / 1e3 for protocol in NCCL.PROTOCOLS]
    # 2(N - 1) - 2(M - 1) = 40,960 hops inside nodes, 2(M - 1) = 8,190 between them; a hop takes at
    # least as long as posting a message, 1 us, or 3 us of Simple
    hops_us = [(6.6, 1.0, 2.7), (14.0, 1.9, 4.0), (8.4, 3.4, 14.0)]
    expected = [(call + 40_960 * near + 8190 * far) / 1e3 for call, near, far in hops_us]
    assert ring == pytest.approx(expected)
    assert [round(value) for value in ring] == [63, 111, 254]
    assert [round(value, 2) for value in tree] == [0.13, 0.23, 0.38]


def test_the_page_about_scale_shows_what_comes_out() -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "scale.py"), "--check"]
    subprocess.run(program, check=True)


# --- laws ----------------------------------------------------------------------------------


@functools.cache
def everything() -> list[tuple[Schedule, Topology]]:
    topologies = [*PRESETS.values(), dataclasses.replace(FLAT, cards=8)]
    schedules = [
        entry.schedule(ranks, node_size=2 if ranks % 2 == 0 else 1)
        for entry in catalog()
        for ranks in (1, 5, 16)
    ]
    return [(schedule, topology) for schedule in schedules for topology in topologies]


def test_bytes_in_are_bytes_out_and_nothing_is_busy_for_longer_than_it_takes() -> None:
    for schedule, topology in everything():
        timeline = simulate(schedule, topology, SIZE)
        sent = float(schedule.chunks_sent().sum()) * schedule.chunk_bytes(SIZE)
        by_kind: dict[tuple[str, str], float] = {}
        for link in timeline.links:
            kind = (link.name.split()[0], link.name.split()[-1])
            by_kind[kind] = by_kind.get(kind, 0.0) + link.bytes
            assert link.busy_s <= timeline.time_s * (1 + 1e-9)
        assert by_kind["rank", "out"] == pytest.approx(sent)
        assert by_kind["rank", "in"] == pytest.approx(sent)
        assert by_kind["node", "out"] == pytest.approx(by_kind["node", "in"])
        assert by_kind["node", "out"] <= sent * (1 + 1e-9)
        assert timeline.time_s == timeline.finish_s.max()


def test_no_all_reduce_is_faster_than_can_be() -> None:
    for schedule, topology in everything():
        if schedule.collective == "all_reduce":
            n = schedule.ranks
            time = simulate(schedule, topology, SIZE).time_s
            alpha = min(topology.inside_latency_s, topology.between_latency_s or math.inf)
            assert time >= math.ceil(math.log2(n)) * alpha
            assert time >= 2 * (n - 1) / n * SIZE / topology.inside_bytes_per_s * (1 - 1e-9)


def test_more_of_anything_bad_is_never_faster() -> None:
    """Where no card is shared: a shared card's queue can be faster when a rank is late."""
    for schedule, topology in everything():
        if schedule.ranks < 5 or topology.name not in ("h100", "flat"):
            continue
        base = simulate(schedule, topology, SIZE).time_s
        worse = [
            simulate(schedule, topology, 2 * SIZE).time_s,
            simulate(schedule, topology, SIZE, slow_ranks={1: 3.0}).time_s,
            simulate(schedule, topology, SIZE, late_s={0: 1e-3}).time_s,
        ]
        assert min(worse) >= base * (1 - 1e-9), schedule.title()


# --- contention, slowness ------------------------------------------------------------------


def pairs_across(cards: int) -> Timeline:
    """Four ranks of one node, each sending to a partner in the other one."""
    topology = Topology("two nodes", 4, 0.0, 1e9, 0.0, 1e9, cards=cards)
    step = [(rank, rank + 4, 0, "reduce") for rank in range(4)]
    schedule = Schedule.from_steps("all_reduce", "half", 8, 1, [step])  # type: ignore[list-item]
    return simulate(schedule, topology, 1e9)


def test_ranks_share_a_card() -> None:
    assert pairs_across(4).time_s == pytest.approx(1.0)
    assert pairs_across(2).time_s == pytest.approx(2.0)
    assert pairs_across(1).time_s == pytest.approx(4.0)
    uses = {link.name: link for link in pairs_across(2).links}
    assert uses["node 0 card 1 out"].busy_s == pytest.approx(2.0)
    assert uses["node 1 card 0 in"].bytes == pytest.approx(2e9)
    assert uses["node 1 card 0 out"].bytes == 0


def test_a_late_rank_delays_a_ring_by_as_much() -> None:
    ring = find("all_reduce", "ring").schedule(8)
    flat = Topology.flat(0.0, 1e9)
    base = simulate(ring, flat, 8e6).time_s
    assert base == pytest.approx(14e-3)
    assert simulate(ring, flat, 8e6, late_s={5: 1.0}).time_s == pytest.approx(1 + base)


def test_a_slow_rank_adds_slowly() -> None:
    reduce = find("reduce", "binomial").schedule(2)
    flat = Topology.flat(0.0, math.inf, reduce_bytes_per_s=1e9)
    assert simulate(reduce, flat, 1e9).time_s == pytest.approx(1.0)
    assert simulate(reduce, flat, 1e9, slow_ranks={0: 2.5}).time_s == pytest.approx(2.5)
    assert simulate(reduce, flat, 1e9, slow_ranks={0: 2.5}).reducing_s.tolist() == [2.5, 0.0]


def test_what_is_not_there_cannot_be_slow() -> None:
    ring = find("all_reduce", "ring").schedule(8)
    h100 = PRESETS["h100"]
    with pytest.raises(ValueError, match="above 0"):
        simulate(ring, h100, 8, slow_ranks={1: 0.0})
    with pytest.raises(ValueError, match="rank 9 is not among 8 ranks"):
        simulate(ring, h100, 8, slow_ranks={9: 2.0})
    with pytest.raises(ValueError, match="-1 bytes"):
        simulate(ring, h100, -1)


# --- large ---------------------------------------------------------------------------------


def every_step(*_: Any) -> None:
    """With `on_step`: no repeated step is skipped."""


def test_rounds_that_repeat_need_not_be_simulated() -> None:
    """The shortcut for long rings gives the same result as simulating every step."""
    for name, ranks, late in (("ring", 96, {}), ("ring_2d", 96, {}), ("ring", 96, {7: 1e-4})):
        for topology in (*PRESETS.values(), FLAT):
            schedule = find("all_reduce", name).schedule(ranks)
            full = simulate(schedule, topology, SIZE, late_s=late, on_step=every_step)
            short = simulate(schedule, topology, SIZE, late_s=late)
            np.testing.assert_allclose(short.finish_s, full.finish_s, rtol=1e-9)
            assert short.reducing_s == pytest.approx(full.reducing_s)


@pytest.mark.parametrize("name", ["ring", "double_tree", "binary_tree", "binomial"])
def test_24576_ranks(name: str) -> None:
    schedule = find("all_reduce", name).schedule(24_576)
    timeline = simulate(schedule, PRESETS["summit"], 8)
    assert 1e-5 < timeline.time_s < 1
    assert len(timeline.finish_s) == 24_576
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 4 << 20  # KiB


# --- choosing ------------------------------------------------------------------------------


def test_small_ones_want_few_steps_and_large_ones_few_bytes() -> None:
    small, large = rank_sizes("all_reduce", 64, (8, 1 << 30), PRESETS["h100"])
    assert small.best.algorithm.name == "recursive_doubling"
    assert large.best.label == "ring (8 channels)"
    assert "latency-bound" in explain(small)
    assert "bandwidth-bound" in explain(large)
    assert "network cards" in explain(large)
    *times_s, only_planned = [choice.time_s for choice in small.choices]
    assert times_s == sorted(times_s)
    assert only_planned < times_s[0]


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_can_be_ranked(collective: str) -> None:
    for ranks in (1, 2, 9, 24):
        ranking = rank_algorithms(collective, ranks, 1 << 20, PRESETS["ethernet"])
        names = {choice.algorithm.name for choice in ranking.choices}
        names |= {name for name, _ in ranking.left_out}
        assert names == {entry.name for entry in catalog(collective)}
        assert explain(ranking)


def test_what_is_left_out_says_why() -> None:
    ranking = rank_algorithms("all_reduce", 9, 8, PRESETS["h100"])
    assert dict(ranking.left_out) == {
        name: f"{name} needs nodes of equal size: 9 ranks do not fill nodes of 8"
        for name in ("hierarchical", "nccl_tree")
    }
    ranking = rank_algorithms("all_gather", 2048, 8, PRESETS["h100"])
    assert "direct is too large beyond 1,024 ranks" in dict(ranking.left_out)["direct"]


def test_a_schedule_too_large_to_write_down_is_refused_whoever_asks_for_it() -> None:
    limited = [entry for entry in catalog() if entry.most_ranks is not None]
    assert find("all_reduce", "lanes") in limited
    for entry in limited:
        assert entry.most_ranks is not None
        with pytest.raises(ValueError, match=f"{entry.name} is too large beyond"):
            entry.schedule(entry.most_ranks + 8, node_size=8)


def test_complexity_is_computed() -> None:
    found = {(c.algorithm.collective, c.algorithm.name): c for c in costs(8)}
    assert len(found) == len(catalog())
    assert found["all_reduce", "ring"].time == "14 a + 1.75 b + 0.875 g"
    assert found["all_reduce", "recursive_doubling"].time == "3 a + 3 b + 3 g"
    assert found["all_to_all", "bruck"].time == "3 a + 1.5 b"
    ring = found["all_reduce", "ring"]
    parts_s = ring.alpha * ALPHA + ring.beta * SIZE * BETA + ring.gamma * SIZE * GAMMA
    assert parts_s == pytest.approx(time_s("all_reduce", "ring", 8))
    assert [c.time for c in costs(1, "all_reduce")] == ["0"] * 11


# --- topologies and sizes ------------------------------------------------------------------


def test_topologies_come_from_files(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        assert preset.source
        path = tmp_path / f"{preset.name}.toml"
        path.write_text(preset.to_toml())
        assert find_topology(str(path)) == preset
    path = tmp_path / "mine.toml"
    path.write_text("node_size = 2\ninside_latency_s = 1e-6\ninside_bytes_per_s = 1e9\n")
    assert find_topology(str(path)) == Topology("mine", 2, 1e-6, 1e9)
    assert find_topology("a100") is PRESETS["a100"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inside_bytes_per_s = -1.0", "inside_bytes_per_s of topology 'bad' must be more than 0"),
        ("card_bytes_per_s = nan", "card_bytes_per_s of topology 'bad' must be more than 0"),
        ("overhead_s = -1e-6", "overhead_s of topology 'bad' must be 0 or more, not -1e-06"),
        ("overhead_s = inf", "overhead_s of topology 'bad' must be 0 or more, not inf"),
        (
            "node_size = 2.5",
            "node_size of topology 'bad' must be an integer of at least 1",
        ),
        ("cards = true", "cards of topology 'bad' must be an integer of at least 1, not True"),
        ("call_s = 'a'", "call_s of topology 'bad' must be a number"),
        ("speed = 3", "has unknown keys: speed; the known ones are name, node_size"),
        ("node_size =", "is not TOML"),
    ],
)
def test_bad_files_get_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    good = {"node_size": "2", "inside_latency_s": "1e-6", "inside_bytes_per_s": "1e9"}
    good.pop(text.split(" =")[0], None)
    path = tmp_path / "bad.toml"
    path.write_text("\n".join([text, *(f"{key} = {value}" for key, value in good.items())]))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        find_topology(str(path))
    assert "\n" not in str(caught.value)


def test_missing_files_and_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        find_topology(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match=r"no topology 'h200': h100, a100, .* or a \.toml file"):
        find_topology("h200")
    path = tmp_path / "empty.toml"
    path.write_text("")
    with pytest.raises(ValueError, match="lacks node_size, inside_latency_s, inside_bytes_per_s"):
        find_topology(str(path))
    assert dataclasses.replace(PRESETS["h100"], name="x").nodes(9) == 2


def test_sizes() -> None:
    sizes = {"0": 0, "8": 8, "64K": 65_536, "64k": 65_536, "1.5M": 1_572_864}
    sizes |= {"1G": 1 << 30, "2 GiB": 2 << 30, "1KB": 1024}
    for text, size in sizes.items():
        assert parse_size(text) == size
    for wrong in ("64Q", "", "K", "-8", "8:", "1e3"):
        with pytest.raises(ValueError, match="is not a size: sizes are written like 8, 64K"):
            parse_size(wrong)
    assert parse_sizes("8:64") == (8, 16, 32, 64)
    assert parse_sizes("8:100") == (8, 16, 32, 64, 100)
    assert parse_sizes("1K:1M", factor=32) == (1024, 32_768, 1 << 20)
    assert parse_sizes("8,1K") == (8, 1024)
    for wrong in ("64:8", "0:8"):
        with pytest.raises(ValueError, match="is not a range of sizes"):
            parse_sizes(wrong)
    for size, text in {0: "0", 8: "8", 1536: "1.5K", 64 << 20: "64M", 1 << 30: "1G"}.items():
        assert format_size(size) == text
    seconds = {0: "0 s", 5e-9: "5 ns", 1.5e-6: "1.5 us", 2.5e-3: "2.5 ms", 12: "12 s"}
    for number, text in seconds.items():
        assert format_seconds(number) == text
