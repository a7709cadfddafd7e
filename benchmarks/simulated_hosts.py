"""The simulator beside real runs over hosts: the schedules that unisono runs between 2, 3 and 4.

    sudo python benchmarks/simulated_hosts.py                 2, 3 and 4 hosts of 2 ranks, 1 Gbit/s
    sudo python benchmarks/simulated_hosts.py --hosts 2 4 --collectives all_reduce --write

Hosts are network namespaces, as in benchmarks/hosts.py, which does the measuring and needs root.
The rate of the cables is given, less the packets' headers; two ranks of this machine tell what a
hop inside a host costs (as in benchmarks/simulated.py), and the calls of 1 KiB on two hosts what a
call costs before anything large moves. All else is simulated: small calls by `mates`, large ones by
`lanes`, in as many pieces as unisono cuts them into. --write puts the table into docs/hosts.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

import simulated

import hosts
from hosts import COLLECTIVES, HEADERS, KIB, MIB, Figure, Setting
from unisono.plan import Schedule, Topology, find, simulate
from unisono.plan.sizes import format_seconds, format_size

LANE_BYTES = 512 * KIB
"""Of a chunk, for each lane: csrc/lanes.c."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "hosts.md"
SIZES = (KIB, MIB, 64 * MIB)
SMALL_BYTES = 4096
"""Up to so many bytes of each rank a call is over with its meeting."""
LATENCY_S = 200e-6
"""What gloo takes to bring a small message to another host, on cores that others use, too."""


def schedule_of(name: str, size_bytes: int, setting: Setting) -> Schedule:
    """What unisono runs for such a call."""
    count, ranks = setting.hosts, setting.hosts * setting.ranks
    own = size_bytes // ranks if name == "all_gather" else size_bytes
    if own <= SMALL_BYTES:
        return find(name, "mates").schedule(ranks, node_size=setting.ranks)
    share = {
        "all_reduce": size_bytes // ranks,
        "broadcast": size_bytes // setting.ranks,
        "all_gather": size_bytes // ranks,
        "reduce_scatter": size_bytes // ranks,
        "all_to_all": size_bytes // count,
    }[name]
    pieces = max(1, -(-share // LANE_BYTES))
    return find(name, "lanes").schedule(ranks, node_size=setting.ranks, pieces=pieces)


def make_topology(setting: Setting) -> Topology:
    """These hosts, as far as two ranks of this machine and the cables tell."""
    inside = simulated.calibrated()
    return Topology(
        "namespaces",
        node_size=setting.ranks,
        inside_latency_s=inside.inside_latency_s,
        inside_bytes_per_s=inside.inside_bytes_per_s,
        between_latency_s=LATENCY_S,
        card_bytes_per_s=setting.rate_bits_per_s / 8 / HEADERS,
        reduce_bytes_per_s=inside.reduce_bytes_per_s,
    )


def calibrate_call(topology: Topology, setting: Setting, figures: Sequence[Figure]) -> Topology:
    """With what a call costs: what measured small ones took beyond the simulated messages."""
    rests = []
    for figure in figures:
        if figure.size_bytes == SIZES[0]:
            schedule = schedule_of(figure.what, figure.size_bytes, setting)
            moving_s = simulate(schedule, topology, figure.size_bytes).time_s
            rests.append(figure.milliseconds["unisono"] / 1000 - moving_s)
    return dataclasses.replace(topology, call_s=max(0.0, statistics.median(rests)))


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
    options = parser.parse_args()
    first = Setting(
        hosts=min(options.hosts),
        ranks=options.ranks,
        rate_bits_per_s=int(options.rate * 1e9),
        sizes=SIZES,
        collectives=tuple(options.collectives),
        ddp=False,
        rounds=options.rounds,
        backends=("unisono",),
    )
    topology = make_topology(first)
    lines = ["| hosts | | bytes | by | simulated | measured | off by |", "|---:|---|---:|---|"]
    lines[1] += "---:|---:|---:|"
    off: dict[bool, list[float]] = {True: [], False: []}
    calibration = ""
    for count in sorted(options.hosts):
        setting = dataclasses.replace(first, hosts=count)
        figures = hosts.measure(setting)
        if not calibration:
            topology = calibrate_call(topology, setting, figures)
            calibration = describe(topology)
        for figure in figures:
            schedule = schedule_of(figure.what, figure.size_bytes, setting)
            expected_s = simulate(schedule, topology, figure.size_bytes).time_s
            took_s = figure.milliseconds["unisono"] / 1000
            error = expected_s / took_s - 1
            off[figure.size_bytes >= 64 * MIB].append(abs(error))
            both = f"{format_seconds(expected_s)} | {format_seconds(took_s)}"
            size = format_size(figure.size_bytes)
            lines.append(
                f"| {count} | {figure.what} | {size} | {schedule.algorithm} | {both} "
                f"| {error:+.0%} |"
            )
    text = [calibration, "", *lines, ""]
    text += [
        f"Off by {statistics.median(off[True]):.0%} in the median and {max(off[True]):.0%} at most "
        f"for 64M, by {statistics.median(off[False]):.0%} in the median for less."
    ]
    print("\n".join(text))
    if options.write:
        head, begin, rest = PAGE.read_text().partition("<!-- simulated -->\n")
        _, end, tail = rest.partition("<!-- /simulated -->")
        PAGE.write_text(head + begin + "\n".join(text) + "\n" + end + tail)


def describe(topology: Topology) -> str:
    return (
        f"{topology.node_size} ranks per host, cables of "
        f"{topology.card_bytes_per_s * HEADERS * 8 / 1e9:g} Gbit/s; "
        f"{format_seconds(topology.call_s)} per call, {format_seconds(LATENCY_S)} per hop between "
        f"hosts; inside {format_seconds(topology.inside_latency_s)} per hop, "
        f"{topology.inside_bytes_per_s / 1e9:.1f} GB/s, adds "
        f"{topology.reduce_bytes_per_s / 1e9:.1f} GB/s."
    )


if __name__ == "__main__":
    main()
