"""How a call over hosts begins: all ranks compare what they are about to do.

Each rank posts a row on its host: what it calls, and its bytes if they are few. The leaders
exchange the rows of their hosts, compare all of them, and tell their hosts. Where everybody's bytes
were few, everybody has all of them afterwards, and the call needs nothing more between hosts.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from unisono.comm.announced_calls import (
    AnnouncedCall,
    are_alike,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.hosts.link import memory_of
from unisono.errors import CollectiveMismatch

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup

Payloads = list[torch.Tensor]

_SMALL_BYTES = 4096
_ALL_BYTES = 64 * 1024
_NOT_SMALL = 2**32 - 1
_LENGTH = struct.Struct("<I")
_GO, _TAKE, _MISMATCH = 1, 2, 3
_STAGE = 0


class Meeting:
    """The meetings of one group, one after the other."""

    def __init__(self, group: HostsGroup) -> None:
        self._group = group
        self._head_bytes = encode_call(AnnouncedCall(""), len(group.placement.members)).numel()
        self.most_bytes = min(_SMALL_BYTES, _ALL_BYTES // len(group.placement.members))
        self._row = torch.zeros(
            _LENGTH.size + self._head_bytes + self.most_bytes, dtype=torch.uint8
        )
        self._rows = torch.zeros(len(group.placement.here), len(self._row), dtype=torch.uint8)
        self._verdict = torch.zeros(2, dtype=torch.int64)
        self.heads: list[torch.Tensor] = []
        """What each rank said in the latest meeting that brought all bytes."""

    def hold(
        self, call: AnnouncedCall, payload: torch.Tensor | None
    ) -> tuple[CollectiveMismatch | None, Payloads | None]:
        """What every member raises, if they do not mean the same call; and all bytes, by rank,
        where they are few."""
        group, local = self._group, self._group.local
        self._write(call, payload)
        if local.size > 1:
            local.gather(self._rows if group.placement.leads else None, self._row, 0)
        else:
            self._rows[0] = self._row
        local.timeout_s = call.timeout_s + 2.0  # the leader hears of others for longer
        blob = None
        if group.placement.leads:
            blob = self._exchange()
            self._judge(blob)
        if local.size > 1:
            local.broadcast(self._verdict, 0)
        verdict, length = self._verdict.tolist()
        if verdict == _GO:
            return None, None
        if local.size > 1:
            if blob is None:
                blob = torch.empty(length, dtype=torch.uint8)
            local.broadcast(blob, 0)
        assert blob is not None
        heads, payloads = self._read(blob)
        self.heads = heads
        if verdict == _TAKE:
            return None, payloads
        calls = [decode_call(head, group.size) for head in heads]
        return find_mismatch(calls, group.rank, group.name, group.calls), None

    def _write(self, call: AnnouncedCall, payload: torch.Tensor | None) -> None:
        row = self._row
        length = _NOT_SMALL
        begin = _LENGTH.size + self._head_bytes
        if payload is not None and payload.numel() <= self.most_bytes:
            length = payload.numel()
            row[begin : begin + length].copy_(payload)
        _LENGTH.pack_into(memory_of(row), 0, length)
        row[_LENGTH.size : begin] = encode_call(call, self._group.size)

    def _exchange(self) -> torch.Tensor:
        """The rows of all ranks, hosts one after the other."""
        group, placement = self._group, self._group.placement
        mine = torch.cat([self._used(row) for row in self._rows])
        for host in placement.others():
            group.send_row(placement.peer(host, 0), _STAGE, mine)
        of_hosts = []
        for host in range(len(placement.hosts)):
            if host == placement.host:
                of_hosts.append(mine)
                continue
            parts, rows = [], 0
            while rows < len(placement.hosts[host]):
                frame = group.take_frame(placement.peer(host, 0), _STAGE)
                parts.append(frame.payload)
                rows = self._count(torch.cat(parts), len(placement.hosts[host]))
            of_hosts.append(torch.cat(parts))
        return torch.cat(of_hosts)

    def _used(self, row: torch.Tensor) -> torch.Tensor:
        return row[: self._length(row)]

    def _length(self, row: torch.Tensor) -> int:
        """How long the row that begins here is."""
        (length,) = _LENGTH.unpack_from(memory_of(row), 0)
        return _LENGTH.size + self._head_bytes + (0 if length == _NOT_SMALL else int(length))

    def _count(self, rows: torch.Tensor, most: int) -> int:
        """How many whole rows there are."""
        found, begin = 0, 0
        while found < most and begin + _LENGTH.size <= len(rows):
            begin += self._length(rows[begin:])
            if begin > len(rows):
                break
            found += 1
        return found

    def _judge(self, blob: torch.Tensor) -> None:
        heads, payloads = self._read(blob)
        verdict = _GO if payloads is None else _TAKE
        if not are_alike(heads):
            calls = [decode_call(head, self._group.size) for head in heads]
            if find_mismatch(calls, self._group.rank, self._group.name) is not None:
                verdict = _MISMATCH
        self._verdict[0], self._verdict[1] = verdict, len(blob)

    def _read(self, blob: torch.Tensor) -> tuple[list[torch.Tensor], Payloads | None]:
        """What each rank said, by rank, and its bytes, if all have sent them."""
        order = [rank for ranks in self._group.placement.hosts for rank in ranks]
        heads: list[torch.Tensor] = [blob] * len(order)
        payloads: list[torch.Tensor | None] = [None] * len(order)
        begin = 0
        for rank in order:
            end = begin + self._length(blob[begin:])
            (length,) = _LENGTH.unpack_from(memory_of(blob[begin:]), 0)
            payload_begin = begin + _LENGTH.size + self._head_bytes
            heads[rank] = blob[begin + _LENGTH.size : payload_begin]
            if length != _NOT_SMALL:
                payloads[rank] = blob[payload_begin:end]
            begin = end
        if any(payload is None for payload in payloads):
            return heads, None
        return heads, [payload for payload in payloads if payload is not None]
