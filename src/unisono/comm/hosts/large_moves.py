"""Large calls over hosts that move data: all_gather, broadcast, and what differs for every pair.

Bytes that leave each host, of H, with S bytes on the wide side: all_gather S/H to each other host,
broadcast S along a chain of hosts, all_to_all what its ranks have for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from unisono.comm.hosts.lanes import (
    OUT,
    Lane,
    count_chunks,
    run_pipeline,
    slice_of,
    span_of,
    write_slice,
)
from unisono.comm.on_rows.row_transport import Rows

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup


def all_gather_large(group: HostsGroup, targets: Rows, row: torch.Tensor, stage: int = OUT) -> None:
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
                lane.send(host, stage, part)

    def share(chunk: int) -> None:
        if chunk == 0 and is_own:
            lane.share_inside(rows[place.host], row)
        for host in place.others():
            spans = [span_of(begin, end, chunks, chunk) for begin, end in slices[host]]
            parts = [slice_of(rows[host], *span) for span in spans]
            own = parts[place.index]
            if lane.number is not None:
                lane.take(host, stage, own)
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
                lane.take(before, OUT, own)
            if position < lane.hosts - 1:
                lane.send(after, OUT, own)
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
            group.send_row(place.mate(host), OUT, torch.cat(there))

    def exchange_inside(chunk: int) -> None:
        for_each: list[Rows] = [[part_of(parts[rank], chunk)] for rank in place.here]
        for rank in origins[place.index][1:]:
            lengths = [length(rank, taker, chunk) for taker in place.here]
            brought = torch.empty(sum(lengths), dtype=torch.uint8)
            group.take_row(place.members[rank], OUT, brought)
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
