"""Deltas: what has changed since the version that both sides have, for transfers between hosts.

A sender keeps a snapshot of what it sent last, in the form in which it was sent. It compares bit by
bit and packs the differences; a receiver applies them to a copy of what it serves, whose checksum
must then equal that of the sender's weights. If too much has changed to be worth it, the whole
bucket is sent.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from unisono.collectives.ragged import flat_bytes
from unisono.comm.engine import native

Tensors = list[torch.Tensor]
Wait = Callable[[], object]
Begin = Callable[[Any], Wait]
"""Sends or receives tensors, and returns a function that waits for it."""

APART, HELD, MISSING, DECLINED = range(4)
"""Whether a rank has the version that a delta starts from: it has no transfers between hosts; yes;
no; it sends everything in any case."""


class DeltaSide:
    """One rank's side of deltas: the `transfers` of its plan, by number, that may use them. A
    sender `gives_up` if it has no memory for a snapshot, or if deltas have been slower twice."""

    def __init__(self, transfers: set[int], gives_up: bool) -> None:
        self.transfers, self._gives_up = transfers, gives_up
        self.has_base = False
        """Whether this rank has exactly the result of the last update."""
        self.sent_bytes = 0
        """The bytes of changes that the last update sent."""
        self._snapshot: dict[int, Tensors] = {}  # by the number of the step
        self._full_s, self._slower = math.inf, 0

    @property
    def snapshot_bytes(self) -> int:
        """The size of the snapshot on this rank."""
        return sum(row.numel() for rows in self._snapshot.values() for row in rows)

    def state(self) -> int:
        """Whether this rank has the base version."""
        if not self.transfers:
            return APART
        return DECLINED if self._gives_up else HELD if self.has_base else MISSING

    def note(self, seconds: float, is_delta: bool) -> None:
        """Record how long a sender's update took."""
        if is_delta:
            self._slower = self._slower + 1 if seconds > self._full_s else 0
        else:
            self._full_s = min(self._full_s, seconds)
        if self._slower == 2:
            self._gives_up, self._snapshot = True, {}

    def send(self, step: int, new: Tensors, begin: Begin, as_delta: bool) -> Wait:
        """Start to send a bucket: all of it, or the lengths of the changes and then the changes."""
        new[:] = [tensor.contiguous() for tensor in new]
        packed = self._pack(step, new) if as_delta else None
        if packed is None and not self._gives_up:
            self._snapshot[step] = [flat_bytes(tensor).clone() for tensor in new]
        if not as_delta:
            return begin(new)
        lengths, moved = packed or ([-1] * len(new), new)
        self.sent_bytes += sum(tensor.nbytes for tensor in moved)
        told, sent = begin(torch.tensor(lengths)), begin(moved)
        return lambda: (told(), sent())

    def receive(self, old: Tensors, new: Tensors, begin: Begin) -> Wait:
        """The other side: `old` becomes `new`, in the same memory or in another."""
        lengths = torch.empty(len(new), dtype=torch.int64)
        begin(lengths)()
        is_all = bool(lengths[0] < 0)
        moved = new if is_all else [torch.empty(int(lengths.sum()), dtype=torch.uint8)]
        self.sent_bytes += sum(tensor.nbytes for tensor in moved)
        received = begin(moved)
        if is_all:
            return received
        for before, after in zip(old, new, strict=True):
            if before.data_ptr() != after.data_ptr():
                after.copy_(before)
        return lambda: (received(), _apply(new, lengths.tolist(), moved[0].data_ptr()))

    def _pack(self, step: int, tensors: Tensors) -> tuple[list[int], Tensors] | None:
        """The changes in a bucket: the length of each tensor's part, and all parts. None if there
        are too many to be worth it."""
        packed = torch.empty(sum(each.nbytes for each in tensors) * 3 // 4, dtype=torch.uint8)
        lengths, end = [], 0
        for old, tensor in zip(self._snapshot[step], tensors, strict=True):
            new, room = flat_bytes(tensor), (packed.data_ptr() + end, packed.numel() - end)
            where = old.data_ptr(), new.data_ptr(), new.numel(), tensor.element_size()
            lengths.append(native.pack_changes(*where, *room))
            if lengths[-1] < 0:
                return None
            end += lengths[-1]
        return lengths, [packed[:end]]


def _apply(tensors: Tensors, lengths: list[int], packed: int) -> bool:
    """Apply changes to tensors of the old version. The checksum verifies the result."""
    for tensor, length in zip(tensors, lengths, strict=True):
        row = flat_bytes(tensor)
        where = row.data_ptr(), row.numel(), tensor.element_size()
        if not native.apply_changes(*where, packed, length):
            raise RuntimeError("the changes of a tensor were damaged in transit")
        if not tensor.is_contiguous():
            tensor.copy_(row.view(tensor.dtype).view(tensor.shape))
        packed += length
    return True
