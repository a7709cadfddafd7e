"""From what trainer and engines hold to what travels: transfers and buckets.

Every rank describes what it holds; from all descriptions every rank makes the same plan, or finds
the same differences, so that nothing about the bytes' way has to be agreed on later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.errors import WeightMismatch, name_number
from unisono.training.weights.description import (
    Description,
    Difference,
    TrainerTensor,
    UpdateOptions,
    compare,
    differences_table,
    trainer_tensors,
)
from unisono.training.weights.shards import Box, Place

_GPU_BUCKET_BYTES = 1 << 30
"""What travels at a time, at least, from memory to memory of GPUs: every bucket costs each rank a
turn on a GPU that they share."""


@dataclass(frozen=True)
class Unit:
    """The elements of a `box` of a tensor, which rank `sender` holds as part of the box `held`, and
    which travel, or are read or served, in one piece."""

    name: str
    dtype: torch.dtype
    box: Box
    sender: int
    held: Box
    place: Place | None = None
    """Where other ranks can read it; None: it is sent, or served on a GPU."""
    gpu: str = ""
    """The GPU on which an engine serves it."""

    @property
    def bytes(self) -> int:
        """Its size on the way."""
        return self.box.count * self.dtype.itemsize


@dataclass(frozen=True)
class WeightTransfer:
    """A sender and those receivers that take the same from it, and what. They read it where it
    lies (`is_read`), or it is sent."""

    members: tuple[int, ...]
    """All of them; the sender is the first."""
    is_read: bool
    buckets: list[list[Unit]]
    """What travels together."""


@dataclass(frozen=True)
class WeightPlan:
    """What an update moves."""

    options: UpdateOptions
    senders: tuple[int, ...]
    tensors: dict[str, TrainerTensor]
    transfers: list[WeightTransfer]
    is_on_gpus: bool
    """Whether all ranks hold their weights on one GPU, or each on its own: then they need not pass
    through the CPU's memory."""
    aliases: dict[int, dict[str, Unit]]
    """For each engine that serves the trainer's memory: what it serves, by name."""
    exports: dict[int, tuple[str, ...]]
    """For each sender with memory of a GPU that engines serve: the names of what lies there."""


def make_plan(everyone: Sequence[Description]) -> WeightPlan:
    """The plan for ranks that hold what these descriptions say.

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
    if is_on_gpus and not options.convert:  # nothing is packed: a bucket takes no memory
        bucket_bytes = max(bucket_bytes, _GPU_BUCKET_BYTES)
    return WeightPlan(
        options,
        tuple(senders),
        trainer,
        _plan_transfers(senders, trainer, wanted, bucket_bytes),
        is_on_gpus,
        aliases,
        {rank: tuple(names) for rank, names in exports.items()},
    )


def _wanted_boxes(engine: Description, trainer: Mapping[str, TrainerTensor]) -> dict[str, Box]:
    """The boxes that an engine receives: names that both sides have tied come once."""
    if engine.takes_all:
        return {
            name: Box((0,) * len(ours.whole), ours.whole)
            for name, ours in trainer.items()
            if ours.first == name
        }
    return {name: entry.box for name, entry in engine.weights.items() if entry.first == name}


def _unit(sender: int, held: Description, name: str, box: Box, dtype: torch.dtype) -> Unit:
    """A box of what a sender holds; with its place, where others can read it as it is."""
    entry = held.weights[name]
    place = entry.place if torch_dtype(entry.dtype) == dtype else None
    return Unit(name, dtype, box, sender, entry.box, place)


def _plan_aliases(
    rank: int,
    everyone: Sequence[Description],
    trainer: Mapping[str, TrainerTensor],
    wanted: Mapping[str, Box],
    differences: list[Difference],
) -> dict[str, Unit]:
    """What an engine serves in the trainer's memory, and what it cannot."""
    found: dict[str, Unit] = {}
    engine = everyone[rank]
    for name, box in wanted.items():
        if name not in trainer or not box.count:
            continue
        ours = trainer[name]
        holders = [
            holder
            for piece, ranks in ours.boxes.items()
            if piece.intersection(box) == box
            for holder in ranks
        ]
        for holder in holders:
            unit = _unit(holder, everyone[holder], name, box, torch_dtype(ours.dtype))
            gpu = everyone[holder].gpu
            if unit.place is None and gpu and (engine.takes_all or engine.gpu == gpu):
                unit = replace(unit, gpu=gpu)
            if unit.place is not None or unit.gpu:
                found[name] = unit
                break
        why = ""
        if not holders:
            why = "it lies on several ranks"
        elif name not in found and any(everyone[holder].gpu for holder in holders):
            theirs = f"on GPU {engine.gpu}" if engine.gpu else "not on one GPU"
            why = f"it lies on GPU {everyone[holders[0]].gpu}, and the engine's weights {theirs}"
        elif name not in found:
            why = "it is no shared tensor of this group: see unisono.share_module"
        elif not engine.takes_all and engine.weights[name].dtype != ours.dtype:
            why = f"the engine has {engine.weights[name].dtype}"
        if why:
            differences.append((name, str(ours), f"rank {rank}: alias=True, but {why}"))
    return found


def _plan_transfers(
    senders: Mapping[int, Description],
    trainer: Mapping[str, TrainerTensor],
    wanted: Mapping[int, Mapping[str, Box]],
    bucket_bytes: int,
) -> list[WeightTransfer]:
    found: dict[tuple[tuple[int, ...], bool], list[Unit]] = {}
    load = dict.fromkeys(senders, 0)
    for name, ours in trainer.items():
        dtype = ours.travels_as
        for piece, holders in ours.boxes.items():
            units = [_unit(rank, senders[rank], name, piece, dtype) for rank in holders]
            placed = [unit for unit in units if unit.place is not None]
            whole = min(placed or units, key=lambda unit: (load[unit.sender], unit.sender))
            for box, takers in _shared_parts(piece, name, wanted).items():
                load[whole.sender] += box.count * dtype.itemsize
                cuts = box.split(max(1, bucket_bytes // dtype.itemsize))
                key = (whole.sender, *takers), bool(placed)
                found.setdefault(key, []).extend(replace(whole, box=cut) for cut in cuts)
    return [WeightTransfer(*key, _cut(found[key], bucket_bytes)) for key in sorted(found)]


def _cut(units: Sequence[Unit], bucket_bytes: int) -> list[list[Unit]]:
    """Units in buckets of at most so many bytes."""
    buckets: list[list[Unit]] = []
    filled = bucket_bytes
    for unit in units:
        filled += unit.bytes
        if filled > bucket_bytes:
            buckets.append([])
            filled = unit.bytes
        buckets[-1].append(unit)
    return buckets


def _shared_parts(
    piece: Box, name: str, wanted: Mapping[int, Mapping[str, Box]]
) -> dict[Box, list[int]]:
    """What is wanted of a piece, and by whom: equal parts once."""
    parts: dict[Box, list[int]] = {}
    for rank, boxes in wanted.items():
        part = piece.intersection(boxes[name]) if name in boxes else None
        if part is not None:
            parts.setdefault(part, []).append(rank)
    return parts
