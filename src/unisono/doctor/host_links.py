"""`unisono doctor --hosts`: the hosts of a job, the links between them, and which one is slow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from unisono.collectives.objects import all_gather_object
from unisono.comm.communicator import Communicator
from unisono.errors import list_ranks
from unisono.show.table import BARE, build_table, to_json

SLOW = 0.6
"""A link with less than this share of the usual bandwidth is slow."""
FAR = 3.0
"""So is one with this many times the usual latency, if it is also more than FAR_US longer."""
FAR_US = 200
_MANY_HOSTS = 12
_SHORT_S = 0.15
"""How long a stream lasts if there are many hosts."""
_COMM_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class HostFacts:
    """One host: its ranks, and the interface by which the others reach it; its `mtu` and the
    `speed_mbit` of its driver are 0 if unknown."""

    name: str
    ranks: tuple[int, ...]
    address: str
    interface: str
    mtu: int
    speed_mbit: int


@dataclass(frozen=True)
class LinkFacts:
    """The latency and bandwidth from one host to another; `verdict` is "slow" or ""."""

    first: str
    second: str
    latency_us: float
    there_mbit: float
    back_mbit: float
    verdict: str = ""


def check_hosts(as_json: bool, console: Console) -> None:
    """Measure and print; every rank calls this, the first one prints."""
    import unisono
    from unisono.comm.hosts.hosts_transport import HostsTransport

    with unisono.init("unisono", timeout_s=_COMM_TIMEOUT_S, with_torch=False) as comm:
        hosts, links = _measure(comm) if isinstance(comm.transport, HostsTransport) else ([], [])
        judged, slow = judge(links)
        if comm.rank == 0 and as_json:
            print(to_json({"hosts": hosts, "links": judged, "slow": slow}))
        elif comm.rank == 0 and not hosts:
            console.print(f"all {comm.size} ranks are on one host: there is no link to measure")
        elif comm.rank == 0:
            show_hosts(hosts, judged, slow, console)
        comm.barrier()


def _measure(comm: Communicator) -> tuple[list[HostFacts], list[LinkFacts]]:
    """Measure every pair of hosts, one after the other; all ranks call this."""
    from unisono.comm.hosts.hosts_transport import HostsTransport
    from unisono.comm.hosts.link_speed import STREAM_S, measure_links
    from unisono.comm.meeting.network import find_interface

    transport = comm.transport
    assert isinstance(transport, HostsTransport)
    hosts = transport.links.hosts
    interface = find_interface(hosts.address)
    mtu, speed_mbit = _read_number(interface, "mtu"), _read_number(interface, "speed")
    told = all_gather_object((hosts.address, interface, mtu, speed_mbit), group=comm)
    leaders = [transport.placement.members.index(hosts.leader(host)) for host in range(hosts.count)]
    facts = [
        HostFacts(hosts.names[host], tuple(hosts.members[host]), *told[leader])
        for host, leader in enumerate(leaders)
    ]
    speeds = measure_links(comm, STREAM_S if hosts.count < _MANY_HOSTS else _SHORT_S)
    links = [
        LinkFacts(
            hosts.names[speed.first],
            hosts.names[speed.second],
            speed.latency_s * 1e6,
            speed.there * 8 / 1e6,
            speed.back * 8 / 1e6,
        )
        for speed in speeds
    ]
    return facts, links


def _read_number(interface: str, what: str) -> int:
    try:
        return max(0, int(Path(f"/sys/class/net/{interface}/{what}").read_text()))
    except (OSError, ValueError):
        return 0


def judge(links: Sequence[LinkFacts]) -> tuple[list[LinkFacts], list[str]]:
    """The links with their verdicts, compared with the usual values, and the slow ones in
    sentences."""
    if not links:
        return [], []
    usual_mbit = statistics.median_high([m for k in links for m in (k.there_mbit, k.back_mbit)])
    usual_us = statistics.median_low([link.latency_us for link in links])
    judged, slow = [], []
    for link in links:
        one, other = link.first, link.second
        problems = [
            f"{begin} to {end} carries {mbit:,.0f} Mbit/s where {usual_mbit:,.0f} is usual"
            for begin, end, mbit in ((one, other, link.there_mbit), (other, one, link.back_mbit))
            if mbit < SLOW * usual_mbit
        ]
        if link.latency_us > max(FAR * usual_us, usual_us + FAR_US):
            problems.append(
                f"{one} to {other} takes {link.latency_us:,.0f} us for the shortest message "
                f"where {usual_us:,.0f} is usual"
            )
        slow += problems
        judged.append(replace(link, verdict="slow" if problems else ""))
    return judged, [*_slow_hosts(judged), *slow]


def _slow_hosts(links: Sequence[LinkFacts]) -> list[str]:
    """Hosts whose links are all slow while others' are not: then the host is to blame."""
    names = dict.fromkeys(name for link in links for name in (link.first, link.second))
    if len(names) < 3 or all(link.verdict for link in links):
        return []
    return [
        f"every link of {name} is slow: look at its interface, its cable and its port"
        for name in names
        if all(link.verdict for link in links if name in (link.first, link.second))
    ]


def show_hosts(
    hosts: Sequence[HostFacts], links: Sequence[LinkFacts], slow: Sequence[str], console: Console
) -> None:
    heads = ("host", "ranks", "address", "interface", "mtu", "says")
    rows = [
        (
            *(host.name, list_ranks(host.ranks), host.address, host.interface or "?"),
            *(str(host.mtu or "-"), f"{host.speed_mbit:,} Mbit/s" if host.speed_mbit else "-"),
        )
        for host in hosts
    ]
    console.print(build_table(heads, rows, **BARE), "")
    figures = ("link", ">latency us", ">there Mbit/s", ">back Mbit/s", "")
    lines = [
        (
            f"{link.first} - {link.second}",
            *(f"{n:,.0f}" for n in (link.latency_us, link.there_mbit, link.back_mbit)),
            link.verdict,
        )
        for link in links
    ]
    styles = ["yellow" if link.verdict else "" for link in links]
    console.print(build_table(figures, lines, styles, **BARE), "")
    for sentence in slow:
        console.print(Text(sentence, "bold yellow"), soft_wrap=True)
    if not slow:
        console.print("no link is slower than the others", style="green")
