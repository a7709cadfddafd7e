"""How a call over hosts begins: all ranks compare what they are about to do.

Every rank sends a row to its mate on each other host: a digest of its call, and its bytes if they
are few. The ranks of a host then gather what they have of their own and what their mates have sent.
So everybody has all rows after one exchange between hosts and one inside; where all bytes were few,
the call needs nothing more. What is needed to tell a mismatch, texts and lines, is exchanged only
if there is one.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch

from unisono.comm.on_rows.announced_calls import (
    AnnouncedCall,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.on_rows.mismatches import PairwiseSizes
from unisono.errors import CollectiveMismatch

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup

_SMALL_BYTES = 4096
_ALL_BYTES = 64 * 1024
_HEAD = struct.Struct("<BBxxI16s8x")  # as long as keeps what follows aligned
_CALLS, _PAIRS, _TEXTS = 0, 3, 4  # stages

Sizes = list[list[int]]
Bytes = numpy.ndarray[Any, numpy.dtype[numpy.uint8]]


@dataclass(frozen=True)
class Findings:
    """What a meeting brings: everybody's bytes, by rank, where all are few; and how many elements
    each rank has for each, where that differs from rank to rank."""

    payloads: list[torch.Tensor] | None
    sends: Sizes


class Meeting:
    """The meetings of one group, one after the other."""

    def __init__(self, group: HostsGroup) -> None:
        self._group = group
        place = group.placement
        self._size = len(place.members)
        self.most_bytes = min(_SMALL_BYTES, _ALL_BYTES // self._size) // 16 * 16
        self._pair_bytes = 16 * self._size
        self._has_room_for_pairs = 2 * self._pair_bytes <= self.most_bytes
        self._origins = [place.origins(index) for index in range(len(place.here))]
        self._mates = [place.mate(host) for host in place.others()]
        self._senders = [place.members[rank] for rank in place.origins(place.index)[1:]]
        self._row_bytes = _HEAD.size + self.most_bytes
        self._memory: dict[int, _Memory] = {}

    def hold(self, call: AnnouncedCall, payload: torch.Tensor | None) -> Findings:
        """Meet; raises CollectiveMismatch on every rank if they do not mean the same call."""
        pairs = self._encode_pairs(call)
        body = pairs if pairs is not None and self._has_room_for_pairs else None
        rows = self._share(self._encode(call, body, payload), self._row_bytes, _CALLS)
        heads = [_HEAD.unpack_from(row, 0) for row in rows]  # type: ignore[arg-type]
        if any(head[0] != heads[0][0] or head[3] != heads[0][3] for head in heads):
            raise self._mismatch(call)
        at = _HEAD.size
        sends: Sizes = []
        if pairs is not None and not call.refused:
            if body is None:
                tables = self._share(pairs, self._pair_bytes, _PAIRS)
            else:
                tables = [row[at : at + self._pair_bytes] for row in rows]
                at += self._pair_bytes
            sends = self._check_pairs(call, tables)
        if not all(is_whole for _, is_whole, _, _ in heads):
            return Findings(None, sends)
        payloads = [
            torch.from_numpy(row[at : at + length])
            for row, (_, _, length, _) in zip(rows, heads, strict=True)
        ]
        return Findings(payloads, sends)

    def _encode(
        self, call: AnnouncedCall, body: Bytes | None, payload: torch.Tensor | None
    ) -> Bytes:
        before = 0 if body is None else body.size
        length = 0 if payload is None else payload.numel()
        is_whole = payload is not None and before + length <= self.most_bytes
        row: Bytes = numpy.empty(_HEAD.size + before + length * is_whole, numpy.uint8)
        digest = hashlib.blake2b(call.text.encode(), digest_size=16).digest()
        _HEAD.pack_into(row, 0, call.refused, is_whole, length, digest)  # type: ignore[arg-type]
        if body is not None:
            row[_HEAD.size : _HEAD.size + before] = body
        if is_whole and payload is not None and length:
            row[_HEAD.size + before :] = payload.numpy()
        return row

    def _encode_pairs(self, call: AnnouncedCall) -> Bytes | None:
        if not call.sends:
            return None
        return numpy.array([*call.sends, *call.takes], numpy.int64).view(numpy.uint8)

    def _check_pairs(self, call: AnnouncedCall, tables: list[Bytes]) -> Sizes:
        pairs = [table.view(numpy.int64).tolist() for table in tables]
        sends = [of_rank[: self._size] for of_rank in pairs]
        if PairwiseSizes(sends, [of_rank[self._size :] for of_rank in pairs]).unequal_pairs():
            raise self._mismatch(call)
        return sends

    def _mismatch(self, call: AnnouncedCall) -> CollectiveMismatch:
        """All ranks have seen that there is one: let them say what they meant, and where."""
        mine = encode_call(call, self._size)
        rows = self._share(mine.numpy(), mine.numel(), _TEXTS)
        group = self._group
        calls = [
            decode_call(torch.from_numpy(row), self._size, host)
            for row, host in zip(rows, group.host_names, strict=True)
        ]
        error = find_mismatch(calls, group.rank, group.name, group.calls)
        assert error is not None
        return error

    def _share(self, row: Bytes, width: int, stage: int) -> list[Bytes]:
        """Everybody's row, by rank, of at most so many bytes; what is behind its own is noise. The
        rows are those of the next meeting, too."""
        group = self._group
        memory = self._memory.get(width)
        if memory is None:
            index = group.placement.index
            memory = self._memory[width] = _Memory(width, self._origins, index)
        sent = torch.from_numpy(row)
        for mate in self._mates:
            group.send_row(mate, stage, sent)
        own = memory.own_array
        own[0, : row.size] = row
        for at, sender in enumerate(self._senders, 1):
            frame = group.take_frame(sender, stage)
            own[at, : frame.payload.numel()] = frame.payload.numpy()
            frame.release()
        if len(self._origins) > 1:
            group.local.all_gather(memory.blocks, memory.own)
        return memory.rows


class _Memory:
    """Where a host gathers rows of a width: what each of its ranks brings, and all by rank."""

    def __init__(self, width: int, origins: list[list[int]], index: int) -> None:
        self.blocks = [torch.zeros(len(ranks), width, dtype=torch.uint8) for ranks in origins]
        self.own = torch.zeros(len(origins[index]), width, dtype=torch.uint8)
        self.own_array = self.own.numpy()
        arrays = [block.numpy() for block in self.blocks]
        if len(origins) == 1:
            arrays = [self.own_array]
        by_rank = {
            rank: row
            for ranks, array in zip(origins, arrays, strict=True)
            for rank, row in zip(ranks, array, strict=True)
        }
        self.rows: list[Bytes] = [by_rank[rank] for rank in range(len(by_rank))]
