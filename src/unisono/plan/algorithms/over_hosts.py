"""What the algorithms for ranks on several hosts have in common: who is where, and pipelines.

A host is the list of its ranks. `node_size` says how many there are on each, in blocks, the last
one perhaps smaller; where ranks lie otherwise, it is the list of hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from unisono.plan.schedule import Action, Phase, Step

Hosts = Sequence[Sequence[int]]
Move = tuple[int, int, int, int]
"""From which rank to which, the first chunk, how many."""


def hosts_of(ranks: int, node_size: int | Hosts) -> Hosts:
    """Ranks 0 to node_size - 1 on the first host, and so on; what is left on the last."""
    if not isinstance(node_size, int):
        return node_size
    if node_size < 1:
        raise ValueError(f"a host has at least one rank, not {node_size}")
    return [range(first, min(first + node_size, ranks)) for first in range(0, ranks, node_size)]


def host_of(hosts: Hosts, rank: int) -> int:
    """Which of the hosts a root is on."""
    for number, host in enumerate(hosts):
        if rank in host:
            return number
    raise ValueError(f"root {rank} is not among {sum(map(len, hosts))} ranks")


def make_step(moves: Iterable[Move], action: Action) -> Step:
    """A step of such moves; those from a rank to itself are left out."""
    others = [move for move in moves if move[0] != move[1]]
    source, destination, chunk, count = np.array(others, np.int64).reshape(-1, 4).T
    return Step.of(source, destination, chunk, action, count)


def pipeline(stages: Sequence[Step], pieces: int, shift: int, within: int) -> list[Step | Phase]:
    """Each piece goes through the stages, each stage a piece behind the one before. `stages` are
    those of the first piece; the chunks of the next lie `shift` further in blocks of `within`."""
    if pieces < 1:
        raise ValueError(f"a tensor is cut into at least one piece, not {pieces}")
    stages = [stage for stage in stages if len(stage)]

    def at(time: int) -> Step:
        parts = [
            (stage, shift * (time - behind))
            for behind, stage in enumerate(stages)
            if 0 <= time - behind < pieces
        ]
        return Step.of(
            np.concatenate([stage.source for stage, _ in parts]),
            np.concatenate([stage.destination for stage, _ in parts]),
            np.concatenate([stage.chunk + further for stage, further in parts]),
            np.concatenate([stage.reduces for stage, _ in parts]),
            np.concatenate([stage.count for stage, _ in parts]),
        )

    steps: list[Step | Phase] = []
    full = pieces - len(stages) + 1  # so many steps have all stages
    time, last = 0, pieces + len(stages) - 1 if stages else 0
    while time < last:
        repeats = full if time == len(stages) - 1 and full > 1 else 1
        steps.append(Phase(at(time), repeats, shift, within) if repeats > 1 else at(time))
        time += repeats
    return steps


def mate_on(host: Sequence[int], index: int) -> int:
    """The rank of another host to which the index-th of this one gives what is for all there."""
    return host[index % len(host)]


def origins_of(hosts: Hosts, number: int, index: int) -> list[int]:
    """Whose data the index-th rank of a host hands on inside it: its own first, then that of the
    ranks on other hosts whose mate it is."""
    here = hosts[number]
    found = [here[index]]
    for other, ranks in enumerate(hosts):
        if other != number:
            found += [rank for at, rank in enumerate(ranks) if at % len(here) == index]
    return found
