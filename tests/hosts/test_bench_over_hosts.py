"""`unisono bench` under torchrun, on hosts with rate-limited cables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from namespaces import Host, Link, MakeNetwork, start_torchrun

from unisono.bench.results import read

FAST_BITS_PER_S = 400_000_000


def run_everywhere(
    hosts: Sequence[Host], ranks: Sequence[int], command: Sequence[str], folder: Path
) -> tuple[list[int], str]:
    """torchrun's exit code on each host, and rank 0's output."""
    environment = os.environ | {"COLUMNS": "80"}
    started = start_torchrun(hosts, ranks, ["-m", "unisono", *command], folder, environment)
    codes = [process.wait() for process in started]
    return codes, started[0].text()


def test_a_benchmark_over_hosts(make_network: MakeNetwork, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    sizes = [1024, 4 << 20]
    command = ["bench", "all_reduce", "all_to_all", "--sizes", "1K,4M"]
    command += ["--backends", "unisono,unisono-torch,gloo", "--budget", "0.1", "--json", str(path)]
    with make_network(2, Link(FAST_BITS_PER_S)) as made:
        codes, text = run_everywhere(made.hosts, (2, 2), command, tmp_path)
    assert codes == [0, 0], text
    run = read(path)
    assert run.machine["hosts"] == [{"name": "host0", "ranks": 2}, {"name": "host1", "ranks": 2}]
    assert "2 hosts: host0 (2), host1 (2)" in text
    assert len(run.rows) == 2 * 3 * 2
    for row in run.rows:
        assert (row.wrong, row.ranks, row.skew_us, row.floor_us) == (0, 4, None, None)
        assert row.size_bytes in sizes
        if row.size_bytes == sizes[1]:  # S bytes cross the cable in each direction
            assert row.time_us.p50 > 0.85 * row.size_bytes * 8 / FAST_BITS_PER_S * 1e6
