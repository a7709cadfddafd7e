"""Where the members of one group are, and which of them communicate between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono.comm.meeting.identity import Hosts


class Placement(NamedTuple):
    """`members` has the global ranks of a group in the order of its ranks; `hosts` the group
    ranks on each host, hosts by lowest rank; `host` and `index` are this rank's place in them;
    `sharers` is how many run on this machine, including those of other hosts."""

    members: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    host: int
    index: int  # type: ignore[assignment]  # instead of the method of tuples
    sharers: int = 0

    @property
    def rank(self) -> int:
        """This rank."""
        return self.hosts[self.host][self.index]

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    def hosts_of_ranks(self) -> list[int]:
        """The number of each rank's host."""
        found = {rank: host for host, ranks in enumerate(self.hosts) for rank in ranks}
        return [found[rank] for rank in range(len(self.members))]

    def others(self) -> Iterator[int]:
        """The numbers of the other hosts, beginning after our own, so that not all hosts contact
        the same one at once."""
        for step in range(1, len(self.hosts)):
            yield (self.host + step) % len(self.hosts)

    def mate(self, rank: int, host: int) -> int:
        """The rank on another host that receives what a rank posts."""
        (index,) = (ranks.index(rank) for ranks in self.hosts if rank in ranks)
        return self.hosts[host][index % len(self.hosts[host])]

    def origins(self, index: int) -> list[int]:
        """The ranks of other hosts whose mate is the index-th rank of this one."""
        away = [ranks for host, ranks in enumerate(self.hosts) if host != self.host]
        return [rank for ranks in away for rank in ranks[index :: len(self.here)]]

    def neighbours(self) -> list[int]:
        """The global ranks to which this rank needs a line: at least one on each host, so that
        every host detects a death."""
        ranks = [self.mate(self.rank, host) for host in self.others()] + self.origins(self.index)
        return [self.members[rank] for rank in dict.fromkeys(ranks)]


def place(members: Sequence[int], hosts: Hosts, me: int) -> Placement:
    """Where these global ranks are, seen from one of them."""
    host_of = {rank: host for host, ranks in enumerate(hosts.members) for rank in ranks}
    by_host: dict[int, list[int]] = {}
    for rank, member in enumerate(members):
        by_host.setdefault(host_of[member], []).append(rank)
    rank = list(members).index(me)
    grouped = tuple(map(tuple, by_host.values()))
    host = next(at for at, ranks in enumerate(grouped) if rank in ranks)
    sharers = sum(hosts.boots[member] == hosts.boots[me] for member in members if hosts.boots)
    return Placement(tuple(members), grouped, host, grouped[host].index(rank), sharers)
