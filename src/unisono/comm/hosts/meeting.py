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
from typing import TYPE_CHECKING

import numpy
import torch

from unisono.comm.announced_calls import (
    AnnouncedCall,
    decode_call,
    encode_call,
    find_mismatch,
)
from unisono.comm.hosts.link import memory_of
from unisono.comm.mismatches import PairwiseSizes
from unisono.errors import CollectiveMismatch

if TYPE_CHECKING:
    from unisono.comm.hosts.group import HostsGroup

_SMALL_BYTES = 4096
_ALL_BYTES = 64 * 1024
_HEAD = struct.Struct("<BBxxI16s")
_CALLS, _PAIRS, _TEXTS = 0, 3, 4  # stages

Sizes = list[list[int]]


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
        self.most_bytes = min(_SMALL_BYTES, _ALL_BYTES // self._size)
        self._pair_bytes = 16 * self._size
        self._has_room_for_pairs = 2 * self._pair_bytes <= self.most_bytes
        self._origins = [place.origins(index) for index in range(len(place.here))]
        self._blocks: dict[int, list[torch.Tensor]] = {}

    def hold(self, call: AnnouncedCall, payload: torch.Tensor | None) -> Findings:
        """Meet; raises CollectiveMismatch on every rank if they do not mean the same call."""
        pairs = self._encode_pairs(call)
        body = pairs if pairs is not None and self._has_room_for_pairs else None
        rows = self._share(self._encode(call, body, payload), _HEAD.size + self.most_bytes, _CALLS)
        heads = [_HEAD.unpack_from(memory_of(row), 0) for row in rows]
        said = {(refused, digest) for refused, _, _, digest in heads}
        if len(said) > 1:
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
        lengths = [length for _, _, length, _ in heads]
        payloads = [row[at : at + size] for row, size in zip(rows, lengths, strict=True)]
        return Findings(payloads, sends)

    def _encode(
        self, call: AnnouncedCall, body: torch.Tensor | None, payload: torch.Tensor | None
    ) -> torch.Tensor:
        before = 0 if body is None else body.numel()
        length = 0 if payload is None else payload.numel()
        is_whole = payload is not None and before + length <= self.most_bytes
        row = torch.empty(_HEAD.size + before + (length if is_whole else 0), dtype=torch.uint8)
        digest = hashlib.blake2b(call.text.encode(), digest_size=16).digest()
        _HEAD.pack_into(memory_of(row), 0, call.refused, is_whole, length, digest)
        if body is not None:
            row[_HEAD.size : _HEAD.size + before] = body
        if is_whole and payload is not None and length:
            row[_HEAD.size + before :] = payload
        return row

    def _encode_pairs(self, call: AnnouncedCall) -> torch.Tensor | None:
        if not call.sends:
            return None
        pairs = numpy.array([*call.sends, *call.takes], numpy.int64)
        return torch.from_numpy(pairs).view(torch.uint8)

    def _check_pairs(self, call: AnnouncedCall, tables: list[torch.Tensor]) -> Sizes:
        pairs = [table.clone().view(torch.int64).tolist() for table in tables]
        sends = [of_rank[: self._size] for of_rank in pairs]
        if PairwiseSizes(sends, [of_rank[self._size :] for of_rank in pairs]).unequal_pairs():
            raise self._mismatch(call)
        return sends

    def _mismatch(self, call: AnnouncedCall) -> CollectiveMismatch:
        """All ranks have seen that there is one: let them say what they meant, and where."""
        mine = encode_call(call, self._size)
        rows = self._share(mine, mine.numel(), _TEXTS)
        group = self._group
        calls = [decode_call(row, self._size) for row in rows]
        error = find_mismatch(calls, group.rank, group.name, group.calls)
        assert error is not None
        return error

    def _share(self, row: torch.Tensor, width: int, stage: int) -> list[torch.Tensor]:
        """Everybody's row, by rank, of at most so many bytes; what is behind its own is noise."""
        group, place = self._group, self._group.placement
        blocks = self._blocks.get(width)
        if blocks is None:
            blocks = self._blocks[width] = [
                torch.zeros(len(ranks), width, dtype=torch.uint8) for ranks in self._origins
            ]
        for host in place.others():
            group.send_row(place.mate(host), stage, row)
        own = torch.zeros(len(self._origins[place.index]), width, dtype=torch.uint8)
        own[0, : row.numel()] = row
        for at, rank in enumerate(self._origins[place.index][1:], 1):
            frame = group.take_frame(place.members[rank], stage)
            own[at, : frame.payload.numel()] = frame.payload
            frame.release()
        if len(place.here) > 1:
            group.local.all_gather(blocks, own)
        else:
            blocks = [own]
        rows: list[torch.Tensor] = [row] * self._size
        for ranks, block in zip(self._origins, blocks, strict=True):
            for rank, found in zip(ranks, block, strict=True):
                rows[rank] = found
        return rows
