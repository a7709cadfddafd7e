"""Large calls over hosts, in chunks: what a host does with one chunk overlaps with the network's
work on the others.

Bytes that leave each host in a call on S bytes, with H hosts of R ranks: all_reduce
2 (H-1)/H S, reduce S to the root's host, reduce_scatter and all_gather (H-1)/H S of the wide side,
broadcast S along a chain of hosts, all_to_all what its ranks have for other hosts. For uneven hosts
as many lanes carry it as the smallest has ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from unisono.comm.hosts.link import FRAME_BYTES
from unisono.comm.hosts.reductions import Reduction
from unisono.comm.row_group import Rows
from unisono.comm.rows import bytes_of

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup

_OUT, _BACK = 1, 2
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

    def reduce_inside(self, parts: Rows, reduction: Reduction) -> torch.Tensor:
        """Our part of the sum of this host's ranks."""
        if len(parts) == 1:
            return reduction.combine_ranks(parts)
        own = torch.empty_like(parts[self.place.index])
        self.group.local.reduce_scatter(own, parts, reduction.inside)
        return own

    def share_inside(self, parts: Rows, own: torch.Tensor) -> None:
        """Every rank of this host has all parts."""
        if len(parts) > 1:
            self.group.local.all_gather(parts, own)
        elif parts[0].data_ptr() != own.data_ptr():
            parts[0].copy_(own)


def reduce_large(
    group: HostsGroup, row: torch.Tensor, reduction: Reduction, root: int | None, keep: bool
) -> torch.Tensor:
    """The reduction of a row for all ranks, or for `root`; in place unless `keep` forbids it."""
    if root is not None:
        return _reduce_to_root(group, row, reduction, root)
    lane = Lane(group)
    wide = reduction.widen(row)
    result = torch.empty_like(row) if keep else row
    chunks = count_chunks(row.numel() // (lane.count * lane.hosts) * wide.element_size())
    partials: dict[int, torch.Tensor] = {}
    results: dict[int, torch.Tensor] = {}

    def spans(chunk: int) -> list[Span]:
        return lane.split(*span_of(0, row.numel(), chunks, chunk))

    def host_part(part: torch.Tensor, host: int) -> torch.Tensor:
        begin, end = span_of(0, part.numel(), lane.hosts, host)
        return part[begin:end]

    def reduce_inside(chunk: int) -> None:
        parts = [wide[begin:end] for begin, end in spans(chunk)]
        partial = partials[chunk] = lane.reduce_inside(parts, reduction)
        if lane.number is not None:
            for host in lane.place.others():
                lane.send(host, _OUT, host_part(partial, host))

    def reduce_between(chunk: int) -> None:
        partial = partials.pop(chunk)
        own = results[chunk] = torch.empty_like(partial, dtype=row.dtype)
        if lane.number is None:
            return
        mine = host_part(partial, lane.place.host)
        finished = reduction.combine_hosts(lane.take_all(_OUT, mine))
        host_part(own, lane.place.host).copy_(finished)
        for host in lane.place.others():
            lane.send(host, _BACK, finished)

    def share(chunk: int) -> None:
        own = results.pop(chunk)
        if lane.number is not None:
            for host in lane.place.others():
                lane.take(host, _BACK, host_part(own, host))
        lane.share_inside([result[begin:end] for begin, end in spans(chunk)], own)

    run_pipeline(chunks, reduce_inside, reduce_between, share)
    return result


def _reduce_to_root(
    group: HostsGroup, row: torch.Tensor, reduction: Reduction, root: int
) -> torch.Tensor:
    lane = Lane(group)
    home = next(host for host, ranks in enumerate(lane.place.hosts) if root in ranks)
    is_home = lane.place.host == home
    wide = reduction.widen(row)
    result = torch.empty_like(row) if group.rank == root else row
    chunks = count_chunks(row.numel() // lane.count * wide.element_size())
    partials: dict[int, torch.Tensor] = {}

    def spans(chunk: int) -> list[Span]:
        return lane.split(*span_of(0, row.numel(), chunks, chunk))

    def reduce_inside(chunk: int) -> None:
        parts = [wide[begin:end] for begin, end in spans(chunk)]
        partials[chunk] = lane.reduce_inside(parts, reduction)
        if lane.number is not None and not is_home:
            lane.send(home, _OUT, partials[chunk])

    def finish(chunk: int) -> None:
        own = partials.pop(chunk)
        if not is_home:
            return
        if lane.number is not None:
            own = reduction.combine_hosts(lane.take_all(_OUT, own))
        own = own.to(row.dtype)
        parts = [result[begin:end] for begin, end in spans(chunk)]
        if len(parts) == 1:
            parts[0].copy_(own)
        else:
            to = lane.place.here.index(root)
            group.local.gather(parts if group.rank == root else None, own, to)

    run_pipeline(chunks, reduce_inside, finish)
    return result


def reduce_scatter_large(group: HostsGroup, by_rank: Rows, reduction: Reduction) -> torch.Tensor:
    """Our part of the reduction of all ranks' rows."""
    lane = Lane(group)
    place = lane.place
    rows = [[by_rank[rank] for rank in ranks] for ranks in place.hosts]
    lengths = [sum(row.numel() for row in of_host) for of_host in rows]
    slices = [lane.split(0, length) for length in lengths]
    width = torch.empty(0, dtype=reduction.partial).element_size()
    chunks = count_chunks(max(lengths) // lane.count * width)
    own_begin, own_end = slices[place.host][place.index]
    result = torch.empty(own_end - own_begin, dtype=reduction.dtype)
    partials: dict[int, torch.Tensor] = {}

    def reduce_inside(chunk: int) -> None:
        for host in (*place.others(), place.host):
            spans = [span_of(begin, end, chunks, chunk) for begin, end in slices[host]]
            parts = [reduction.widen(slice_of(rows[host], *span)) for span in spans]
            partial = lane.reduce_inside(parts, reduction)
            if host == place.host:
                partials[chunk] = partial
            elif lane.number is not None:
                lane.send(host, _OUT, partial)

    def reduce_between(chunk: int) -> None:
        partial = partials.pop(chunk)
        if lane.number is not None:
            begin, end = span_of(0, len(result), chunks, chunk)
            result[begin:end] = reduction.combine_hosts(lane.take_all(_OUT, partial))

    run_pipeline(chunks, reduce_inside, reduce_between)
    return _hand_over(group, result, slices[place.host], rows[place.host])


def _hand_over(
    group: HostsGroup, result: torch.Tensor, slices: list[Span], rows: Rows
) -> torch.Tensor:
    """From what each lane has of its host's results to what each rank wants of them."""
    wanted, begin = [], 0
    for row in rows:
        wanted.append((begin, begin + row.numel()))
        begin += row.numel()
    if wanted == slices:
        return result
    index = group.placement.index
    (own_begin, own_end), (has_begin, _) = wanted[index], slices[index]
    output = torch.empty(own_end - own_begin, dtype=result.dtype)
    taken, given = [], []
    for other in range(len(rows)):
        low, high = _common(wanted[index], slices[other])
        taken.append(output[low - own_begin : high - own_begin] if low < high else output[:0])
        low, high = _common(wanted[other], slices[index])
        given.append(result[low - has_begin : high - has_begin] if low < high else result[:0])
    group.local.all_to_all(taken, given)
    return output


def _common(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def all_gather_large(group: HostsGroup, targets: Rows, row: torch.Tensor) -> None:
    """Each target becomes its rank's row of bytes."""
    lane = Lane(group)
    place = lane.place
    rows = [[targets[rank] for rank in ranks] for ranks in place.hosts]
    slices = [lane.split(0, sum(len(target) for target in of_host)) for of_host in rows]
    is_own = all(  # then a lane can begin before its host has met
        len(place.here) == lane.count and end - begin == len(target)
        for (begin, end), target in zip(slices[place.host], rows[place.host], strict=True)
    )
    sources = rows[place.host]
    if is_own:
        sources = [row if at == place.index else part for at, part in enumerate(sources)]
    else:
        lane.share_inside(rows[place.host], row)
    longest = max(end - begin for spans in slices for begin, end in spans)
    chunks = count_chunks(longest)

    def send(chunk: int) -> None:
        if lane.number is not None:
            begin, end = span_of(*slices[place.host][place.index], chunks, chunk)
            part = slice_of(sources, begin, end)
            for host in place.others():
                lane.send(host, _OUT, part)

    def share(chunk: int) -> None:
        if chunk == 0 and is_own:
            lane.share_inside(rows[place.host], row)
        for host in place.others():
            spans = [span_of(begin, end, chunks, chunk) for begin, end in slices[host]]
            parts = [slice_of(rows[host], *span) for span in spans]
            own = parts[place.index]
            if lane.number is not None:
                lane.take(host, _OUT, own)
            lane.share_inside(parts, own)
            for (begin, _), part in zip(spans, parts, strict=True):
                if not _is_view(part, rows[host]):
                    write_slice(rows[host], begin, part)

    run_pipeline(chunks, send, share)


def _is_view(part: torch.Tensor, rows: Rows) -> bool:
    storage = part.untyped_storage().data_ptr()
    return any(row.untyped_storage().data_ptr() == storage for row in rows)


def broadcast_large(group: HostsGroup, row: torch.Tensor, root: int) -> None:
    """A row of bytes becomes the root's: hosts pass it on in a chain."""
    lane = Lane(group)
    place = lane.place
    home = next(host for host, ranks in enumerate(place.hosts) if root in ranks)
    position = (place.host - home) % lane.hosts
    before, after = (place.host - 1) % lane.hosts, (place.host + 1) % lane.hosts
    chunks = count_chunks(len(row) // lane.count)

    def move(chunk: int) -> None:
        begin, end = span_of(0, len(row), chunks, chunk)
        parts = [row[low:high] for low, high in lane.split(begin, end)]
        own = parts[place.index]
        if position == 0 and len(parts) > 1:
            group.local.broadcast(row[begin:end], place.here.index(root))
        if lane.number is not None:
            if position > 0:
                lane.take(before, _OUT, own)
            if position < lane.hosts - 1:
                lane.send(after, _OUT, own)
        if position > 0:
            lane.share_inside(parts, own)

    run_pipeline(chunks, move)


def exchange_large(
    group: HostsGroup,
    output: torch.Tensor,
    input: torch.Tensor,
    from_each: Sequence[int],
    sizes: Sequence[Sequence[int]],
) -> None:
    """`sizes` says how many bytes each rank has for each. What is for another host goes to a mate
    there; the ranks of a host exchange what they have of their own and what they got for others."""
    place, local = group.placement, group.local
    parts = torch.split(input, list(sizes[group.rank]))
    targets = torch.split(output, list(from_each))
    origins = [place.origins(index) for index in range(len(place.here))]
    chunks = count_chunks(
        max(
            sum(sizes[giver][taker] for taker in ranks)
            for host, ranks in enumerate(place.hosts)
            for giver in range(group.size)
            if giver not in ranks
        )
    )

    def length(giver: int, taker: int, chunk: int) -> int:
        begin, end = span_of(0, sizes[giver][taker], chunks, chunk)
        return end - begin

    def part_of(row: torch.Tensor, chunk: int) -> torch.Tensor:
        begin, end = span_of(0, len(row), chunks, chunk)
        return row[begin:end]

    def send(chunk: int) -> None:
        for host in place.others():
            there = [part_of(parts[rank], chunk) for rank in place.hosts[host]]
            group.send_row(place.mate(host), _OUT, torch.cat(there))

    def exchange_inside(chunk: int) -> None:
        for_each: list[Rows] = [[part_of(parts[rank], chunk)] for rank in place.here]
        for rank in origins[place.index][1:]:
            lengths = [length(rank, taker, chunk) for taker in place.here]
            brought = torch.empty(sum(lengths), dtype=torch.uint8)
            group.take_row(place.members[rank], _OUT, brought)
            for found, part in zip(for_each, torch.split(brought, lengths), strict=True):
                found.append(part)
        given = [torch.cat(rows) for rows in for_each]
        lengths_of = [[length(rank, group.rank, chunk) for rank in ranks] for ranks in origins]
        taken = given
        if len(place.here) > 1:
            taken = [torch.empty(sum(lengths), dtype=torch.uint8) for lengths in lengths_of]
            local.all_to_all(taken, given)
        for ranks, lengths, whole in zip(origins, lengths_of, taken, strict=True):
            for rank, part in zip(ranks, torch.split(whole, lengths), strict=True):
                part_of(targets[rank], chunk).copy_(part)

    run_pipeline(chunks, send, exchange_inside)
