"""Hosts: the transport of ranks on several hosts: shared memory inside each, gloo between them.

A large call has three steps, which overlap in chunks: the ranks of a host combine or collect
their data, each lane (the j-th ranks of all hosts) exchanges its part of it, and the ranks of a
host share what has come. A part crosses the network once for each host that needs it. Small calls
are over with the meeting by which every call begins: it carries their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono import variables
from unisono.comm.hosts.large_moves import all_gather_large, broadcast_large, exchange_large
from unisono.comm.hosts.large_reductions import (
    reduce_in_order,
    reduce_large,
    reduce_scatter_in_order,
    reduce_scatter_large,
)
from unisono.comm.hosts.messages import HostsMessages
from unisono.comm.hosts.reductions import HostsReduction
from unisono.comm.on_rows.announced_calls import AnnouncedCall
from unisono.comm.on_rows.row_transport import Rows
from unisono.comm.on_rows.rows import bytes_of
from unisono.comm.reductions import Reduction
from unisono.comm.transport import Transport


class HostsTransport(HostsMessages):
    """A rank of a group of several hosts. Made by `connect` and `split`, not by hand."""

    def __init__(self, *args: Any) -> None:
        self._is_strict = bool(variables.STRICT_ORDER.read())
        self._rounds = bool(variables.ROUND_HALVES.read())
        super().__init__(*args)

    def split(self, members: tuple[int, ...], name: str) -> Transport:
        from unisono.comm.hosts.making import split_group

        return split_group(self, members, name)

    def announce(self, text: str, *args: Any, **named: Any) -> AnnouncedCall:
        text += " in strict order" if self._is_strict else ""
        text += " with halves rounded between hosts" if self._rounds else ""
        return super().announce(text, *args, **named)

    def reduce_row(
        self, row: torch.Tensor, op: Reduction, root: int | None, call: AnnouncedCall, keep: bool
    ) -> torch.Tensor:
        reduction = HostsReduction(op, row.dtype, self.size, self._rounds)
        payloads = self._take_all(call, bytes_of(row))
        if payloads is None and self._is_strict:
            return reduce_in_order(self, row, reduction)
        if payloads is None:
            return reduce_large(self, row, reduction, root, keep)
        if root not in (None, self.rank):
            return row
        rows = [payload.view(row.dtype) for payload in payloads]
        return self._combine(rows, reduction)

    def _take_all(self, call: AnnouncedCall, payload: torch.Tensor | None) -> Rows | None:
        """Everybody's bytes, by rank, where all are few."""
        return self._meet(call, payload).payloads

    def _combine(self, rows: Sequence[torch.Tensor], reduction: HostsReduction) -> torch.Tensor:
        """The reduction of all ranks' rows, in the order of the large ones."""
        if self._is_strict:
            return reduction.combine_all(rows)
        partials = [
            reduction.narrow(reduction.combine_ranks([rows[rank] for rank in ranks]))
            for ranks in self.placement.hosts
        ]
        return reduction.combine_hosts(partials)

    def scatter_rows(self, by_rank: Rows, op: Reduction, call: AnnouncedCall) -> torch.Tensor:
        reduction = HostsReduction(op, by_rank[0].dtype, self.size, self._rounds)
        small = sum(row.nbytes for row in by_rank) <= self._meeting.most_bytes
        payloads = self._take_all(call, bytes_of(torch.cat(by_rank)) if small else None)
        if payloads is None and self._is_strict:
            return reduce_scatter_in_order(self, by_rank, reduction)
        if payloads is None:
            return reduce_scatter_large(self, by_rank, reduction)
        begin = sum(row.numel() for row in by_rank[: self.rank])
        end = begin + by_rank[self.rank].numel()
        rows = [payload.view(by_rank[0].dtype)[begin:end] for payload in payloads]
        return self._combine(rows, reduction)

    def broadcast_row(self, row: torch.Tensor, root: int, call: AnnouncedCall) -> None:
        small = row if self.rank == root or row.numel() > self._meeting.most_bytes else row[:0]
        payloads = self._take_all(call, small)
        if payloads is None:
            broadcast_large(self, row, root)
        elif self.rank != root:
            row.copy_(payloads[root])

    def gather_rows(self, targets: Rows, row: torch.Tensor, call: AnnouncedCall) -> None:
        longest = max(target.numel() for target in targets)
        payloads = self._take_all(call, row if longest <= self._meeting.most_bytes else None)
        if payloads is None:
            all_gather_large(self, targets, row)
            return
        for target, payload in zip(targets, payloads, strict=True):
            target.copy_(payload)

    def exchange_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        from_each: Sequence[int],
        to_each: Sequence[int],
        width: int,
        call: AnnouncedCall,
    ) -> None:
        findings = self._meet(call, input)
        sizes = [[count * width for count in of_rank] for of_rank in findings.sends]
        if findings.payloads is None:
            exchange_large(self, output, input, from_each, sizes)
            return
        begin = 0
        for rank, length in enumerate(from_each):
            first = sum(sizes[rank][: self.rank])
            output[begin : begin + length].copy_(findings.payloads[rank][first : first + length])
            begin += length

    def meet(self, call: AnnouncedCall) -> None:
        self._meet(call)
