"""Large calls over several hosts, as unisono runs them (docs/hosts.md).

Lane j consists of the j-th rank of every host; there are as many lanes as the smallest host has
ranks. The ranks of a host combine or collect their data, the ranks of each lane exchange their part
directly, and the ranks of a host share what has arrived. Pieces of the tensor go through these
stages one after another. The stages are those of Horovod's hierarchical all-reduce (2018), but
hosts may differ in size. The cost with h hosts of g ranks, both above 1, and p pieces:

| collective     | steps     | a rank sends inside | and to other hosts  |
|----------------|-----------|---------------------|---------------------|
| all_reduce     | p + 3     | 2(g - 1) / g        | 2(h - 1) / (h g)    |
| reduce         | p + 2     | (g - 1) / g and 1/g | 1 / g               |
| broadcast      | p + h     | (g - 1) / g         | 1 / g, host to host |
| all_gather     | p + 1     | (g - 1) / g         | (h - 1) / (h g)     |
| reduce_scatter | p + 1     | (g - 1) / g         | (h - 1) / (h g)     |
| all_to_all     | p + 1     | (g - 1) / (h g)     | (h - 1) / h         |

The root of a broadcast sends g - 1 inside. In a reduction, ranks without a lane send less. With
hosts of different sizes all_gather and reduce_scatter take one more step, inside.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from unisono.plan.algorithms.reverse import backwards
from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Action, Phase, Schedule, Step

Hosts = Sequence[Sequence[int]]
Move = tuple[int, int, int, int]
"""(source, destination, first chunk, number of chunks)."""

MOST_RANKS = 1024


def count_lanes(hosts: Hosts) -> int:
    """How many ranks of each host exchange data with other hosts."""
    return min(map(len, hosts))


@algorithm("all_reduce", "lanes", most_ranks=MOST_RANKS)
def all_reduce(ranks: int, node_size: int | Hosts = 1, pieces: int = 4) -> Schedule:
    hosts = hosts_of(ranks, node_size)
    lanes, parts = count_lanes(hosts), len(hosts)
    piece = lanes * parts
    into = [(s, d, lane * parts, parts) for s, d, lane in _into_lanes(hosts, lanes)]
    far = [*_along_lanes(hosts)]
    stages = [
        make_step(into, "reduce"),
        make_step([(s, d, lane * parts + to, 1) for s, d, lane, _, to in far], "reduce"),
        make_step([(s, d, lane * parts + of, 1) for s, d, lane, of, _ in far], "copy"),
        make_step([(d, s, chunk, count) for s, d, chunk, count in into], "copy"),
    ]
    steps = pipeline(stages, pieces, piece, piece * pieces)
    return Schedule.from_steps("all_reduce", "lanes", ranks, piece * pieces, steps)


@algorithm("reduce", "lanes", most_ranks=MOST_RANKS)
def reduce(ranks: int, root: int = 0, node_size: int | Hosts = 1, pieces: int = 4) -> Schedule:
    hosts = hosts_of(ranks, node_size)
    lanes, home = count_lanes(hosts), host_of(hosts, root)
    far = [(s, d, lane, 1) for s, d, lane, _, to in _along_lanes(hosts) if to == home]
    stages = [
        make_step([(s, d, lane, 1) for s, d, lane in _into_lanes(hosts, lanes)], "reduce"),
        make_step(far, "reduce"),
        make_step([(rank, root, lane, 1) for lane, rank in enumerate(hosts[home][:lanes])], "copy"),
    ]
    steps = pipeline(stages, pieces, lanes, lanes * pieces)
    return Schedule.from_steps("reduce", "lanes", ranks, lanes * pieces, steps, root)


@algorithm("broadcast", "lanes", most_ranks=MOST_RANKS)
def broadcast(ranks: int, root: int = 0, node_size: int | Hosts = 1, pieces: int = 4) -> Schedule:
    """Every rank ends up with the root's tensor. Hosts pass it on in a chain."""
    hosts = hosts_of(ranks, node_size)
    lanes, home = count_lanes(hosts), host_of(hosts, root)
    chain = [hosts[(home + position) % len(hosts)] for position in range(len(hosts))]
    first: list[Move] = [(root, rank, 0, lanes) for rank in chain[0]]
    stages = [make_step(first, "copy")]
    shared: list[Move] = []
    for before, here in itertools.pairwise(chain):
        passed = [(before[lane], here[lane], lane, 1) for lane in range(lanes)]
        stages.append(make_step([*passed, *shared], "copy"))
        shared = [(d, s, lane, 1) for s, d, lane in _into_lanes([here], lanes)]
    stages.append(make_step(shared, "copy"))
    steps = pipeline(stages, pieces, lanes, lanes * pieces)
    return Schedule.from_steps("broadcast", "lanes", ranks, lanes * pieces, steps, root)


@algorithm("all_gather", "lanes", most_ranks=MOST_RANKS)
def all_gather(ranks: int, node_size: int | Hosts = 1, pieces: int = 4) -> Schedule:
    """Every rank ends up with every rank's part. Hosts of different sizes share inside first; then
    a host's data is cut into as many parts as there are lanes."""
    hosts = hosts_of(ranks, node_size)
    lanes = count_lanes(hosts)
    is_even = all(len(host) == lanes for host in hosts)
    units = 1 if is_even else lanes  # per rank, so that they can be divided among the lanes
    carried = [  # by host and lane: the first chunk of each unit
        np.array([(rank * units + unit) * pieces for rank in host for unit in range(units)])
        .reshape(lanes, -1)
        .tolist()
        for host in hosts
    ]
    own = units * pieces
    first = [(source, to, source * own, own) for host in hosts for source in host for to in host]
    steps: list[Step] = [] if is_even else [make_step(first, "copy")]
    between = [
        (s, d, chunk, 1) for s, d, lane, of, _ in _along_lanes(hosts) for chunk in carried[of][lane]
    ]
    inside = [
        (source, to, chunk, 1)
        for number, host in enumerate(hosts)
        for lane, source in enumerate(host[:lanes])
        for of in range(len(hosts))
        if of != number or is_even
        for chunk in carried[of][lane]
        for to in host
    ]
    stages = [make_step(between, "copy"), make_step(inside, "copy")]
    piped = pipeline(stages, pieces, 1, pieces)
    return Schedule.from_steps("all_gather", "lanes", ranks, ranks * own, [*steps, *piped])


@algorithm("reduce_scatter", "lanes", most_ranks=MOST_RANKS)
def reduce_scatter(ranks: int, node_size: int | Hosts = 1, pieces: int = 4) -> Schedule:
    return backwards(all_gather(ranks, node_size, pieces))


@algorithm("all_to_all", "lanes", most_ranks=512)
def all_to_all(ranks: int, node_size: int | Hosts = 1, pieces: int = 4) -> Schedule:
    """Every rank ends up with what each rank had for it, directly from that rank: inside a host all
    at once, from other hosts in pieces."""
    hosts = hosts_of(ranks, node_size)
    number = {rank: number for number, host in enumerate(hosts) for rank in host}
    pairs = [(source, to, (source * ranks + to) * pieces) for source in number for to in number]
    inside = [(*pair, pieces) for pair in pairs if number[pair[0]] == number[pair[1]]]
    between = [(*pair, 1) for pair in pairs if number[pair[0]] != number[pair[1]]]
    first = make_step(inside, "copy")
    piped = pipeline([make_step(between, "copy")], pieces, 1, pieces)
    steps = [first, *piped] if len(first) else piped
    return Schedule.from_steps("all_to_all", "lanes", ranks, ranks * ranks * pieces, steps)


# -- who talks to whom ---------------------------------------------------------------------------


def _into_lanes(hosts: Hosts, lanes: int) -> Iterator[tuple[int, int, int]]:
    """From each rank to each rank of its host that has a lane, and which lane."""
    for host in hosts:
        for source in host:
            yield from ((source, to, lane) for lane, to in enumerate(host[:lanes]))


def _along_lanes(hosts: Hosts) -> Iterator[tuple[int, int, int, int, int]]:
    """From each rank with a lane to each other rank of it: the lane, the hosts from and to."""
    for lane in range(count_lanes(hosts)):
        for of, host in enumerate(hosts):
            for to, there in enumerate(hosts):
                if to != of:
                    yield host[lane], there[lane], lane, of, to


# -- who is where, and pipelines -------------------------------------------------------------------
# A host is the list of its ranks. `node_size` is the number of ranks per host, in blocks, of which
# the last may be smaller; for any other placement it is the list of hosts.


def hosts_of(ranks: int, node_size: int | Hosts) -> Hosts:
    """Ranks 0 to node_size - 1 on the first host, and so on; the last host has the rest."""
    if not isinstance(node_size, int):
        return node_size
    if node_size < 1:
        raise ValueError(f"a host needs at least one rank, not {node_size}")
    return [range(first, min(first + node_size, ranks)) for first in range(0, ranks, node_size)]


def host_of(hosts: Hosts, rank: int) -> int:
    for number, host in enumerate(hosts):
        if rank in host:
            return number
    raise ValueError(f"root {rank} is not among {sum(map(len, hosts))} ranks")


def make_step(moves: Iterable[Move], action: Action) -> Step:
    """A step of these moves; those from a rank to itself are left out."""
    others = [move for move in moves if move[0] != move[1]]
    source, destination, chunk, count = np.array(others, np.int64).reshape(-1, 4).T
    return Step.of(source, destination, chunk, action, count)


def pipeline(stages: Sequence[Step], pieces: int, shift: int, within: int) -> list[Step | Phase]:
    """Each piece goes through the stages, one step behind the piece before. `stages` are those of
    the first piece; the chunks of the next are `shift` further on, in blocks of `within`."""
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, not {pieces}")
    stages = [stage for stage in stages if len(stage)]

    def at(time: int) -> Step:
        parts = [
            dataclasses.replace(stage, chunk=stage.chunk + shift * (time - behind))
            for behind, stage in enumerate(stages)
            if 0 <= time - behind < pieces
        ]
        names = ("source", "destination", "chunk", "reduces", "count")
        return Step.of(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    steps: list[Step | Phase] = []
    full = pieces - len(stages) + 1  # steps in which all stages are busy
    time, last = 0, pieces + len(stages) - 1 if stages else 0
    while time < last:
        repeats = full if time == len(stages) - 1 and full > 1 else 1
        steps.append(Phase(at(time), repeats, shift, within) if repeats > 1 else at(time))
        time += repeats
    return steps
