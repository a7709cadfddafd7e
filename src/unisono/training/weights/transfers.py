"""How weights travel: in buckets, two under way at a time, straight from memory to memory; and a
checksum that says whether they arrived.

A transfer has a group of its own, of a sender and those receivers that take the same from it. So
no other sender has to hold what passes, and senders work at the same time. On shared memory a
bucket goes from the sender's tensors through the engine's slots into the receivers': nothing is
packed, unless a tensor has to be converted or lies on another device. Weights that are shared
tensors are not sent at all: receivers read them where they lie, and say when they have.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from unisono.collectives.ragged import device_of, flat_bytes
from unisono.comm.base import Communicator, Work
from unisono.comm.shared_memory.transport import SharedMemory
from unisono.training.weights.plan import WeightPlan, WeightTransfer
from unisono.training.weights.reading import MappedWeights, Unit, bytes_of
from unisono.training.weights.shards import HeldTensor

_ROW_INTEGERS = 512

Progress = Callable[[int, int], Any]
"""Called with the bytes that have moved and the bytes that will."""


class TransferGroups:
    """The groups of the transfers in which this rank takes part, kept from update to update."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._groups: dict[tuple[int, ...], Communicator] = {}
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
        if (
            device.type == "cpu"
            and plan.is_on_gpus
            and isinstance(self._comm.transport, SharedMemory)
        ):
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
        # A receiver serves all transfers at once; a sender holds converted copies of two buckets.
        most = 2 if sends else 2 * len(transfers)
        sums: dict[int, list[int]] = {id(transfer): [] for transfer in transfers}
        total, done = bytes_of(plan.units(rank)), 0
        under_way: deque[tuple[WeightTransfer, int, list[torch.Tensor], Work | None]] = deque()

        def finish() -> int:
            transfer, index, tensors, work = under_way.popleft()
            if work is not None:
                work.wait()
            if plan.options.checksum and not sends:
                sums[id(transfer)].append(checksum(tensors))
            moved = done + bytes_of(transfer.buckets[index])
            if progress is not None:
                progress(moved, total)
            return moved

        for transfer, index in steps:
            if len(under_way) == most:
                done = finish()
            bucket = transfer.buckets[index]
            tensors = [part(unit) for unit in bucket]
            work = None
            if not transfer.is_read:
                if sends:
                    tensors = [
                        _as_it_travels(unit, tensor, device)
                        for unit, tensor in zip(bucket, tensors, strict=True)
                    ]
                work = self._groups[transfer.members].broadcast(tensors, 0, async_op=True)
            elif not sends:
                self._read(bucket, tensors)
            under_way.append((transfer, index, tensors, work))
            if plan.options.checksum and sends:
                sums[id(transfer)].append(checksum(tensors))  # while they are under way
        while under_way:
            done = finish()
        self.mapped.let_go()
        if device.type == "cuda":  # who votes for what has arrived must know that it has
            torch.cuda.current_stream(device).synchronize()
        return self._find_damage(transfers, sums) if plan.options.checksum else []

    @torch.inference_mode()  # in which tensors of both kinds can be written to
    def _read(self, bucket: list[Unit], tensors: list[torch.Tensor]) -> None:
        """Copy a bucket out of its sender's memory."""
        for unit, tensor in zip(bucket, tensors, strict=True):
            tensor.copy_(self.mapped.find(unit))

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
                    names = list(dict.fromkeys(unit.name for unit in transfer.buckets[index]))
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


def _as_it_travels(unit: Unit, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor itself, or a copy where it has to be converted, lies on another device, or has
    elements that share memory: such a one cannot be broadcast."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    if any(length > 1 and stride == 0 for length, stride in pairs):
        tensor = tensor.contiguous()
    if tensor.device.type == device.type:
        device = tensor.device
    return tensor.to(device, unit.dtype)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A 63-bit number for the bytes of these tensors, in order, whatever their strides.

    The 64-bit integers of each 4 KiB are added up, at the speed of memory, and the sums are
    hashed: one changed integer is always noticed, and so are rows that changed places, but not
    integers that changed places within a row. It guards against accidents, not against an attacker.
    On a GPU the sums are added up once more, each times an odd number of its own, so that little
    crosses the bus: a number to be compared with that of other tensors on a GPU.
    """
    digest = hashlib.blake2b(digest_size=8)
    given = list(tensors)
    if given and all(tensor.is_cuda for tensor in given):
        sums = torch.cat([_sums_on_gpu(tensor) for tensor in given])
        digest.update(sums.cpu().numpy().data)
        given = []
    for tensor in given:
        data = flat_bytes(tensor).cpu().numpy()
        whole_rows = len(data) // (8 * _ROW_INTEGERS)
        cut = whole_rows * 8 * _ROW_INTEGERS
        integers = data[:cut].view(numpy.int64).reshape(whole_rows, _ROW_INTEGERS)
        digest.update(integers.sum(axis=1).data)
        digest.update(data[cut:].data)
    return int.from_bytes(digest.digest(), "little") >> 1


def _sums_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A few integers for the bytes of a tensor on a GPU."""
    data = flat_bytes(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    cut = data.numel() // (8 * _ROW_INTEGERS) * (8 * _ROW_INTEGERS)
    rows = data[:cut].view(torch.int64).view(-1, _ROW_INTEGERS).sum(dim=1)
    rest = data.new_zeros(8 * _ROW_INTEGERS)
    rest[: data.numel() - cut] = data[cut:]
    sums = torch.cat([rows, rest.view(torch.int64)])
    sums = torch.nn.functional.pad(sums, (0, -sums.numel() % _ROW_INTEGERS))
    odd = 2 * torch.arange(_ROW_INTEGERS, device=data.device) + 1
    return (sums.view(-1, _ROW_INTEGERS) * odd).sum(dim=1)
