"""What large calls over hosts are made of: lanes between hosts, chunks, stages that overlap.

A lane is the j-th ranks of all hosts: each carries its part of a call between them. Of uneven hosts
as many ranks have a lane as the smallest has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from unisono.comm.hosts.link import FRAME_BYTES
from unisono.comm.hosts.reductions import HostsReduction
from unisono.comm.on_rows.row_transport import Rows
from unisono.comm.on_rows.rows import bytes_of

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup

OUT, BACK, GATHER = 1, 2, 5
"""Stages of a call, by which frames of different steps are told apart."""

_LEAST_CHUNK = 256 * 1024
_WANTED_CHUNKS = 4
Span = tuple[int, int]


def bound(length: int, parts: int, part: int) -> int:
    """Where a part begins, if a length is cut into parts as equal as may be."""
    return length * part // parts


def span_of(begin: int, end: int, parts: int, part: int) -> Span:
    """From where to where a part of a span goes."""
    length = end - begin
    return begin + bound(length, parts, part), begin + bound(length, parts, part + 1)


def count_chunks(share_bytes: int) -> int:
    """In how many chunks to move so many bytes by one connection: frames, or smaller where there
    would be too few of them to overlap."""
    frames = -(-share_bytes // FRAME_BYTES)
    return max(1, frames, min(_WANTED_CHUNKS, share_bytes // _LEAST_CHUNK))


def run_pipeline(chunks: int, *stages: Callable[[int], None]) -> None:
    """Have each chunk go through the stages, each stage one chunk behind the one before."""
    for turn in range(chunks + len(stages) - 1):
        for behind, stage in enumerate(stages):
            if 0 <= turn - behind < chunks:
                stage(turn - behind)


def slice_of(rows: Sequence[torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """Part of rows behind each other: a view where it lies in one of them, else a copy."""
    found = [row[low:high] for row, low, high in _overlaps(rows, begin, end)]
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if found else rows[0][:0]


def write_slice(rows: Sequence[torch.Tensor], begin: int, part: torch.Tensor) -> None:
    """The reverse of `slice_of`, where that was a copy."""
    at = 0
    for row, low, high in _overlaps(rows, begin, begin + part.numel()):
        row[low:high].copy_(part[at : at + high - low])
        at += high - low


def _overlaps(
    rows: Sequence[torch.Tensor], begin: int, end: int
) -> Iterator[tuple[torch.Tensor, int, int]]:
    start = 0
    for row in rows:
        low, high = max(begin - start, 0), min(end - start, row.numel())
        if low < high:
            yield row, low, high
        start += row.numel()


class Lane:
    """This rank's part in a large call: `number` is None where its host has more ranks than the
    smallest one, and it takes part inside its host alone."""

    def __init__(self, group: HostsGroup) -> None:
        self.group = group
        self.place = group.placement
        self.count = self.place.lanes
        self.hosts = len(self.place.hosts)
        self.number = self.place.index if self.place.index < self.count else None

    def send(self, host: int, stage: int, row: torch.Tensor) -> None:
        """Send a row to the rank of the same lane on another host."""
        assert self.number is not None
        self.group.send_row(self.place.peer(host, self.number), stage, bytes_of(row))

    def take(self, host: int, stage: int, row: torch.Tensor) -> None:
        """Fill a row with what the rank of the same lane on another host sends."""
        assert self.number is not None
        self.group.take_row(self.place.peer(host, self.number), stage, bytes_of(row))

    def take_all(self, stage: int, own: torch.Tensor) -> Rows:
        """What each host has, in the order of hosts: `own` is ours."""
        rows = []
        for host in range(self.hosts):
            row = own
            if host != self.place.host:
                row = torch.empty_like(own)
                self.take(host, stage, row)
            rows.append(row)
        return rows

    def split(self, begin: int, end: int) -> list[Span]:
        """From where to where each rank of this host has a part of a span: nothing for those
        without a lane."""
        spans = [span_of(begin, end, self.count, lane) for lane in range(self.count)]
        return spans + [(end, end)] * (len(self.place.here) - self.count)

    def reduce_inside(self, parts: Rows, reduction: HostsReduction) -> torch.Tensor:
        """Our part of the sum of this host's ranks, as it crosses to others."""
        if len(parts) == 1:
            return reduction.narrow(reduction.combine_ranks(parts))
        own = torch.empty_like(parts[self.place.index])
        self.group.local.reduce_scatter(own, parts, reduction.inside)
        return reduction.narrow(own)

    def share_inside(self, parts: Rows, own: torch.Tensor) -> None:
        """Every rank of this host has all parts."""
        if len(parts) > 1:
            self.group.local.all_gather(parts, own)
        elif parts[0].data_ptr() != own.data_ptr():
            parts[0].copy_(own)
