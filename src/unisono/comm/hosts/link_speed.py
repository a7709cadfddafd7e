"""How fast the links between hosts are: latency, and bandwidth each way, one pair at a time.

The lowest ranks of two hosts exchange messages of their group. All other hosts are silent
meanwhile.
"""

from __future__ import annotations

import collections
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.hosts.hosts_transport import HostsTransport

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

STREAM_S = 0.4
"""The minimum duration of a stream."""

_PINGS = 40
_BLOCK_BYTES = 1 << 20
_UNDER_WAY = 8
_TAG = 3 << 29
"""Not used by programs or schedules."""


@dataclass(frozen=True)
class LinkSpeed:
    """Between two hosts, by their numbers: seconds for the shortest message, one way, and bytes
    per second from the first to the second and back."""

    first: int
    second: int
    latency_s: float
    there: float
    back: float


def measure_links(comm: Communicator, stream_s: float = STREAM_S) -> list[LinkSpeed]:
    """Measure every pair of hosts of a group; all ranks call this, and get the same result.

    Raises a GroupError if hosts cannot reach each other.
    """
    transport = comm.transport
    assert isinstance(transport, HostsTransport)
    leaders = [ranks[0] for ranks in transport.placement.hosts]
    found = []
    for first, second in itertools.combinations(range(len(leaders)), 2):
        ends = leaders[first], leaders[second]
        figures = torch.zeros(3, dtype=torch.float64)
        comm.barrier()  # no other rank sends
        if comm.rank in ends:
            peer = ends[1 - ends.index(comm.rank)]
            measured = _measure_pair(comm, peer, comm.rank == ends[0], stream_s)
            figures = torch.tensor(measured, dtype=torch.float64)
        comm.broadcast(figures, ends[0])
        found.append(LinkSpeed(first, second, *figures.tolist()))
    return found


def _measure_pair(comm: Communicator, peer: int, is_first: bool, stream_s: float) -> list[float]:
    """Latency, bandwidth there and back; valid on the first of the two."""
    latency_s = _ping(comm, peer, is_first)
    there = _send_stream(comm, peer, stream_s) if is_first else _take_stream(comm, peer)
    back = _take_stream(comm, peer) if is_first else _send_stream(comm, peer, stream_s)
    return [latency_s, there, back]


def _ping(comm: Communicator, peer: int, is_first: bool) -> float:
    message = torch.zeros(8, dtype=torch.uint8)
    took = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        if is_first:
            comm.send(message, peer, _TAG)
        comm.recv(message, peer, _TAG)
        if not is_first:
            comm.send(message, peer, _TAG)
        took.append((time.perf_counter() - begin) / 2)
    return sorted(took)[len(took) // 4]  # other programs lengthen many of them


def _send_stream(comm: Communicator, peer: int, stream_s: float) -> float:
    """Send longer and longer streams until one takes long enough; returns its bytes per second.
    The other side gets it, too."""
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    blocks, answer = 1, torch.zeros(1, dtype=torch.float64)
    while True:
        begin = time.perf_counter()
        comm.send(torch.tensor([blocks]), peer, _TAG + 1)
        _keep_under_way(blocks, lambda _: comm.isend(block, peer, _TAG))
        comm.recv(answer, peer, _TAG)
        took_s = time.perf_counter() - begin
        if took_s > stream_s:
            break
        blocks = min(64 * blocks, int(1.3 * blocks * stream_s / took_s) + 1)
    speed = blocks * _BLOCK_BYTES / took_s
    comm.send(torch.tensor([0]), peer, _TAG + 1)
    comm.send(torch.tensor([speed], dtype=torch.float64), peer, _TAG)
    return speed


def _take_stream(comm: Communicator, peer: int) -> float:
    memory = [torch.empty(_BLOCK_BYTES, dtype=torch.uint8) for _ in range(_UNDER_WAY)]
    speed = torch.zeros(1, dtype=torch.float64)
    announced = torch.zeros(1, dtype=torch.int64)
    while True:
        comm.recv(announced, peer, _TAG + 1)
        if not announced:
            comm.recv(speed, peer, _TAG)
            return float(speed.item())
        blocks = int(announced.item())
        _keep_under_way(blocks, lambda at: comm.irecv(memory[at % _UNDER_WAY], peer, _TAG))
        comm.send(speed, peer, _TAG)


def _keep_under_way(blocks: int, begin: Any) -> None:
    """Start this many messages, keeping a few in flight, and wait for all."""
    under_way: collections.deque[Any] = collections.deque()
    for number in range(blocks):
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
        under_way.append(begin(number))
    for work in under_way:
        work.wait()
