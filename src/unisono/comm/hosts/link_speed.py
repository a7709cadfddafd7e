"""How fast the links between hosts are: latency, and bandwidth each way, one pair at a time.

Between the lowest ranks of two hosts a plain stream goes over a gloo connection of its own, which
is what large calls are made of. All other hosts are silent meanwhile.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unisono.comm.hosts.hosts_transport import HostsTransport

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

STREAM_S = 0.4
"""For how long a stream goes on at least."""

_PINGS = 40
_BLOCK_BYTES = 1 << 20
_UNDER_WAY = 8
_TIMEOUT_S = 120.0
_serials = itertools.count()


@dataclass(frozen=True)
class LinkSpeed:
    """Between two hosts, by their numbers: seconds for the shortest message, one way, and bytes per
    second from the first to the second, and back."""

    first: int
    second: int
    latency_s: float
    there: float
    back: float


def measure_links(comm: Communicator, stream_s: float = STREAM_S) -> list[LinkSpeed]:
    """Measure every pair of hosts of a world; all ranks call this, and have the same afterwards.

    Raises RendezvousError or a GroupError where hosts do not reach each other.
    """
    transport = comm.transport
    assert isinstance(transport, HostsTransport)
    links = transport.links
    hosts = links.hosts
    serial = next(_serials)
    found = []
    for first, second in itertools.combinations(range(hosts.count), 2):
        ends = hosts.leader(first), hosts.leader(second)
        figures = torch.zeros(3, dtype=torch.float64)
        comm.barrier()  # nobody else sends
        if links.me in ends:
            peer = ends[1 - ends.index(links.me)]
            gloo = links.make_pair(peer, f"unisono/speed/{serial}", _TIMEOUT_S)
            figures = torch.tensor(_measure_pair(gloo, stream_s), dtype=torch.float64)
        comm.broadcast(figures, transport.placement.members.index(ends[0]))
        found.append(LinkSpeed(first, second, *figures.tolist()))
    return found


def _measure_pair(gloo: Any, stream_s: float) -> list[float]:
    """Latency, bandwidth there and back; the first of the two has them right."""
    latency_s = _ping(gloo)
    there = _send_stream(gloo, stream_s) if gloo.rank() == 0 else _take_stream(gloo)
    back = _send_stream(gloo, stream_s) if gloo.rank() == 1 else _take_stream(gloo)
    return [latency_s, there, back]


def _ping(gloo: Any) -> float:
    other = 1 - gloo.rank()
    message = torch.zeros(8, dtype=torch.uint8)
    took = []
    for _ in range(_PINGS):
        if gloo.rank() == 0:
            begin = time.perf_counter()
            gloo.send([message], other, 0).wait()
            gloo.recv([message], other, 0).wait()
            took.append((time.perf_counter() - begin) / 2)
        else:
            gloo.recv([message], other, 0).wait()
            gloo.send([message], other, 0).wait()
    return statistics.median(took[len(took) // 4 :]) if took else 0.0


def _send_stream(gloo: Any, stream_s: float) -> float:
    """Send ever longer streams until one takes long enough: bytes per second in that. The other
    side is told of it, too."""
    other = 1 - gloo.rank()
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
    blocks, answer = 1, torch.zeros(1, dtype=torch.float64)
    while True:
        begin = time.perf_counter()
        gloo.send([torch.tensor([blocks], dtype=torch.int64)], other, 1).wait()
        under_way: collections.deque[Any] = collections.deque()
        for _ in range(blocks):
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().wait()
            under_way.append(gloo.send([block], other, 2))
        for work in under_way:
            work.wait()
        gloo.recv([answer], other, 3).wait()
        took_s = time.perf_counter() - begin
        if took_s > stream_s:
            break
        blocks = min(64 * blocks, int(1.3 * blocks * stream_s / took_s) + 1)
    speed = blocks * _BLOCK_BYTES / took_s
    gloo.send([torch.tensor([0], dtype=torch.int64)], other, 1).wait()
    gloo.send([torch.tensor([speed], dtype=torch.float64)], other, 3).wait()
    return speed


def _take_stream(gloo: Any) -> float:
    other = 1 - gloo.rank()
    memory = [torch.empty(_BLOCK_BYTES, dtype=torch.uint8) for _ in range(_UNDER_WAY)]
    speed = torch.zeros(1, dtype=torch.float64)
    announced = torch.zeros(1, dtype=torch.int64)
    while True:
        gloo.recv([announced], other, 1).wait()
        blocks = int(announced.item())
        if not blocks:
            gloo.recv([speed], other, 3).wait()
            return float(speed.item())
        under_way: collections.deque[Any] = collections.deque()
        for number in range(blocks):  # ahead of what is sent
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().wait()
            under_way.append(gloo.recv([memory[number % _UNDER_WAY]], other, 2))
        for work in under_way:
            work.wait()
        gloo.send([speed], other, 3).wait()
