"""`unisono doctor --hosts` and `unisono bench` under torchrun, on hosts with rate-limited
cables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from namespaces import Host, Link, MakeNetwork, start_torchrun

from unisono.bench.results import read
from unisono.doctor.host_links import LinkFacts, judge

FAST_BITS_PER_S = 400_000_000
SLOW_BITS_PER_S = FAST_BITS_PER_S // 10


def slow_down(host: Host, towards: Host) -> None:
    """Limit what a host sends to one other host to a tenth of the rate; all else stays the same."""
    for command in (
        "qdisc del dev eth0 root",
        "qdisc add dev eth0 root handle 1: htb default 1",
        f"class add dev eth0 parent 1: classid 1:1 htb rate {FAST_BITS_PER_S}",
        f"class add dev eth0 parent 1: classid 1:2 htb rate {SLOW_BITS_PER_S}",
        f"filter add dev eth0 parent 1: protocol ip u32 match ip dst {towards.ipv4}/32 flowid 1:2",
    ):
        host.run("tc", *command.split())


def run_everywhere(
    hosts: Sequence[Host], ranks: Sequence[int], command: Sequence[str], folder: Path
) -> tuple[list[int], str]:
    """torchrun's exit code on each host, and rank 0's output."""
    environment = os.environ | {"COLUMNS": "80"}
    started = start_torchrun(hosts, ranks, ["-m", "unisono", *command], folder, environment)
    codes = [process.wait() for process in started]
    return codes, started[0].text()


def test_the_slow_link_is_named(make_network: MakeNetwork, tmp_path: Path) -> None:
    with make_network(3, Link(FAST_BITS_PER_S)) as made:
        _, second, third = made.hosts
        slow_down(second, third)
        slow_down(third, second)
        codes, text = run_everywhere(
            made.hosts, (2, 1, 1), ["doctor", "--hosts", "--json"], tmp_path
        )
    told = json.loads(text[text.index("{\n") : text.rindex("\n}") + 2])
    assert codes == [0, 0, 0], text
    names = [(host["name"], host["ranks"], host["interface"]) for host in told["hosts"]]
    assert names == [("host0", [0, 1], "eth0"), ("host1", [2], "eth0"), ("host2", [3], "eth0")]
    assert [(link["first"], link["second"], link["verdict"]) for link in told["links"]] == [
        ("host0", "host1", ""),
        ("host0", "host2", ""),
        ("host1", "host2", "slow"),
    ]
    for link in told["links"]:
        rate = (SLOW_BITS_PER_S if link["verdict"] else FAST_BITS_PER_S) / 1e6
        for way in ("there_mbit", "back_mbit"):
            assert 0.3 * rate < link[way] < 1.1 * rate, link  # a busy machine may halve it
    assert len(told["slow"]) == 2
    assert told["slow"][0].startswith("host1 to host2 carries ")


def link(first: int, second: int, there: float, back: float, latency_us: float = 50) -> LinkFacts:
    return LinkFacts(f"node{first}", f"node{second}", latency_us, there, back)


def test_a_host_all_of_whose_links_are_slow() -> None:
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    links = [link(*pair, *((90, 95) if 2 in pair else (940, 941))) for pair in pairs]
    judged, slow = judge(links)
    assert slow[0].startswith("every link of node2 is slow")
    assert sum(1 for found in judged if found.verdict) == 3


def test_one_way_and_latency() -> None:
    _, slow = judge([link(0, 1, 940, 200)])
    assert slow == ["node1 to node0 carries 200 Mbit/s where 940 is usual"]
    _, slow = judge([link(0, 1, 90, 91), link(0, 2, 92, 90, 900), link(1, 2, 91, 90)])
    assert slow == ["node0 to node2 takes 900 us for the shortest message where 50 is usual"]
    _, slow = judge([link(0, 1, 90, 91), link(0, 2, 92, 90), link(1, 2, 70, 90)])
    assert not slow


# -- unisono bench -------------------------------------------------------------------------------


def test_the_link_is_the_floor_of_a_benchmark(make_network: MakeNetwork, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    sizes = [1024, 4 << 20]
    command = ["bench", "all_reduce", "all_to_all", "--sizes", "1K,4M"]
    command += ["--backends", "unisono,unisono-torch,gloo", "--budget", "0.1", "--json", str(path)]
    for _ in range(3):  # a busy machine may have a slow moment
        with make_network(2, Link(FAST_BITS_PER_S)) as made:
            codes, text = run_everywhere(made.hosts, (2, 2), command, tmp_path)
        assert codes == [0, 0], text
        run = read(path)
        if 8 * run.machine["link"]["bytes_per_s"] > 0.7 * FAST_BITS_PER_S:
            break
    assert run.machine["hosts"] == [{"name": "host0", "ranks": 2}, {"name": "host1", "ranks": 2}]
    assert run.machine["link"]["interface"] == "eth0"
    rate = run.machine["link"]["bytes_per_s"]
    assert 0.7 * FAST_BITS_PER_S < 8 * rate < 1.1 * FAST_BITS_PER_S
    assert "2 hosts: host0 (2), host1 (2); a stream over eth0 carries" in text
    assert len(run.rows) == 2 * 3 * 2
    for row in run.rows:
        assert (row.wrong, row.ranks, row.skew_us) == (0, 4, None)
        assert row.size_bytes in sizes
        times = {"all_reduce": 1.0, "all_to_all": 1.0}[row.collective]
        assert row.floor_us is not None
        if row.size_bytes == sizes[1]:  # where bandwidth matters, not latency
            bytes_us = times * row.size_bytes / rate * 1e6
            assert bytes_us <= row.floor_us < 1.3 * bytes_us + 20_000
            assert row.time_us.p50 > 0.85 * bytes_us
