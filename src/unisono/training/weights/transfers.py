"""How weights are sent: in buckets, two in flight at a time, directly from memory to memory; and a
checksum to verify them.

A sender and the receivers that take the same data from it form their own group, unless they are all
ranks. So senders work at the same time and need no buffers for each other. On shared memory a
bucket goes from the sender's tensors through the engine's slots into the receivers': nothing is
packed unless a tensor has to be converted or is on another device, or is small: each tensor costs
more than its bytes, so small ones travel in one row.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from unisono.collectives.ragged import device_of, flat_bytes
from unisono.comm.communicator import Communicator
from unisono.comm.engine import native
from unisono.comm.work import Work
from unisono.torch_autograd import mark_written, outlasting_inference_mode
from unisono.training.weights.deltas import Begin, DeltaSide, Wait
from unisono.training.weights.plan import Unit, WeightPlan, WeightTransfer
from unisono.training.weights.shards import Held

_ROW_INTEGERS = 512
_ALIGNED_BYTES = 16  # as every dtype needs it

Progress = Callable[[int, int], Any]
"""Called with the bytes moved and the bytes in all."""


class _Step(NamedTuple):
    """A bucket of a transfer of this rank, and how large it is."""

    number: int
    transfer: int
    bucket: list[Unit]
    bytes: int
    is_packed: bool

    def parts_of(self, held: Held) -> list[torch.Tensor]:
        """Its tensors, or parts of tensors, in `held`."""
        return [held.part(unit.name, unit.box) for unit in self.bucket]


class _Update(NamedTuple):
    """One update, on this rank: see `Transfers.move`. `sums` are checksums, by transfer."""

    at: Held
    base: Held
    device: torch.device
    as_deltas: bool
    sums: list[list[int]]


class _Row:
    """The small tensors of a bucket, packed into `memory`: of a rank that holds `held`."""

    @outlasting_inference_mode()
    def __init__(self, bucket: list[Unit], held: Held, device: torch.device) -> None:
        sizes = [unit.bytes + -unit.bytes % _ALIGNED_BYTES for unit in bucket]
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._views = [
            memory[: unit.bytes].view(unit.dtype).view(unit.box.shape)
            for unit, memory in zip(bucket, self.memory.split_with_sizes(sizes), strict=True)
        ]
        self._keys = [held.key(unit.name, unit.box) for unit in bucket]
        self._parts = {
            i: unit.box
            for i, (key, unit) in enumerate(zip(self._keys, bucket, strict=True))
            if unit.box != held.boxes[key][1]
        }
        dtypes = [held.tensors[key].dtype for key in self._keys if key in held.tensors]
        self._is_converted = dtypes != [unit.dtype for unit in bucket]

    @property
    def is_whole(self) -> bool:
        """Whether each of them is all that the rank holds under its key."""
        return not self._parts

    def _tensors(self, held: Held) -> list[torch.Tensor]:
        """Where the same elements are in `held`."""
        found = list(map(held.tensors.__getitem__, self._keys))
        for index, box in self._parts.items():
            found[index] = held[self._keys[index]].part(box)
        return found

    def pack(self, held: Held) -> None:
        """Copy them from `held`."""
        if self._is_converted or not self.fits(held):
            with outlasting_inference_mode():
                torch._foreach_copy_(self._views, self._tensors(held))

    def unpack(self, held: Held) -> None:
        """Copy them to `held`."""
        tensors = self._tensors(held)
        with writing_to(tensors):
            torch._foreach_copy_(tensors, self._views)

    def fits(self, held: Held) -> bool:
        """Whether C can copy between the row and `held`, in both directions. It finds out by
        copying from `held`."""
        try:
            native.copy_row(self.memory, self._tensors(held), True)
        except (ValueError, TypeError, BufferError, RuntimeError):
            return False  # not contiguous, freed, on a GPU, or of a dtype that C does not know
        return True

    def unpacking(self, held: Held) -> list[Callable[[], object]]:
        """C functions that copy them to `held`, which they fit, and count the writes."""
        tensors = self._tensors(held)
        return [
            partial(native.copy_row, self.memory, tensors, False),
            partial(mark_written, tensors),
        ]


class Transfers:
    """This rank's part in a plan, for every update with it."""

    def __init__(self, comm: Communicator, plan: WeightPlan) -> None:
        self.plan = plan
        self._comm = comm
        self._sends = comm.rank in plan.senders
        self._checks = plan.options.checksum
        self._mine = [each for each in plan.transfers if comm.rank in each.members]
        longest = max((len(transfer.buckets) for transfer in self._mine), default=0)
        buckets = [  # in an order that all ranks keep
            (number, bucket, sum(unit.bytes for unit in bucket), bucket[0].name in plan.packed)
            for i in range(longest)
            for number, transfer in enumerate(self._mine)
            for bucket in transfer.buckets[i : i + 1]
        ]
        self._steps = [_Step(number, *each) for number, each in enumerate(buckets)]
        self._groups: dict[tuple[int, ...], Communicator] = {}
        """The groups that were made for it, by their members."""
        moved = {unit.name for step in self._steps for unit in step.bucket}
        self.tensors = len(moved | plan.aliases.get(comm.rank, {}).keys())
        self.buckets = len(self._steps)
        self.bytes = sum(step.bytes for step in self._steps)
        self.deltas = DeltaSide(set(), gives_up=False)
        self._rows: dict[int, _Row] = {}  # by the number of the step
        self.unpacks = True
        """Whether a receiver's small tensors are unpacked as they arrive; otherwise by
        `unpacking`."""

    def open(self) -> None:
        """Make the groups, and find those that span hosts."""
        for transfer in self._mine:
            members = transfer.members
            if len(members) < self._comm.size and members not in self._groups:
                group = self._comm.split(members, "weights")
                assert group is not None
                self._groups[members] = group
        spanning = {
            number
            for number, transfer in enumerate(self._mine)
            if self.plan.options.deltas
            and self.plan.keepers.issuperset(transfer.members[1:])
            and self._comm.backend == "unisono"
            and not self._groups.get(transfer.members, self._comm).transport.is_on_one_host
        }
        size = sum(step.bytes for step in self._steps if step.transfer in spanning)
        has_room = not spanning or 2 * size < native.memory_room()
        self.deltas = DeltaSide(spanning, gives_up=self._sends and not has_room)

    def device_for(self, mine: Held) -> torch.device:
        """Where the data is on this rank, which holds `mine`."""
        device = torch.device(device_of(self._comm))
        is_shared = self._comm.transport.is_on_one_host
        if device.type == "cpu" and self.plan.is_on_gpus and is_shared:
            return next(iter(mine.values())).tensor.device
        return device

    def move(
        self,
        at: Held,
        base: Held,
        device: torch.device,
        progress: Progress | None,
        as_deltas: bool,
    ) -> list[str]:
        """Send or receive everything, or between hosts what has changed. `at` is where it is on
        this rank, by name, `base` the version that changes apply to, perhaps in the same memory,
        `device` where it is sent from. Returns, for a receiver, what was damaged."""
        begin_s = time.perf_counter()
        self.deltas.has_base, self.deltas.sent_bytes = False, 0
        for group in self._groups.values():
            group.timeout_s = self._comm.timeout_s
        update = _Update(at, base, device, as_deltas, [[] for _ in self._mine])
        start = self._send if self._sends else self._receive
        # A receiver serves all transfers at once; a sender holds converted copies of two buckets.
        most = 2 if self._sends else 2 * len(self._mine)
        under_way: deque[tuple[_Step, Wait]] = deque()
        moved_bytes = 0

        def finish() -> None:
            nonlocal moved_bytes
            step, wait = under_way.popleft()
            wait()
            moved_bytes += step.bytes
            if progress is not None:
                progress(moved_bytes, self.bytes)

        for step in self._steps:
            if len(under_way) == most:
                finish()
            under_way.append((step, start(step, update)))
        while under_way:
            finish()
        if device.type == "cuda":  # a vote for new weights requires that they have arrived
            torch.cuda.current_stream(device).synchronize()
        if self._sends:
            self.deltas.note(time.perf_counter() - begin_s, as_deltas)
        return self._find_damage(update.sums) if self._checks else []

    def _send(self, step: _Step, update: _Update) -> Wait:
        if step.is_packed:
            row = self._row(step, update.at, update.device)
            row.pack(update.at)
            tensors = [row.memory]
        else:
            tensors = step.parts_of(update.at)
            _convert(step.bucket, tensors, update.device)
        begin = self._beginning(step, update.device)
        if step.transfer in self.deltas.transfers:
            wait = self.deltas.send(step.number, tensors, begin, update.as_deltas)
        else:
            wait = begin(tensors)
        if self._checks:
            update.sums[step.transfer].append(checksum(tensors))  # while they are in flight
        return wait

    def _receive(self, step: _Step, update: _Update) -> Wait:
        row = self._row(step, update.at, update.device) if step.is_packed else None
        tensors = step.parts_of(update.at) if row is None else [row.memory]
        begin = self._beginning(step, update.device)
        if update.as_deltas and step.transfer in self.deltas.transfers:
            wait = self.deltas.receive(step.parts_of(update.base), tensors, begin)
        else:
            wait = begin(tensors)

        def finish() -> None:
            wait()
            if row is not None and self.unpacks:
                row.unpack(update.at)
            if self._checks:
                update.sums[step.transfer].append(checksum(tensors))

        return finish

    def can_stay_packed(self, mine: Held, device: torch.device) -> bool:
        """Whether `unpacking` can copy to these tensors of a receiver: contiguous ones in the CPU's
        memory, which it receives in one piece. It must not fail after the vote, so it is tried."""
        if device.type != "cpu":
            return False
        rows = [self._row(step, mine, device) for step in self._steps if step.is_packed]
        return all(row.is_whole and row.fits(mine) for row in rows)

    def _row(self, step: _Step, held: Held, device: torch.device) -> _Row:
        if step.number not in self._rows:
            self._rows[step.number] = _Row(step.bucket, held, device)
        return self._rows[step.number]

    def unpacking(self, mine: Held) -> list[Callable[[], object]]:
        """C functions that copy to these tensors what has stayed packed."""
        return [step for row in self._rows.values() for step in row.unpacking(mine)]

    def _beginning(self, step: _Step, device: torch.device) -> Begin:
        """What sends or receives tensors of a step. Without anything to do meanwhile, waiting at
        once is faster."""
        overlaps = self._checks or len(self._mine) > 1 or device.type != "cpu"

        def begin(tensors: Any) -> Wait:
            work = self._broadcast(self._mine[step.transfer], tensors, async_op=overlaps)
            return lambda: work.wait() if work is not None else None

        return begin

    def _broadcast(self, transfer: WeightTransfer, tensors: Any, async_op: bool) -> Work | None:
        group = self._groups.get(transfer.members)
        if group is not None:
            return group.broadcast(tensors, 0, async_op=async_op)
        return self._comm.broadcast(tensors, transfer.members[0], async_op=async_op)

    def _find_damage(self, sums: list[list[int]]) -> list[str]:
        """Compare with the senders' checksums."""
        found = []
        for transfer, mine in zip(self._mine, sums, strict=True):
            theirs = torch.tensor(mine, dtype=torch.int64, device=device_of(self._comm))
            self._broadcast(transfer, theirs, async_op=False)
            for index, (sent, arrived) in enumerate(zip(theirs.tolist(), mine, strict=True)):
                if sent != arrived:
                    names = list(dict.fromkeys(unit.name for unit in transfer.buckets[index]))
                    listed = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
                    found.append(
                        f"bucket {index} from rank {transfer.members[0]} ({listed}) was damaged "
                        "in transit, or changed while it was sent"
                    )
        return found

    # -- ends ------------------------------------------------------------------------------------

    def rank_of(self, group: str, rank: int) -> int:
        """The rank in the common group of a rank in a transfer's group."""
        for members, own in self._groups.items():
            if own.name == group and 0 <= rank < len(members):
                return members[rank]
        return rank

    def abort(self, reason: str) -> None:
        """Abort the groups that were made, so that no rank waits in a transfer."""
        for group in self._groups.values():
            group.abort(reason)

    def close(self) -> None:
        """Give them back."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.close()


@contextlib.contextmanager
def writing_to(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """For operators that write to these; not recorded for backward."""
    with torch.inference_mode(any(map(torch.Tensor.is_inference, tensors))), torch.no_grad():
        yield


def _convert(bucket: list[Unit], tensors: list[torch.Tensor], device: torch.device) -> None:
    """Replace what cannot be sent as it is."""
    for i, (unit, tensor) in enumerate(zip(bucket, tensors, strict=True)):
        if 0 in tensor.stride():  # elements that share memory cannot be broadcast
            tensor = tensor.contiguous()
        is_there = tensor.device.type == device.type
        tensors[i] = tensor.to(tensor.device if is_there else device, unit.dtype)


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A 63-bit checksum of the bytes of these tensors, in order, independent of strides.

    The 64-bit integers of each 4 KiB are added up, at the speed of memory, and the sums are hashed:
    it always detects one changed integer, and exchanged rows, but not integers exchanged within a
    row. It guards against accidents, not against an attacker. On a GPU the sums are added up once
    more, each times its own odd number, so that little crosses the bus: compare it only with
    checksums of GPU tensors.
    """
    digest = hashlib.blake2b(digest_size=8)
    given = list(tensors)
    if {tensor.is_cuda for tensor in given} == {True}:
        sums = torch.cat([_sums_on_gpu(tensor) for tensor in given])
        digest.update(sums.cpu().numpy().data)
        given = []
    for tensor in given:
        if tensor.nbytes < 8 * _ROW_INTEGERS and _is_plain(tensor):  # ten times as fast
            digest.update(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
            continue
        data = flat_bytes(tensor).cpu().numpy()
        whole_rows = len(data) // (8 * _ROW_INTEGERS)
        cut = whole_rows * 8 * _ROW_INTEGERS
        integers = data[:cut].view(numpy.int64).reshape(whole_rows, _ROW_INTEGERS)
        digest.update(integers.sum(axis=1).data)
        digest.update(data[cut:].data)
    return int.from_bytes(digest.digest(), "little") >> 1


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are in the CPU's memory, in order."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not lazy


def _sums_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A few checksum integers for the bytes of a GPU tensor."""
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
