"""The simulator against real runs over hosts: the schedules that unisono runs between 2, 3 and 4.

    sudo python benchmarks/simulated_hosts.py                 2, 3 and 4 hosts of 2 ranks, 1 Gbit/s
    sudo python benchmarks/simulated_hosts.py --hosts 2 4 --collectives all_reduce --write
    python benchmarks/simulated_hosts.py --many --write       64 to 1,024 hosts, simulated alone

Hosts are network namespaces, as in benchmarks/hosts.py, which does the measuring and needs root.
The rate and the burst of the cables are given. Two ranks of this machine give the cost of a hop
inside a host (as in benchmarks/simulated.py), a round trip of 8 bytes that of a hop between hosts,
and the calls of 1 KiB on the fewest hosts the rest of a call's cost. All hosts share this machine's
cores: if ranks outnumber them, a call costs in proportion to the ranks. Everything else is
simulated: small calls by `mates`, large ones by `lanes`, in as many pieces as unisono cuts them
into. The burst that a cable lets pass after a pause is subtracted. --write puts the table into
docs/hosts.md. Nothing else may run meanwhile.

--many simulates a small all_reduce on many hosts of one rank, on a network of --rate: as unisono
does it (bruck's all_gather of what each host brings, with its description), as it would if every
host sent to every other (mates), by a binomial tree up and down, and by a ring, as gloo does it. A
message takes --latency us, and keeps its sender and its receiver busy for --overhead us of them:
as much longer an exchange of 80 bytes over TCP takes than one way (docs/hosts.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import simulated

import hosts
from hosts import COLLECTIVES, HEADERS, KIB, MIB, PING_PONG, Figure, Setting, least_bytes
from unisono.plan import Schedule, Topology, find, simulate
from unisono.plan.sizes import format_seconds, format_size

PAGE = Path(__file__).resolve().parent.parent / "docs" / "hosts.md"
SIZES = (8, KIB, MIB, 64 * MIB)
POST_BYTES = 1504
"""Bytes per rank up to which a call always fits into the descriptors: csrc/base/constants.h."""
LANE_BYTES, ROW_BYTES = 512 * KIB, 256 * KIB
"""Of a chunk, for each lane or broadcast, and for each rank's row: csrc/hosts/lanes.h."""
MANY = (64, 128, 256, 512, 1024)
DESCRIBED_BYTES = 32
"""What goes with each contribution: `post` in csrc/hosts/posts.c."""
BURST_BYTES = 256 * KIB
"""What a cable lets pass at once: tests/hosts/namespaces.py."""


def schedule_of(name: str, size_bytes: int, setting: Setting) -> Schedule:
    """What unisono runs for such a call."""
    ranks = setting.hosts * setting.ranks
    own = size_bytes // ranks if name == "all_gather" else size_bytes
    if own <= POST_BYTES:
        return find(name, "mates").schedule(ranks, node_size=setting.ranks)
    pieces = {
        "all_reduce": size_bytes / setting.ranks / LANE_BYTES,
        "broadcast": size_bytes / LANE_BYTES,
        "all_gather": size_bytes / ranks / ROW_BYTES,
        "reduce_scatter": size_bytes / ranks / ROW_BYTES,
        "all_to_all": size_bytes / ranks / ROW_BYTES,
    }[name]
    return find(name, "lanes").schedule(ranks, node_size=setting.ranks, pieces=math.ceil(pieces))


def simulate_s(figure: Figure, topology: Topology, setting: Setting) -> float:
    """How long such a call takes on these hosts."""
    schedule = schedule_of(figure.what, figure.size_bytes, setting)
    crossing = least_bytes(figure.what, figure.size_bytes, setting)
    at_once_s = min(BURST_BYTES, crossing) / topology.card_bytes_per_s
    return simulate(schedule, topology, figure.size_bytes).time_s - at_once_s


def fit(setting: Setting, figures: Sequence[Figure]) -> Topology:
    """These hosts, as measured by the cables, two ranks of this machine and the smallest calls."""
    inside = simulated.calibrated()
    trip = next(f for f in figures if f.what == PING_PONG and f.size_bytes == SIZES[0])
    topology = Topology(
        "namespaces",
        node_size=setting.ranks,
        inside_latency_s=inside.inside_latency_s,
        inside_bytes_per_s=inside.inside_bytes_per_s,
        between_latency_s=trip.milliseconds["unisono"] / 1000 / 2,
        card_bytes_per_s=setting.rate_bits_per_s / 8 / HEADERS,
        reduce_bytes_per_s=inside.reduce_bytes_per_s,
    )
    rests = [
        figure.milliseconds["unisono"] / 1000 - simulate_s(figure, topology, setting)
        for figure in figures
        if figure.what in COLLECTIVES and figure.size_bytes == KIB
    ]
    return dataclasses.replace(topology, call_s=max(0.0, statistics.median(rests)))


def scaled(topology: Topology, first: Setting, setting: Setting) -> Topology:
    """The same with more hosts on the same cores."""
    cores = len(os.sched_getaffinity(0))
    before, now = (max(cores, each.hosts * each.ranks) for each in (first, setting))
    return dataclasses.replace(topology, call_s=topology.call_s * now / before)


def simulate_many(rate_bits_per_s: float, latency_s: float, overhead_s: float) -> list[str]:
    """A table of small all_reduces on many hosts: messages of the busiest host, and times."""
    topology = Topology(
        "hosts",
        node_size=1,
        inside_latency_s=0.0,
        inside_bytes_per_s=math.inf,
        between_latency_s=latency_s - overhead_s,
        card_bytes_per_s=rate_bits_per_s / 8 / HEADERS,
        overhead_s=overhead_s,
    )
    lines = [
        "| hosts | bytes | messages: unisono | to each | tree | ring, gloo "
        "| time: unisono | to each | tree | ring, gloo |",
        "|---:|---:|" + "---:|" * 8,
    ]
    for size_bytes, count in itertools.product((8, KIB), MANY):
        ways = [
            [("all_gather", "bruck", count * (size_bytes + DESCRIBED_BYTES))],
            [("all_reduce", "mates", size_bytes + DESCRIBED_BYTES)],
            [("reduce", "binomial", size_bytes), ("broadcast", "binomial", size_bytes)],
            [("all_reduce", "ring", size_bytes)],
        ]
        messages, times = [], []
        for way in ways:
            made = [(find(name, by).schedule(count), total) for name, by, total in way]
            messages.append(f"{sum(most_sent(schedule) for schedule, _ in made):,}")
            seconds = sum(simulate(schedule, topology, total).time_s for schedule, total in made)
            times.append(format_seconds(seconds))
        lines.append(f"| {count:,} | {size_bytes:,} | {' | '.join((*messages, *times))} |")
    return lines


def most_sent(schedule: Schedule) -> int:
    """The messages of the rank that sends most; what one step sends to one rank is one message."""
    pairs = [
        np.unique(np.stack([step.source, step.destination]), axis=1) for step in schedule.steps
    ]
    sources = np.concatenate([each[0, each[0] != each[1]] for each in pairs])
    return int(np.bincount(sources).max())


def write_between(marks: str, text: Sequence[str]) -> None:
    """Replace a part of the page."""
    head, begin, rest = PAGE.read_text().partition(f"<!-- {marks} -->\n")
    _, end, tail = rest.partition(f"<!-- /{marks} -->")
    PAGE.write_text(head + begin + "\n".join(text) + "\n" + end + tail)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--ranks", type=int, default=2, help="on each host")
    parser.add_argument("--rate", type=float, default=1.0, help="of each cable, in Gbit/s")
    parser.add_argument("--collectives", nargs="+", default=list(COLLECTIVES), choices=COLLECTIVES)
    parser.add_argument("--rounds", type=int, default=0, help="for each size; else by the size")
    parser.add_argument("--write", action="store_true", help="into docs/hosts.md")
    parser.add_argument("--many", action="store_true", help="simulate 64 to 1,024 hosts instead")
    parser.add_argument("--latency", type=float, default=7.7, help="of --many, in us")
    parser.add_argument("--overhead", type=float, default=2.3, help="of --many, in us")
    options = parser.parse_args()
    if options.many:
        rows = simulate_many(options.rate * 1e9, options.latency / 1e6, options.overhead / 1e6)
        print("\n".join(rows))
        if options.write:
            write_between("many-hosts", rows)
        return
    first = Setting(
        hosts=min(options.hosts),
        ranks=options.ranks,
        rate_bits_per_s=int(options.rate * 1e9),
        sizes=SIZES,
        collectives=(PING_PONG, *options.collectives),
        ddp=False,
        rounds=options.rounds,
        backends=("unisono",),
    )
    topology: Topology | None = None
    lines = ["| hosts | |", "|---:|---|"]
    for size_bytes in SIZES[1:]:
        lines[0] += f" {format_size(size_bytes)} simulated | measured | off by |"
        lines[1] += "---:|---:|---:|"
    cells: dict[tuple[int, str], str] = {}
    off: dict[bool, list[float]] = {True: [], False: []}
    for count in sorted(options.hosts):
        setting = dataclasses.replace(first, hosts=count)
        figures = hosts.measure(setting)
        topology = topology or fit(setting, figures)
        here = scaled(topology, first, setting)
        for figure in figures:
            if figure.what == PING_PONG or figure.size_bytes == SIZES[0]:
                continue
            expected_s = simulate_s(figure, here, setting)
            took_s = figure.milliseconds["unisono"] / 1000
            error = expected_s / took_s - 1
            off[figure.size_bytes >= 64 * MIB].append(abs(error))
            both = f"{format_seconds(expected_s)} | {format_seconds(took_s)}"
            row = cells.get((count, figure.what), f"| {count} | {figure.what} |")
            cells[count, figure.what] = f"{row} {both} | {error:+.0%} |"
    assert topology is not None
    lines += cells.values()
    text = [describe(topology), "", *lines, ""]
    text += [
        f"Off by {statistics.median(off[True]):.0%} in the median and {max(off[True]):.0%} at most "
        f"for 64M, by {statistics.median(off[False]):.0%} in the median for less."
    ]
    print("\n".join(text))
    if options.write:
        write_between("simulated", text)


def describe(topology: Topology) -> str:
    return (
        f"{topology.node_size} ranks per host, cables of "
        f"{topology.card_bytes_per_s * HEADERS * 8 / 1e9:g} Gbit/s; "
        f"{format_seconds(topology.call_s)} per call, "
        f"{format_seconds(topology.between_latency_s)} per hop between hosts; "
        f"inside {format_seconds(topology.inside_latency_s)} per hop, "
        f"{topology.inside_bytes_per_s / 1e9:.1f} GB/s, adds "
        f"{topology.reduce_bytes_per_s / 1e9:.1f} GB/s; commit {simulated.commit()}."
    )


if __name__ == "__main__":
    main()
