"""Where the members of one group are, and who of them talks to whom between hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unisono.comm.hosts.identity import Hosts


@dataclass(frozen=True)
class Placement:
    """`members` has the global ranks of a group in the order of its ranks; `hosts` the group ranks
    on each host, hosts by lowest rank; `host` and `index` say where this rank stands in them."""

    members: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    host: int
    index: int

    @property
    def rank(self) -> int:
        """This rank."""
        return self.hosts[self.host][self.index]

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this host."""
        return self.hosts[self.host]

    @property
    def lanes(self) -> int:
        """How many ranks of each host exchange the parts of a large call: as many as the smallest
        host has. The j-th of a host talks to the j-th of the others."""
        return min(map(len, self.hosts))

    def others(self) -> Iterator[int]:
        """The numbers of the other hosts, beginning behind our own, so that not all hosts turn to
        the same one at once."""
        for step in range(1, len(self.hosts)):
            yield (self.host + step) % len(self.hosts)

    def peer(self, host: int, index: int) -> int:
        """The global rank of the index-th rank of a host."""
        return self.members[self.hosts[host][index]]

    def mate(self, host: int) -> int:
        """The global rank on another host to which this rank gives what is for that host alone."""
        return self.peer(host, self.index % len(self.hosts[host]))

    def origins(self, index: int) -> list[int]:
        """Whose data the index-th rank of this host hands on to the others of it: its own first,
        then that of its mates on other hosts."""
        here = len(self.here)
        found = [self.here[index]]
        for host, ranks in enumerate(self.hosts):
            if host != self.host:
                found += [rank for at, rank in enumerate(ranks) if at % here == index]
        return found

    def neighbours(self) -> list[int]:
        """The global ranks that this rank has to have a connection to: at least one of each host,
        so that a death is seen by somebody on every host."""
        mates = [self.mate(host) for host in self.others()]
        theirs = [self.members[rank] for rank in self.origins(self.index)[1:]]
        return list(dict.fromkeys(mates + theirs))


def place(members: Sequence[int], hosts: Hosts, me: int) -> Placement:
    """Where these global ranks are, seen from one of them."""
    host_of = {rank: host for host, ranks in enumerate(hosts.members) for rank in ranks}
    by_host: dict[int, list[int]] = {}
    for rank, member in enumerate(members):
        by_host.setdefault(host_of[member], []).append(rank)
    rank = list(members).index(me)
    grouped = tuple(map(tuple, by_host.values()))
    host = next(at for at, ranks in enumerate(grouped) if rank in ranks)
    return Placement(tuple(members), grouped, host, grouped[host].index(rank))
