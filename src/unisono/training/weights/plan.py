"""From what trainer and engines hold to what travels: differences, transfers and buckets.

Every rank describes what it holds; from all descriptions every rank makes the same plan, or finds
the same differences, so that nothing about the bytes' way has to be agreed on later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.errors import WeightMismatch, name_number
from unisono.training.weights.description import DescribedTensor, Description, UpdateOptions
from unisono.training.weights.gpu_memory import GpuPart
from unisono.training.weights.reading import PlacedPart
from unisono.training.weights.shards import Box, Lengths

ALIGNMENT_BYTES = 256
GPU_BUCKET_BYTES = 1 << 30
"""What travels at a time, at least, from memory to memory of GPUs: every bucket costs each rank a
turn on a GPU that they share."""
_MOST_ROWS = 40


@dataclass(frozen=True)
class Unit:
    """A part of a tensor that travels in one piece."""

    name: str
    dtype: torch.dtype
    box: Box
    source: PlacedPart | None = None
    """Where those who take it can read it; None: it is sent."""

    @property
    def bytes(self) -> int:
        """Its size on the way."""
        return self.box.count * self.dtype.itemsize


@dataclass
class WeightBucket:
    """Units that travel together; `offsets` is where each lies where they have to be packed."""

    units: list[Unit] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bytes: int = 0
    """What it moves."""
    packed_bytes: int = 0
    """How long it is, packed."""

    def add(self, unit: Unit) -> None:
        """Put a unit behind the others."""
        self.units.append(unit)
        self.offsets.append(self.packed_bytes)
        self.bytes += unit.bytes
        aligned = -(-unit.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.packed_bytes += aligned


@dataclass(frozen=True)
class WeightTransfer:
    """A sender and those receivers that take the same from it, and what. They read it where it
    lies (`is_read`), or it is sent."""

    sender: int
    receivers: tuple[int, ...]
    is_read: bool = False
    buckets: list[WeightBucket] = field(default_factory=list)

    @property
    def members(self) -> tuple[int, ...]:
        """All of them; the sender is the first."""
        return (self.sender, *self.receivers)


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it travels. `first` is the name that it is tied to on the trainer, or itself."""

    dtype: torch.dtype
    whole: Lengths
    first: str


@dataclass(frozen=True)
class WeightPlan:
    """What an update moves."""

    options: UpdateOptions
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    tensors: dict[str, PlannedTensor]
    transfers: list[WeightTransfer]
    version: int = -1
    is_on_gpus: bool = False
    """Whether all ranks hold their weights on one GPU, or each on its own: then they need not pass
    through the CPU's memory."""
    aliases: dict[int, dict[str, PlacedPart | GpuPart]] = field(default_factory=dict)
    """For each engine that serves the trainer's memory: what it serves, by name."""
    exports: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """For each sender with memory of a GPU that engines serve: the names of what lies there."""

    def steps(self, rank: int) -> list[tuple[WeightTransfer, int]]:
        """The transfers and buckets that a rank takes part in, in the order that all ranks keep."""
        transfers = [transfer for transfer in self.transfers if rank in transfer.members]
        longest = max((len(transfer.buckets) for transfer in transfers), default=0)
        return [
            (transfer, i)
            for i in range(longest)
            for transfer in transfers
            if i < len(transfer.buckets)
        ]

    def bytes(self, rank: int) -> int:
        """How many bytes a rank sends or receives."""
        return sum(transfer.buckets[index].bytes for transfer, index in self.steps(rank))


@dataclass
class _TrainerTensor:
    """A tensor of the trainer: who holds which boxes of it."""

    dtype: str
    whole: Lengths
    boxes: dict[Box, list[int]]
    first: str


def make_plan(everyone: Sequence[Description]) -> WeightPlan:
    """The plan for ranks that hold what these descriptions say.

    Raises WeightMismatch, the same on every rank, if the tensors do not fit.
    """
    senders, receivers = (
        tuple(rank for rank, description in enumerate(everyone) if description.role == role)
        for role in ("sender", "receiver")
    )
    if not senders or not receivers:
        raise WeightMismatch(
            f"a weight update needs senders and receivers: of {name_number(len(everyone), 'rank')} "
            f"{len(senders)} send(s) and {len(receivers)} receive(s)"
        )
    options = everyone[senders[0]].options
    assert options is not None
    for rank in senders[1:]:
        if everyone[rank].options != options:
            raise WeightMismatch(
                f"senders differ in their options: rank {senders[0]} has {options}, rank {rank} "
                f"{everyone[rank].options}"
            )
    differences: list[tuple[str, str, str]] = []
    trainer = _trainer_tensors(everyone, senders, differences)
    wanted = {rank: _wanted_boxes(everyone[rank], trainer) for rank in receivers}
    engines = {rank: everyone[rank] for rank in receivers}
    tensors = _compare(trainer, engines, options, differences)
    aliases = {
        rank: _plan_aliases(rank, everyone, trainer, wanted.pop(rank), differences)
        for rank in receivers
        if everyone[rank].alias
    }
    if differences:
        raise WeightMismatch(differences_table(differences), differences=differences)
    gpus = {description.gpu for description in everyone}
    is_on_gpus = "" not in gpus and len(gpus) in (1, len(everyone))
    bucket_bytes = options.bucket_bytes
    if is_on_gpus and not options.convert:  # nothing is packed: a bucket takes no memory
        bucket_bytes = max(bucket_bytes, GPU_BUCKET_BYTES)
    transfers = _plan_transfers(everyone, trainer, tensors, wanted, bucket_bytes, senders)
    return WeightPlan(
        options,
        senders,
        receivers,
        tensors,
        transfers,
        is_on_gpus=is_on_gpus,
        aliases=aliases,
        exports=_plan_exports(aliases),
    )


# -- comparing -----------------------------------------------------------------------------------


def _trainer_tensors(
    everyone: Sequence[Description], senders: Sequence[int], differences: list[Any]
) -> dict[str, _TrainerTensor]:
    found: dict[str, _TrainerTensor] = {}
    for rank in senders:
        for name, entry in (everyone[rank].weights or {}).items():
            whole = found.setdefault(
                name, _TrainerTensor(entry.dtype, entry.whole, {}, entry.first)
            )
            if (entry.dtype, entry.whole) != (whole.dtype, whole.whole):
                text = f"rank {rank}: {tensor_text(entry.dtype, entry.whole)}, others: "
                differences.append((name, text + tensor_text(whole.dtype, whole.whole), "-"))
                continue
            if entry.first != whole.first:
                whole.first = name  # not tied everywhere
            if entry.box.count:
                whole.boxes.setdefault(entry.box, []).append(rank)
    for name, whole in found.items():
        if whole.first in found and found[whole.first].first != whole.first:
            whole.first = name
        wrong = _problem_of(whole)
        if wrong:
            differences.append((name, f"{tensor_text(whole.dtype, whole.whole)}: {wrong}", "-"))
    return found


def _problem_of(whole: _TrainerTensor) -> str:
    """What is wrong with the boxes of which a tensor consists, if anything."""
    boxes = list(whole.boxes)
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            if box.intersection(other):
                ranks = whole.boxes[other][0], whole.boxes[box][0]
                return f"the shards of ranks {ranks[0]} and {ranks[1]} overlap"
    missing = Box((), whole.whole).count - sum(box.count for box in boxes)
    return f"{missing} elements are on no rank" if missing else ""


def _wanted_boxes(engine: Description, trainer: Mapping[str, _TrainerTensor]) -> dict[str, Box]:
    """The boxes that an engine receives: names that both sides have tied come once."""
    if engine.weights is None:
        return {
            name: Box((0,) * len(ours.whole), ours.whole)
            for name, ours in trainer.items()
            if ours.first == name
        }
    return {name: entry.box for name, entry in engine.weights.items() if entry.first == name}


def _compare(
    trainer: Mapping[str, _TrainerTensor],
    engines: Mapping[int, Description],
    options: UpdateOptions,
    differences: list[tuple[str, str, str]],
) -> dict[str, PlannedTensor]:
    """The tensors as they travel, and what does not fit."""
    tensors: dict[str, PlannedTensor] = {}
    for name, ours in trainer.items():
        dtypes = {}
        for rank, engine in engines.items():
            entry = (engine.weights or {}).get(name)
            if entry is not None:
                dtypes[rank] = entry.dtype
                wrong = _misfit(ours, entry, trainer, options.convert)
                if wrong:
                    text = tensor_text(ours.dtype, ours.whole)
                    differences.append((name, text, f"rank {rank}: {wrong}"))
            elif engine.weights is not None and not engine.partial:
                differences.append((name, tensor_text(ours.dtype, ours.whole), f"rank {rank}: -"))
        if options.convert and len(set(dtypes.values())) > 1:
            texts = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in dtypes.items())
            differences.append((name, ours.dtype, f"engines differ: {texts}"))
        dtype = next(iter(dtypes.values()), ours.dtype)
        tensors[name] = PlannedTensor(torch_dtype(dtype), ours.whole, ours.first)
    for rank, engine in engines.items():
        for name, entry in (engine.weights or {}).items():
            if name not in trainer:
                text = f"rank {rank}: {tensor_text(entry.dtype, entry.whole)}"
                differences.append((name, "-", text))
    return tensors


def _misfit(
    ours: _TrainerTensor,
    entry: DescribedTensor,
    trainer: Mapping[str, _TrainerTensor],
    convert: bool,
) -> str:
    """How an engine's tensor differs from the trainer's; nothing where it fits."""
    if entry.whole != ours.whole:
        return tensor_text(entry.dtype, entry.whole)
    if entry.dtype != ours.dtype:
        floats = all(torch_dtype(name).is_floating_point for name in (ours.dtype, entry.dtype))
        if not convert or not floats:
            remedy = " (convert=True on the sender converts)" if floats else ""
            return tensor_text(entry.dtype, entry.whole) + remedy
    first = trainer.get(entry.first)
    if first is None or first.first != ours.first:
        return f"tied to {entry.first}, on the trainer not"
    return ""


def tensor_text(dtype: str, whole: Sequence[int]) -> str:
    """ "float32 (8, 4)": a tensor in a table of differences."""
    return f"{dtype} {tuple(whole)}"


def differences_table(differences: Sequence[tuple[str, str, str]]) -> str:
    """What does not fit, for people: lines of a name, what the trainer has, what an engine has."""
    rows = [("weight", "trainer", "engine"), *differences[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    if len(differences) > _MOST_ROWS:
        lines.append(f"  and {len(differences) - _MOST_ROWS} more")
    head = f"trainer and engines differ in {len(differences)} weight(s); nothing was moved"
    return "\n".join([head, *lines])


# -- transfers and buckets ---------------------------------------------------------------------


def _placed_part(
    everyone: Sequence[Description], rank: int, name: str, box: Box, dtype: torch.dtype
) -> PlacedPart | None:
    """Where others can read a box of what `rank` holds; None: they cannot, or it is converted."""
    held = (everyone[rank].weights or {})[name]
    if held.place is None or torch_dtype(held.dtype) != dtype:
        return None
    return PlacedPart(rank, held.place, held.box, box, dtype)


def _plan_aliases(
    rank: int,
    everyone: Sequence[Description],
    trainer: Mapping[str, _TrainerTensor],
    wanted: Mapping[str, Box],
    differences: list[tuple[str, str, str]],
) -> dict[str, PlacedPart | GpuPart]:
    """What an engine serves in the trainer's memory, and what it cannot."""
    found: dict[str, PlacedPart | GpuPart] = {}
    engine = everyone[rank]
    for name, box in wanted.items():
        if name not in trainer or not box.count:
            continue
        ours = trainer[name]
        entry = (engine.weights or {}).get(name)
        holders = [
            holder
            for piece, ranks in ours.boxes.items()
            if piece.intersection(box) == box
            for holder in ranks
        ]
        dtype = torch_dtype(ours.dtype)
        parts = [
            _placed_part(everyone, holder, name, box, dtype)
            or _gpu_part(everyone, holder, name, box, dtype, engine)
            for holder in holders
        ]
        part = next((part for part in parts if part is not None), None)
        why = ""
        if not holders:
            why = "it lies on several ranks"
        elif part is None and any(everyone[holder].gpu for holder in holders):
            theirs = f"on GPU {engine.gpu}" if engine.gpu else "not on one GPU"
            why = f"it lies on GPU {everyone[holders[0]].gpu}, and the engine's weights {theirs}"
        elif part is None:
            why = "it is no shared tensor of this group: see unisono.share_module"
        elif entry is not None and entry.dtype != ours.dtype:
            why = f"the engine has {entry.dtype}"
        if part is not None and not why:
            found[name] = part
        else:
            text = tensor_text(ours.dtype, ours.whole)
            differences.append((name, text, f"rank {rank}: alias=True, but {why}"))
    return found


def _gpu_part(
    everyone: Sequence[Description],
    rank: int,
    name: str,
    box: Box,
    dtype: torch.dtype,
    engine: Description,
) -> GpuPart | None:
    """A box of what `rank` holds on a GPU, for an engine on the same one; None: it is not."""
    gpu = everyone[rank].gpu
    if not gpu or (engine.weights is not None and engine.gpu != gpu):
        return None
    return GpuPart(rank, gpu, (everyone[rank].weights or {})[name].box, box, dtype)


def _plan_exports(
    aliases: Mapping[int, Mapping[str, PlacedPart | GpuPart]],
) -> dict[int, tuple[str, ...]]:
    names: dict[int, dict[str, None]] = {}
    for parts in aliases.values():
        for name, part in parts.items():
            if isinstance(part, GpuPart):
                names.setdefault(part.sender, {})[name] = None
    return {rank: tuple(found) for rank, found in names.items()}


def _plan_transfers(
    everyone: Sequence[Description],
    trainer: Mapping[str, _TrainerTensor],
    tensors: Mapping[str, PlannedTensor],
    wanted: Mapping[int, Mapping[str, Box]],
    bucket_bytes: int,
    senders: Sequence[int],
) -> list[WeightTransfer]:
    transfers: dict[tuple[int, tuple[int, ...], bool], WeightTransfer] = {}
    load = dict.fromkeys(senders, 0)
    for name, ours in trainer.items():
        dtype = tensors[name].dtype
        for piece, holders in ours.boxes.items():
            placed = [rank for rank in holders if _placed_part(everyone, rank, name, piece, dtype)]
            sender = min(placed or holders, key=lambda rank: (load[rank], rank))
            for box, takers in _shared_parts(piece, name, wanted):
                load[sender] += box.count * dtype.itemsize
                key = sender, takers, bool(placed)
                transfer = transfers.setdefault(key, WeightTransfer(*key))
                for cut in box.split(max(1, bucket_bytes // dtype.itemsize)):
                    source = _placed_part(everyone, sender, name, cut, dtype)
                    _add_to_last(transfer.buckets, Unit(name, dtype, cut, source), bucket_bytes)
    return [transfers[key] for key in sorted(transfers)]


def _shared_parts(
    piece: Box, name: str, wanted: Mapping[int, Mapping[str, Box]]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """What is wanted of a piece, and by whom: equal parts once."""
    parts: dict[Box, list[int]] = {}
    for rank, boxes in wanted.items():
        part = piece.intersection(boxes[name]) if name in boxes else None
        if part is not None:
            parts.setdefault(part, []).append(rank)
    for part, ranks in parts.items():
        yield part, tuple(ranks)


def _add_to_last(buckets: list[WeightBucket], unit: Unit, bucket_bytes: int) -> None:
    if not buckets or buckets[-1].packed_bytes + unit.bytes > bucket_bytes:
        buckets.append(WeightBucket())
    buckets[-1].add(unit)
