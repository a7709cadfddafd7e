"""From what trainer and engines hold to what is sent: transfers and buckets.

Every rank describes what it holds. From all descriptions every rank makes the same plan, or finds
the same differences, so that nothing has to be agreed on later.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.comm.tensors import dtype_name
from unisono.errors import WeightMismatch, name_number
from unisono.training.weights import gpu_memory
from unisono.training.weights.shards import Box, HeldTensor, Lengths, MappedPlace, name_of

_MOST_ROWS = 40  # of a table of differences

_GPU_BUCKET_BYTES = 1 << 30
"""The least size of a bucket between GPU memories: every bucket costs each rank a time slice on a
shared GPU."""

_PACKED_BYTES = 32 * 1024
"""The most bytes of a tensor that is packed: two more copies take less time than a tensor does."""

Difference = tuple[str, str, str]
"""A name, what the trainer has, what an engine has."""


@dataclass(frozen=True)
class UpdateOptions:
    """The options of an update, set by its senders."""

    transactional: bool
    checksum: bool
    convert: bool
    bucket_bytes: int
    deltas: bool


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor, or a part of one, in a description: `first` is the name that it shares its memory
    with, or its own; `place` its position in memory that all ranks have mapped."""

    dtype: str
    whole: Lengths
    box: Box
    first: str
    place: MappedPlace | None = None


@dataclass(frozen=True)
class Description:
    """What a rank contributes to an update. An engine that `takes_all` has no weights of its
    own."""

    role: Literal["sender", "receiver"]
    weights: dict[str, DescribedTensor]
    """By key: see `Held`."""
    options: UpdateOptions | None = None
    partial: bool = False
    alias: bool = False
    takes_all: bool = False
    keeps: bool = False
    """Whether an engine still has the result of the last update at the next one."""
    gpu: str = ""
    """The GPU on which all of its weights are, if there is one."""

    @classmethod
    def of(
        cls,
        role: Any,
        weights: Mapping[str, HeldTensor],
        ties: Mapping[str, str],
        place_of: Callable[[torch.Tensor], MappedPlace | None] = lambda tensor: None,
        **more: Any,
    ) -> Self:
        """The description of what a rank holds; `ties` are its `tied_names`."""
        entries = {
            name: DescribedTensor(
                *(dtype_name(held.tensor), held.whole, held.box),
                *(name_of(ties[name]), place_of(held.tensor)),
            )
            for name, held in weights.items()
        }
        gpu = gpu_memory.gpu_of(held.tensor for held in weights.values())
        return cls(role, entries, gpu=gpu, **more)

    def parts(self) -> dict[str, list[DescribedTensor]]:
        """All parts of each name."""
        found: dict[str, list[DescribedTensor]] = {}
        for key, entry in self.weights.items():
            found.setdefault(name_of(key), []).append(entry)
        return found

    def text(self) -> str:
        """As JSON, to send it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """From JSON, which has lists for tuples."""
        read = json.loads(text, object_hook=_with_tuples)
        for name, entry in read["weights"].items():
            place = entry["place"] and MappedPlace(**entry["place"])
            read["weights"][name] = DescribedTensor(
                **entry | {"box": Box(**entry["box"]), "place": place}
            )
        return cls(**read | {"options": read["options"] and UpdateOptions(**read["options"])})


def _with_tuples(read: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(each) if isinstance(each, list) else each for key, each in read.items()}


@dataclass
class TrainerTensor:
    """A tensor of the trainer: which rank holds which boxes of it. `first` is the name that it is
    tied to on all senders, or its own."""

    dtype: str
    whole: Lengths
    boxes: dict[Box, list[int]]
    first: str
    travels_as: torch.dtype = torch.float32
    """The dtype in which it is sent, once `compare` has found it."""

    def __str__(self) -> str:
        return tensor_text(self.dtype, self.whole)

    def problem(self) -> str:
        """What is wrong with the boxes, if anything."""
        boxes = list(self.boxes)
        for index, box in enumerate(boxes):
            for other in boxes[:index]:
                if box.intersection(other):
                    ranks = self.boxes[other][0], self.boxes[box][0]
                    return f"the shards of ranks {ranks[0]} and {ranks[1]} overlap"
        missing = Box((), self.whole).count - sum(box.count for box in boxes)
        return f"{missing} elements are on no rank" if missing else ""


@dataclass(frozen=True)
class Unit:
    """The elements of a `box` of a tensor, which rank `sender` holds as part of the box `held`, and
    which are sent, or served, in one piece."""

    name: str
    dtype: torch.dtype
    box: Box
    sender: int
    held: Box
    place: MappedPlace | None = None
    """Where an engine serves it in shared memory."""
    gpu: str = ""
    """The GPU on which an engine serves it."""

    @property
    def bytes(self) -> int:
        """Its size as sent."""
        return self.box.count * self.dtype.itemsize


@dataclass(frozen=True)
class WeightTransfer:
    """A sender, the receivers that take the same data from it, and the data."""

    members: tuple[int, ...]
    """All of them; the sender is the first."""
    buckets: list[list[Unit]]
    """What is sent together."""


@dataclass(frozen=True)
class WeightPlan:
    """What an update moves."""

    options: UpdateOptions
    senders: tuple[int, ...]
    tensors: dict[str, TrainerTensor]
    transfers: list[WeightTransfer]
    is_on_gpus: bool
    """Whether all ranks hold their weights on one GPU, or each on its own: then the weights need
    not pass through CPU memory."""
    aliases: dict[int, dict[str, Unit]]
    """For each engine that serves the trainer's memory: what it serves, by name."""
    keepers: frozenset[int]
    """The engines that can receive changes."""
    packed: frozenset[str]
    """The small tensors, which each sender packs into one row for each of its transfers, the last
    bucket: at most one bucket in all."""
    exports: dict[int, tuple[str, ...]]
    """For each sender with GPU memory that engines serve: the names of the weights there."""


def make_plan(everyone: Sequence[Description], packs: bool = True) -> WeightPlan:
    """The plan for ranks with these descriptions; it `packs` small tensors.

    Raises WeightMismatch, the same on every rank, if the tensors do not fit.
    """
    senders, engines = (
        {rank: each for rank, each in enumerate(everyone) if each.role == role}
        for role in ("sender", "receiver")
    )
    if not senders or not engines:
        raise WeightMismatch(
            f"a weight update needs senders and receivers: of {name_number(len(everyone), 'rank')} "
            f"{len(senders)} send(s) and {len(engines)} receive(s)"
        )
    first, *others = senders
    options = senders[first].options
    assert options is not None
    for rank in others:
        if senders[rank].options != options:
            raise WeightMismatch(
                f"senders differ in their options: rank {first} has {options}, rank {rank} "
                f"{senders[rank].options}"
            )
    differences: list[Difference] = []
    trainer = trainer_tensors(senders, differences)
    compare(trainer, engines, options.convert, differences)
    wanted = {rank: _wanted_boxes(engine, trainer) for rank, engine in engines.items()}
    aliases = {
        rank: _plan_aliases(rank, everyone, trainer, wanted.pop(rank), differences)
        for rank, engine in engines.items()
        if engine.alias
    }
    if differences:
        raise WeightMismatch(differences_table(differences), differences=differences)
    exports: dict[int, dict[str, None]] = {}
    for units in aliases.values():
        for name, unit in units.items():
            if unit.gpu:
                exports.setdefault(unit.sender, {})[name] = None
    gpus = {description.gpu for description in everyone}
    is_on_gpus = "" not in gpus and len(gpus) in (1, len(everyone))
    bucket_bytes = options.bucket_bytes
    if is_on_gpus and not options.convert:  # nothing is packed, so a bucket takes no memory
        bucket_bytes = max(bucket_bytes, _GPU_BUCKET_BYTES)
    packed = _small(trainer, bucket_bytes) if packs and not is_on_gpus else frozenset[str]()
    return WeightPlan(
        options,
        tuple(senders),
        trainer,
        _plan_transfers(senders, trainer, wanted, bucket_bytes, packed),
        is_on_gpus,
        aliases,
        frozenset(rank for rank, engine in engines.items() if engine.keeps),
        packed,
        {rank: tuple(names) for rank, names in exports.items()},
    )


_Wanted = dict[str, list[Box]]


def _wanted_boxes(engine: Description, trainer: Mapping[str, TrainerTensor]) -> _Wanted:
    """The boxes that an engine receives: names that are tied on both sides come once."""
    if engine.takes_all:
        return {
            name: [Box((0,) * len(ours.whole), ours.whole)]
            for name, ours in trainer.items()
            if ours.first == name
        }
    return {
        name: [entry.box for entry in parts if entry.first == name]
        for name, parts in engine.parts().items()
    }


def _plan_aliases(
    rank: int,
    everyone: Sequence[Description],
    trainer: Mapping[str, TrainerTensor],
    wanted: _Wanted,
    differences: list[Difference],
) -> dict[str, Unit]:
    """What an engine serves in the trainer's memory, and what it cannot."""
    found: dict[str, Unit] = {}
    engine = everyone[rank]
    for name, boxes in wanted.items():
        if name not in trainer or not any(box.count for box in boxes):
            continue
        box = boxes[0]
        ours = trainer[name]
        holders = [
            holder
            for piece, ranks in ours.boxes.items()
            if piece.intersection(box) == box
            for holder in ranks
            if name in everyone[holder].weights and len(boxes) == 1
        ]
        for holder in holders:
            entry, gpu = everyone[holder].weights[name], everyone[holder].gpu
            if entry.place is not None or (not engine.takes_all and engine.gpu != gpu):
                gpu = ""
            if entry.place is not None or gpu:
                dtype = torch_dtype(ours.dtype)
                found[name] = Unit(name, dtype, box, holder, entry.box, entry.place, gpu)
                break
        why = ""
        if not holders:
            why = "it is spread over several ranks, or has several parts"
        elif name not in found and any(everyone[holder].gpu for holder in holders):
            theirs = f"on GPU {engine.gpu}" if engine.gpu else "not on one GPU"
            why = f"it is on GPU {everyone[holders[0]].gpu}, and the engine's weights are {theirs}"
        elif name not in found:
            why = "it is not a shared tensor of this group: see unisono.share_module"
        elif not engine.takes_all and engine.weights[name].dtype != ours.dtype:
            why = f"the engine has {engine.weights[name].dtype}"
        if why:
            differences.append((name, str(ours), f"rank {rank}: alias=True, but {why}"))
    return found


def _plan_transfers(
    senders: Mapping[int, Description],
    trainer: Mapping[str, TrainerTensor],
    wanted: Mapping[int, _Wanted],
    bucket_bytes: int,
    packed: frozenset[str],
) -> list[WeightTransfer]:
    found: dict[tuple[int, ...], list[Unit]] = {}
    load = dict.fromkeys(senders, 0)
    for name, ours in trainer.items():
        dtype = ours.travels_as
        for piece, holders in ours.boxes.items():
            sender = min(holders, key=lambda rank: (load[rank], rank))
            for box, takers in _shared_parts(piece, name, wanted).items():
                load[sender] += box.count * dtype.itemsize
                units = found.setdefault((sender, *takers), [])
                for part in box.split(max(1, bucket_bytes // dtype.itemsize)):
                    units.append(Unit(name, dtype, part, sender, piece))
    return [WeightTransfer(key, _cut(found[key], bucket_bytes, packed)) for key in sorted(found)]


def _small(trainer: Mapping[str, TrainerTensor], most_bytes: int) -> frozenset[str]:
    """The names of small tensors, with at most this many bytes in all."""
    found = []
    for name, ours in trainer.items():
        size = math.prod(ours.whole) * ours.travels_as.itemsize
        if size <= min(_PACKED_BYTES, most_bytes):
            most_bytes -= size
            found.append(name)
    return frozenset(found if len(found) > 1 else ())


def _cut(units: Sequence[Unit], bucket_bytes: int, packed: frozenset[str]) -> list[list[Unit]]:
    """Units in buckets of at most this many bytes; those to be packed in one at the end."""
    small = [unit for unit in units if unit.name in packed]
    buckets: list[list[Unit]] = []
    filled = bucket_bytes
    for unit in units:
        if unit.name in packed:
            continue
        filled += unit.bytes
        if filled > bucket_bytes:
            buckets.append([])
            filled = unit.bytes
        buckets[-1].append(unit)
    return [*buckets, small] if small else buckets


def _shared_parts(piece: Box, name: str, wanted: Mapping[int, _Wanted]) -> dict[Box, list[int]]:
    """Which parts of a piece are needed, and by whom; equal parts once."""
    parts: dict[Box, list[int]] = {}
    for rank, boxes in wanted.items():
        for box in boxes.get(name, ()):
            part = piece.intersection(box)
            if part is not None:
                parts.setdefault(part, []).append(rank)
    return parts


# -- comparing ----------------------------------------------------------------------


def trainer_tensors(
    senders: Mapping[int, Description], differences: list[Difference]
) -> dict[str, TrainerTensor]:
    """What all senders hold, merged."""
    found: dict[str, TrainerTensor] = {}
    for rank, sender in senders.items():
        for key, entry in sender.weights.items():
            name = name_of(key)
            ours = found.setdefault(name, TrainerTensor(entry.dtype, entry.whole, {}, entry.first))
            if (entry.dtype, entry.whole) != (ours.dtype, ours.whole):
                theirs = tensor_text(entry.dtype, entry.whole)
                differences.append((name, f"rank {rank}: {theirs}, others: {ours}", "-"))
                continue
            if entry.first != ours.first:
                ours.first = name  # not tied everywhere
            if entry.box.count:
                ours.boxes.setdefault(entry.box, []).append(rank)
    for name, ours in found.items():
        if ours.first in found and found[ours.first].first != ours.first:
            ours.first = name
        wrong = ours.problem()
        if wrong:
            differences.append((name, f"{ours}: {wrong}", "-"))
    return found


def compare(
    trainer: Mapping[str, TrainerTensor],
    engines: Mapping[int, Description],
    convert: bool,
    differences: list[Difference],
) -> None:
    """Find the dtype in which each tensor is sent, and what does not fit."""
    theirs = {rank: engine.parts() for rank, engine in engines.items()}
    for name, ours in trainer.items():
        dtypes = {}
        for rank, engine in engines.items():
            if name in theirs[rank]:
                for entry in theirs[rank][name]:
                    dtypes[rank] = entry.dtype
                    wrong = _misfit(ours, entry, trainer, convert)
                    if wrong:
                        break
            else:
                wrong = "" if engine.takes_all or engine.partial else "-"
            if wrong:
                differences.append((name, str(ours), f"rank {rank}: {wrong}"))
        if convert and len(set(dtypes.values())) > 1:
            texts = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in dtypes.items())
            differences.append((name, ours.dtype, f"engines differ: {texts}"))
        ours.travels_as = torch_dtype(next(iter(dtypes.values()), ours.dtype))
    for rank, parts in theirs.items():
        for name, (entry, *_) in parts.items():
            if name not in trainer:
                text = f"rank {rank}: {tensor_text(entry.dtype, entry.whole)}"
                differences.append((name, "-", text))


def _misfit(
    ours: TrainerTensor,
    entry: DescribedTensor,
    trainer: Mapping[str, TrainerTensor],
    convert: bool,
) -> str:
    """How an engine's tensor differs from the trainer's; nothing where it fits."""
    if entry.whole != ours.whole:
        return tensor_text(entry.dtype, entry.whole)
    if entry.dtype != ours.dtype:
        floats = all(torch_dtype(name).is_floating_point for name in (ours.dtype, entry.dtype))
        if not convert or not floats:
            remedy = " (pass convert=True on the sender to convert it)" if floats else ""
            return tensor_text(entry.dtype, entry.whole) + remedy
    first = trainer.get(entry.first)
    if first is None or first.first != ours.first:
        return f"tied to {entry.first}, but not on the trainer"
    return ""


def tensor_text(dtype: str, whole: Sequence[int]) -> str:
    """ "float32 (8, 4)": a tensor in a table of differences."""
    return f"{dtype} {tuple(whole)}"


def differences_table(differences: Sequence[Difference]) -> str:
    """The differences as a table."""
    rows = [("weight", "trainer", "engine"), *differences[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    if len(differences) > _MOST_ROWS:
        lines.append(f"  and {len(differences) - _MOST_ROWS} more")
    head = f"trainer and engines differ in {len(differences)} weight(s); nothing was moved"
    return "\n".join([head, *lines])
