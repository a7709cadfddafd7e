"""What a test on several ranks costs: the pytest plugin's warm ranks against new processes.

    python benchmarks/plugin.py                  4 ranks, 100 tests, about a minute
    python benchmarks/plugin.py --ranks 2 --json plugin.json

The plugin runs a project with one file of trivial tests: each joins its world, sums a tensor and
checks it. A figure is the time from pytest's start of a test to its end in the controller; the
first test, which starts the ranks, is separate. The peer does the same work as most projects do:
`torch.multiprocessing.spawn`, gloo's `init_process_group` through a FileStore, the same sum. It
may keep this process, which has already imported torch, as the plugin keeps its controller.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = """
import pytest
import torch

@pytest.mark.ranks({ranks})
@pytest.mark.parametrize("number", range({tests} + 1))
def test_sum(comm, number):
    tensor = torch.ones(4)
    comm.all_reduce(tensor)
    assert tensor.eq(comm.size).all()
"""

CLOCK = """
import json
import time

seconds = []

def pytest_runtest_logstart():
    seconds.append(-time.perf_counter())

def pytest_runtest_logfinish():
    seconds[-1] += time.perf_counter()

def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        with open("seconds.json", "w") as file:
            json.dump(seconds, file)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="What a test on several ranks costs.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tests", type=int, default=100)
    parser.add_argument("--spawns", type=int, default=5, help="how often the peer is measured")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()

    first, *warm = with_plugin(arguments.ranks, arguments.tests)
    spawned = with_spawn(arguments.ranks, arguments.spawns)
    rows = {
        "unisono, warm ranks": warm,
        "unisono, first test": [first],
        "mp.spawn and gloo": spawned,
    }
    print(f"one test on {arguments.ranks} ranks, {len(os.sched_getaffinity(0))} cores\n")
    print(f"{'ms':<22}{'tests':>6}{'median':>10}{'mean':>10}{'max':>10}")
    for name, values in rows.items():
        figures = statistics.median(values), statistics.fmean(values), max(values)
        print(
            f"{name:<22}{len(values):>6}"
            + "".join(f"{1e3 * seconds:>10.1f}" for seconds in figures)
        )
    ratio = statistics.median(spawned) / statistics.median(warm)
    print(f"\nmp.spawn and gloo / unisono: {ratio:.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))


def with_plugin(ranks: int, tests: int) -> list[float]:
    """Seconds for each of `tests` tests, after those of the first one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_sums.py").write_text(TESTS.format(ranks=ranks, tests=tests))
        Path(folder, "conftest.py").write_text(CLOCK)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds: list[float] = json.loads(Path(folder, "seconds.json").read_text())
        return seconds


def with_spawn(ranks: int, times: int) -> list[float]:
    """Seconds for each of this many runs of new processes with gloo."""
    import torch.multiprocessing

    seconds = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            torch.multiprocessing.spawn(gloo_rank, (ranks, os.path.join(folder, "store")), ranks)
            seconds.append(time.perf_counter() - began)
    return seconds


def gloo_rank(rank: int, ranks: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.eq(ranks).all()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
