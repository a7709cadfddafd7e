"""Deltas: what has changed since the version that both sides have, for transfers between hosts.

A sender keeps a snapshot of what it sent last, as it travelled. It compares bit by bit, and packs
what differs; a receiver applies that to a copy of what it serves, whose checksum must then be that
of the sender's weights. Where so much has changed that all of a bucket is as good, all is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from unisono.collectives.ragged import flat_bytes
from unisono.comm.engine import native

Wait = Callable[[], object]
Begin = Callable[[Any], Wait]
"""Sends or receives one or several tensors, and returns what waits for that."""

APART, HELD, MISSING, DECLINED = range(4)
"""What a rank says of the version that a delta begins with: no transfer of its own crosses hosts;
it has it; it does not; it has, but sending all is faster."""

_CLEARLY_FASTER = 4
"""The first update by a plan takes memory from the system. Deltas have to be so much faster than
that one, or another full update is made, for comparison."""


class DeltaSide:
    """One rank's side of deltas by a plan: in which of its transfers, by number, they may go, and
    whether they pay. A sender `gives_up` where there is no memory for its snapshot."""

    def __init__(self, transfers: set[int], gives_up: bool) -> None:
        self.transfers = transfers
        self.has_base = False
        """Whether this rank has what the last update brought, and nothing else."""
        self.sent_bytes = 0
        """What travelled instead of all, in the last update."""
        self._gives_up = gives_up
        self._snapshot: dict[int, list[torch.Tensor]] = {}  # by the number of the step
        self._full_s, self._fulls, self._delta_s = math.inf, 0, (0.0, 0.0)

    @property
    def snapshot_bytes(self) -> int:
        """The memory that the snapshot takes on this rank."""
        return sum(row.numel() for rows in self._snapshot.values() for row in rows)

    def state(self) -> int:
        """What this rank says of the version that it has."""
        if not self.transfers:
            return APART
        if self._gives_up or not self._pay():
            return DECLINED
        return HELD if self.has_base else MISSING

    def _pay(self) -> bool:
        margin = _CLEARLY_FASTER if self._fulls < 2 else 1
        return min(self._delta_s) * margin <= self._full_s

    def note(self, seconds: float, is_delta: bool) -> None:
        """A sender's update took so long."""
        if is_delta:
            self._delta_s = self._delta_s[1], seconds
        else:
            self._full_s, self._fulls = min(self._full_s, seconds), self._fulls + 1
        if self._fulls > 1 and not self._pay():  # they were slower twice
            self._gives_up, self._snapshot = True, {}

    def send(self, step: int, new: list[torch.Tensor], begin: Begin, as_delta: bool) -> Wait:
        """Begin to send a bucket: all of it, or the lengths of what has changed, and then that."""
        changes = self._pack(step, new) if as_delta else None
        if changes is None:
            self._keep(step, new)
        if not as_delta:
            return begin(new)
        lengths, packed = changes or ([-1] * len(new), new)
        return self._both(begin(torch.tensor(lengths)), lengths, packed, begin)

    def receive(
        self, old: list[torch.Tensor], new: list[torch.Tensor], begin: Begin, as_delta: bool
    ) -> Wait:
        """The other side of it: what was `old` becomes new, in the same memory or in another."""
        if not as_delta:
            return begin(new)
        told = torch.empty(len(new), dtype=torch.int64)
        begin(told)()
        lengths = told.tolist()
        if -1 in lengths:
            return self._both(do_nothing, lengths, new, begin)
        packed = torch.empty(sum(lengths), dtype=torch.uint8)
        received = self._both(do_nothing, lengths, packed, begin)
        for before, after in zip(old, new, strict=True):
            if before.data_ptr() != after.data_ptr():
                after.copy_(before)

        def finish() -> None:
            received()
            _apply(new, lengths, packed)

        return finish

    def _both(self, told: Wait, lengths: list[int], packed: Any, begin: Begin) -> Wait:
        self.sent_bytes += sum(each.nbytes for each in packed) if -1 in lengths else packed.nbytes
        moved = begin(packed) if any(lengths) else do_nothing
        return lambda: (told(), moved())

    def _keep(self, step: int, tensors: list[torch.Tensor]) -> None:
        """All of a bucket is sent: the next delta begins with that."""
        if self._gives_up:
            return
        rows = self._snapshot.setdefault(step, [])
        rows += (torch.empty_like(flat_bytes(tensor)) for tensor in tensors[len(rows) :])
        for row, tensor in zip(rows, tensors, strict=True):
            row.copy_(flat_bytes(tensor))

    def _pack(
        self, step: int, tensors: list[torch.Tensor]
    ) -> tuple[list[int], torch.Tensor] | None:
        """What has changed in a bucket: the length of each tensor's part, and all parts. None: so
        much that it does not pay."""
        rows = [flat_bytes(tensor) for tensor in tensors]
        packed = torch.empty(sum(row.numel() for row in rows) * 3 // 4, dtype=torch.uint8)
        lengths, end = [], 0
        for old, new, tensor in zip(self._snapshot[step], rows, tensors, strict=True):
            where = old.data_ptr(), new.data_ptr(), new.numel(), tensor.element_size()
            length = native.pack_changes(*where, packed.data_ptr() + end, packed.numel() - end)
            if length < 0:
                return None
            lengths.append(length)
            end += length
        return lengths, packed[:end]


def do_nothing() -> None:
    """There is nothing to wait for."""


def _apply(tensors: list[torch.Tensor], lengths: list[int], packed: torch.Tensor) -> None:
    """Make tensors of the old version new."""
    at = packed.data_ptr()
    for tensor, length in zip(tensors, lengths, strict=True):
        row = flat_bytes(tensor)
        where = row.data_ptr(), row.numel(), tensor.element_size()
        if not native.apply_changes(*where, at, length):
            raise RuntimeError("the changes of a tensor arrived damaged")
        if not tensor.is_contiguous():
            tensor.copy_(row.view(tensor.dtype).view(tensor.shape))
        at += length
