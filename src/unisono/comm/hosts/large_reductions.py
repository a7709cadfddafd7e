"""Large reductions over hosts: inside each host, between them by lanes, and back.

Bytes that leave each host in a call on S bytes, with H hosts: all_reduce 2 (H-1)/H S, reduce S to
the root's host, reduce_scatter (H-1)/H S.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unisono.comm.hosts.lanes import (
    BACK,
    GATHER,
    OUT,
    Lane,
    Span,
    count_chunks,
    run_pipeline,
    slice_of,
    span_of,
)
from unisono.comm.hosts.large_moves import all_gather_large, exchange_large
from unisono.comm.hosts.reductions import HostsReduction
from unisono.comm.on_rows.row_transport import Rows
from unisono.comm.on_rows.rows import bytes_of

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup


def reduce_large(
    group: HostsGroup, row: torch.Tensor, reduction: HostsReduction, root: int | None, keep: bool
) -> torch.Tensor:
    """The reduction of a row for all ranks, or for `root`; in place unless `keep` forbids it."""
    if root is not None:
        return _reduce_to_root(group, row, reduction, root)
    lane = Lane(group)
    wide = reduction.widen(row)
    result = torch.empty_like(row) if keep else row
    chunks = count_chunks(row.numel() // (lane.count * lane.hosts) * reduction.crossing.itemsize)
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
                lane.send(host, OUT, host_part(partial, host))

    def reduce_between(chunk: int) -> None:
        partial = partials.pop(chunk)
        own = results[chunk] = torch.empty_like(partial, dtype=row.dtype)
        if lane.number is None:
            return
        mine = host_part(partial, lane.place.host)
        finished = reduction.combine_hosts(lane.take_all(OUT, mine))
        host_part(own, lane.place.host).copy_(finished)
        for host in lane.place.others():
            lane.send(host, BACK, finished)

    def share(chunk: int) -> None:
        own = results.pop(chunk)
        if lane.number is not None:
            for host in lane.place.others():
                lane.take(host, BACK, host_part(own, host))
        lane.share_inside([result[begin:end] for begin, end in spans(chunk)], own)

    run_pipeline(chunks, reduce_inside, reduce_between, share)
    return result


def _reduce_to_root(
    group: HostsGroup, row: torch.Tensor, reduction: HostsReduction, root: int
) -> torch.Tensor:
    lane = Lane(group)
    home = next(host for host, ranks in enumerate(lane.place.hosts) if root in ranks)
    is_home = lane.place.host == home
    wide = reduction.widen(row)
    result = torch.empty_like(row) if group.rank == root else row
    chunks = count_chunks(row.numel() // lane.count * reduction.crossing.itemsize)
    partials: dict[int, torch.Tensor] = {}

    def spans(chunk: int) -> list[Span]:
        return lane.split(*span_of(0, row.numel(), chunks, chunk))

    def reduce_inside(chunk: int) -> None:
        parts = [wide[begin:end] for begin, end in spans(chunk)]
        partials[chunk] = lane.reduce_inside(parts, reduction)
        if lane.number is not None and not is_home:
            lane.send(home, OUT, partials[chunk])

    def finish(chunk: int) -> None:
        own = partials.pop(chunk)
        if not is_home:
            return
        if lane.number is not None:
            own = reduction.combine_hosts(lane.take_all(OUT, own))
        own = own.to(row.dtype)
        parts = [result[begin:end] for begin, end in spans(chunk)]
        if len(parts) == 1:
            parts[0].copy_(own)
        else:
            to = lane.place.here.index(root)
            group.local.gather(parts if group.rank == root else None, own, to)

    run_pipeline(chunks, reduce_inside, finish)
    return result


def reduce_scatter_large(
    group: HostsGroup, by_rank: Rows, reduction: HostsReduction
) -> torch.Tensor:
    """Our part of the reduction of all ranks' rows."""
    lane = Lane(group)
    place = lane.place
    rows = [[by_rank[rank] for rank in ranks] for ranks in place.hosts]
    lengths = [sum(row.numel() for row in of_host) for of_host in rows]
    slices = [lane.split(0, length) for length in lengths]
    chunks = count_chunks(max(lengths) // lane.count * reduction.crossing.itemsize)
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
                lane.send(host, OUT, partial)

    def reduce_between(chunk: int) -> None:
        partial = partials.pop(chunk)
        if lane.number is not None:
            begin, end = span_of(0, len(result), chunks, chunk)
            result[begin:end] = reduction.combine_hosts(lane.take_all(OUT, partial))

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


# -- in the order of ranks ------------------------------------------------------------------------


def reduce_in_order(
    group: HostsGroup, row: torch.Tensor, reduction: HostsReduction
) -> torch.Tensor:
    """The reduction of a row for all ranks, in the order of ranks whatever their hosts: each
    combines a share of everybody's, which takes R/2 + 1/2 times the bytes between hosts."""
    bounds = [span_of(0, len(row), group.size, rank) for rank in range(group.size)]
    shares = [row[begin:end] for begin, end in bounds]
    own = reduce_scatter_in_order(group, shares, reduction)
    result = torch.empty_like(row)
    targets = [bytes_of(result[begin:end]) for begin, end in bounds]
    all_gather_large(group, targets, bytes_of(own), GATHER)
    return result


def reduce_scatter_in_order(
    group: HostsGroup, by_rank: Rows, reduction: HostsReduction
) -> torch.Tensor:
    """Our part of the reduction of all ranks' rows, in the order of ranks."""
    lengths = [row.nbytes for row in by_rank]
    own = lengths[group.rank]
    everybodys = torch.empty(own * group.size, dtype=torch.uint8)
    sizes = [lengths] * group.size
    exchange_large(group, everybodys, bytes_of(torch.cat(by_rank)), [own] * group.size, sizes)
    rows = everybodys.view(reduction.dtype).chunk(group.size) if own else [by_rank[group.rank]]
    return reduction.combine_all(list(rows))
