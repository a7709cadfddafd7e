"""`unisono doctor --hosts`: the hosts of a job, the links between them, and which one is slow."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unisono.collectives.objects import all_gather_object
from unisono.wording import list_ranks

if TYPE_CHECKING:
    from unisono.comm.base import Communicator

SLOW = 0.6
"""A link with less than this share of the usual bandwidth is slow."""
FAR = 3.0
"""So is one with this many times the usual latency, if that is more than FAR_S longer, too."""
FAR_S = 200e-6
_MANY_PAIRS = 60
_SHORT_S = 0.15
_COMM_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class HostFacts:
    """One host: its ranks, and the interface by which the others reach it; its `mtu` and the
    `speed_mbit` that its driver tells are 0 where they are not known."""

    name: str
    ranks: tuple[int, ...]
    address: str
    interface: str
    mtu: int
    speed_mbit: int


@dataclass(frozen=True)
class LinkFacts:
    """What a message and a stream take from one host to another; `verdict` says what is wrong."""

    first: str
    second: str
    latency_us: float
    there_mbit: float
    back_mbit: float
    verdict: str = ""


@dataclass(frozen=True)
class HostsReport:
    """All hosts, all links, and what is wrong with them, a sentence each."""

    hosts: tuple[HostFacts, ...]
    links: tuple[LinkFacts, ...]
    slow: tuple[str, ...]


def check_hosts(as_json: bool, console: Console) -> None:
    """Measure; every rank calls this, the first one prints."""
    import unisono
    from unisono.comm.hosts.communicator import HostsCommunicator

    with unisono.init("unisono", timeout_s=_COMM_TIMEOUT_S, with_torch=False) as comm:
        if not isinstance(comm, HostsCommunicator):
            report = HostsReport((), (), ())
        else:
            report = measure_hosts(comm)
        if comm.rank == 0:
            if as_json:
                print(json.dumps(asdict(report), indent=2))
            else:
                _print(report, comm, console)
        comm.barrier()


def measure_hosts(comm: Any) -> HostsReport:
    """Measure every pair of the hosts of a world, one after the other; all ranks call this."""
    from unisono.comm.hosts.link_speed import STREAM_S, measure_links

    hosts = comm.links.hosts
    told = all_gather_object(asdict(_own_facts(hosts)), group=comm)
    facts = [HostFacts(**(found | {"ranks": tuple(found["ranks"])})) for found in told]
    first_of = [facts[comm.placement.members.index(hosts.leader(h))] for h in range(hosts.count)]
    many = hosts.count * (hosts.count - 1) // 2 > _MANY_PAIRS
    speeds = measure_links(comm, _SHORT_S if many else STREAM_S)
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
    return judge(first_of, links)


def _own_facts(hosts: Any) -> HostFacts:
    from unisono.comm.hosts.network import find_interface

    interface = find_interface(hosts.address)
    return HostFacts(
        hosts.names[hosts.mine],
        hosts.members[hosts.mine],
        hosts.address,
        interface,
        _number(interface, "mtu"),
        max(0, _number(interface, "speed")),
    )


def _number(interface: str, what: str) -> int:
    try:
        return int(Path(f"/sys/class/net/{interface}/{what}").read_text())
    except (OSError, ValueError):
        return 0


def judge(hosts: Sequence[HostFacts], links: Sequence[LinkFacts]) -> HostsReport:
    """Say which links are slow: by what is usual among these, each way counted by itself."""
    if not links:
        return HostsReport(tuple(hosts), (), ())
    usual_mbit = statistics.median_high([m for k in links for m in (k.there_mbit, k.back_mbit)])
    usual_us = statistics.median_low([link.latency_us for link in links])
    judged, slow = [], []
    for link in links:
        problems = [
            f"{begin} to {end} carries {mbit:,.0f} Mbit/s where {usual_mbit:,.0f} is usual"
            for begin, end, mbit in (
                (link.first, link.second, link.there_mbit),
                (link.second, link.first, link.back_mbit),
            )
            if mbit < SLOW * usual_mbit
        ]
        if link.latency_us > FAR * usual_us and link.latency_us - usual_us > FAR_S * 1e6:
            problems.append(
                f"{link.first} to {link.second} takes {link.latency_us:,.0f} us for the shortest "
                f"message where {usual_us:,.0f} is usual"
            )
        slow += problems
        judged.append(replace(link, verdict="slow" if problems else ""))
    return HostsReport(tuple(hosts), tuple(judged), (*_slow_hosts(judged), *slow))


def _slow_hosts(links: Sequence[LinkFacts]) -> list[str]:
    """Hosts all of whose links are slow, where others' are not: then it is the host."""
    names = dict.fromkeys(name for link in links for name in (link.first, link.second))
    if len(names) < 3 or all(link.verdict for link in links):
        return []
    own = {name: [link for link in links if name in (link.first, link.second)] for name in names}
    found = [name for name, of_host in own.items() if all(link.verdict for link in of_host)]
    return [
        f"every link of {name} is slow: look at its interface, its cable and its port"
        for name in found
    ]


def _print(report: HostsReport, comm: Communicator, console: Console) -> None:
    if not report.hosts:
        console.print(f"all {comm.size} ranks are on one host: there is no link to measure")
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("host", "ranks", "address", "interface", "mtu", "says"):
        table.add_column(name, overflow="fold")
    for host in report.hosts:
        says = f"{host.speed_mbit:,} Mbit/s" if host.speed_mbit else "-"
        cells = (host.name, list_ranks(host.ranks), host.address, host.interface or "?")
        table.add_row(*map(Text, cells), str(host.mtu or "-"), says)
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("link", overflow="fold")
    for name in ("latency us", "there Mbit/s", "back Mbit/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for link in report.links:
        figures = [f"{n:,.0f}" for n in (link.latency_us, link.there_mbit, link.back_mbit)]
        ends = Text(f"{link.first} - {link.second}")
        table.add_row(ends, *figures, link.verdict, style="yellow" if link.verdict else "")
    console.print(table)
    console.print()
    for sentence in report.slow:
        console.print(Text(sentence, "bold yellow"), soft_wrap=True)
    if not report.slow:
        console.print("no link is slower than the others", style="green")
