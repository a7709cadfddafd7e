"""How weights travel: in buckets, two under way at a time, straight from memory to memory.

A transfer has a group of its own, of a sender and those receivers that take the same from it. So
no other sender has to hold what passes, and senders work at the same time. On shared memory a
bucket goes from the sender's tensors through the engine's slots into the receivers': nothing is
packed, unless a tensor has to be converted or lies on another device. Weights that are shared
tensors are not sent at all: receivers read them where they lie, and say when they have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono.collectives.ragged import device_of
from unisono.comm.base import Communicator, Work
from unisono.comm.shared_memory.engine_calls import GpuTensors
from unisono.training.weights.checksum import checksum
from unisono.training.weights.plan import Unit, WeightBucket, WeightPlan, WeightTransfer
from unisono.training.weights.reading import MappedWeights
from unisono.training.weights.shards import HeldTensor

Progress = Callable[[int, int], Any]
"""Called with the bytes that have moved and the bytes that will."""


class TransferGroups:
    """The groups of the transfers in which this rank takes part, kept from update to update."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._groups: dict[tuple[int, ...], Communicator] = {}
        self._packing: list[torch.Tensor] = []
        self.mapped = MappedWeights(comm)

    def names(self) -> list[str]:
        """The groups that this rank has."""
        return [group.name for group in self._groups.values()]

    def keep(self, names: Sequence[Collection[str]]) -> None:
        """Close the groups that a member does not have, since it has begun anew. `names` is what
        every rank has."""
        for members, group in list(self._groups.items()):
            if any(group.name not in names[rank] for rank in members):
                self._groups.pop(members).close()

    def open(self, plan: WeightPlan) -> None:
        """Make the groups that a plan needs and that are not there yet."""
        for transfer in plan.transfers:
            if self._comm.rank in transfer.members and transfer.members not in self._groups:
                group = self._comm.split(transfer.members, "weights")
                assert group is not None
                self._groups[transfer.members] = group
        for group in self._groups.values():
            group.timeout_s = self._comm.timeout_s

    def device_for(self, plan: WeightPlan, mine: Mapping[str, HeldTensor]) -> torch.device:
        """Where what travels lies on this rank, which holds `mine`."""
        device = torch.device(device_of(self._comm))
        if device.type == "cpu" and plan.is_on_gpus and isinstance(self._comm, GpuTensors):
            return next(iter(mine.values())).tensor.device
        return device

    def move(
        self,
        plan: WeightPlan,
        part: Callable[[Unit], torch.Tensor],
        device: torch.device,
        progress: Progress | None,
    ) -> list[str]:
        """Send or receive everything. `part` is the memory of a unit on this rank, `device` where
        it is while it travels. Returns, for a receiver, what arrived damaged."""
        rank = self._comm.rank
        sends = rank in plan.senders
        steps = plan.steps(rank)
        transfers = [transfer for transfer in plan.transfers if rank in transfer.members]
        # A receiver serves all transfers at once; a sender has two buffers for what must be packed.
        most = 2 if sends else 2 * len(transfers)
        sums: dict[int, list[int]] = {id(transfer): [] for transfer in transfers}
        total, done = plan.bytes(rank), 0
        under_way: deque[tuple[WeightTransfer, int, list[torch.Tensor], Work | None]] = deque()

        def finish() -> int:
            transfer, index, tensors, work = under_way.popleft()
            if work is not None:
                work.wait()
            if plan.options.checksum and not sends:
                sums[id(transfer)].append(checksum(tensors))
            moved = done + transfer.buckets[index].bytes
            if progress is not None:
                progress(moved, total)
            return moved

        for number, (transfer, index) in enumerate(steps):
            if len(under_way) == most:
                done = finish()
            bucket = transfer.buckets[index]
            tensors = [part(unit) for unit in bucket.units]
            work = None
            if not transfer.is_read:
                if sends:
                    tensors = list(self._pack(bucket, tensors, device, number % 2))
                work = self._groups[transfer.members].broadcast(tensors, 0, async_op=True)
            elif not sends:
                self._read(bucket, tensors)
            under_way.append((transfer, index, tensors, work))
            if plan.options.checksum and sends:
                sums[id(transfer)].append(checksum(tensors))  # while they are under way
        while under_way:
            done = finish()
        self._packing.clear()
        self.mapped.let_go()
        if device.type == "cuda":  # who votes for what has arrived must know that it has
            torch.cuda.current_stream(device).synchronize()
        return self._find_damage(transfers, sums) if plan.options.checksum else []

    @torch.inference_mode()  # in which tensors of both kinds can be written to
    def _read(self, bucket: WeightBucket, tensors: list[torch.Tensor]) -> None:
        """Copy a bucket out of its sender's memory."""
        for unit, tensor in zip(bucket.units, tensors, strict=True):
            assert unit.source is not None
            tensor.copy_(self.mapped.find(unit.source))

    def _pack(
        self, bucket: WeightBucket, tensors: list[torch.Tensor], device: torch.device, which: int
    ) -> Iterator[torch.Tensor]:
        """The tensors as they travel: themselves, or converted, in a buffer."""
        for unit, offset, tensor in zip(bucket.units, bucket.offsets, tensors, strict=True):
            plain = tensor.dtype == unit.dtype and tensor.device.type == device.type
            if plain and not _is_expanded(tensor):
                yield tensor
                continue
            while len(self._packing) < 2:
                self._packing.append(torch.empty(0, dtype=torch.uint8, device=device))
            buffer = self._packing[which]
            if buffer.numel() < bucket.packed_bytes:
                buffer = torch.empty(bucket.packed_bytes, dtype=torch.uint8, device=device)
                self._packing[which] = buffer
            packed = buffer[offset : offset + unit.bytes].view(unit.dtype).view(unit.box.shape)
            yield packed.copy_(tensor)

    def _find_damage(
        self, transfers: list[WeightTransfer], sums: Mapping[int, list[int]]
    ) -> list[str]:
        """Compare with the senders' checksums."""
        found = []
        for transfer in transfers:
            mine = sums[id(transfer)]
            theirs = torch.tensor(mine, dtype=torch.int64, device=device_of(self._comm))
            self._groups[transfer.members].broadcast(theirs, 0)
            for index, (sent, arrived) in enumerate(zip(theirs.tolist(), mine, strict=True)):
                if sent != arrived:
                    names = list(dict.fromkeys(unit.name for unit in transfer.buckets[index].units))
                    listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
                    found.append(
                        f"bucket {index} from rank {transfer.sender} ({listed}) arrived damaged, "
                        "or changed while it was sent"
                    )
        return found

    def rank_of(self, group: str, rank: int) -> int:
        """The rank, in the group that all have in common, of a rank of a transfer's group."""
        for members, own in self._groups.items():
            if own.name == group and 0 <= rank < len(members):
                return members[rank]
        return rank

    def abort(self, reason: str) -> None:
        """End all groups, so that nobody waits in a transfer."""
        for group in self._groups.values():
            group.abort(reason)

    def close(self) -> None:
        """Give the groups back."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory: such a tensor cannot be broadcast."""
    if tensor.is_contiguous():
        return False
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(length > 1 and stride == 0 for length, stride in pairs)
