"""The floor of a row: the least that a rank must do with its own memory, done by all ranks at once;
and over several hosts the time that their links need (docs/bench.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.bench.backends.base import Buffers, Call, Case
from unisono.bench.collectives import item_bytes
from unisono.cases.primitives import Primitive

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

NAME = "floor"
_STREAM_S = 0.3


def floor_calls(case: Case, buffers: Buffers) -> Sequence[Call] | None:
    """A local add or copy of the bytes that the collective combines or moves; None if there are
    none. A reduce_scatter adds all parts but one into one."""
    if case.collective.is_empty:
        return None
    if case.collective.name == "reduce_scatter":
        parts = buffers.parts("input", case.ranks)
        return [partial(_add_all, parts[0].clone(), parts[1:] or parts)]
    wide = buffers.output if buffers.output.numel() >= buffers.input.numel() else buffers.input
    other = wide.new_zeros(wide.numel())
    if case.collective.reduces:
        return [partial(wide.add_, other)]
    return [partial(other.copy_, wide)]


def floor_bytes(case: Case, item_bytes: int) -> int:
    counts = case.collective.counts(case.size_bytes, item_bytes, case.ranks)
    wide = max(counts.output, counts.input)
    return item_bytes * (counts.output if case.collective.name == "reduce_scatter" else wide)


def _add_all(total: Any, parts: Sequence[Any]) -> None:
    for part in parts:
        total.add_(part)


# -- several hosts -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LinkLimit:
    """`hosts` are the names of the hosts and how many ranks each has; `interface` is that of this
    one. `bytes_per_s` is what the slowest link carries, `latency_s` what a message takes there."""

    hosts: tuple[tuple[str, int], ...]
    interface: str
    bytes_per_s: float
    latency_s: float

    def least_us(self, case: Case) -> float:
        """The least possible time of a call; 0 if it need not leave a host."""
        share = self._share(case.collective)
        if share is None:
            return 0.0
        items = item_bytes(case.dtype)
        size_bytes = items * case.collective.counts(case.size_bytes, items, case.ranks).size
        return (self.latency_s + share * size_bytes / self.bytes_per_s) * 1e6

    def _share(self, collective: Primitive) -> float | None:
        """How many times its size the busiest host's link carries."""
        ranks = [count for _, count in self.hosts]
        total, hosts = sum(ranks), len(ranks)
        away = [(total - count) / total for count in ranks]
        if not collective.is_collective:
            return None  # messages may stay on a host
        if collective.is_empty:
            return 0.0
        if not collective.wide:
            return 1.0 if collective.is_rooted else 2 * (hosts - 1) / hosts
        if collective.is_rooted:
            return min(away)  # for any root
        if collective.is_pairwise:
            return max(count * share for count, share in zip(ranks, away, strict=True))
        return max(away)

    def facts(self) -> dict[str, Any]:
        return {
            "hosts": [{"name": name, "ranks": ranks} for name, ranks in self.hosts],
            "link": {
                "interface": self.interface,
                "bytes_per_s": self.bytes_per_s,
                "latency_us": self.latency_s * 1e6,
            },
        }


def ranks_by_host(comm: Communicator) -> tuple[tuple[int, ...], ...]:
    from unisono.comm.hosts.hosts_transport import HostsTransport

    if isinstance(comm.transport, HostsTransport):
        return comm.transport.links.hosts.members
    return (tuple(range(comm.size)),)


def measure_link_limit(comm: Communicator) -> LinkLimit | None:
    """Measure every link of a group over hosts, with all its ranks; None for one host."""
    from unisono.comm.hosts.hosts_transport import HostsTransport
    from unisono.comm.hosts.link_speed import measure_links
    from unisono.comm.meeting.network import find_interface

    if not isinstance(comm.transport, HostsTransport):
        return None
    hosts = comm.transport.links.hosts
    speeds = measure_links(comm, _STREAM_S)
    return LinkLimit(
        tuple(zip(hosts.names, map(len, hosts.members), strict=True)),
        find_interface(hosts.address),
        min(min(speed.there, speed.back) for speed in speeds),
        min(speed.latency_s for speed in speeds),
    )
