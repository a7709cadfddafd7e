"""The simulator against real runs: schedules in the engine on this machine.

    python benchmarks/simulated.py                    4 ranks, half a minute
    python benchmarks/simulated.py --ranks 4 8 --write    the table goes into docs/scale.md

Two ranks that pass 8 bytes back and forth, a few times and many times, give the cost of a call and
of each hop. The ring with 16 MiB gives a bandwidth, and NumPy's addition on both ranks at once the
speed of reduction. From these four numbers the simulator predicts other algorithms on more ranks
and at other sizes, and then they are run. Medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy

import unisono
from unisono.plan import Schedule, Topology, find, simulate
from unisono.plan.sizes import format_seconds, format_size

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
from commit import commit

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
ALGORITHMS = ("ring", "binomial", "double_tree", "recursive_doubling", "halving_doubling")
SIZES = (8, 64 << 10, 1 << 20, 16 << 20)
LARGE = 16 << 20
FEW, MANY = 2, 32  # passes


def tosses(times: int) -> Schedule:
    """Rank 1's part is added on rank 0, and the sum goes back and forth: `times` hops in total."""
    steps = [[(1, 0, 0, "reduce")]]
    steps += [[(number % 2, 1 - number % 2, 0, "copy")] for number in range(times - 1)]
    return Schedule.from_steps("all_reduce", f"{times} tosses", 2, 1, steps)


def times_s(calls: list[tuple[str | Schedule, int]]) -> list[float]:
    """On each rank: the median time of each (algorithm, bytes); each round takes all of them."""
    comm = unisono.init("unisono", with_torch=False)
    tensors = [numpy.zeros(size // 4, numpy.float32) for _, size in calls]
    rounds = 15
    seconds = numpy.zeros((len(calls), rounds))
    for number in range(-2, rounds):
        for which, (name, size) in enumerate(calls):
            repeats = max(1, min(50, (1 << 20) // size))
            comm.barrier()
            begin_s = time.perf_counter()
            for _ in range(repeats):
                comm.all_reduce(tensors[which], algorithm=name)
            if number >= 0:
                seconds[which, number] = (time.perf_counter() - begin_s) / repeats
    comm.all_reduce(seconds, "max")
    return [statistics.median(row) for row in seconds.tolist()]


def adding_s() -> float:
    """On each rank: the time to add LARGE bytes, while the others do the same."""
    comm = unisono.init("unisono", with_torch=False)
    mine, other = numpy.ones(LARGE // 4, numpy.float32), numpy.ones(LARGE // 4, numpy.float32)
    laps = []
    for _ in range(9):
        comm.barrier()
        begin_s = time.perf_counter()
        numpy.add(mine, other, out=mine)
        laps.append(time.perf_counter() - begin_s)
    return statistics.median(laps)


def calibrated() -> Topology:
    calls = [(tosses(FEW), 8), (tosses(MANY), 8), ("ring", LARGE)]
    few_s, many_s, large_s = unisono.launch(times_s, 2, (calls,))[0]
    reduce_bytes_per_s = LARGE / max(unisono.launch(adding_s, 2))
    hop_s = max(0.0, many_s - few_s) / (MANY - FEW)
    call_s = max(0.0, few_s - FEW * hop_s)
    moving_s = large_s - call_s - 2 * hop_s - LARGE / 2 / reduce_bytes_per_s
    flat = Topology.flat(hop_s, LARGE / moving_s, reduce_bytes_per_s=reduce_bytes_per_s)
    return replace(flat, call_s=call_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--write", action="store_true", help="into docs/scale.md")
    options = parser.parse_args()
    here = calibrated()
    calibration = (
        f"{platform.machine()}: {format_seconds(here.call_s)} per call, "
        f"{format_seconds(here.inside_latency_s)} per hop, "
        f"{here.inside_bytes_per_s / 1e9:.1f} GB/s, adds {here.reduce_bytes_per_s / 1e9:.1f} GB/s; "
        f"commit {commit()}."
    )
    lines = [calibration, "", "| ranks | bytes | algorithm | simulated | measured | off by |"]
    lines.append("|---:|---:|---|---:|---:|---:|")
    print("\n".join(lines), flush=True)
    deviations = []
    for ranks in options.ranks:
        calls = [(name, size) for size in SIZES for name in ALGORITHMS]
        for (name, size), took_s in zip(
            calls, unisono.launch(times_s, ranks, (calls,))[0], strict=True
        ):
            expected_s = simulate(find("all_reduce", name).schedule(ranks), here, size).time_s
            off = expected_s / took_s - 1
            deviations.append(abs(off))
            both = f"{format_seconds(expected_s)} | {format_seconds(took_s)}"
            lines.append(f"| {ranks} | {format_size(size)} | {name} | {both} | {off:+.0%} |")
            print(lines[-1], flush=True)
    lines += ["", f"Half of them are off by less than {statistics.median(deviations):.0%}."]
    print(lines[-1])
    if options.write:
        head, begin, rest = PAGE.read_text().partition("<!-- simulated -->\n")
        _, end, tail = rest.partition("<!-- /simulated -->")
        PAGE.write_text(head + begin + "\n".join(lines) + "\n" + end + tail)


if __name__ == "__main__":
    main()
